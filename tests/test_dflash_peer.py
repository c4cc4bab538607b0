"""The DFlash peer of benchmarks/dflash: drafters that transformers' own generation runs."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from d3d_hf.testing import ForwardCounter, tiny_model
from d3d_hf.training import D3DTrainingArguments


pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="transformers without native DFlash")
FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "dflash"
sys.path.insert(0, str(FOLDER))
import compare  # noqa: E402
from dflash_drafter import conditioning_layers, make_dflash_drafter, read_hidden_states, unused_token  # noqa: E402
from dflash_training import (  # noqa: E402
    DFlashTrainer,
    collate,
    drafts_after,
    draw_anchors,
    packed_block_states,
    tokens_after,
)


MASK_ID = 66


@pytest.fixture
def target():
    return tiny_model("llama", num_layers=4)


def make(target, num_layers=2, num_draft_tokens=4, ids=None):
    return make_dflash_drafter(target, num_layers, num_draft_tokens, MASK_ID, ids)


def text(target, length=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(2, 60, (1, 6), generator=generator)
    return target.generate(prompt, max_new_tokens=length - 6, do_sample=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("from_target", [True, False])
def test_untrained_drafter_gives_plain_ids(architecture, from_target):
    target = tiny_model(architecture, num_layers=4)
    drafter = make(target, ids=text(target) if from_target else None)
    prompt = torch.tensor([[5, 9, 13, 2, 40]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    drafted = target.generate(
        prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter, speculation_type="dflash"
    )
    assert drafted.tolist() == plain.tolist()


def test_packed_blocks_equal_the_ones_that_generation_drafts(target):
    """Each block of a packed pass, against the drafts that transformers' own generation makes at the same anchor."""
    drafter = make(target, ids=text(target))
    prompt = text(target)[:, :8]
    seen, original = [], drafter.forward

    def noted(**kwargs):
        outputs = original(**kwargs)
        seen.append((int(kwargs["position_ids"][0, -drafter.config.block_size]), outputs.last_hidden_state))
        return outputs

    drafter.forward = noted
    ids = target.generate(
        prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter, speculation_type="dflash"
    )
    del drafter.forward
    anchors = torch.tensor([[position for position, _ in seen]])
    assert anchors.shape[1] > 2 and anchors[0, 0] == 8
    padded = torch.nn.functional.pad(ids, (0, 3))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 3))
    with torch.no_grad():
        packed = packed_block_states(drafter, target, padded, mask, anchors)
    for i, (_, states) in enumerate(seen):
        torch.testing.assert_close(packed[:, i], states, atol=1e-5, rtol=1e-4)


def test_labels_are_the_tokens_at_the_slots_own_places():
    ids = torch.arange(10)[None]
    mask = torch.tensor([[1] * 8 + [0] * 2])
    assert tokens_after(ids, mask, torch.tensor([[2, 6, -1]]), 3).tolist() == [[[3, 4, 5], [7, -1, -1], [-1] * 3]]


def test_anchors_are_response_tokens_with_one_after_them():
    for seed in range(20):
        anchors, num_visible = draw_anchors(12, 5, np.random.default_rng(seed), num_blocks=4)
        assert len(set(anchors.tolist())) == 4 and anchors.min() >= 5 and anchors.max() <= 10
        assert not num_visible.any()
    anchors, _ = draw_anchors(8, 5, np.random.default_rng(0), num_blocks=4)
    assert sorted(anchors.tolist()) == [-1, -1, 5, 6]


def test_target_states_are_those_of_the_layers(target):
    ids = text(target)
    every = target(ids, output_hidden_states=True).hidden_states
    states = read_hidden_states(target, ids, torch.ones_like(ids), [0, 2])
    torch.testing.assert_close(states, torch.cat([every[1], every[3]], dim=-1))


def test_conditioning_layers():
    assert conditioning_layers(30, 5) == [1, 8, 14, 20, 27]
    assert conditioning_layers(2, 3) == [0]


