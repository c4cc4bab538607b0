"""
Draft trees in CUDA graphs, with the backend that stands in for them: replayed passes against eager ones, padding that
touches nothing, and the same text.
"""

import pytest
import torch
from fake_graphs import FakeGraphs
from tree_passes import with_branch

from d3d_hf import D3DDrafterForCausalLM, compile_target
from d3d_hf.compiled import target as target_module
from d3d_hf.compiled.graphed import IDS, integers_of, static_masks
from d3d_hf.compiled.graphed_drafter import GraphedDrafter
from d3d_hf.decoding.target_pass import TargetPasses
from d3d_hf.kernels.visibility import BRANCH, POSITION
from d3d_hf.kernels.visibility import dense_visibility as dense_visibility_of
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.packing import (
    CONTEXT,
    additive,
    attention_masks,
    dense_visibility,
    lay_out,
    lay_out_tree,
)
from d3d_hf.model.storage import GrowingCache
from d3d_hf.testing import ForwardCounter, tiny_config, tiny_model
from lossless import generate, prompt_of


NUM_CACHED = 11
TREES = {
    "one node": [0],
    "two siblings": [0, 0],
    "chain": [0, 1, 2, 3, 4],
    "star": [0] * 6,
    "binary": [0, 0, 1, 1, 2, 2, 3],  # fills its pass, with the root
    "ragged": [0, 1, 1, 0, 4, 2],
}
KINDS = [("llama", "sdpa"), ("qwen3", "eager"), ("gemma3", "sdpa"), ("llama", "d3d_packed"), ("gemma3", "d3d_packed")]


@pytest.fixture
def graphs(monkeypatch):
    fake = FakeGraphs()
    monkeypatch.setattr(target_module, "graphs_for", lambda device: fake)
    return fake


def target_of(architecture="llama", implementation="sdpa", draft_lengths=None):
    target = tiny_model(architecture, seed=5, initializer_range=0.2)
    target.set_attn_implementation(implementation)
    return target if draft_lengths is None else compile_target(target, draft_lengths=draft_lengths)


def state_of(target):
    return target.__dict__["_compiled_target"]


def run_tree(target, cache, parents, num_cached=NUM_CACHED, knows_layout=True):
    """Logits of a pass with a tree over a cache that is filled first, and the cache."""
    ids = prompt_of(num_cached + 1 + len(parents))
    cached = {cache_argument(target): cache}
    with torch.no_grad():
        for part in ids[:, :num_cached].split(200, dim=1):
            target(input_ids=part, use_cache=True, **cached)
        layout = lay_out_tree(1, torch.tensor(parents), num_cached)
        cache.layout = layout if knows_layout else None
        logits = target(
            input_ids=ids[:, num_cached:],
            position_ids=layout.position_ids,
            attention_mask=attention_masks(layout, target.config, torch.float32),
            use_cache=True,
            return_dict=True,
            **cached,
        ).logits
        cache.layout = None
    return logits


def assert_same_storage(ours, theirs):
    assert ours.get_seq_length() == theirs.get_seq_length()
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        length = layer.get_seq_length()
        for states, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            torch.testing.assert_close(states[:, :, :length], expected[:, :, :length], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("architecture", "implementation"), KINDS)
def test_a_replayed_tree_is_an_eager_one(graphs, architecture, implementation, tree):
    """Padded to the bucket or not: logits of every node, and the keys and values that the accepted ones leave."""
    eager_cache = GrowingCache(2)
    expected = run_tree(target_of(architecture), eager_cache, TREES[tree])
    target = target_of(architecture, implementation, draft_lengths=(1, 7))
    cache = state_of(target).make_cache()
    got = run_tree(target, cache, TREES[tree])
    assert state_of(target).num_static_passes == graphs.num_replays - 1 == 1, "one is the comparison"
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert_same_storage(cache, eager_cache)
    for each in (cache, eager_cache):
        each.keep(NUM_CACHED + 1, [NUM_CACHED + len(TREES[tree])])
    assert_same_storage(cache, eager_cache)


