"""
What stands around CUDA graphs, with a backend that stands in for them: buckets, storage that grows and is lent again,
captures and fallbacks, and which thread does what. A replay runs the function for real, after a check that nothing it
was captured with has moved.
"""

import copy
import gc
import threading

import pytest
import torch
from fake_graphs import FakeGraphs

from d3d_hf import D3DDrafterForCausalLM, compile_target, uncompile_target
from d3d_hf.compiled import drafter as drafter_module
from d3d_hf.compiled import target as target_module
from d3d_hf.compiled.drafter import compiled_drafter, pass_buckets
from d3d_hf.compiled.graphed import integers_of, static_masks
from d3d_hf.compiled.graphed_drafter import GraphedDrafter
from d3d_hf.compiled.graphed_target import GraphedTarget
from d3d_hf.compiled.pooled_cache import PooledCache, StoragePool
from d3d_hf.decoding.async_drafts import AsyncDrafts
from d3d_hf.decoding.worker import InlineWorker
from d3d_hf.kernels.visibility import num_rows
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.model.packing import attention_masks, lay_out
from d3d_hf.model.storage import GrowingCache
from d3d_hf.testing import ForwardCounter, tiny_config, tiny_model
from lossless import generate, prompt_of


@pytest.fixture
def graphs(monkeypatch):
    fake = FakeGraphs()
    monkeypatch.setattr(drafter_module, "graphs_for", lambda device: fake)
    monkeypatch.setattr(target_module, "graphs_for", lambda device: fake)
    return fake


def drafter_of(architecture="llama", **kwargs):
    model = tiny_model(architecture, seed=5, initializer_range=0.2, num_layers=2)
    return D3DDrafterForCausalLM.from_backbone(model, block_size=4, chained_head_size=8, **kwargs)


def target_of(architecture="llama", **kwargs):
    return tiny_model(architecture, seed=5, initializer_range=0.2, num_layers=2, **kwargs)


def drafts_of(drafter, compile_drafter, rounds=8):
    """A few drafts after a text that grows by a few tokens each, and the logits of their blocks."""
    session = DraftingSession(drafter, 67, compile_drafter=compile_drafter)
    generator = torch.Generator().manual_seed(0)
    text, drafts = prompt_of(9)[0], []
    for length in range(rounds):
        session.prepare()
        block = session.block(text, 4)
        drafts.append((session.reader.chain(block, 4).tolist(), block.logits.clone()))
        text = torch.cat([text, torch.randint(2, 67, (1 + length % 5,), generator=generator)])
    session.close()
    return drafts


