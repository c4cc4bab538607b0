"""What a call returns and leaves behind is plain decoding's, field by field: results, caches, lengths."""

import itertools

import pytest
import torch
import transformers.generation.stopping_criteria
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from beside_plain import assert_as_plain, fewest_forwards, num_new_tokens, run
from d3d_hf.model.backbones import cache_argument
from d3d_hf.testing import (
    ARCHITECTURES,
    SLIDING_WINDOW,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
)
from lossless import PROMPT_LENGTH, prompt_of


BLOCK_SIZE, NEW = 5, 17
EVERYTHING = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


def target_of(architecture):
    """Attentions are given out by the eager implementation alone."""
    return tiny_model(architecture, seed=11, attn_implementation="eager")


def cache_of(output):
    return output["cache"] if "cache" in output else output["past_key_values"]


def assert_same_values(ours, plain, path):
    """The same nest of tuples with tensors of the same shapes and values."""
    assert type(ours) is type(plain), path
    if isinstance(plain, torch.Tensor):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype, (path, ours.shape, plain.shape)
        torch.testing.assert_close(ours, plain, atol=2e-4, rtol=2e-4, msg=lambda text: f"{path}: {text}")
        return
    assert isinstance(plain, tuple) and len(ours) == len(plain), (path, len(ours), len(plain))
    for index, (one, other) in enumerate(zip(ours, plain)):
        assert_same_values(one, other, f"{path}[{index}]")


def assert_same_caches(ours, plain):
    assert type(ours) is type(plain) and len(ours.layers) == len(plain.layers)
    assert ours.get_seq_length() == plain.get_seq_length()
    for index, (one, other) in enumerate(zip(ours.layers, plain.layers)):
        assert type(one) is type(other) and one.is_initialized == other.is_initialized
        assert one.get_seq_length() == other.get_seq_length()
        for name in ("sliding_window", "cumulative_length", "record_past", "dtype", "device"):
            assert getattr(one, name, None) == getattr(other, name, None), name
        assert one.get_mask_sizes(3) == other.get_mask_sizes(3)
        if other.is_initialized:
            assert_same_values((one.keys, one.values), (other.keys, other.values), f"layer {index}")


def assert_same_results(ours, plain):
    assert type(ours) is type(plain) and list(ours.keys()) == list(plain.keys())
    for name, value in plain.items():
        if name in ("cache", "past_key_values"):
            assert_same_caches(ours[name], value)
        else:
            assert_same_values(ours[name], value, name)


# Results


def drafters_of(reference):
    return {
        "oracle": oracle_drafter(reference, block_size=BLOCK_SIZE),
        "noisy": noisy_oracle_drafter(reference, [2], block_size=BLOCK_SIZE),
        "anti": anti_oracle_drafter(reference, block_size=BLOCK_SIZE),
    }


