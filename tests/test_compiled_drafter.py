"""Compiled passes give the drafts of eager ones, and are dropped when the drafter changes."""

import copy
import pickle
import threading

import pytest
import torch
import torch.utils.cpp_extension

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.compiled import drafter as compiled
from d3d_hf.compiled.drafter import compiled_drafter, pass_buckets
from d3d_hf.decoding.async_drafts import AsyncDrafts
from d3d_hf.decoding.worker import InlineWorker
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.testing import ForwardCounter, tiny_model
from lossless import generate, prompt_of


pytestmark = pytest.mark.skipif(torch.utils.cpp_extension.get_cxx_compiler() is None, reason="needs a C++ compiler")


def drafter_of(architecture="llama", **kwargs):
    model = tiny_model(architecture, seed=5, initializer_range=0.2, num_layers=2)
    return D3DDrafterForCausalLM.from_backbone(model, block_size=4, chained_head_size=8, **kwargs)


def drafts_of(drafter, compile_drafter, seed=0, rounds=8):
    """A few drafts after a text that grows by a few tokens each, and the logits of their blocks."""
    session = DraftingSession(drafter, 67, compile_drafter=compile_drafter)
    generator = torch.Generator().manual_seed(seed)
    text, drafts = prompt_of(9)[0], []
    for length in range(rounds):
        session.prepare()
        block = session.block(text, 4)
        drafts.append((session.reader.chain(block, 4).tolist(), block.logits.clone()))
        text = torch.cat([text, torch.randint(2, 67, (1 + length % 5,), generator=generator)])
    return drafts


