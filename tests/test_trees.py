"""Draft trees: how they are built, what the target accepts of them, and that the text stays plain generation's."""

import pytest
import torch

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.decoding.draft_tree import DraftTree
from d3d_hf.decoding.ngrams import Continuation, TextChances, TextIndex, merge
from d3d_hf.decoding.noise import ForeseenNoise
from d3d_hf.decoding.tree_building import Draws, TreeBuilder
from d3d_hf.decoding.tree_size import Calibration, PassCosts, SizeRule
from d3d_hf.decoding.walk import Walk
from d3d_hf.model.block import Block
from d3d_hf.testing import (
    ARCHITECTURES,
    ForwardCounter,
    ScriptedDrafter,
    anti_oracle_drafter,
    memoryless_model,
    oracle_drafter,
    tiny_model,
)
from lossless import assert_same, generate, prompt_of


def use_trees(drafter, size, from_text=False, mode="sync", depth=None):
    config = drafter.generation_config
    config.draft_tree_size, config.draft_from_text, config.drafting_mode = size, from_text, mode
    config.num_assistant_tokens = depth
    return drafter


def a_block(drafter, num_rows, seed=0, bonus=None, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_rows, drafter.config.hidden_size, generator=generator)
    logits = spread * torch.randn(num_rows, drafter.config.vocab_size, generator=generator)
    return Block(hidden_states, logits, bonus)


def a_drafter(chained_head_size=None, vocab_size=67, **kwargs):
    drafter = D3DDrafterForCausalLM.from_backbone(
        tiny_model("llama", seed=3, vocab_size=vocab_size), chained_head_size=chained_head_size, **kwargs
    )
    if drafter.chained_head is not None:
        for parameter in drafter.chained_head.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return drafter


def draws_for(vocab_size, num_rows, **settings):
    noise = torch.empty(num_rows, vocab_size).exponential_(generator=torch.Generator().manual_seed(5))
    return Draws(noise, **settings)


@pytest.mark.parametrize("bonus", [None, 7])
@pytest.mark.parametrize("head, vocab_size", [(None, 67), (16, 67), (16, 40), (None, 200), (16, 200)])
@pytest.mark.parametrize("num_nodes, depth", [(1, 1), (5, 3), (16, 6), (33, 6), (64, 2)])
@pytest.mark.parametrize("draws", [None, {}, {"temperature": 0.6}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}])
def test_levels_at_once_give_the_tree_of_one_node_at_a_time(bonus, head, vocab_size, num_nodes, depth, draws):
    drafter = a_drafter(head, vocab_size)
    builder, block = TreeBuilder(drafter, vocab_size), a_block(drafter, 6, bonus=bonus)
    draws = None if draws is None else draws_for(vocab_size, depth, **draws)
    fast = builder.tree(block, num_nodes, depth, draws)
    slow = builder.tree_one_by_one(block, num_nodes, depth, draws)
    assert fast.read() == slow.read()
    assert torch.allclose(fast.chances, slow.chances, atol=1e-6)
    assert max(fast.read().depths) <= depth
    if draws is None or not draws.cuts:
        assert len(fast) == num_nodes


def test_smaller_trees_are_the_first_nodes_of_larger_ones():
    drafter = a_drafter(16)
    builder, block = TreeBuilder(drafter, 67), a_block(drafter, 6)
    large = builder.tree(block, 40, 6)
    assert (large.chances.diff() <= 0).all()
    for size in (1, 2, 7, 39):
        assert large.first(size).read() == builder.tree(block, size, 6).read()


def test_a_chain_is_the_tree_that_takes_one_child_each_time():
    drafter = a_drafter(16)
    builder, block = TreeBuilder(drafter, 67), a_block(drafter, 6, spread=30.0)
    tree = builder.tree(block, 6, 6)
    assert tree.read().parents == list(range(6)) and tree.tokens.tolist() == builder.chain(block, 6).tolist()


def test_the_mask_token_and_tokens_beyond_the_vocabulary_are_in_no_tree():
    drafter = a_drafter(vocab_size=67, mask_token_id=9)
    block = a_block(drafter, 4)
    block.logits[:, 9] = block.logits[:, 60:] = 100.0
    tokens = TreeBuilder(drafter, 60).tree(block, 64, 4).tokens.tolist()
    assert 9 not in tokens and max(tokens) < 60


