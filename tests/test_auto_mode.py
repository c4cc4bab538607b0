"""The automatic mode: which way of drafting it takes, and that the output is the target's whatever it takes."""

import functools
import random

import pytest
import torch

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.decoding import async_drafts, auto_drafts, drafts, loop
from d3d_hf.decoding.mode_selector import ModeSelector
from d3d_hf.testing import memoryless_model, oracle_drafter, tiny_model
from lossless import BLOCK_SIZE, assert_same, drafters_of, generate, prompt_of
from test_sampling import LAWS, NUM_TESTS, VOCAB_SIZE, drafter_of, transition_p_value, transitions


def play(plain_s, verify_s, draft_s, pack_s, tokens, num_tokens=400, seed=0):
    """
    A generation of `num_tokens` tokens on imagined devices; `tokens(mode, rng)` says what a round emits. A draft reads
    what was written since the last one, the prompt of 100 tokens at first, at a millisecond a token.

    Returns the selector, the seconds it took, and the tokens that each mode emitted.
    """
    rng, selector = random.Random(seed), ModeSelector()
    seconds, emitted, last, num_unread = 0.0, {"none": 0, "sync": 0, "async": 0}, None, 100
    while sum(emitted.values()) < num_tokens:
        mode = selector.choose(max(verify_s, pack_s))
        if mode == "none":
            num_new, took = 1, plain_s
        elif mode == "sync" or last != "async":
            num_new, took = tokens("sync", rng), verify_s + draft_s
        else:
            num_new, took = tokens("async", rng), max(verify_s, pack_s)
        took, num_unread = (took, num_unread) if mode == "none" else (took + 0.001 * num_unread, 0)
        num_unread += num_new
        selector.record(num_new, took, verify_s)
        seconds, last = seconds + took, mode
        emitted[mode] += num_new
    return selector, seconds, emitted


def a_few(mode, rng):
    return rng.choice({"sync": [2, 3, 4, 5, 6], "async": [2, 3, 4, 5]}[mode])


@pytest.mark.parametrize(
    "case, draft_s, pack_s, tokens, best",
    [
        ("useless drafter", 0.045, 0.080, lambda mode, rng: 1, "none"),
        ("slow packed pass", 0.045, 0.500, a_few, "sync"),
        ("second device", 0.045, 0.050, a_few, "async"),
        ("slow drafter", 0.300, 0.900, a_few, "none"),
    ],
)
def test_the_fastest_mode_is_taken(case, draft_s, pack_s, tokens, best):
    selector, seconds, emitted = play(0.050, 0.055, draft_s, pack_s, tokens)
    assert emitted[best] > 0.85 * sum(emitted.values())
    assert selector.choices[-1]["mode"] == best
    if best == "none":
        assert seconds <= 1.05 * 400 * 0.050
    if case == "useless drafter":
        assert seconds <= 1.03 * 400 * 0.050
        assert emitted["async"] == 0, "it cannot win, so it is not tried"


def test_modes_are_looked_at_again():
    """A text that becomes easy to draft after a few drafts; and one that becomes hard."""
    for drafted, modes in (([1] * 3 + [6] * 900, ("none", "sync")), ([6] * 20 + [1] * 900, ("sync", "none"))):
        drafted = iter(drafted)
        selector, _, emitted = play(0.050, 0.055, 0.045, 0.5, lambda mode, rng: next(drafted), num_tokens=900)  # noqa: B023
        assert selector.choices[-1]["mode"] == modes[1]
        assert emitted[modes[0]] > 20 and emitted[modes[1]] > 100


def test_choices_name_rounds_and_rates():
    selector, _, _ = play(0.050, 0.055, 0.045, 0.080, lambda mode, rng: 1)
    assert selector.choices[0] == {"round": 0, "mode": "none", "reason": "prefill"}
    assert selector.choices[1] == {"round": 1, "mode": "sync", "reason": "trial"}
    chosen = next(choice for choice in selector.choices if "tokens/s" in choice["reason"])
    assert chosen["mode"] == "none" and "none 20.0 tokens/s" in chosen["reason"]


# Whole generations


def in_auto_mode(drafter):
    drafter.generation_config.drafting_mode = "auto"
    drafter.generation_config.on_draft_error = "raise"
    return drafter


