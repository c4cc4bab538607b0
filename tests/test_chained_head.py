"""The chained head: token by token it does what it does over whole packed passes, and every law stays exact."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments
from d3d_hf.decoding.packed_drafts import PackedSession
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import ARCHITECTURES, memoryless_model, tiny_model
from d3d_hf.training.acceptance import draft_outcomes, play_through
from lossless import assert_same, generate, prompt_of
from test_sampling import LAWS, NUM_TESTS, VOCAB_SIZE, transition_p_value, transitions


@pytest.fixture(autouse=True)
def _whole_vocabulary(monkeypatch):
    """Unless a test says otherwise no token is left out of a law."""
    monkeypatch.setattr("d3d_hf.model.block.SHORTLIST", 128)


def perturb(drafter, scale=0.3, seed=0):
    """Gives the head something to say: it begins as no correction."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.chained_head.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return drafter


def drafter_of(architecture="llama", block_size=5, **kwargs):
    model = tiny_model(architecture, seed=5, initializer_range=0.2)
    return perturb(D3DDrafterForCausalLM.from_backbone(model, block_size=block_size, chained_head_size=8, **kwargs))


def laws_by_definition(drafter, ids, slot_tokens, layout):
    with torch.no_grad():
        return drafter.packed_forward(ids, layout, slot_tokens=slot_tokens).logits[0].float()


def assert_likeliest(draft, laws):
    """Each token is the likeliest of its law, but for rounding."""
    gaps = laws.max(dim=-1).values - laws.gather(1, draft[:, None])[:, 0]
    assert gaps.max() < 1e-4