class SecondChoiceDrafter(ScriptedDrafter):
    """The right token is its second choice everywhere."""

    def project(self, hidden_states, backbone=None):
        right = hidden_states[..., :1].round().long()
        logits = torch.zeros(*hidden_states.shape[:-1], self.config.vocab_size)
        return logits.scatter(-1, (right + 1) % self.config.vocab_size, 20.2).scatter(-1, right, 20.0)


def second_choice_drafter(reference, **kwargs):
    drafter = oracle_drafter(reference, **kwargs)
    drafter.__class__ = SecondChoiceDrafter
    return drafter


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_second_choice_is_found_by_a_tree_and_by_no_chain(architecture):
    target, prompt = tiny_model(architecture, seed=11), prompt_of()
    reference = generate(target, prompt)
    drafter = use_trees(second_choice_drafter(reference, block_size=4), 0)
    assert_same(target, prompt, drafter, num_forwards=33)
    # Four levels of two choices are 30 nodes: all four tokens are in the tree.
    use_trees(drafter, 30)
    assert_same(target, prompt, drafter, num_forwards=7)
    stats = drafter.last_generation_stats
    assert set(stats.accepted_from) == {"rank 2"} and stats.accepted_from["rank 2"] == 26
    assert stats.depth_per_round > 3 and stats.nodes_per_round > 20


@pytest.mark.parametrize("mode", ["sync", "async", "auto"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trees_change_no_token(architecture, mode):
    """Random drafters, whose trees are wide; sliding windows shorter than the text in one architecture."""
    target = tiny_model(architecture, seed=11)
    for seed, size in ((0, 1), (1, 7), (2, 32), (3, "auto")):
        drafter = D3DDrafterForCausalLM.from_backbone(
            target if seed % 2 else tiny_model("qwen3", seed=2), block_size=5
        )
        use_trees(drafter, size, from_text=bool(seed % 2), mode=mode)
        assert_same(target, prompt_of(20, seed), drafter, max_new_tokens=21)
        torch.manual_seed(seed)
        reference = generate(target, prompt_of(20, seed), do_sample=True)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        output = generate(target, prompt_of(20, seed), drafter, do_sample=True)
        assert output.tolist() == reference.tolist() and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_trees_under_either_attention(attention):
    target = tiny_model("gemma3", seed=11, attn_implementation=attention)
    reference = generate(target, prompt_of())
    drafter = use_trees(second_choice_drafter(reference, block_size=3), 14)
    assert_same(target, prompt_of(), drafter, num_forwards=9)


def test_a_tree_is_no_deeper_than_the_text_has_room():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt)
    drafter = use_trees(second_choice_drafter(reference, block_size=4), 30)
    for length in (1, 2, 3, 5, 6):
        assert_same(target, prompt, drafter, num_forwards=-(-length // 5), max_new_tokens=length)
        assert all(max(tree.depths) < length for tree in drafter.last_generation_stats.trees)


def test_eos_ends_the_text_wherever_in_the_tree_it_stands():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    free = generate(target, prompt)
    for place in (2, 3, 8):
        ends = {"eos_token_id": int(free[0, prompt.shape[1] + place])}
        drafter = use_trees(second_choice_drafter(free, block_size=4), 30)
        assert_same(target, prompt, drafter, **ends)
        # EOS on side branches ends nothing.
        never = int(next(token for token in range(2, 67) if token not in free[0].tolist()))
        assert_same(target, prompt, drafter, num_forwards=7, eos_token_id=never)


def test_long_prompts_are_read_before_a_tree_hangs_on_them(monkeypatch):
    monkeypatch.setattr("d3d_hf.decoding.target_pass._MOST_CONTEXT_WITH_TREE", 16)
    target, prompt = tiny_model("llama", seed=11), prompt_of(50)
    drafter = use_trees(second_choice_drafter(generate(target, prompt), block_size=4), 30)
    with ForwardCounter(target) as forwards:
        output = generate(target, prompt, drafter)
    assert output.tolist() == generate(target, prompt).tolist() and forwards.count == 7 + 3


@pytest.mark.slow
def test_compiled_passes_verify_trees():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt)
    drafter = use_trees(second_choice_drafter(reference, block_size=4), 30)
    with d3d_hf.compiled_target(target, draft_lengths=(8, 32)) as compiled:
        for size in (30, 8, 5, "auto"):
            use_trees(drafter, size)
            assert generate(compiled, prompt, drafter).tolist() == reference.tolist()
        assert compiled.draft_tree_sizes == (8, 32)
        use_trees(drafter, 30)
        assert_same(compiled, prompt, drafter, num_forwards=7)


# Shared noise


@pytest.mark.parametrize("vocab_size", [5, 1000, 49_152, 151_936])
def test_foreseen_noise_draws_what_multinomial_draws(vocab_size):
    probs = torch.randn(6, vocab_size).softmax(-1)
    torch.manual_seed(3)
    expected = [int(torch.multinomial(row[None], 1)) for row in probs]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    noise = ForeseenNoise(vocab_size, torch.device("cpu"))
    noise.row(3)
    noise.row(1)
    assert [int(noise.draw(row[None])) for row in probs] == expected
    assert torch.equal(torch.get_rng_state(), state) and noise.is_foreseeable


def test_noise_is_not_foreseen_where_somebody_else_draws():
    probs = torch.randn(4, 50).softmax(-1)
    torch.manual_seed(3)
    expected = [(torch.rand(2).tolist(), int(torch.multinomial(row[None], 1))) for row in probs]
    torch.manual_seed(3)
    noise = ForeseenNoise(50, torch.device("cpu"))
    noise.row(5)
    assert [(torch.rand(2).tolist(), int(noise.draw(row[None]))) for row in probs] == expected
    assert not noise.is_foreseeable


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "min_p": 0.05}],
)
def test_a_drafter_that_equals_its_target_foresees_every_draw(settings):
    """The first token of a draft is the drafter's own next token: of its target's law, and so of its target's draw."""
    target, prompt = tiny_model("llama", seed=11, initializer_range=0.08), prompt_of()
    drafter = use_trees(D3DDrafterForCausalLM.from_backbone(target, block_size=4), 1, depth=1)
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, **settings}
    for seed in range(3):
        torch.manual_seed(seed)
        reference = generate(target, prompt, **kwargs)
        torch.manual_seed(seed)
        with ForwardCounter(target) as forwards:
            output = generate(target, prompt, drafter, **kwargs)
        assert output.tolist() == reference.tolist()
        assert forwards.count == 20 and drafter.last_generation_stats.ranked_by == "noise"