@pytest.mark.parametrize("implementation", ["sdpa", "d3d_packed"])
def test_one_graph_serves_trees_and_chains_in_turn(graphs, implementation):
    """What a round leaves in the tensor of integers is nothing to the next."""
    eager, target = target_of(), target_of(implementation=implementation, draft_lengths=(7,))
    caches = {eager: GrowingCache(2), target: state_of(target).make_cache()}
    for parents in (TREES["binary"], None, TREES["one node"], TREES["star"], None, TREES["ragged"]):
        logits = [(run_chain if parents is None else run_tree)(model, caches[model], parents) for model in caches]
        torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
        for cache in caches.values():
            cache.keep(0, [])
    assert state_of(target).num_static_passes == 6 and len(graphs.captures) == 1


def run_chain(target, cache, parents=None):
    ids, cached = prompt_of(18), {cache_argument(target): cache, "use_cache": True}
    with torch.no_grad():
        target(input_ids=ids[:, :13], **cached)
        return target(input_ids=ids[:, 13:], return_dict=True, **cached).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "d3d_packed"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_padding_of_a_tree_sees_nothing_and_is_seen_by_nothing(architecture, implementation):
    config = tiny_config(architecture)
    config._attn_implementation = implementation
    layout, bucket, capacity = lay_out_tree(2, torch.tensor(TREES["ragged"]), 9), 16, 32
    num_tokens, first = layout.num_tokens, 9 + layout.num_tokens
    masks = static_masks(integers_of(layout, bucket), config, capacity, torch.float32)
    windows = (
        {"full_attention": None, "sliding_attention": config.sliding_window} if isinstance(masks, dict) else {"": None}
    )
    for name, window in windows.items():
        mask = masks[name] if name else masks
        if implementation == "d3d_packed":
            seen = dense_visibility_of(mask, capacity)
        else:
            seen = mask if implementation == "sdpa" else mask == additive(torch.tensor(True), torch.float32)
        seen = seen[0, 0]
        assert torch.equal(seen[:num_tokens, :first], dense_visibility(layout, window)[0])
        assert not seen[:num_tokens, first:].any(), "padding is seen by no token"
        itself = torch.zeros(bucket - num_tokens, capacity, dtype=torch.bool)
        if implementation != "d3d_packed":  # else a softmax would run over nothing
            itself[torch.arange(bucket - num_tokens), first + torch.arange(bucket - num_tokens)] = True
        assert torch.equal(seen[num_tokens:], itself)


@pytest.mark.parametrize("is_hidden", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "d3d_packed"])
def test_what_padding_holds_is_nothing_to_the_tree(graphs, monkeypatch, implementation, is_hidden):
    """Other ids and positions in it change no logit; they would if it were seen."""
    parents = TREES["ragged"]
    expected = run_tree(target_of(), GrowingCache(2), parents)
    target, send = target_of(implementation=implementation, draft_lengths=(15,)), graphs.send

    def send_with_other_padding(values, buffer):
        values = values.clone()
        values[:, :, [IDS, -1], 1 + len(parents) :] = torch.randint(
            2, 60, (2, buffer.shape[3] - 1 - len(parents))
        ).int()
        if not is_hidden:
            values[:, :, BRANCH, 1 + len(parents) :] = CONTEXT
            values[:, :, POSITION, 1 + len(parents) :] = 0
        send(values, buffer)

    monkeypatch.setattr(graphs, "send", send_with_other_padding)
    got = run_tree(target, state_of(target).make_cache(), parents)
    assert state_of(target).num_static_passes == 1
    assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4) == is_hidden


@pytest.mark.parametrize("implementation", ["sdpa", "d3d_packed"])
def test_a_tree_that_makes_the_storage_grow(graphs, implementation):
    """A pass that no longer fits moves the text to larger storage, whose graph is another one."""
    target, parents = target_of(implementation=implementation, draft_lengths=(7,)), TREES["binary"]
    for num_cached, capacity in ((210, 256), (248, 256), (249, 512), (255, 512)):
        eager_cache, cache = GrowingCache(2), state_of(target).make_cache(max_length=1)
        expected = run_tree(target_of(), eager_cache, parents, num_cached)
        got = run_tree(target, cache, parents, num_cached)
        assert cache.capacity == capacity
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert_same_storage(cache, eager_cache)
    assert state_of(target).num_static_passes == 4


