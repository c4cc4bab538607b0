"""Pruning: skipping against removing, shared against naive scores, the choice, the loop, resumption, the command."""

import copy
import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from d3d_hf import D3DConfig, D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments
from d3d_hf.cli import main
from d3d_hf.model.packing import lay_out
from d3d_hf.pruning import (
    PruningGoal,
    Recovery,
    measurements,
    prune_after_training,
    prune_drafter,
    remove_layers,
    skip_layers,
)
from d3d_hf.pruning.baselines import block_influence, removed_by_influence, removed_evenly, removed_from_end
from d3d_hf.pruning.removal import merged_copy
from d3d_hf.pruning.report import as_markdown, plot_report
from d3d_hf.pruning.scoring import (
    Accepted,
    CalibrationSet,
    LayerScore,
    accepted_drafts,
    accepted_without_each,
    accepted_without_each_naively,
    cheapest,
    score_layers,
)
from d3d_hf.testing import tiny_model, tiny_tokenizer
from d3d_hf.training.acceptance import AcceptedByPosition, draft_outcomes


BLOCK_SIZE = 4
NUM_LAYERS = 5
ARCHITECTURES = ["llama", "qwen3", "gemma3"]


def target_of(architecture="llama", num_layers=NUM_LAYERS, **kwargs):
    # Small weights: every layer matters, and none is all that matters.
    return tiny_model(architecture, seed=3, num_layers=num_layers, initializer_range=0.15, **kwargs)


def drafter_of(architecture="llama", num_layers=NUM_LAYERS, **kwargs):
    drafter = D3DDrafterForCausalLM.from_backbone(target_of(architecture, num_layers), block_size=BLOCK_SIZE, **kwargs)
    if drafter.chained_head is not None:
        torch.nn.init.normal_(drafter.chained_head.out.weight, std=0.2)
    return drafter