@pytest.mark.parametrize("mode, do_sample", [("sync", False), ("sync", True), ("async", True)])
@pytest.mark.parametrize("prompt_length", [1, PROMPT_LENGTH, 2 * SLIDING_WINDOW + 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_results_are_plain_decodings_field_by_field(architecture, prompt_length, mode, do_sample):
    target, prompt = target_of(architecture), prompt_of(prompt_length)
    kwargs = {"do_sample": do_sample, "max_new_tokens": NEW, "repetition_penalty": 1.2, "top_k": 20}
    # A call that asks for attentions of windows runs without drafts: below.
    asked = EVERYTHING[:3] if architecture == "gemma3" else EVERYTHING
    kwargs.update({"return_dict_in_generate": True, **dict.fromkeys(asked, True)})
    plain = run(target, prompt, seed=5, **kwargs)
    assert all(len(plain.output[name.removeprefix("output_")]) == NEW for name in asked)
    for name, drafter in drafters_of(plain.ids).items():
        drafter.generation_config.drafting_mode = mode
        ours = run(target, prompt, drafter, seed=5, **kwargs)
        assert_as_plain(ours, plain, drafter)
        assert_same_results(ours.output, plain.output)
        if name == "oracle":
            num_alone = 1 if mode == "async" else 0
            assert ours.num_forwards == num_alone + fewest_forwards(NEW - num_alone, BLOCK_SIZE)


@pytest.mark.parametrize("tree_size", [0, 12])
@pytest.mark.parametrize("asked", [(), *((name,) for name in EVERYTHING)], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_was_not_asked_for_is_not_there(architecture, asked, tree_size):
    target, prompt = target_of(architecture), prompt_of(11)
    kwargs = {"max_new_tokens": NEW, "return_dict_in_generate": True, **dict.fromkeys(asked, True)}
    plain = run(target, prompt, **kwargs)
    drafter = acceptance_profile_drafter(plain.ids, [0.9, 0.7], block_size=BLOCK_SIZE)
    drafter.generation_config.draft_tree_size = tree_size
    ours = run(target, prompt, drafter, **kwargs)
    assert_same_results(ours.output, plain.output)
    if architecture == "llama" or asked != ("output_attentions",):
        assert_as_plain(ours, plain, drafter)
        assert ours.num_forwards < NEW


@pytest.mark.parametrize("asked", [EVERYTHING[:3], EVERYTHING])
def test_a_text_that_ends_early_leaves_what_plain_decoding_leaves(asked):
    """The end stands in the middle of an accepted block: nothing of what follows it shows, in no field."""
    target, prompt = target_of("llama" if asked == EVERYTHING else "gemma3"), prompt_of()
    free = run(target, prompt, max_new_tokens=NEW, do_sample=True)
    drafter = oracle_drafter(free.ids, block_size=BLOCK_SIZE)
    for num_tokens in range(1, 9):
        kwargs = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0, "return_dict_in_generate": True}
        kwargs.update(dict.fromkeys(asked, True), eos_token_id=int(free.ids[0, PROMPT_LENGTH + num_tokens - 1]))
        plain = run(target, prompt, **kwargs)
        ours = run(target, prompt, drafter, **kwargs)
        assert_as_plain(ours, plain, drafter)
        assert_same_results(ours.output, plain.output)
        assert ours.num_forwards == fewest_forwards(num_new_tokens(plain, prompt), BLOCK_SIZE)


# Caches


def empty_cache(target, knows_config):
    return DynamicCache(config=target.config) if knows_config else DynamicCache()


def filled_cache(target, prompt, knows_config, num_tokens):
    cache = empty_cache(target, knows_config)
    if num_tokens:
        with torch.no_grad():
            target(prompt[:, :num_tokens], **{cache_argument(target): cache})
    return cache


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize("knows_config", [False, True])
@pytest.mark.parametrize("num_cached", [0, 1, 9, 21])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_users_cache_is_left_as_plain_decoding_leaves_it(architecture, num_cached, knows_config, return_dict):
    target, prompt = target_of(architecture), prompt_of(22)
    kwargs = {"max_new_tokens": NEW, "return_dict_in_generate": return_dict}
    runs, caches = [], []
    for make in (None, oracle_drafter, lambda ids, **sizes: noisy_oracle_drafter(ids, [1], **sizes)):
        drafter = None if make is None else make(runs[0].ids, block_size=BLOCK_SIZE)
        caches.append(filled_cache(target, prompt, knows_config, num_cached))
        runs.append(run(target, prompt, drafter, **{cache_argument(target): caches[-1]}, **kwargs))
        assert_as_plain(runs[-1], runs[0], drafter)
        assert_same_caches(caches[-1], caches[0])
        if return_dict:
            assert cache_of(runs[-1].output) is caches[-1]
    assert caches[0].get_seq_length() == 22 + NEW - 1
    assert [each.num_forwards for each in runs] == [NEW, fewest_forwards(NEW, BLOCK_SIZE), fewest_forwards(NEW, 1)]


@pytest.mark.parametrize("knows_config", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_cache_goes_from_turn_to_turn_whoever_drafts_in_each(architecture, knows_config):
    """A conversation of four turns, every turn with or without the drafter: one text, one cache."""
    target, num_turns = target_of(architecture), 4

    def drafter_of(reference, turn):
        drafter = oracle_drafter(reference, block_size=BLOCK_SIZE)
        drafter.generation_config.draft_tree_size = 12 * (turn % 2)
        return drafter

    def converse(with_drafter, reference=None):
        cache, text, num_forwards = empty_cache(target, knows_config), prompt_of(3), []
        for turn in range(num_turns):
            text = torch.cat([text, prompt_of(3 + turn, seed=turn)], dim=1)
            drafter = drafter_of(reference, turn) if with_drafter[turn] else None
            kwargs = {"max_new_tokens": 6 + turn, "do_sample": True, cache_argument(target): cache}
            done = run(target, text, drafter, seed=turn, **kwargs)
            text = done.ids
            num_forwards.append(done.num_forwards)
        return text, cache, num_forwards

    expected, expected_cache, _ = converse([False] * num_turns)
    for with_drafter in itertools.product([False, True], repeat=num_turns):
        text, cache, num_forwards = converse(with_drafter, expected)
        assert torch.equal(text, expected)
        assert_same_caches(cache, expected_cache)
        for turn, (count, drafted) in enumerate(zip(num_forwards, with_drafter)):
            assert count == (fewest_forwards(6 + turn, BLOCK_SIZE) if drafted else 6 + turn)


@pytest.mark.parametrize(
    "num_given, num_cached, reason", [(4, 9, "holds text that input_ids lacks"), (13, 13, "holds all the text")]
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_cache_that_leaves_nothing_to_draft_from_runs_plain(architecture, num_given, num_cached, reason, caplog):
    """The new tokens alone are given, so that the drafter would lack the text; or none of them is new."""
    target, prompt = target_of(architecture), prompt_of(13)
    outputs, caches = [], []
    for drafter in (None, oracle_drafter(prompt)):
        caches.append(filled_cache(target, prompt, True, num_cached))
        kwargs = {"attention_mask": torch.ones_like(prompt), cache_argument(target): caches[-1]}
        outputs.append(run(target, prompt[:, -num_given:], drafter, max_new_tokens=7, **kwargs))
    assert_as_plain(outputs[1], outputs[0])
    assert_same_caches(caches[1], caches[0])
    assert drafter.last_generation_stats.door == "plain" and outputs[1].num_forwards == 7
    assert caplog.text.count("Generating without drafts") == 1 and reason in caplog.text


class Interrupts(transformers.LogitsProcessor, transformers.StoppingCriteria, BaseStreamer):
    """Any of the three, at one of its calls."""

    def __init__(self, num_calls):
        self.num_calls = num_calls

    def count_down(self):
        self.num_calls -= 1
        if not self.num_calls:
            raise KeyboardInterrupt

    def put(self, value):
        if value.numel() == 1:  # not the prompt
            self.count_down()

    def end(self):
        pass


class InterruptingProcessor(Interrupts):
    def __call__(self, input_ids, scores):
        self.count_down()
        return scores


class InterruptingCriterion(Interrupts):
    def __call__(self, input_ids, scores, **kwargs):
        self.count_down()
        return torch.zeros(1, dtype=torch.bool)


INTERRUPTS = {
    "processor": lambda num_calls: {"logits_processor": [InterruptingProcessor(num_calls)]},
    "criterion": lambda num_calls: {"stopping_criteria": [InterruptingCriterion(num_calls)]},
    "streamer": lambda num_calls: {"streamer": Interrupts(num_calls)},
}


@pytest.mark.parametrize("knows_config", [False, True])
@pytest.mark.parametrize("tree_size", [0, 12])
@pytest.mark.parametrize("make", [oracle_drafter, anti_oracle_drafter])
@pytest.mark.parametrize("who", INTERRUPTS)
def test_a_call_that_the_caller_interrupts_leaves_the_text_in_the_cache_and_no_draft(
    who, make, tree_size, knows_config
):
    """In the middle of a block, too: one goes on from there as after plain decoding."""
    target, prompt = target_of("gemma3"), prompt_of(12)
    free = run(target, prompt, max_new_tokens=NEW)
    drafter = make(free.ids, block_size=BLOCK_SIZE)
    drafter.generation_config.draft_tree_size = tree_size
    for num_tokens in range(1, 9):
        caches = []
        for assistant in (None, drafter):
            caches.append(empty_cache(target, knows_config))
            kwargs = {"max_new_tokens": NEW, cache_argument(target): caches[-1]}
            with pytest.raises(KeyboardInterrupt):
                run(target, prompt, assistant, **INTERRUPTS[who](num_tokens), **kwargs)
        assert caches[0].get_seq_length() == 12 + num_tokens - 1
        assert_same_caches(caches[1], caches[0])


def test_a_forward_that_fails_leaves_the_text_before_it_in_the_cache():
    target, prompt = target_of("llama"), prompt_of()
    free = run(target, prompt, max_new_tokens=NEW)
    cache, layer, lengths = DynamicCache(), target.model.layers[1], []

    def fail(module, args, kwargs):
        lengths.append(1)
        if len(lengths) == 3:
            raise MemoryError

    hook = layer.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(MemoryError):
            drafter = oracle_drafter(free.ids, block_size=BLOCK_SIZE)
            run(target, prompt, drafter, max_new_tokens=NEW, **{cache_argument(target): cache})
    finally:
        hook.remove()
    num_read = PROMPT_LENGTH - 1 + 2 * (BLOCK_SIZE + 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [num_read] * 2
    ours = run(target, free.ids[:, : num_read + 1], max_new_tokens=5, **{cache_argument(target): cache})
    assert torch.equal(ours.ids, free.ids[:, : num_read + 6])


# The prompt


@pytest.mark.parametrize("num_cached", [0, 5])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 17, 18, 40])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_prompt_read_in_chunks(architecture, chunk_size, num_cached):
    target, prompt = target_of(architecture), prompt_of(18)
    kwargs = {"max_new_tokens": NEW, "prefill_chunk_size": chunk_size, "return_dict_in_generate": True}
    kwargs.update(do_sample=True, output_hidden_states=True, output_logits=True)
    runs = []
    for make in (None, oracle_drafter, anti_oracle_drafter):
        drafter = None if make is None else make(runs[0].ids, block_size=BLOCK_SIZE)
        cache = {cache_argument(target): filled_cache(target, prompt, True, num_cached)}
        runs.append(run(target, prompt, drafter, **cache, **kwargs))
        num_chunks = -(-(18 - num_cached) // chunk_size)
        assert_as_plain(runs[-1], runs[0], drafter, num_other_forwards=num_chunks - 1)
        assert_same_results(runs[-1].output, runs[0].output)
    assert runs[0].num_forwards == runs[2].num_forwards == num_chunks - 1 + NEW
    assert runs[1].num_forwards == num_chunks - 1 + fewest_forwards(NEW, BLOCK_SIZE)


POSITIONS = {
    "moved": [7, 8, 9, 10, 11, 12],
    "with a gap": [0, 1, 2, 10, 11, 12],
    "repeated": [0, 0, 1, 1, 2, 2],
}


@pytest.mark.parametrize("tree_size", [0, 12])
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_positions_that_the_caller_gave(architecture, name, chunk_size, tree_size):
    target, prompt = tiny_model(architecture, seed=11, initializer_range=0.3), prompt_of()
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "prefill_chunk_size": chunk_size}
    num_other_forwards = 0 if chunk_size is None else 1
    without = run(target, prompt, **kwargs)
    kwargs["position_ids"] = torch.tensor([POSITIONS[name]])
    plain = run(target, prompt, **kwargs)
    # RoPE is relative, so that a text that is moved as a whole stays the same. This tiny Gemma hardly looks back.
    assert architecture == "gemma3" or (plain.ids.tolist() == without.ids.tolist()) == (name == "moved")
    for make in (oracle_drafter, anti_oracle_drafter):
        drafter = make(plain.ids, block_size=BLOCK_SIZE)
        drafter.generation_config.draft_tree_size = tree_size
        drafter.generation_config.draft_from_text = False
        ours = run(target, prompt, drafter, **kwargs)
        assert_as_plain(ours, plain, drafter, num_other_forwards)
        at_most = fewest_forwards(NEW, BLOCK_SIZE) if make is oracle_drafter else NEW
        assert ours.num_forwards - num_other_forwards <= at_most


# Lengths


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", seed=11)


@pytest.fixture(scope="module")
def free(target):
    return run(target, prompt_of(), max_new_tokens=40)


def check_end(target, free, expected_length=None, **kwargs):
    """An oracle that knows how the text would go on ends it where plain decoding does, in the fewest forwards."""
    prompt = free.ids[:, :PROMPT_LENGTH]
    plain = run(target, prompt, **kwargs)
    num_tokens = num_new_tokens(plain, prompt)
    assert expected_length is None or num_tokens == expected_length
    for tree_size in (0, 12):
        drafter = oracle_drafter(free.ids, block_size=BLOCK_SIZE)
        drafter.generation_config.draft_tree_size = tree_size
        ours = run(target, prompt, drafter, **kwargs)
        assert_as_plain(ours, plain, drafter)
        assert ours.num_forwards == fewest_forwards(num_tokens, BLOCK_SIZE)


@pytest.mark.parametrize("num_tokens", range(1, 15))
def test_the_greatest_length_within_a_block(target, free, num_tokens):
    check_end(target, free, num_tokens, max_new_tokens=num_tokens)
    check_end(target, free, num_tokens, max_new_tokens=None, max_length=PROMPT_LENGTH + num_tokens)


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_time_that_is_up(target, free, num_tokens, monkeypatch):
    """By a clock that goes on by a second at each look: it is looked at once for each token."""

    class Clock:
        now = 0

        def time(self):
            self.now += 1
            return self.now

    clock = Clock()
    monkeypatch.setattr(transformers.generation.stopping_criteria, "time", clock)
    check_end(target, free, num_tokens, max_new_tokens=40, max_time=num_tokens - 0.5)


@pytest.mark.parametrize("indices", [(0,), (4,), (5,), (6,), (20, 9), (31, 7, 12), (2, 3, 4, 5)], ids=str)
def test_any_of_several_ends(target, free, indices):
    ends = [int(free.ids[0, PROMPT_LENGTH + index]) for index in indices]
    for eos_token_id in (ends, ends[::-1], ends[0]):
        check_end(target, free, max_new_tokens=40, eos_token_id=eos_token_id, pad_token_id=0)


@pytest.mark.parametrize("least", [1, 4, 5, 6, 11, 39, 40])
@pytest.mark.parametrize("option", ["min_new_tokens", "min_length"])
def test_least_lengths(target, free, option, least):
    """Ends are forbidden inside a block and allowed from its middle on; the oracle knows that too."""
    prompt = free.ids[:, :PROMPT_LENGTH]
    kwargs = {"max_new_tokens": 40, "eos_token_id": list(range(2, 40)), "pad_token_id": 0}
    kwargs[option] = least if option == "min_new_tokens" else PROMPT_LENGTH + least
    plain = run(target, prompt, **kwargs)
    assert least <= num_new_tokens(plain, prompt)
    check_end(target, plain, **kwargs)