def assert_same_drafts(ours, theirs):
    for (tokens, logits), (other_tokens, other_logits) in zip(ours, theirs, strict=True):
        assert tokens == other_tokens
        torch.testing.assert_close(logits, other_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_drafts_are_those_of_eager_passes(architecture):
    drafter = drafter_of(architecture)
    eager, fast = drafts_of(drafter, False), drafts_of(drafter, True)
    assert compiled_drafter(drafter).num_static_passes >= 7, compiled_drafter(drafter).reason
    assert_same_drafts(fast, eager)

    # other weights, other drafts
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    changed = drafts_of(drafter, False)
    assert [tokens for tokens, _ in changed] != [tokens for tokens, _ in eager]
    assert_same_drafts(drafts_of(drafter, True), changed)


def test_every_mode_and_runner_drafts_the_same(monkeypatch):
    """Eager and compiled, threaded and inline: the same rounds, greedy, and the target's own ids."""
    target = tiny_model("llama", seed=5, initializer_range=0.2, num_layers=2)
    drafter = drafter_of()
    prompt = prompt_of()
    reference = generate(target, prompt).tolist()
    options = drafter.generation_config
    options.on_draft_error, options.num_bonus_guesses = "raise", 0
    for mode in ("sync", "async"):
        options.drafting_mode, accepted = mode, []
        for compile_drafter in (False, True):
            options.compile_drafter = compile_drafter
            before = compiled_drafter(drafter).num_static_passes
            assert generate(target, prompt, drafter).tolist() == reference
            accepted.append(drafter.last_generation_stats.num_accepted)
            assert (compiled_drafter(drafter).num_static_passes > before) == compile_drafter
        assert accepted[0] == accepted[1]
    monkeypatch.setattr(AsyncDrafts, "_make_worker", lambda self, drafter: InlineWorker())
    assert generate(target, prompt, drafter).tolist() == reference
    assert drafter.last_generation_stats.num_accepted == accepted[0]

    # nothing hangs on the drafter that could not be copied or stored
    copied = copy.deepcopy(drafter)
    again = pickle.loads(pickle.dumps(drafter))
    for other in (copied, again):
        assert generate(target, prompt, other).tolist() == reference


def test_warmup_compiles_ahead(monkeypatch):
    drafter = drafter_of()
    drafter.generation_config.drafting_mode = "sync"
    assert compiled.storage_for(drafter, "auto") is None
    drafter.warmup(max_context=100)
    state = compiled_drafter(drafter)
    graphs = len(state._graphs)
    assert graphs >= 1
    assert compiled.storage_for(drafter, "auto") is not None
    target = tiny_model("llama", seed=5, initializer_range=0.2, num_layers=2)
    with ForwardCounter(drafter, "packed_forward") as passes:
        generate(target, prompt_of(), drafter)
    assert passes.count > 3
    assert len(state._graphs) == graphs, "nothing was left to compile"
    for value in (0, -3, 2.5, True, "long"):
        with pytest.raises(ValueError, match="max_context is .*give a number of tokens"):
            drafter.warmup(max_context=value)


def test_eager_drafting_earns_its_compilation_in_the_end():
    drafter = drafter_of()
    assert compiled.storage_for(drafter, "auto") is None
    compiled.count_eager(drafter, 5.0)
    assert compiled.storage_for(drafter, "auto") is None
    compiled.count_eager(drafter, 60.0)
    assert compiled.storage_for(drafter, "auto") is not None
    assert compiled.storage_for(drafter, False) is None


def test_what_cannot_be_compiled_drafts_eagerly(caplog):
    drafter = drafter_of().to(torch.float16)
    target = tiny_model("llama", seed=5, initializer_range=0.2, num_layers=2)
    drafter.generation_config.compile_drafter = True
    assert generate(target, prompt_of(), drafter).tolist() == generate(target, prompt_of()).tolist()
    (record,) = [r for r in caplog.records if "runs as before" in r.getMessage()]
    assert "float16" in record.getMessage()


def test_buckets_hold_the_usual_passes():
    short, synchronous, half, packed, *more = pass_buckets(8)
    assert short == 5 + 7 and synchronous == 9 + 7 and half == 9 + 4 * 8 and packed == 9 + 9 * 8 and more == [162, 324]
    for block_size in (1, 2, 3, 16):
        assert list(pass_buckets(block_size)) == sorted(set(pass_buckets(block_size)))
        assert pass_buckets(block_size)[1] >= 2 * block_size


def test_autocast_and_inference_mode_are_no_hindrance():
    """Under autocast keys and values come in two dtypes, so passes run eagerly; afterwards compiled again."""
    target = tiny_model("llama", seed=5, initializer_range=0.2, num_layers=2)
    drafter = drafter_of()
    drafter.generation_config.drafting_mode = "sync"
    drafter.generation_config.on_draft_error = "raise"
    drafter.warmup(max_context=200)
    state, prompt = compiled_drafter(drafter), prompt_of()
    before = state.num_static_passes
    with torch.autocast("cpu", torch.bfloat16):
        generate(target, prompt, drafter, max_new_tokens=60)
    assert state.num_static_passes == before
    reference = generate(target, prompt, max_new_tokens=60).tolist()
    with torch.inference_mode():
        drafter.generation_config.drafting_mode = "auto"
        assert generate(target, prompt, drafter, max_new_tokens=60).tolist() == reference
    drafter.generation_config.drafting_mode = "sync"
    assert generate(target, prompt, drafter, max_new_tokens=60).tolist() == reference
    assert state.num_static_passes > before and state.reason is None


def test_compiling_is_not_counted_against_a_mode_or_the_worker(monkeypatch):
    """However long it takes: a packed pass is not thought to hang, and auto does not think drafting slow."""
    target = tiny_model("llama", seed=5, initializer_range=0.2, num_layers=2)
    prompt, threads = prompt_of(), set()
    make_ready = compiled.CompiledDrafter.make_ready

    def watched(self, drafter, sizes):
        threads.add(threading.current_thread())
        return make_ready(self, drafter, sizes)

    monkeypatch.setattr(compiled.CompiledDrafter, "make_ready", watched)
    for mode in ("async", "auto"):
        drafter = drafter_of()
        options = drafter.generation_config
        options.drafting_mode, options.compile_drafter, options.on_draft_error = mode, True, "raise"
        options.num_bonus_guesses = 0
        assert generate(target, prompt, drafter).tolist() == generate(target, prompt).tolist()
        assert compiled_drafter(drafter).ready
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("value", [1, 0, "yes", 1.0])
def test_the_option_is_checked(value):
    drafter = drafter_of()
    drafter.generation_config.compile_drafter = value
    with pytest.raises(ValueError, match="compile_drafter is .*choose one of"):
        generate(tiny_model("llama", num_layers=2), prompt_of(), drafter)
