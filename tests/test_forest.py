"""
Trees of tokens on a text: who sees whom, against a definition by brute force, and one pass over a tree against one
pass for each of its paths.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from d3d_hf.decoding.draft_tree import DraftTree
from d3d_hf.decoding.target_pass import TargetPasses, reason_not_to_pass, takes_trees
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.generation_hook import Call, DraftingError
from d3d_hf.model.packing import (
    CONTEXT,
    NODE,
    ancestor_table,
    dense_visibility,
    lay_out,
    lay_out_tree,
    visibility_rule,
)
from d3d_hf.model.storage import GrowingCache
from d3d_hf.testing import SLIDING_WINDOW, scripted_drafter, tiny_model


MODELS = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt2")
WINDOWS = st.sampled_from([None, 1, 2, 3, 8])


def trees(max_nodes=14):
    """Parents of each node, counted from 1; 0 is the root. Bushes, chains, and what lies between."""
    anything = st.integers(0, max_nodes).flatmap(
        lambda size: st.tuples(*(st.integers(0, node) for node in range(size))).map(list)
    )
    return st.one_of(anything, st.integers(0, max_nodes).map(lambda size: list(range(size))))


# Visibility


def ancestors_by_definition(parents: list[int], node: int) -> set[int]:
    """The node and those above it, the root left out."""
    line = set()
    while node:
        line.add(node)
        node = parents[node - 1]
    return line


def visibility_by_definition(num_cached, context_length, parents, window):
    """
    Rows of booleans, and positions: a token of the text sees the text up to itself; a node sees the text up to the
    root's anchor, its ancestors and itself; of all these, what stands less than a window back.
    """
    num_text = num_cached + context_length
    lines = [ancestors_by_definition(parents, node) for node in range(1, len(parents) + 1)]
    positions = list(range(num_text)) + [num_text - 1 + len(line) for line in lines]
    rows = []
    for query in range(num_cached, num_text + len(parents)):
        row = []
        for key in range(num_text + len(parents)):
            if query < num_text:
                is_seen = key <= query
            else:
                is_seen = key < num_text or key - num_text + 1 in lines[query - num_text]
            row.append(is_seen and (window is None or positions[query] - positions[key] < window))
        rows.append(row)
    return rows, positions[num_cached:]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), trees(), WINDOWS)
def test_a_node_sees_the_text_its_ancestors_and_itself(num_cached, context_length, parents, window):
    layout = lay_out_tree(context_length, torch.tensor(parents, dtype=torch.long), num_cached)
    rows, positions = visibility_by_definition(num_cached, context_length, parents, window)
    assert dense_visibility(layout, window)[0].tolist() == rows
    assert layout.position_ids[0].tolist() == positions
    assert layout.branch_ids[0].tolist() == [CONTEXT] * context_length + [NODE] * len(parents)
    assert layout.num_tokens == context_length + len(parents) and not layout.is_mask_slot.any()


@settings(max_examples=100, deadline=None)
@given(trees(max_nodes=40))
def test_ancestors_are_those_above(parents):
    table = ancestor_table(torch.tensor(parents, dtype=torch.long))
    expected = [ancestors_by_definition(parents, node) for node in range(1, len(parents) + 1)]
    assert [{key + 1 for key, is_above in enumerate(row) if is_above} for row in table.tolist()] == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 12), WINDOWS)
def test_a_chain_as_a_tree_is_a_causal_pass(num_cached, context_length, num_nodes, window):
    tree = lay_out_tree(context_length, torch.arange(num_nodes), num_cached)
    causal = lay_out(context_length + num_nodes, num_cached=num_cached)
    assert torch.equal(dense_visibility(tree, window), dense_visibility(causal, window))
    assert torch.equal(tree.position_ids, causal.position_ids)


def written_out(layout, window):
    """The rule, asked for each pair of tokens of each row."""
    rule, (batch, num_tokens) = visibility_rule(layout, window), layout.position_ids.shape
    rows = torch.arange(batch)[:, None, None]
    queries, keys = torch.arange(num_tokens)[:, None], torch.arange(layout.num_cached + num_tokens)[None]
    return rule(rows, None, queries, keys).expand(batch, -1, -1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), trees(), WINDOWS)
def test_the_rule_says_of_trees_what_is_written_out(num_cached, context_length, parents, window):
    layout = lay_out_tree(context_length, torch.tensor(parents, dtype=torch.long), num_cached)
    assert torch.equal(written_out(layout, window), dense_visibility(layout, window))


@st.composite
def batches_with_branches(draw):
    """Layouts of `lay_out` with everything at once: rows with padding on a side, branches, some of them padding."""
    batch, context_length = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    num_slots = draw(st.lists(st.integers(1, 4), max_size=4))
    # Padding and a cache do not go together: positions count the tokens of this pass.
    num_cached = draw(st.sampled_from([0, 0, 5]))
    mask, anchors, num_visible = None, None, None
    if num_cached == 0 and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, context_length), min_size=batch, max_size=batch))
        mask = torch.tensor([[0] * (context_length - length) + [1] * length for length in lengths])
        if draw(st.booleans()):
            mask = mask.flip(1)
    if num_slots:
        anchor = st.integers(-1, num_cached + context_length - 1)
        per_row = st.lists(anchor, min_size=len(num_slots), max_size=len(num_slots))
        anchors = torch.tensor(draw(st.lists(per_row, min_size=batch, max_size=batch)))
        visible = st.lists(st.integers(0, 4), min_size=len(num_slots), max_size=len(num_slots))
        num_visible = torch.tensor(draw(st.lists(visible, min_size=batch, max_size=batch)))
    return lay_out(
        context_length,
        anchors,
        num_slots,
        num_visible=num_visible,
        num_cached=num_cached,
        context_mask=mask,
        bidirectional=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(batches_with_branches(), WINDOWS)
def test_the_rule_says_of_branches_and_batches_what_is_written_out(layout, window):
    assert torch.equal(written_out(layout, window), dense_visibility(layout, window))


# One pass over a tree


@functools.cache
def model_of(name, attn_implementation):
    if name != "gpt2":
        return tiny_model(name, seed=3, attn_implementation=attn_implementation, initializer_range=0.2)
    config = GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return GPT2LMHeadModel._from_config(config, attn_implementation=attn_implementation).float().eval()


@functools.cache
def any_drafter():
    return scripted_drafter(lambda position, slot: 0)


def call_of(target, prompt) -> Call:
    """A call as `generate` has prepared it, before anything was done."""
    caught = []

    def catch(call):
        caught.append(call)
        raise DraftingError("caught")

    drafter = any_drafter()
    drafter.make_drafts = catch
    with pytest.raises(DraftingError, match="caught"):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=64, do_sample=False)
    return caught[0]


def random_ids(count, seed):
    return torch.randint(2, 67, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def check_tree(target, num_cached, context_length, parents, seed, num_rounds=1):
    """
    Passes over random trees, each after a verdict on the one before it: the logits of every node are those of its path
    alone, after the same text, with nothing cached.
    """
    text = random_ids(num_cached + context_length, seed)
    call = call_of(target, text)
    cache = GrowingCache(target.config.num_hidden_layers)
    assert reason_not_to_pass(call) is None and takes_trees(call)
    passes = TargetPasses(call, cache)
    if num_cached:
        passes.run(text[:, :num_cached], DraftTree.empty())
    for turn in range(num_rounds):
        assert passes.num_cached == text.shape[1] - context_length
        tokens = random_ids(len(parents), seed + turn + 1)[0]
        tree = DraftTree(tokens, torch.tensor(parents, dtype=torch.long))
        output = passes.run(text[:, passes.num_cached :], tree)
        assert output.logits.shape == (1 + len(parents), 67)
        paths = [[]]
        for node, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], node])
        for node, path in enumerate(paths):
            alone = torch.cat([text[0], tokens[torch.tensor(path, dtype=torch.long) - 1]])
            expected = target(alone[None]).logits[0, -1]
            torch.testing.assert_close(output.logits[node], expected, atol=1e-5, rtol=1e-5)
        accepted = paths[(seed + 5 * turn) % len(paths)]
        passes.commit(output, accepted)
        bonus = random_ids(1, seed + 100 + turn)[0]
        text = torch.cat([text[0], tokens[torch.tensor(accepted, dtype=torch.long) - 1], bonus])[None]
        context_length = 1
    # What was moved and what was cropped: the cache is that of the text alone.
    alone = DynamicCache()
    target(text[:, :-1], **{cache_argument(target): alone})
    for layer, expected in zip(cache.layers, alone.layers):
        assert layer.get_seq_length() == text.shape[1] - 1
        for states, others in ((layer.keys, expected.keys), (layer.values, expected.values)):
            torch.testing.assert_close(states[:, :, : text.shape[1] - 1], others, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_over_a_tree_equals_each_path_alone(name, attn_implementation):
    target = model_of(name, attn_implementation)

    @settings(max_examples=30, deadline=None)
    @given(st.sampled_from([0, 1, 7, SLIDING_WINDOW + 5]), st.integers(1, 4), trees(10), st.integers(0, 10**6))
    def check(num_cached, context_length, parents, seed):
        check_tree(target, num_cached, context_length, parents, seed)

    check()


@pytest.mark.parametrize("name", MODELS)
def test_trees_one_after_another(name):
    """Ten rounds: what a verdict accepts is moved to the text's end, and the next tree hangs on it."""
    check_tree(model_of(name, "sdpa"), 3, 2, [0, 0, 1, 1, 2, 5, 6, 3, 8], seed=5, num_rounds=10)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trees_over_storage_that_grows(name):
    """Texts about the capacity at which the storage doubles."""
    for num_cached in (254, 255, 256):
        check_tree(model_of(name, "sdpa"), num_cached, 1, [0, 0, 1, 2, 4], seed=num_cached, num_rounds=2)