def test_trained_drafter_saves_target_forwards(target, tmp_path):
    """Trained on what the target says, loaded by transformers' own class, it drafts what the target says."""
    from transformers import AutoModel

    rows = [{"input_ids": text(target, seed=seed)[0].tolist(), "prompt_length": 6} for seed in range(4)]
    arguments = D3DTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=60,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=20,
    )
    drafter = make(target, ids=torch.tensor([rows[0]["input_ids"]]))
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    trainer = DFlashTrainer(drafter, arguments, target, rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < 0.5 * float(losses[0])
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())

    drafter.save_pretrained(tmp_path / "final")
    loaded = AutoModel.from_pretrained(tmp_path / "final").eval()
    prompt = torch.tensor([rows[0]["input_ids"][:6]])
    plain = target.generate(prompt, max_new_tokens=24, do_sample=False)
    with ForwardCounter(target) as forwards:
        drafted = target.generate(
            prompt, max_new_tokens=24, do_sample=False, assistant_model=loaded, speculation_type="dflash"
        )
    assert drafted.tolist() == plain.tolist()
    assert forwards.count <= 12  # 24 without drafts

    batch = collate([{"input_ids": plain[0].tolist(), "anchors": np.array([8, 12])}])
    drafts = drafts_after(loaded, target, **{k: batch[k] for k in ("context_mask", "anchors")}, ids=batch["input_ids"])
    assert (drafts[0, :, 0] == plain[0, [9, 13]]).all()


def settings(tmp_path, **changes) -> Namespace:
    defaults = {
        "output_dir": tmp_path,
        "methods": ["dflash", "d3d"],
        "layers": 2,
        "block_size": 4,
        "steps": 4,
        "batch_size": 2,
        "blocks": 4,
        "learning_rate": 1e-3,
        "dflash_learning_rate": None,
        "chained_head_size": None,
        "random_start": False,
        "mask_token_id": MASK_ID,
        "eval_positions": 8,
        "generate": 2,
        "max_new_tokens": 12,
        "logging_steps": 2,
        "save_steps": 2,
        "seed": 0,
    }
    return Namespace(**{**defaults, **changes})


def test_comparison_is_resumed_to_the_same_drafter(target, tmp_path, monkeypatch):
    rows = [{"input_ids": text(target, seed=seed)[0].tolist(), "prompt_length": 6} for seed in range(6)]
    held_out = [(row["input_ids"], 6) for row in rows[4:]]
    whole = compare.compare(target, rows[:4], held_out, settings(tmp_path / "whole"))
    assert [row["method"] for row in whole] == ["dflash", "d3d"]
    for row in whole:
        assert row["ids_equal"] == "2 of 2"
        assert row["tokens_per_round"] == pytest.approx(1 + row["acceptance_length"], abs=1e-3)
        assert row["tokens_per_round_interval"][0] <= row["tokens_per_round"] <= row["tokens_per_round_interval"][1]
        assert sum(row["accepted_by_slot"]) == pytest.approx(row["acceptance_length"], abs=5e-3)
        assert [entry["step"] for entry in row["training_log"]] == [2, 4]
        assert all(entry["seconds_per_step"] > 0 for entry in row["training_log"])

    class Ended(Exception):
        pass

    class EndAtStep3(compare.StepTimer):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(compare, "StepTimer", EndAtStep3)
        for method in ("dflash", "d3d"):
            with pytest.raises(Ended):
                compare.compare(target, rows[:4], held_out, settings(tmp_path / "ended", methods=[method]))
            assert not (tmp_path / "ended" / method / "final").exists()
    resumed = compare.compare(target, rows[:4], held_out, settings(tmp_path / "ended"))
    for before, after in zip(whole, resumed, strict=True):
        assert after["tokens_per_round"] == before["tokens_per_round"]
        assert [entry["loss"] for entry in after["training_log"]] == [
            entry["loss"] for entry in before["training_log"]
        ]


def test_wrong_values_are_named(target):
    with pytest.raises(ValueError, match="num_layers is 9"):
        make(target, num_layers=9)
    with pytest.raises(ValueError, match="num_draft_tokens is 0"):
        make(target, num_draft_tokens=0)
    with pytest.raises(ValueError, match="mask_token_id is 67"):
        make_dflash_drafter(target, 2, 4, 67)
    biased = tiny_model("llama", num_layers=4, attention_bias=True)
    with pytest.raises(ValueError, match="random weights"):
        make(biased, ids=text(target))


def test_mask_token_is_one_that_no_text_holds():
    class Tokenizer:
        all_special_ids = (0, 1)

        def get_added_vocab(self):
            return {"<pad>": 0, "<s>": 1, "<a>": 2, "<b>": 3}

    assert unused_token(Tokenizer(), [([0, 3, 7], 1)]) == 2
    with pytest.raises(ValueError, match="--mask-token-id"):
        unused_token(Tokenizer(), [([2, 3], 1)])