def assert_same_drafts(ours, theirs):
    for (tokens, logits), (other_tokens, other_logits) in zip(ours, theirs, strict=True):
        assert tokens == other_tokens
        torch.testing.assert_close(logits, other_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "d3d_packed"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_masks_are_those_of_an_eager_pass(architecture, implementation):
    """Whole storage against what is filled; padding sees nothing that counts and makes no NaN."""
    config = tiny_config(architecture)
    config._attn_implementation = implementation
    layout = lay_out(3, torch.tensor([[9, 11]]), (4, 4), num_visible=torch.tensor([[0, 1]]), num_cached=9)
    bucket, capacity, num_tokens = 16, 32, layout.num_tokens
    integers = integers_of(layout, bucket, torch.zeros(1, num_tokens))
    masks, expected = static_masks(integers, config, capacity, torch.float32), None
    if implementation == "d3d_packed":
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        from d3d_hf.kernels.visibility import dense_visibility

        dense = {name: dense_visibility(mask, capacity) for name, mask in _by_type(masks).items()}
    else:
        dense = {name: mask if mask.dtype == torch.bool else mask == 0 for name, mask in _by_type(masks).items()}
    config._attn_implementation = "sdpa"
    expected = _by_type(attention_masks(layout, config, torch.float32))
    assert dense.keys() == expected.keys()
    for name, mask in expected.items():
        assert torch.equal(dense[name][:, :, :num_tokens, : 9 + num_tokens], mask)
        assert not dense[name][:, :, :num_tokens, 9 + num_tokens :].any()
        assert implementation == "d3d_packed" or dense[name].any(-1).all(), "a row that sees nothing gives NaN"


def _by_type(masks):
    return masks if isinstance(masks, dict) else {"": masks}


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "d3d_packed"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_drafts_are_those_of_eager_passes(graphs, architecture, implementation):
    drafter = drafter_of(architecture)
    eager = drafts_of(drafter, False)
    drafter.set_attn_implementation({"backbone_config": implementation})
    assert drafter._backbone.config._attn_implementation == implementation
    for _ in range(2):  # the second time over storage that was used before
        assert_same_drafts(drafts_of(drafter, True), eager)
    state = compiled_drafter(drafter)
    assert isinstance(state, GraphedDrafter) and state.reason is None
    assert graphs.num_replays >= 14
    assert sorted(shape[-1] for shape in graphs.captures) == list(pass_buckets(4)[:2]), "captured once, lent again"
    sizes = {(num_rows(bucket, has_tree=True) + 2) * bucket for bucket in pass_buckets(4)[:2]}
    assert set(graphs.sent) == sizes, "integers alone go to the device"


@pytest.mark.parametrize("num_guesses", [0, 3])
def test_every_mode_and_runner_drafts_the_same(graphs, monkeypatch, num_guesses):
    """Eager and graphed, threaded and inline: the same rounds, greedy, and the target's own ids."""
    target, drafter, prompt = target_of(), drafter_of(), prompt_of()
    reference = generate(target, prompt).tolist()
    options = drafter.generation_config
    options.on_draft_error, options.num_bonus_guesses = "raise", num_guesses
    for mode in ("sync", "async"):
        options.drafting_mode, accepted = mode, []
        for compile_drafter in (False, True):
            options.compile_drafter, before = compile_drafter, graphs.num_replays
            assert generate(target, prompt, drafter).tolist() == reference
            accepted.append(drafter.last_generation_stats.num_accepted)
            assert (graphs.num_replays > before) == compile_drafter
        assert accepted[0] == accepted[1]
    assert graphs.threads == {threading.current_thread()}, "captures are the caller's business"
    monkeypatch.setattr(AsyncDrafts, "_make_worker", lambda self, drafter: InlineWorker())
    assert generate(target, prompt, drafter).tolist() == reference
    assert drafter.last_generation_stats.num_accepted == accepted[0]


def test_a_text_that_outgrows_its_storage_is_captured_anew(graphs):
    target, drafter = target_of(), drafter_of()
    options = drafter.generation_config
    options.on_draft_error, options.drafting_mode = "raise", "sync"
    prompt = prompt_of(300)
    reference = generate(target, prompt, max_new_tokens=250)
    assert torch.equal(generate(target, prompt, drafter, max_new_tokens=250), reference)
    state = compiled_drafter(drafter)
    assert sorted(state.pool._idle) == [1024], "room for a prompt of 300 tokens and 256 more"
    assert torch.equal(generate(target, prompt_of(9), drafter), generate(target, prompt_of(9)))
    assert sorted(state.pool._idle) == [512, 1024]
    before = len(graphs.captures)
    prompt = torch.cat([reference[:, :440], prompt_of(4)], dim=1)[:, -222:]
    with ForwardCounter(target) as forwards:
        output = generate(target, prompt, drafter, max_new_tokens=300)
    assert torch.equal(output, generate(target, prompt, max_new_tokens=300)) and forwards.count > 1
    assert len(graphs.captures) == before, "the text moved from one storage to the other, whose graphs were there"
    assert sorted(state.pool._idle) == [512, 1024]


def test_warmup_captures_ahead(graphs):
    drafter, target = drafter_of(), target_of()
    drafter.generation_config.drafting_mode = "async"
    drafter.warmup(max_context=700)
    captured = list(graphs.captures)
    longest = 5 + 20 * 4
    wanted = [bucket for bucket in pass_buckets(4) if bucket <= max(longest, 100)]
    assert {shape[-1] for shape in captured} == set(wanted)
    assert len(captured) == 2 * len(wanted), "at capacities of 512 and 1024"
    for length in (6, 650):
        prompt = prompt_of(length)
        assert torch.equal(generate(target, prompt, drafter), generate(target, prompt))
    assert graphs.captures == captured


def test_what_reads_a_value_back_is_not_captured(graphs, caplog):
    """RoPE that goes by the longest position looks at it from Python."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = target_of(rope_parameters=rope, max_position_embeddings=64)
    reference = generate(target, prompt_of())
    compile_target(target)
    assert torch.equal(generate(target, prompt_of()), reference)
    assert graphs.num_replays == 0
    assert any("not permitted when stream is capturing" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("attempt", ["drafter", "target"])
def test_what_cannot_be_captured_runs_eagerly(graphs, caplog, attempt):
    graphs.error = RuntimeError("operation not permitted when stream is capturing")
    target, drafter, prompt = target_of(), drafter_of(), prompt_of()
    reference = generate(target, prompt).tolist()
    drafter.generation_config.on_draft_error = "raise"
    if attempt == "target":
        compile_target(target)
    for _ in range(2):
        assert generate(target, prompt, drafter if attempt == "drafter" else None).tolist() == reference
    (record,) = [r for r in caplog.records if "runs as before" in r.getMessage()]
    assert "not permitted when stream is capturing" in record.getMessage()
    assert graphs.num_replays == 0


def test_a_forward_that_fails_while_a_graph_is_made_leaves_the_cache_as_it_was(graphs, monkeypatch):
    """Halfway through the layers some hold tokens that others lack."""
    target = target_of()
    reference = generate(target, prompt_of())
    compile_target(target)
    update, num_updates = PooledCache.update, 0

    def failing(self, key_states, *args, **kwargs):
        nonlocal num_updates
        num_updates += 1
        if num_updates == 4:  # the second layer, in the first forward after the prefill
            raise MemoryError("out of memory")
        return update(self, key_states, *args, **kwargs)

    monkeypatch.setattr(PooledCache, "update", failing)
    assert torch.equal(generate(target, prompt_of()), reference)
    assert target.__dict__["_compiled_target"].reason is not None and graphs.num_replays == 0


def test_a_replay_that_differs_is_not_used(graphs, caplog, monkeypatch):
    capture = graphs.capture

    def wrong(function, buffers, workspace):
        replay = capture(function, buffers, workspace)
        return lambda: replay().flip(-1)

    monkeypatch.setattr(graphs, "capture", wrong)
    target, drafter, prompt = target_of(), drafter_of(), prompt_of()
    assert generate(target, prompt, drafter).tolist() == generate(target, prompt).tolist()
    assert any("differs from the model's own" in record.getMessage() for record in caplog.records)
    assert compiled_drafter(drafter).num_static_passes == 0


def test_changed_weights(graphs):
    """Values are seen by the next replay; other memory makes other graphs."""
    drafter = drafter_of()
    before = drafts_of(drafter, True)
    num_captures = len(graphs.captures)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    changed = drafts_of(drafter, True)
    assert len(graphs.captures) == num_captures
    assert [tokens for tokens, _ in changed] != [tokens for tokens, _ in before]
    assert_same_drafts(changed, drafts_of(drafter, False))
    head = drafter._backbone.model.layers[0].mlp.down_proj
    head.weight = torch.nn.Parameter(head.weight.detach().flip(0).clone())
    assert_same_drafts(drafts_of(drafter, True), drafts_of(drafter, False))
    assert len(graphs.captures) == 2 * num_captures


def test_two_generations_at_once_have_storage_of_their_own(graphs):
    """Events drive them: the second one drafts while the first stands between two passes."""
    drafter, first_stands, second_is_done = drafter_of(), threading.Event(), threading.Event()
    expected = drafts_of(drafter, False)
    results = {}

    def first():
        session = DraftingSession(drafter, 67, compile_drafter=True)
        text = prompt_of(9)[0]
        for _ in range(2):
            session.prepare()
            block = session.block(text, 4)
            results["first"] = [(session.reader.chain(block, 4).tolist(), block.logits.clone())]
            first_stands.set()
            assert second_is_done.wait(60)
        session.close()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_stands.wait(60)
    results["second"] = drafts_of(drafter, True)
    second_is_done.set()
    thread.join(60)
    assert not thread.is_alive()
    assert_same_drafts(results["second"], expected)
    assert_same_drafts(results["first"], expected[:1])
    state = compiled_drafter(drafter)
    assert len(state.pool._idle) == 1, "of equal storages one is kept"


@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [("llama", "sdpa"), ("llama", "d3d_packed"), ("qwen3", "eager"), ("gemma3", "sdpa"), ("gemma3", "d3d_packed")],
)
def test_target_generates_what_it_did(graphs, architecture, implementation):
    target, drafter, prompt = target_of(architecture), drafter_of(), prompt_of()
    target.set_attn_implementation(implementation)
    plain, assisted = generate(target, prompt), generate(target, prompt, drafter)
    lookup = generate(target, prompt, prompt_lookup_num_tokens=3)
    compile_target(target, draft_lengths=(4,))
    try:
        state, with_lookup = target.__dict__["_compiled_target"], {"prompt_lookup_num_tokens": 3}
        for expected, assistant, kwargs in ((plain, None, {}), (assisted, drafter, {}), (lookup, None, with_lookup)):
            before = state.num_static_passes
            with ForwardCounter(target) as forwards:
                output = generate(target, prompt, assistant, **kwargs)
            assert torch.equal(output, expected)
            assert state.num_static_passes - before == forwards.count - 1, "all but the prefill"
    finally:
        uncompile_target(target)


def test_target_warms_up_and_keeps_what_it_returns(graphs):
    target = target_of()
    expected = target.generate(
        prompt_of(), max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    compile_target(target, draft_lengths=(4,), max_context=300)
    captured = list(graphs.captures)
    assert sorted(shape[-1] for shape in captured) == [1, 1, 5, 5], "at capacities of 256 and 512"
    output = target.generate(
        prompt_of(), max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    assert graphs.captures == captured
    for ours, theirs in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    # the cache that came back is the caller's: another generation has other storage, a copy too
    (cache,) = [value for value in output.values() if isinstance(value, GrowingCache)]
    held, copied = cache.layers[0].keys.clone(), copy.deepcopy(cache)
    assert type(copied) is GrowingCache
    target.generate(prompt_of(seed=3), max_new_tokens=20, do_sample=False)
    assert torch.equal(cache.layers[0].keys, held)
    assert torch.equal(copied.layers[0].keys, held) and copied.get_seq_length() == cache.get_seq_length()
    assert len(graphs.captures) == len(captured) + 1, "one token at a time, over storage of its own"


def test_target_runs_its_own_forward_where_it_must(graphs):
    target = target_of()
    prompt = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt_of()], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    padded = generate(target, prompt, attention_mask=mask)
    batch = generate(target, prompt_of().expand(2, -1))
    compile_target(target)
    assert torch.equal(generate(target, prompt, attention_mask=mask), padded)
    assert torch.equal(generate(target, prompt_of().expand(2, -1)), batch)
    assert graphs.num_replays == 0
    with torch.autocast("cpu", torch.bfloat16):
        generate(target, prompt_of())
    assert graphs.num_replays == 0 and GraphedTarget is type(target.__dict__["_compiled_target"])


def test_storage_goes_back_however_a_cache_ends():
    backend = FakeGraphs()
    pool = StoragePool(2, backend)
    states = torch.ones(1, 2, 5, 8)
    cache = PooledCache(pool)
    for layer in cache.layers:
        layer.update(states, states)
    storage = cache.storage
    cache.reserve(2000)
    assert cache.capacity == 2048 and list(pool._idle) == [512] and pool._idle[512] is storage
    assert torch.equal(cache.layers[1].keys[:, :, :5], states) and cache.get_seq_length() == 5
    del cache, layer
    gc.collect()
    assert sorted(pool._idle) == [512, 2048]
    again = PooledCache(pool)
    again.layers[0].update(states, states)
    assert again.storage is storage and not again.layers[0].keys[:, :, 5:].any(), "it is lent as zeros"
    again.release()
    again.release()
    assert sorted(pool._idle) == [512, 2048]