@pytest.mark.slow  # compiles the attention
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_pass_over_a_tree_under_flex_attention(name):
    target = model_of(name, "sdpa")
    expected = tree_logits(target)
    target = tiny_model(name, seed=3, attn_implementation="flex_attention", initializer_range=0.2)
    torch.testing.assert_close(tree_logits(target), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def tree_logits(target):
    text = random_ids(14, 1)
    passes = TargetPasses(call_of(target, text), GrowingCache(2))
    passes.run(text[:, :12], DraftTree.empty())
    tree = DraftTree(random_ids(6, 2)[0], torch.tensor([0, 0, 1, 2, 2, 4]))
    return passes.run(text[:, 12:], tree).logits


def test_a_long_text_is_read_before_a_tree_hangs_on_it():
    """In parts, so that no mask over the whole of it is written out; in one part where the draft is a chain."""
    target = model_of("llama", "sdpa")
    text = random_ids(1100, 4)
    lengths = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        logits = []
        for parents in (torch.tensor([0, 1, 2]), None):
            passes = TargetPasses(call_of(target, text), GrowingCache(2))
            with torch.no_grad():
                output = passes.run(text, DraftTree(text[0, :3], parents))
            assert output.num_cached + output.num_context == 1100
            logits.append(output.logits)
    finally:
        hook.remove()
    assert lengths == [512, 512, 76 + 3, 1100 + 3]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