def rows_of(count, seed=0, architecture="llama"):
    """The target's own greedy text after random prompts, of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows, target = [], target_of(architecture)
    for number in range(count):
        prompt = torch.randint(2, 67, (1, 3 + number % 4), generator=generator)
        text = target.generate(prompt, max_new_tokens=14 + 3 * (number % 3), do_sample=False)[0]
        rows.append({"input_ids": text.tolist(), "prompt_length": prompt.shape[1]})
    return rows


@pytest.fixture(scope="module")
def rows():
    return rows_of(16)


def adapter_drafter(base_folder=None):
    drafter = drafter_of()
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["mask_embedding"])
    wrapped = get_peft_model(drafter, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    drafter = wrapped.get_base_model().eval()
    drafter.config.adapter_base = base_folder and str(base_folder)
    return drafter


def logits_of(drafter, is_cached):
    """Logits of a plain pass and of a packed one over it, in two passes with a cache or in one without."""
    ids = torch.randint(2, 67, (1, 20), generator=torch.Generator().manual_seed(5))
    num_slots, anchors = (3, 4), torch.tensor([[15, 19]])
    slots = torch.zeros(1, sum(num_slots), dtype=torch.long)
    with torch.no_grad():
        if not is_cached:
            layout = lay_out(20, anchors, num_slots)
            return drafter.packed_forward(torch.cat([ids, slots], dim=1), layout).logits[:, 12:]
        cache = DynamicCache()
        drafter.packed_forward(ids[:, :12], lay_out(12), cache=cache)
        layout = lay_out(8, anchors, num_slots, num_cached=cache.get_seq_length())
        packed = drafter.packed_forward(torch.cat([ids[:, 12:], slots], dim=1), layout, cache=cache).logits
        assert len(cache.layers) == drafter.config.num_hidden_layers
        return packed


# Skipping and removing


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("layers", [[0], [2], [4], [0, 3]])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pruned_drafter_computes_what_the_full_one_does_with_the_layers_skipped(architecture, layers, is_cached):
    drafter = drafter_of(architecture)
    untouched = logits_of(drafter, is_cached)
    with skip_layers(drafter, layers):
        skipped = logits_of(drafter, is_cached)
    torch.testing.assert_close(logits_of(drafter, is_cached), untouched, atol=0, rtol=0)
    assert (skipped - untouched).abs().max() > 1e-2
    remove_layers(drafter, layers)
    torch.testing.assert_close(logits_of(drafter, is_cached), skipped, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_moe"])
def test_removal_twice_is_a_drafter_made_of_the_layers_left(architecture, tmp_path):
    drafter = drafter_of(architecture)
    remove_layers(drafter, [1])
    remove_layers(drafter, [0, 2])  # the layers 0 and 3 of the original
    made = drafter_of(architecture, kept_layers=[2, 4])
    assert drafter.config.kept_layers == [2, 4] and drafter.config.num_hidden_layers == 2
    ours, theirs = drafter.config.backbone_config.to_dict(), made.config.backbone_config.to_dict()
    assert ours == theirs
    assert [module.layer_idx for module in drafter.modules() if hasattr(module, "layer_idx")] == [
        module.layer_idx for module in made.modules() if hasattr(module, "layer_idx")
    ]
    drafter.save_pretrained(tmp_path)
    loaded = D3DDrafterForCausalLM.from_pretrained(tmp_path)
    for is_cached in (False, True):
        expected = logits_of(drafter, is_cached)
        torch.testing.assert_close(logits_of(made, is_cached), expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(logits_of(loaded, is_cached), expected, atol=1e-6, rtol=0)


def test_tied_embeddings_stay_tied(tmp_path):
    drafter = D3DDrafterForCausalLM.from_backbone(target_of(tie_word_embeddings=True), block_size=BLOCK_SIZE)
    remove_layers(drafter, [2])
    drafter.save_pretrained(tmp_path)
    loaded = D3DDrafterForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(loaded, False), logits_of(drafter, False), atol=1e-6, rtol=0)


def test_an_adapter_loses_its_weights_in_the_layers_removed(tmp_path):
    target_of().save_pretrained(tmp_path / "base")
    drafter = adapter_drafter(tmp_path / "base")
    full = logits_of(drafter, False)
    remove_layers(drafter, [0, 3])
    expected = logits_of(drafter, False)
    drafter.save_pretrained(tmp_path / "pruned")
    assert (expected - full).abs().max() > 1e-2
    for loaded in (
        D3DDrafterForCausalLM.from_pretrained(tmp_path / "pruned"),
        D3DDrafterForCausalLM.from_target(target_of(), tmp_path / "pruned"),
        merged_copy(drafter),
    ):
        torch.testing.assert_close(logits_of(loaded, False), expected, atol=1e-5, rtol=0)
    assert merged_copy(drafter, torch.bfloat16).dtype == torch.bfloat16 and hasattr(drafter, "peft_config")


def test_several_eos_ids_are_no_list_of_layers():
    drafter = drafter_of()
    drafter.config.backbone_config.eos_token_id = [3, 4, 5, 6, 7]
    remove_layers(drafter, [1])
    assert drafter.config.backbone_config.eos_token_id == [3, 4, 5, 6, 7]


def test_what_cannot_be_removed_is_refused():
    drafter = drafter_of(num_layers=2)
    with pytest.raises(ValueError, match="All 2 layers .* keep at least one"):
        remove_layers(drafter, [0, 1])
    with pytest.raises(ValueError, match=r"\[2\]: give indices from 0 to 1"):
        skip_layers(drafter, [2])
    with pytest.raises(ValueError, match="once"):
        remove_layers(drafter, [0, 0])
    by_index = adapter_drafter()
    by_index.peft_config["default"].layers_to_transform = [0, 1]
    with pytest.raises(ValueError, match="merge_adapter=True"):
        remove_layers(by_index, [0])
    drafter.model.layers = torch.nn.Sequential(*drafter.model.layers)
    with pytest.raises(ValueError, match="no layers that can be pruned.*nn.ModuleList"):
        skip_layers(drafter, [0])


def test_an_interrupted_block_puts_the_layers_back():
    drafter = drafter_of()
    expected = logits_of(drafter, False)
    with pytest.raises(KeyboardInterrupt), skip_layers(drafter, [1]):
        raise KeyboardInterrupt
    torch.testing.assert_close(logits_of(drafter, False), expected, atol=0, rtol=0)


# Scoring


@pytest.mark.parametrize(
    ("architecture", "kwargs"),
    [
        ("llama", {}),
        ("gemma3", {"block_attention": "causal"}),
        ("qwen3_moe", {}),
        ("llama", {"chained_head_size": 8}),
        ("llama", {"mask_token_id": 66}),
    ],
)
def test_scores_are_those_of_the_twins(architecture, kwargs):
    """Shared hidden states against full passes, and both against the metric of training, text by text."""
    drafter, rows = drafter_of(architecture, **kwargs), rows_of(5, architecture=architecture)
    calibration = CalibrationSet(rows, drafter.config, positions_per_text=30, texts_per_pass=2)
    for number in range(calibration.num_batches):
        batch = calibration.batch(number)
        fast, naive = accepted_without_each(drafter, batch), accepted_without_each_naively(drafter, batch)
        assert len(fast) == NUM_LAYERS
        for left, right in zip(fast, naive, strict=True):
            assert left.to_lists() == right.to_lists()
        assert len({tuple(accepted.tokens) for accepted in fast}) > 1
    with skip_layers(drafter, [3]):
        accepted = accepted_drafts(drafter, calibration)
        for number, row in enumerate(rows):
            ids = torch.tensor([row["input_ids"]])
            anchors = torch.from_numpy(calibration.texts[number][1])[None]
            outcomes = draft_outcomes(drafter, drafter.config, ids, torch.ones_like(ids), anchors)
            expected = AcceptedByPosition.of(outcomes)
            is_position = outcomes.anchors[0] >= 0
            assert accepted.tokens[number] == expected.synchronous[0][is_position].sum()
            assert accepted.first[number] == (expected.rank[0][is_position] == 0).sum()
            assert accepted.positions[number] == is_position.sum()
    assert 0 < accepted.length < accepted_drafts(drafter, calibration).length


def test_one_step_costs_about_half_of_full_passes(rows):
    """Layers run, counted: a full pass, then only the layers behind each candidate."""
    drafter = drafter_of()
    batch = CalibrationSet(rows[:2], drafter.config, 8, 2).batch(0)
    accepted_without_each(drafter, batch)  # the first time in a process one layer runs, to see what its class returns
    ran = []
    for layer in drafter.model.layers:
        layer.self_attn.register_forward_hook(lambda *args: ran.append(1))
    accepted_without_each(drafter, batch)
    num_shared = len(ran)
    accepted_without_each_naively(drafter, batch)
    assert num_shared == NUM_LAYERS + NUM_LAYERS * (NUM_LAYERS - 1) // 2
    assert len(ran) - num_shared == NUM_LAYERS * (NUM_LAYERS - 1)


def test_block_size_one_and_short_texts_are_scored(rows):
    drafter = D3DDrafterForCausalLM.from_backbone(target_of(), block_size=1)
    short = {"input_ids": [5, 6, 7], "prompt_length": 1}
    accepted = accepted_drafts(drafter, CalibrationSet([*rows[:2], short], drafter.config, 50))
    assert accepted.positions[2] == 1 and accepted.length == accepted.ar_accuracy


def test_ties_go_to_the_layer_that_keeps_the_next_token():
    def score(layer, length, accuracy, is_tied):
        return LayerScore(layer, length, [0, 0], 0, [0, 0], accuracy, is_tied)

    assert cheapest([score(0, 2.0, 0.8, True), score(1, 1.99, 0.9, True), score(2, 1.5, 1.0, False)]).layer == 1
    assert cheapest([score(0, 2.0, 0.8, True), score(1, 1.9, 0.9, False)]).layer == 0


def test_noise_is_judged_on_paired_differences():
    """Texts differ much, layers little: pairing sees what two separate intervals would not."""
    positions = np.full(8, 10)
    best = np.array([5, 30, 12, 22, 8, 17, 26, 10])

    def accepted(tokens):
        return Accepted(tokens, np.minimum(tokens, 10), positions)

    wobbling = best + np.array([-3, 2, 2, -3, 2, -3, 2, 0])  # a little less in sum
    scores = score_layers([accepted(best), accepted(best - 1), accepted(wobbling)], accepted(best + 2))
    assert [score.is_tied for score in scores] == [True, False, True]
    assert scores[1].impact == pytest.approx(0.3) and scores[1].impact_interval == pytest.approx([0.3, 0.3])
    low, high = scores[0].interval
    assert low < scores[1].acceptance_length < high


def test_baselines():
    assert removed_evenly(9, 4) == [1, 3, 5, 7] and removed_from_end(9, 2) == [7, 8]
    assert removed_by_influence([0.5, 0.1, 0.3, 0.2], 2) == [1, 3]
    drafter = drafter_of()
    with torch.no_grad():  # a layer that adds nothing has no influence
        drafter.model.layers[2].self_attn.o_proj.weight.zero_()
        drafter.model.layers[2].mlp.down_proj.weight.zero_()
    influence = block_influence(drafter, CalibrationSet(rows_of(3), drafter.config, 4))
    assert influence[2] == pytest.approx(0, abs=1e-6)
    assert min(value for layer, value in enumerate(influence) if layer != 2) > 1e-3


# The loop


def prune(drafter, rows, folder, goal, **kwargs):
    calibration, evaluation = {"a": rows[:4], "b": rows[4:7]}, {"a": rows[7:10], "b": rows[10:12]}
    return prune_drafter(drafter, calibration, evaluation, folder, goal, **kwargs)


def timeless(report):
    """A report without what differs from run to run of the same command."""
    report = copy.deepcopy(report)
    for name in ("git_commit", "date"):
        del report[name]
    for point in (report["full"], *report["steps"]):
        for name in ("packed_pass_ms", "synchronous_pass_ms"):
            assert point.pop(name) > 0
    return report


def recovery_of(rows, num_steps=2):
    arguments = D3DTrainingArguments(
        output_dir="unused", use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=2e-3, blocks_per_sequence=4
    )
    return Recovery(num_steps, arguments, rows[12:])


def test_the_report_holds_what_was_removed(rows, tmp_path):
    drafter = drafter_of()
    seen, goal = [], PruningGoal(num_removed=3)
    watch = {"on_progress": lambda progress: seen.append(copy.copy(progress))}
    pruned, report = prune(drafter, rows, str(tmp_path), goal, compare="all", **watch)
    assert report == json.loads((tmp_path / "pruning_report.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert not (tmp_path / "pruning_work").exists()
    assert drafter.config.num_hidden_layers == NUM_LAYERS and drafter.config.kept_layers is None

    assert [step["num_removed"] for step in report["steps"]] == [1, 2, 3] and report["stopped_by"] == "num_removed"
    removed = [step["removed_layer"] for step in report["steps"]]
    assert pruned.config.kept_layers == sorted(set(range(NUM_LAYERS)) - set(removed))
    assert pruned.config.training_recipe["pruning"]["removed_layers"] == removed
    assert drafter.config.training_recipe is None
    evaluation = CalibrationSet(rows[7:12], drafter.config)
    full = accepted_drafts(drafter, evaluation)
    for step in report["steps"]:
        with skip_layers(drafter, removed[: step["num_removed"]]):
            accepted = accepted_drafts(drafter, evaluation)
        assert step["acceptance_length"] == pytest.approx(accepted.length)
        assert step["retention"] == pytest.approx(accepted.length / full.length)
        low, high = step["retention_interval"]
        assert low <= step["retention"] <= high
        assert len(step["scores"]) == NUM_LAYERS - step["num_removed"] + 1
        of_a = slice(0, 3)
        assert step["by_set"]["a"]["retention"] == pytest.approx(accepted.of(of_a).retention(full.of(of_a)))
    comparison = report["baselines"][0]
    assert comparison["by"]["evenly"]["removed_layers"] == removed_evenly(NUM_LAYERS, 1)
    best = max(comparison["by"].values(), key=lambda values: values["acceptance_length"])
    assert comparison["by"][comparison["best"]] == best

    assert seen[-1].done == seen[-1].total and {p.step for p in seen} == {1, 2, 3}
    assert {p.layer for p in seen if p.step == 1} == {None, *range(NUM_LAYERS)}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    table = as_markdown(report)
    assert f"| 4 | {removed[0]} | {report['steps'][0]['acceptance_length']:.2f} |" in table and "from end" in table
    with pytest.raises(ValueError, match="finished pruning already: give another output folder"):
        prune(drafter, rows, str(tmp_path), PruningGoal(num_removed=3))


def test_the_layer_chosen_costs_least(rows, tmp_path):
    """A layer that does nothing goes first, before any that does something."""
    drafter = drafter_of()
    with torch.no_grad():
        drafter.model.layers[3].self_attn.o_proj.weight.zero_()
        drafter.model.layers[3].mlp.down_proj.weight.zero_()
    _, report = prune(drafter, rows, str(tmp_path), PruningGoal(num_removed=1))
    assert report["steps"][0]["removed_layer"] == 3 and report["steps"][0]["retention"] == 1.0
    assert report["baselines"][0]["best"] in ("progressive", "block_influence")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("is_recovering", [False, True])
def test_a_run_killed_anywhere_ends_the_same(rows, tmp_path, is_recovering, monkeypatch):
    """Killed after each of the files that it writes in turn, and started again as often."""
    kwargs = {"recovery": recovery_of(rows), "train_reference": True} if is_recovering else {}
    goal = PruningGoal(num_removed=2)
    expected, report = prune(drafter_of(), rows, str(tmp_path / "whole"), goal, texts_per_pass=4, **kwargs)
    replace, num_kills = os.replace, 0

    def kill(*args):
        replace(*args)
        raise Killed

    resumed = None
    while resumed is None:
        with monkeypatch.context() as patch:
            patch.setattr("d3d_hf.pruning.resumable_run.os.replace", kill)
            try:
                resumed = prune(drafter_of(), rows, str(tmp_path / "killed"), goal, texts_per_pass=4, **kwargs)
            except Killed:
                num_kills += 1
        if (tmp_path / "killed" / "pruning_report.json").exists():
            break
    assert num_kills > (10 if is_recovering else 8)
    ours = json.loads((tmp_path / "killed" / "pruning_report.json").read_text())
    assert timeless(ours) == timeless(report)
    final = D3DDrafterForCausalLM.from_pretrained(tmp_path / "killed")
    for (name, ours), (_, theirs) in zip(final.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_other_settings_do_not_go_on_with_a_run(rows, tmp_path, monkeypatch):
    """An adapter is the same drafter each time that it is loaded, whatever its base holds where it replaces it."""
    target_of().save_pretrained(tmp_path / "base")
    adapter_drafter(tmp_path / "base").save_pretrained(tmp_path / "drafter")

    def attempt(goal, seed):
        torch.manual_seed(seed)
        drafter = D3DDrafterForCausalLM.from_pretrained(tmp_path / "drafter", merge_adapter=False)
        return prune(drafter, rows, str(tmp_path / "out"), goal)

    def kill(model):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(measurements, "pass_times", kill)
        with pytest.raises(Killed):
            attempt(PruningGoal(num_removed=1), seed=0)
    with pytest.raises(ValueError, match=r"begun with other settings: goal .*another output folder"):
        attempt(PruningGoal(num_removed=2), seed=0)
    assert len(attempt(PruningGoal(num_removed=1), seed=1)[1]["steps"]) == 1


def test_goals(rows, tmp_path, monkeypatch):
    _, report = prune(drafter_of(), rows, str(tmp_path / "all"), PruningGoal(num_removed=4))
    retained = [step["retention"] for step in report["steps"]]
    least = (retained[0] + retained[1]) / 2 if retained[1] < retained[0] else retained[0]
    pruned, report = prune(drafter_of(), rows, str(tmp_path / "share"), PruningGoal(min_retention=least))
    assert report["stopped_by"] == "min_retention" and len(report["steps"]) >= 1
    assert all(step["retention"] >= least for step in report["steps"])
    assert pruned.config.num_hidden_layers == NUM_LAYERS - len(report["steps"])

    def ms_per_layer(model):
        return {"packed_pass_ms": 10.0 * len(model.model.layers), "synchronous_pass_ms": 1.0}

    monkeypatch.setattr(measurements, "pass_times", ms_per_layer)
    _, report = prune(drafter_of(), rows, str(tmp_path / "ms"), PruningGoal(max_draft_ms=30))
    assert report["stopped_by"] == "max_draft_ms" and len(report["steps"]) == 2
    with pytest.raises(ValueError, match="takes 50.0 ms with all layers: there is nothing to prune"):
        prune(drafter_of(), rows, str(tmp_path / "fast"), PruningGoal(max_draft_ms=60))


def test_recovery_trains_the_adapter_alone(rows, tmp_path):
    target_of().save_pretrained(tmp_path / "base")
    drafter = adapter_drafter(tmp_path / "base")
    pruned, report = prune(
        drafter,
        rows,
        str(tmp_path / "out"),
        PruningGoal(num_removed=1),
        recovery=recovery_of(rows),
        train_reference=True,
    )
    kept = pruned.config.kept_layers
    for new, old in enumerate(kept):
        ours, theirs = pruned.model.layers[new].self_attn, drafter.model.layers[old].self_attn
        assert torch.equal(ours.k_proj.weight, theirs.k_proj.weight)
        assert not torch.equal(ours.q_proj.lora_B.default.weight, theirs.q_proj.lora_B.default.weight)
    loaded = D3DDrafterForCausalLM.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "adapter").is_dir() and loaded.config.num_hidden_layers == NUM_LAYERS - 1
    torch.testing.assert_close(logits_of(loaded, False), logits_of(pruned, False), atol=1e-5, rtol=0)
    (step,) = report["steps"]
    (trained,) = report["full"]["trained"]
    assert step["retention_of_trained"] == pytest.approx(step["acceptance_length"] / trained["acceptance_length"])


def test_removals_can_share_a_training(rows, tmp_path, monkeypatch):
    trained = []
    train = Recovery.train
    monkeypatch.setattr(
        Recovery, "train", lambda self, drafter, *args: (trained.append(args[0]), train(self, drafter, *args))
    )
    recovery = dataclasses.replace(recovery_of(rows), every=2)
    _, report = prune(
        drafter_of(),
        rows,
        str(tmp_path),
        PruningGoal(num_removed=3),
        recovery=recovery,
        train_reference=True,
    )
    assert trained == [2, 3, 2, 3], "after the second removal and the last; the same for the reference"
    assert [point["num_removed"] for point in report["full"]["trained"]] == [2, 3]
    first, second, _ = report["steps"]
    assert first["retention_of_trained"] == first["retention"]
    assert second["retention_of_trained"] == pytest.approx(
        second["acceptance_length"] / report["full"]["trained"][0]["acceptance_length"]
    )
    assert report["settings"]["recovery"]["every"] == 2
    text = as_markdown(report)
    assert "2 training steps after every 2." in text and "progressive" in text and "(trained, the others not)" in text


def test_a_trained_drafter_is_pruned_with_its_own_data(rows, tmp_path):
    arguments = D3DTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, save_strategy="no"
    )
    trainer = D3DTrainer(drafter_of(), arguments, train_dataset=rows[12:])
    pruned, report = prune_after_training(
        trainer, {"a": rows[:3]}, {"a": rows[3:6]}, PruningGoal(num_removed=1), recovery_steps=1
    )
    assert pruned.config.num_hidden_layers == NUM_LAYERS - 1 and (tmp_path / "pruned" / "config.json").exists()
    assert report["settings"]["recovery"]["num_steps"] == 1
    assert trainer.model.config.num_hidden_layers == NUM_LAYERS


def test_mistakes_are_refused_before_any_work(rows, tmp_path):
    drafter, folder = drafter_of(), str(tmp_path / "out")
    goal = PruningGoal(num_removed=1)
    with pytest.raises(ValueError, match="num_removed is 5 and the drafter has 5 layers: remove at most 4"):
        prune(drafter, rows, folder, PruningGoal(num_removed=5))
    with pytest.raises(ValueError, match="calibration data hold no rows: give responses"):
        prune_drafter(drafter, {"a": []}, {"a": rows}, folder, goal)
    with pytest.raises(ValueError, match="2 of the evaluation rows are in the calibration data 'a'"):
        prune_drafter(drafter, {"a": rows[:4]}, {"a": rows[2:6]}, folder, goal)
    with pytest.raises(ValueError, match="in the recovery training data"):
        prune(drafter, rows, folder, goal, recovery=Recovery(1, recovery_of(rows).arguments, rows[8:]))
    with pytest.raises(ValueError, match="every is 0: give the removals"):
        dataclasses.replace(recovery_of(rows), every=0)
    with pytest.raises(ValueError, match="token id 90.*vocabulary has 67"):
        prune_drafter(drafter, {"a": [{"input_ids": [90] * 9, "prompt_length": 2}]}, {"a": rows}, folder, goal)
    with pytest.raises(ValueError, match="Row 0 .* no response"):
        prune_drafter(drafter, {"a": [{"input_ids": [9] * 9, "prompt_length": 9}]}, {"a": rows}, folder, goal)
    with pytest.raises(ValueError, match="compare is 'some'"):
        prune(drafter, rows, folder, goal, compare="some")
    with pytest.raises(ValueError, match="train_reference"):
        prune(drafter, rows, folder, goal, train_reference=True)
    with pytest.raises(ValueError, match="Not one draft token is accepted on the evaluation data 'noise'"):
        noise = {"input_ids": [5, 6, 7, 8, 5, 6, 7, 8], "prompt_length": 2}
        prune_drafter(drafter, {"a": rows[:4]}, {"noise": [noise]}, str(tmp_path / "noise"), goal)
    for wrong in ({}, {"num_removed": 0}, {"min_retention": 1.5}, {"max_draft_ms": 0}):
        with pytest.raises(ValueError, match="give"):
            PruningGoal(**wrong)
    assert not (tmp_path / "out").exists()


def test_the_plot_has_curves_and_a_map(rows, tmp_path):
    pytest.importorskip("matplotlib")
    _, report = prune(drafter_of(), rows, str(tmp_path), PruningGoal(num_removed=2), compare="all")
    assert (tmp_path / "pruning.png").read_bytes().startswith(b"\x89PNG")
    plot_report({**report, "steps": [], "baselines": []}, tmp_path / "nothing.png")


# The command


@pytest.fixture
def run(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, part in (("a", rows[:6]), ("b", rows[6:12]), ("more", rows[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    drafter_of().save_pretrained(tmp_path / "drafter")

    def run(*argv, calibration=("a.jsonl", "b.jsonl")):
        argv = [
            "prune",
            "--drafter",
            "drafter",
            "--calibration",
            *map(str, calibration),
            "--output",
            "out",
            *map(str, argv),
        ]
        capsys.readouterr()  # what saving said
        status = main(argv)
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_the_command(run, tmp_path):
    options = ("--calibration-rows", 3, "--evaluation-rows", 2, "--positions", 6, "--compare", "all")
    status, out, err = run("--remove", 2, *options, calibration=(tmp_path / "a.jsonl", "b.jsonl"))
    assert status == 0, err
    report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert report["data"]["calibration"] == {"a": 3, "b": 3} and report["data"]["evaluation"] == {"a": 2, "b": 2}
    assert out.strip() == as_markdown(report) and report["argv"][:2] == ["d3d-hf", "prune"]
    assert str(tmp_path) not in json.dumps(report)
    assert D3DConfig.from_pretrained(tmp_path / "out").kept_layers == report["steps"][-1]["kept_layers"]


def test_the_command_with_recovery(run, tmp_path):
    argv = ("--remove", 1, "--recovery-steps", 1, "--recovery-data", "more.jsonl", "--train-reference")
    status, out, err = run(*argv, "--", "--learning-rate", "1e-3", "--use-cpu")
    assert status == 0, err
    report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert report["settings"]["recovery"]["learning_rate"] == 1e-3
    assert report["steps"][0]["retention_of_trained"] > 0


def test_the_command_refuses(run, tmp_path, rows):
    def refused(*argv, **kwargs):
        status, _, err = run(*argv, **kwargs)
        assert status == 2 and err.count("\n") == 1, err
        return err

    assert "give num_removed" in refused()
    assert "--remove is 5" in refused("--remove", 5) and "at most 4" in refused("--remove", 5)
    assert "give --recovery-data" in refused("--remove", 1, "--recovery-steps", 1)
    assert "without --recovery-steps" in refused("--remove", 1, "--train-reference")
    assert "without --recovery-steps" in refused("--remove", 1, "--recovery-every", 2)
    assert "no option of training" in refused(
        *("--remove", 1, "--recovery-steps", 1, "--recovery-data", "more.jsonl", "--", "--learning-rat", "1")
    )
    assert "leaves 0 to evaluate on" in refused("--remove", 1, "--calibration-rows", 6)
    (tmp_path / "empty.jsonl").write_text("")
    assert "holds no responses" in refused("--remove", 1, calibration=("empty.jsonl",))
    folder = tmp_path / "others"
    folder.mkdir()
    shard = [{"id": str(i), "prompt_ids": [5], "response_ids": [6, 7, 8], "finish": "stop"} for i in range(4)]
    (folder / "responses-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shard))
    metadata = {
        "format_version": 1,
        "target": "org/other",
        "vocab_size": 67,
        "tokenizer_fingerprint": "0" * 64,
        "prompts": {"num_rows": 4},
    }
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({**config, "target_name_or_path": "org/target"}))
    (folder / "metadata.json").write_text(json.dumps(metadata))
    assert "those of 'org/other'" in refused("--remove", 1, calibration=("others",))
    tiny_tokenizer().save_pretrained(tmp_path / "drafter")
    assert "fingerprint" in refused("--remove", 1, calibration=("others",))
    assert not (tmp_path / "out").exists()