def test_a_mask_without_a_layout_is_no_chain(graphs):
    """Whoever else gives a mask of a tree gets the model's own forward."""
    for architecture in ("llama", "gemma3"):
        target = target_of(architecture, draft_lengths=(7,))
        expected = run_tree(target_of(architecture), GrowingCache(2), TREES["ragged"])
        got = run_tree(target, state_of(target).make_cache(), TREES["ragged"], knows_layout=False)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert state_of(target).num_static_passes == 0


@pytest.fixture
def tree_passes_seen(monkeypatch):
    """Nodes of each pass with siblings or one node, in the order of the passes."""
    seen, run = [], TargetPasses.run

    def watched(self, new_ids, tree):
        if not tree.is_chain:
            seen.append(len(tree))
        return run(self, new_ids, tree)

    monkeypatch.setattr(TargetPasses, "run", watched)
    return seen


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 1.1, "top_k": 20}])
@pytest.mark.parametrize(("architecture", "implementation"), KINDS)
def test_trees_generate_what_plain_decoding_does(graphs, tree_passes_seen, architecture, implementation, options):
    plain, prompt = target_of(architecture), prompt_of()
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama", seed=9), block_size=4)
    config = drafter.generation_config
    config.drafting_mode, config.draft_tree_size, config.on_draft_error = "sync", 7, "raise"
    config.compile_drafter = False
    torch.manual_seed(3)
    reference = generate(plain, prompt, **options)
    target = target_of(architecture, implementation, draft_lengths=(1, 7))
    for _ in range(2):  # the second time over storage that was used before
        before = state_of(target).num_static_passes
        torch.manual_seed(3)
        with ForwardCounter(target) as forwards:
            output = generate(target, prompt, drafter, **options)
        assert torch.equal(output, reference)
        assert state_of(target).num_static_passes - before == forwards.count - 1, "all but the prefill"
    assert len(tree_passes_seen) > 6 and max(tree_passes_seen) == 7


def test_a_tree_that_fills_no_bucket_runs_eagerly(graphs, tree_passes_seen):
    prompt = prompt_of()
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama", seed=9), block_size=4)
    config = drafter.generation_config
    config.drafting_mode, config.draft_tree_size, config.compile_drafter = "sync", 9, False
    target = target_of(draft_lengths=(4,))
    assert torch.equal(generate(target, prompt, drafter), generate(target_of(), prompt))
    assert max(tree_passes_seen) == 9


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "d3d_packed"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_packed_draft_on_a_tree_is_an_eager_one(architecture, implementation):
    """Branches that hang on the nodes under verification."""
    backbone = tiny_model(architecture, seed=5, initializer_range=0.2)
    layout = lay_out_tree(2, torch.tensor(TREES["ragged"]), 10)
    for number, host in enumerate((1, 4, 7), start=1):
        layout = with_branch(layout, host, 3, number)
    ids = prompt_of(10 + layout.num_tokens)
    hidden_states = []
    for uses_graphs in (False, True):
        drafter = D3DDrafterForCausalLM.from_backbone(backbone, block_size=4)
        if uses_graphs:
            drafter.set_attn_implementation({"backbone_config": implementation})
        cache = GrowingCache(2)
        if uses_graphs:
            passes = GraphedDrafter(drafter, (6, 8, 24), FakeGraphs())
            cache = passes.make_cache()
        with torch.no_grad():
            drafter.packed_forward(ids[:, :10], lay_out(10), cache=cache, logits_to_keep=1)
            if uses_graphs:
                cache.prepare(drafter, layout.num_tokens)
            output = drafter.packed_forward(ids[:, 10:], layout, cache=cache, logits_to_keep=None)
        hidden_states.append(output.hidden_states[0])
    assert passes.num_static_passes == 1
    torch.testing.assert_close(hidden_states[1], hidden_states[0], atol=1e-4, rtol=1e-4)