@pytest.mark.parametrize("block_attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_have_the_laws_of_a_teacher_forced_pass(architecture, block_attention):
    drafter = drafter_of(architecture, block_attention=block_attention)
    text = prompt_of(9)
    draft = DraftingSession(drafter, 67).draft(text[0], 5)

    layout = lay_out(9, torch.tensor([[8]]), (4,), bidirectional=block_attention == "bidirectional")
    ids = torch.cat([text, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    standing = torch.cat([torch.full((1, 9), -1), draft[None, :4]], dim=1)
    expected = laws_by_definition(drafter, ids, standing, layout)[8:]
    assert_likeliest(draft, expected)
    uncorrected = laws_by_definition(drafter, ids, None, layout)[8:]
    torch.testing.assert_close(expected[0], uncorrected[0], atol=1e-4, rtol=1e-4)
    assert (expected[1:] - uncorrected[1:]).abs().amax(dim=1).min() > 0.1, "every mask slot is corrected"
    assert draft.tolist() != uncorrected.argmax(dim=-1).tolist()


def test_packed_branches_are_corrected_from_the_bonus_on():
    drafter = drafter_of()
    session = PackedSession(drafter, 67)
    text = prompt_of(8)[0]
    drafts = session.pack(text, num_committed=6, round_id=1, num_guesses=1)
    for index, branch in enumerate(drafts.branches):
        bonus = 11 if branch.guess is None else branch.guess
        draft = session.reader.chain(session.block_of(drafts, index, bonus), 5)
        anchor = 5 + branch.node
        shown = branch.guess is not None
        layout = lay_out(anchor + 1, torch.tensor([[anchor]]), (5,), num_visible=torch.tensor([[int(shown)]]))
        ids = torch.cat([text[: anchor + 1], torch.tensor([bonus, 0, 0, 0, 0])])[None]
        standing = torch.cat([torch.full((anchor + 1,), -1), torch.tensor([bonus]), draft[:4]])[None]
        assert_likeliest(draft, laws_by_definition(drafter, ids, standing, layout)[anchor + 1 :])


def test_several_blocks_of_a_batch_are_corrected_apart_from_each_other():
    """Blocks of unequal length, with visible slots, without a chain, and padding: each as if it were alone."""
    drafter = drafter_of()
    contexts = torch.cat([prompt_of(10, seed=1), prompt_of(10, seed=2)])
    anchors = torch.tensor([[3, 9, 6], [5, 2, -1]])
    visible = torch.tensor([[0, 1, 2], [0, 0, 0]])
    slots = torch.randint(2, 67, (2, 4 + 5 + 4), generator=torch.Generator().manual_seed(3))
    standing = torch.cat([torch.full((2, 10), -1), slots], dim=1)
    standing[1, 10 + 4 : 10 + 9] = -1  # the second block of the second row has no chain
    layout = lay_out(10, anchors, (4, 5, 4), num_visible=visible)
    with torch.no_grad():
        logits = drafter.packed_forward(torch.cat([contexts, slots], dim=1), layout, slot_tokens=standing).logits
    starts = (0, 4, 9)
    for row in range(2):
        for block, (start, size) in enumerate(zip(starts, (4, 5, 4), strict=True)):
            anchor = int(anchors[row, block])
            if anchor < 0:
                continue
            alone = lay_out(anchor + 1, torch.tensor([[anchor]]), (size,), num_visible=visible[row, block][None, None])
            own = slots[row, start : start + size]
            ids = torch.cat([contexts[row, : anchor + 1], own])[None]
            chained = standing[row, 10 + start : 10 + start + size]
            given = torch.cat([torch.full((anchor + 1,), -1), chained])[None]
            expected = laws_by_definition(drafter, ids, given, alone)[anchor + 1 :]
            torch.testing.assert_close(logits[row, 10 + start : 10 + start + size], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "granite"])
def test_a_few_candidates_have_the_logits_of_the_whole_vocabulary(architecture):
    """Where logits are scaled (Granite) the whole way is taken; elsewhere the candidates' rows of the head suffice."""
    drafter = drafter_of("llama") if architecture == "llama" else granite_drafter()
    hidden, correction = torch.randn(2, 3, drafter.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, after = drafter.project(hidden), drafter.project(hidden + correction)
        shortlist = drafter.shortlist(before, num_candidates=9)
        assert drafter.shortlist(before, num_candidates=67) is None
    if architecture == "granite":
        assert shortlist is None
        return
    tokens, logits, rows = shortlist
    torch.testing.assert_close(logits + (rows @ correction[..., None])[..., 0], after.gather(1, tokens))
    assert tokens.tolist() == before.topk(9).indices.tolist()
    assert not torch.allclose(before, after, atol=0.01)


def test_without_a_shortlist_the_whole_vocabulary_is_corrected():
    drafter = granite_drafter()
    text = prompt_of(9)
    draft = DraftingSession(drafter, 67).draft(text[0], 5)
    layout = lay_out(9, torch.tensor([[8]]), (7,))
    ids = torch.cat([text, torch.zeros(1, 7, dtype=torch.long)], dim=1)
    standing = torch.cat([torch.full((1, 9), -1), draft[None], torch.full((1, 2), -1)], dim=1)
    assert_likeliest(draft, laws_by_definition(drafter, ids, standing, layout)[8:13])
    assert draft.tolist() != laws_by_definition(drafter, ids, None, layout)[8:13].argmax(dim=-1).tolist()


def granite_drafter():
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=3.0,
    )
    return perturb(D3DDrafterForCausalLM.from_backbone(GraniteForCausalLM(config), chained_head_size=8))


def test_a_new_head_changes_nothing():
    model = tiny_model("llama", seed=5, initializer_range=0.2)
    torch.manual_seed(0)
    drafts = []
    for size in (None, 8):
        drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=5, chained_head_size=size)
        drafts.append(DraftingSession(drafter, 67).draft(prompt_of(9)[0], 5).tolist())
    assert drafts[0] == drafts[1]
    assert drafter.chained_head.hidden_in.weight.std() > 0


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("num_candidates", [4, 128])
def test_greedy_ids_are_the_targets(mode, num_candidates, monkeypatch):
    monkeypatch.setattr("d3d_hf.model.block.SHORTLIST", num_candidates)
    target = tiny_model("llama", seed=5, initializer_range=0.2)
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(target, block_size=5, chained_head_size=8), scale=0.05)
    drafter.generation_config.drafting_mode = mode
    drafter.generation_config.on_draft_error = "raise"
    assert_same(target, prompt_of(), drafter)
    assert drafter.last_generation_stats.tokens_per_round > 1.2


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("num_candidates", [3, 128])
def test_samples_follow_the_targets_law(mode, num_candidates, monkeypatch):
    monkeypatch.setattr("d3d_hf.model.block.SHORTLIST", num_candidates)
    target = memoryless_model(VOCAB_SIZE, seed=1)
    model = memoryless_model(VOCAB_SIZE, seed=1, spread=1.5)
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(model, block_size=4, chained_head_size=8), scale=0.2)
    drafter.generation_config.drafting_mode = mode
    drafter.generation_config.on_draft_error = "raise"
    drafter.generation_config.num_bonus_guesses = 1
    counts = transitions(target, drafter, LAWS["temperature"], num_generations=8)
    assert transition_p_value(counts, target, LAWS["temperature"]) > 1e-4 / NUM_TESTS
    assert drafter.last_generation_stats.tokens_per_round > 1.3


def test_a_drafted_token_never_lies_beyond_the_vocabulary_or_is_the_mask():
    """Also where the drafter likes nothing better."""
    drafter = drafter_of(mask_token_id=3, vocab_size=40)
    with torch.no_grad():
        drafter.lm_head.weight[[3, 50]] *= 100
    wanted = 0
    for seed in range(12):
        text = prompt_of(9, seed=seed)[0].clamp(max=39)
        session = DraftingSession(drafter, 40)
        draft = session.draft(text, 5)
        assert len(draft) == 5 and (draft < 40).all() and (draft != 3).all()
        favourites = session.block(text, 5).logits.argmax(dim=-1)
        wanted += int(((favourites == 3) | (favourites == 50)).sum())
    assert wanted > 0


def test_saved_and_loaded(tmp_path):
    drafter = drafter_of()
    drafter.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.chained_head_size == 8
    for name, parameter in drafter.chained_head.state_dict().items():
        assert torch.equal(parameter, again.chained_head.state_dict()[name])