@pytest.fixture
def any_mode(monkeypatch):
    """Modes drawn at random, so that every change of mode comes up."""
    rng = random.Random(0)
    monkeypatch.setattr(ModeSelector, "choose", lambda self, seconds=None: rng.choice(["none", "sync", "async"]))
    monkeypatch.setattr(ModeSelector, "record", lambda self, *args: None)


def test_every_change_of_mode_leaves_greedy_ids_alone(any_mode):
    target = tiny_model("llama", seed=3, initializer_range=0.2)
    prompt = prompt_of()
    reference = generate(target, prompt, max_new_tokens=60)
    for name, drafter in drafters_of(reference).items():
        assert_same(target, prompt, in_auto_mode(drafter), reference=reference, max_new_tokens=60)
        assert drafter.last_generation_stats.mode == "auto"
        if name == "oracle":
            assert drafter.last_generation_stats.num_rounds < 45


def test_every_change_of_mode_leaves_the_law_alone(any_mode):
    target = memoryless_model(VOCAB_SIZE, seed=1)
    drafter = in_auto_mode(drafter_of("own"))
    drafter.generation_config.num_bonus_guesses = 1
    counts = transitions(target, drafter, LAWS["temperature"], num_generations=8)
    assert transition_p_value(counts, target, LAWS["temperature"]) > 1e-4 / NUM_TESTS


class Clock:
    """Stands in for the module `time`: time passes in forwards alone."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def ticking(self, method, seconds):
        @functools.wraps(method)
        def ticked(*args, **kwargs):
            self.now += seconds
            return method(*args, **kwargs)

        return ticked


@pytest.mark.parametrize("is_useful", [True, False])
def test_a_generation_settles_on_what_pays(is_useful, monkeypatch):
    clock = Clock()
    for module in (auto_drafts, async_drafts, drafts, loop):
        monkeypatch.setattr(module, "time", clock)
    target = tiny_model("llama", seed=3, initializer_range=0.2)
    prompt = prompt_of()
    reference = generate(target, prompt, max_new_tokens=120)
    drafter = oracle_drafter(reference, block_size=BLOCK_SIZE)
    if not is_useful:
        drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3", seed=9), block_size=BLOCK_SIZE)
    in_auto_mode(drafter)
    monkeypatch.setattr(drafter, "packed_forward", clock.ticking(drafter.packed_forward, 0.045))
    monkeypatch.setattr(auto_drafts.AutoDrafts, "_least_async_seconds", lambda self: None)
    target.forward = clock.ticking(target.forward, 0.050)
    generate(target, prompt, drafter, max_new_tokens=120)
    stats = drafter.last_generation_stats
    assert [choice["mode"] for choice in stats.mode_choices[:2]] == ["none", "sync"]
    assert stats.mode_choices[-1]["mode"] == ("sync" if is_useful else "none")
    if is_useful:
        assert stats.num_rounds < 25
    else:
        assert stats.num_drafted <= 6 * BLOCK_SIZE


def test_a_failing_draft_ends_drafting_alone(caplog):
    target = tiny_model("llama", seed=3, initializer_range=0.2)
    prompt = prompt_of()
    for mode in ("sync", "auto"):
        caplog.clear()
        drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama", seed=3), block_size=BLOCK_SIZE)
        drafter.generation_config.drafting_mode = mode
        drafter.packed_forward = failing
        assert generate(target, prompt, drafter).tolist() == generate(target, prompt).tolist()
        (record,) = [r for r in caplog.records if "runs without drafts" in r.getMessage()]
        assert "RuntimeError: out of memory" in record.getMessage()
        assert drafter.last_generation_stats.num_errors == 1
        drafter.generation_config.on_draft_error = "raise"
        with pytest.raises(RuntimeError, match="Drafting failed .*out of memory"):
            generate(target, prompt, drafter)


def failing(*args, **kwargs):
    raise RuntimeError("out of memory")


def test_cpu_threads_come_back(any_mode):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        target = tiny_model("llama", seed=3, initializer_range=0.2)
        drafter = in_auto_mode(D3DDrafterForCausalLM.from_backbone(target, block_size=BLOCK_SIZE))
        generate(target, prompt_of(), drafter)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