def test_where_the_noise_cannot_be_foreseen_the_law_ranks():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = use_trees(D3DDrafterForCausalLM.from_backbone(target, block_size=4), 8)

    def drawing(input_ids, scores):
        return scores + 0.1 * torch.rand(scores.shape)

    outputs = []
    for assistant in (None, drafter):
        torch.manual_seed(1)
        outputs.append(generate(target, prompt, assistant, do_sample=True, logits_processor=[drawing]).tolist())
        outputs.append(torch.get_rng_state().tolist())
    assert outputs[:2] == outputs[2:]
    stats = drafter.last_generation_stats
    assert stats.ranked_by == "law" and "draws from the global generator" in stats.ranking_reason


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 7, "temperature": 0.8}, {"top_p": 0.6, "output_scores": True}])
def test_drawing_for_all_nodes_together_is_drawing_one_by_one(monkeypatch, kwargs):
    """What is done on GPUs, where reading each choice back would wait for the device."""
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = use_trees(D3DDrafterForCausalLM.from_backbone(target, block_size=4), 12)
    kwargs = {"do_sample": True, "top_k": 0, "return_dict_in_generate": True, **kwargs}
    torch.manual_seed(1)
    reference = generate(target, prompt, **kwargs)
    state = torch.get_rng_state()
    together = Walk.__init__

    def init(self, call):
        together(self, call)
        self._draws_together = self._are_rows_alone()
        assert self._draws_together

    monkeypatch.setattr(Walk, "__init__", init)
    torch.manual_seed(1)
    output = generate(target, prompt, drafter, **kwargs)
    assert output.sequences.tolist() == reference.sequences.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    if kwargs.get("output_scores"):
        assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(output.scores, reference.scores))


# Nodes out of the text


def test_continuations_are_those_of_the_longest_match():
    index = TextIndex()
    text = torch.tensor([5, 6, 7, 8, 1, 2, 6, 7, 9, 3, 5, 6, 7])
    found = index.continuations(text, 3)
    assert [(c.tokens, c.match_length) for c in found] == [([8, 1, 2], 3), ([9, 3, 5], 2)]
    text = torch.cat([text, torch.tensor([9, 3])])
    assert index.continuations(text, 2)[0].tokens == [5, 6]
    assert index.continuations(torch.cat([text, torch.tensor([40, 41])]), 2) == []


def test_a_text_that_repeats_itself_goes_on_doing_so():
    found = TextIndex().continuations(torch.tensor([3, 4, 3, 4, 3, 4]), 5)
    assert found[0].tokens == [3, 4, 3, 4, 3]