def test_stored_as_an_adapter(tmp_path):
    model = tiny_model("llama", seed=5, initializer_range=0.2)
    model.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=5, chained_head_size=8)
    lora = LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["mask_embedding", "chained_head"]
    )
    wrapped = get_peft_model(drafter, lora).get_base_model().eval()
    perturb(wrapped)
    wrapped.save_pretrained(tmp_path / "drafter")
    session = DraftingSession(wrapped, 67)
    draft, logits = session.draft(prompt_of(9)[0], 5), session.block(prompt_of(9)[0], 5).logits
    layout = lay_out(9, torch.tensor([[8]]), (4,))
    ids = torch.cat([prompt_of(9), torch.zeros(1, 4, dtype=torch.long)], dim=1)
    standing = torch.cat([torch.full((1, 9), -1), draft[None, :4]], dim=1)
    expected = laws_by_definition(wrapped, ids, standing, layout)[8:]
    loaded = [
        D3DDrafterForCausalLM.from_pretrained(tmp_path / "drafter"),
        D3DDrafterForCausalLM.from_pretrained(tmp_path / "drafter", merge_adapter=False),
        D3DDrafterForCausalLM.from_target(target, adapter=tmp_path / "drafter"),
    ]
    for drafter in loaded:
        session = DraftingSession(drafter, 67)
        torch.testing.assert_close(session.block(prompt_of(9)[0], 5).logits, logits, atol=1e-4, rtol=1e-4)
        assert session.draft(prompt_of(9)[0], 5).tolist() == draft.tolist()
        laws = laws_by_definition(drafter, ids, standing, layout)[8:]
        torch.testing.assert_close(laws, expected, atol=1e-4, rtol=1e-4)


def rows_of(target, num_rows=6):
    rows = []
    for seed in range(num_rows):
        prompt = prompt_of(6, seed=seed)
        output = generate(target, prompt, max_new_tokens=30)
        rows.append({"input_ids": output[0].tolist(), "prompt_length": 6})
    return rows


def training_arguments(folder, **kwargs):
    return D3DTrainingArguments(
        output_dir=str(folder), max_steps=40, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=40, disable_tqdm=True, **kwargs,
    )  # fmt: skip


def test_trained_alone_it_lengthens_drafts(tmp_path):
    """With the backbone frozen, what is gained is the head's."""
    target = tiny_model("llama", seed=5, initializer_range=0.2)
    rows = rows_of(target)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=5, chained_head_size=32)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name.startswith("chained_head."))
    trainer = D3DTrainer(
        drafter, training_arguments(tmp_path, chain_dropout=0.0), train_dataset=rows, eval_dataset=rows
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_tokens_per_round"] > before["eval_tokens_per_round"] + 0.3
    assert after["eval_acceptance_length_masked"] > before["eval_acceptance_length_masked"] + 0.3
    assert after["eval_ar_accuracy"] == before["eval_ar_accuracy"], "the context's own outputs are not corrected"


def test_dropped_chains_are_drawn_anew_and_leave_rows_alone(tmp_path):
    target = tiny_model("llama", seed=5)
    rows = rows_of(target, num_rows=4)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=5, chained_head_size=8)
    shares = []
    for dropout in (0.0, 0.5, 1.0):
        trainer = D3DTrainer(drafter, training_arguments(tmp_path, chain_dropout=dropout), train_dataset=rows)
        batch = next(iter(trainer.get_train_dataloader()))
        tokens, context_length = batch["slot_tokens"], batch["context_mask"].shape[1]
        assert (tokens[:, :context_length] == -1).all()
        is_mask = trainer._layout(batch).is_mask_slot & (batch["labels"] != -100)
        assert not (tokens[~is_mask] >= 0).any()
        shares.append(float((tokens[is_mask] >= 0).float().mean()))
    assert shares[0] == 1 and 0.1 < shares[1] < 0.9 and shares[2] == 0


def test_rounds_played_through_are_those_of_generate():
    target = tiny_model("llama", seed=5, initializer_range=0.2)
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(target, block_size=5, chained_head_size=8), scale=0.05)
    prompt = prompt_of(7)
    text = generate(target, prompt, max_new_tokens=30)
    anchors = torch.arange(6, text.shape[1] - 1)[None]
    outcomes = draft_outcomes(drafter, drafter.config, text, torch.ones_like(text), anchors)
    rounds = play_through(outcomes, 0, prompt_length=7, length=text.shape[1])
    generate(target, prompt, drafter, max_new_tokens=30)
    stats = drafter.last_generation_stats
    assert stats.num_rounds == len(rounds)
    assert stats.num_accepted == {n - 1: rounds.count(n) for n in sorted(set(rounds))}


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "big"])
def test_sizes_are_checked(value):
    with pytest.raises(ValueError, match="chained_head_size is .*256 is usual"):
        D3DDrafterForCausalLM.from_backbone(tiny_model("llama"), chained_head_size=value)