def test_paths_are_merged_by_prefix_and_the_likeliest_nodes_kept():
    tree = DraftTree(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0]), torch.tensor([0.5, 0.2, 0.1]))
    chances = TextChances()
    merged = merge(tree, [Continuation([1, 9, 9], 8)], chances, 10)
    paths = merged.read()
    first = paths.child(0, 1)
    assert paths.child(first, 2) and paths.child(paths.child(first, 9), 9) and paths.child(0, 3)
    assert len(merged) == 5 and (merged.chances.diff() <= 0).all()
    assert merged.chances[first - 1] == pytest.approx(chances.chance(8))
    assert sorted(merged.sources) == ["model"] * 3 + ["text"] * 2
    assert merge(tree, [Continuation([1, 9, 9], 8)], chances, 2).read().tokens == [1, 9]


def test_chances_of_the_text_are_learned():
    chances = TextChances()
    before = chances.chance(3)
    for _ in range(20):
        chances.record(Continuation([1, 2], 3), [7])
    assert chances.chance(3) < 0.3 * before and chances.chance(4) == TextChances().chance(4)


def test_text_drafts_what_the_drafter_does_not():
    """A drafter that is never right, and a model without memory, whose greedy text goes round in a circle."""
    target, prompt = memoryless_model(vocab_size=11, seed=1), torch.tensor([[2, 5]])
    reference = generate(target, prompt, max_new_tokens=60)
    drafter = use_trees(anti_oracle_drafter(reference, block_size=4, vocab_size=11), 0)
    assert_same(target, prompt, drafter, num_forwards=60, max_new_tokens=60)
    use_trees(drafter, 8, from_text=True)
    assert_same(target, prompt, drafter, max_new_tokens=60)
    stats = drafter.last_generation_stats
    assert stats.num_rounds < 30 and stats.accepted_from["text"] > 30


# The size rule


def costs(slope, base=1.0):
    costs = PassCosts()
    for _ in range(3):
        for rows in (1, 9, 33):
            costs.record(rows, base + slope * rows)
    return costs


CHANCES = [0.6, 0.4, 0.3] + [0.1] * 20 + [0.02] * 60


def test_the_size_goes_by_what_a_row_costs():
    sizes = []
    for slope in (0.0, 0.005, 0.05, 1.0):
        rule = SizeRule(costs(slope))
        rule.record_draft(1.0)
        sizes.append(rule.choose(CHANCES))
        assert rule.most >= sizes[-1]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 and sizes[-1] == 4


def test_steps_in_what_rows_cost_are_used():
    steps = PassCosts()
    for _ in range(3):
        for rows, seconds in ((1, 1.0), (9, 1.0), (17, 3.0), (33, 6.0)):
            steps.record(rows, seconds)
    rule = SizeRule(steps, sizes=(8, 16, 32))
    rule.record_draft(1.0)
    assert rule.choose(CHANCES) == 8


def test_a_first_pass_that_compiled_is_not_believed():
    measured = costs(0.01)
    believed = measured.seconds(17)
    measured.record(17, 100.0)
    assert measured.seconds(17) == pytest.approx(believed)
    measured.record(17, 1.2)
    assert measured.seconds(17) == pytest.approx(1.2)


def test_chances_are_corrected_by_verdicts():
    calibration = Calibration()
    assert calibration.chance(0.5) == pytest.approx(0.5) and calibration.chance(0.0) == 0.0
    for _ in range(200):
        calibration.record([0.5, 0.3, 0.01], [True, False, False])
    assert calibration.chance(0.5) > 0.9 and calibration.chance(0.3) < 0.05


def test_plot_of_a_tree(tmp_path):
    pytest.importorskip("matplotlib")
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = use_trees(second_choice_drafter(generate(target, prompt), block_size=4), 30)
    generate(target, prompt, drafter)
    stats = drafter.last_generation_stats
    stats.plot(tmp_path / "tree.png", tree=1)
    assert (tmp_path / "tree.png").stat().st_size > 2000
    with pytest.raises(ValueError, match="drafted 7 trees"):
        stats.plot(tmp_path / "tree.png", tree=7)


@pytest.mark.parametrize(
    "option, value", [("draft_tree_size", -1), ("draft_tree_size", "big"), ("draft_from_text", 2)]
)
def test_options_out_of_range(option, value):
    target = tiny_model("llama", seed=11)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    setattr(drafter.generation_config, option, value)
    with pytest.raises(ValueError, match=option):
        generate(target, prompt_of(), drafter)
