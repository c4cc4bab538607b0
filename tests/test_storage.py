"""Storage for keys and values that grows by doubling, against a cache that is concatenated."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.storage import MIN_CAPACITY, GrowingCache, Storage, capacity_for, first_capacity
from d3d_hf.testing import ARCHITECTURES, anti_oracle_drafter, oracle_drafter, tiny_model
from lossless import generate, prompt_of


LAYERS, HEADS, HEAD_DIM = 3, 2, 4
# Of each layer, head sizes of keys and values.
KINDS = {
    "alike": [(HEAD_DIM, HEAD_DIM)] * LAYERS,
    "one unlike": [(4, 4), (4, 4), (6, 6)],
    "all unlike": [(4, 4), (6, 6), (8, 8)],
    "values unlike": [(4, 6), (4, 6), (4, 4)],
}


def states_of(num_tokens, sizes=(HEAD_DIM, HEAD_DIM), seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, HEADS, num_tokens, size, generator=generator).to(**kwargs) for size in sizes)


def append(caches, num_tokens, kinds, seed):
    """The same new tokens for every cache, layer by layer; what each layer shows is the same."""
    for layer, sizes in enumerate(kinds):
        states = states_of(num_tokens, sizes, seed=1000 * seed + layer)
        shown = [cache.update(*states, layer) for cache in caches]
        for keys, values in shown[1:]:
            assert torch.equal(keys, shown[0][0]) and torch.equal(values, shown[0][1])


def assert_holds(cache, expected):
    """The cache holds what a dynamic one holds."""
    assert cache.get_seq_length() == expected.get_seq_length()
    length = expected.get_seq_length()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.get_seq_length() == length
        assert torch.equal(layer.keys[:, :, :length], other.keys)
        assert torch.equal(layer.values[:, :, :length], other.values)


def keep_in(expected: DynamicCache, start, places):
    """What `keep` means, by indexing anew."""
    chosen = torch.tensor([*range(start), *places], dtype=torch.long)
    for layer in expected.layers:
        layer.keys, layer.values = layer.keys[:, :, chosen], layer.values[:, :, chosen]


def addresses(cache):
    return [tensor.data_ptr() for tensor in cache.storage.tensors]


# Growth


def test_capacities_double():
    assert [capacity_for(count) for count in (0, 1, 256, 257, 512, 513, 5000)] == [256, 256, 256, 512, 512, 1024, 8192]
    assert first_capacity(1) == 512 and first_capacity(700) == 1024
    assert MIN_CAPACITY == 256


@pytest.mark.parametrize("step", [1, 7, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_growing_loses_nothing_and_copies_at_growth_alone(kind, step):
    cache, expected = GrowingCache(LAYERS, max_length=40), DynamicCache()
    assert cache.capacity == 0 and cache.storage is None and cache.get_seq_length() == 0
    capacities, before = [], None
    while cache.get_seq_length() < 1100:
        append([cache, expected], step, KINDS[kind], seed=cache.get_seq_length())
        if not capacities or cache.capacity != capacities[-1]:
            capacities.append(cache.capacity)
        else:
            assert addresses(cache) == before, "text was copied"
        before = addresses(cache)
    assert_holds(cache, expected)
    assert capacities[-1] == 2048 and all(two == 2 ** (i + 1) * capacities[0] for i, two in enumerate(capacities[1:]))
    assert len(cache.storage.tensors) == {"alike": 1, "one unlike": 3, "all unlike": 5, "values unlike": 5}[kind]


def test_layers_that_are_alike_lie_in_one_piece():
    cache = GrowingCache(LAYERS)
    append([cache], 5, KINDS["alike"], seed=1)
    (stack,) = cache.storage.tensors
    assert stack.shape == (LAYERS, 2, 1, HEADS, cache.capacity, HEAD_DIM)
    for index, layer in enumerate(cache.layers):
        assert layer.keys.data_ptr() == stack[index, 0].data_ptr()
        assert layer.values.data_ptr() == stack[index, 1].data_ptr()
    assert not stack[..., 5:, :].any(), "zero where nothing was written"


@pytest.mark.parametrize("max_length, expected", [(None, 512), (40, 256), (300, 512), (5000, 512)])
def test_the_first_size_goes_by_the_greatest_length_and_is_not_bound_by_it(max_length, expected):
    cache = GrowingCache(1, max_length)
    cache.update(*states_of(20), 0)
    assert cache.capacity == expected
    cache.update(*states_of(expected), 0)
    assert cache.capacity == 2 * expected and cache.get_seq_length() == 20 + expected


def test_reserved_room_is_there_when_it_is_needed():
    cache, expected = GrowingCache(LAYERS), DynamicCache()
    append([cache, expected], 9, KINDS["one unlike"], seed=1)
    cache.reserve(900)
    assert cache.capacity == 1024
    before = addresses(cache)
    append([cache, expected], 800, KINDS["one unlike"], seed=2)
    assert addresses(cache) == before
    assert_holds(cache, expected)


# What a verdict keeps


@st.composite
def histories(draw):
    """Rounds of (new tokens, how many of them stay in place, which of the rest are kept)."""
    rounds = []
    for _ in range(draw(st.integers(1, 6))):
        num_new = draw(st.integers(1, 150))
        num_stay = draw(st.integers(0, num_new))
        places = draw(st.sets(st.integers(num_stay, num_new - 1), max_size=8)) if num_stay < num_new else set()
        rounds.append((num_new, num_stay, sorted(places)))
    return rounds


@pytest.mark.parametrize("kind", KINDS)
def test_an_accepted_path_is_moved_to_the_texts_end_in_place(kind):
    @settings(max_examples=40, deadline=None)
    @given(histories())
    def check(rounds):
        cache, expected = GrowingCache(LAYERS, max_length=40), DynamicCache()
        for turn, (num_new, num_stay, places) in enumerate(rounds):
            length = cache.get_seq_length()
            append([cache, expected], num_new, KINDS[kind], seed=turn)
            before = addresses(cache)
            start, places = length + num_stay, [length + place for place in places]
            cache.keep(start, places)
            keep_in(expected, start, places)
            assert addresses(cache) == before
            assert_holds(cache, expected)

    check()


def test_a_path_that_stands_there_already_moves_nothing(monkeypatch):
    cache = GrowingCache(LAYERS)
    append([cache], 9, KINDS["alike"], seed=1)
    monkeypatch.setattr(Storage, "move", lambda *args: pytest.fail("moved"))
    cache.keep(5, [5, 6, 7])
    assert cache.get_seq_length() == 8
    cache.keep(8, [])
    assert cache.get_seq_length() == 8
    cache.keep(3, [])
    assert cache.get_seq_length() == 3


def test_cropping_and_starting_over():
    cache, expected = GrowingCache(LAYERS), DynamicCache()
    append([cache, expected], 9, KINDS["alike"], seed=1)
    for each in (cache, expected):
        each.crop(-3)
    assert_holds(cache, expected)
    append([cache, expected], 4, KINDS["alike"], seed=2)
    assert_holds(cache, expected)
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(tensor.any() for tensor in cache.storage.tensors)
    expected = DynamicCache()
    append([cache, expected], 4, KINDS["alike"], seed=3)
    assert_holds(cache, expected)


# Dtypes


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("kind", ["alike", "one unlike"])
def test_text_of_another_dtype_stays_in_the_wider_one(kind, dtypes):
    """As concatenating has it: a cache that was filled outside autocast and is gone on with inside, or the reverse."""
    cache, expected = GrowingCache(LAYERS), DynamicCache()
    for turn, dtype in enumerate([dtypes[0], dtypes[1], dtypes[0]]):
        for layer, sizes in enumerate(KINDS[kind]):
            states = states_of(5, sizes, seed=10 * turn + layer, dtype=dtype)
            (keys, values), (other_keys, other_values) = (each.update(*states, layer) for each in (cache, expected))
            assert keys.dtype == other_keys.dtype and torch.equal(keys, other_keys)
            assert values.dtype == other_values.dtype and torch.equal(values, other_values)
    cache.keep(10, [12, 14])
    keep_in(expected, 10, [12, 14])
    assert_holds(cache, expected)


def test_an_empty_cache_takes_the_dtype_that_comes():
    cache = GrowingCache(1)
    cache.update(*states_of(5), 0)
    assert cache.holds(torch.float32) and not cache.holds(torch.bfloat16)
    cache.keep(0, [])
    keys, _ = cache.update(*states_of(5, dtype=torch.bfloat16), 0)
    assert keys.dtype == torch.bfloat16 and cache.holds(torch.bfloat16)


@pytest.mark.parametrize("inside_first", [True, False])
def test_a_turn_under_autocast_and_one_outside_share_a_cache(inside_first):
    target, prompt = tiny_model("llama", seed=11), prompt_of()

    def turns(drafter):
        cache, text = DynamicCache(), prompt
        for turn, is_inside in enumerate([inside_first, not inside_first]):
            text = torch.cat([text, prompt_of(3, seed=turn)], dim=1)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
                text = generate(target, text, drafter, max_new_tokens=8, **{cache_argument(target): cache})
        return text, cache

    expected, expected_cache = turns(None)
    drafter = oracle_drafter(expected)
    text, cache = turns(drafter)
    assert torch.equal(text, expected) and drafter.last_generation_stats.num_rounds == 2
    for layer, other in zip(cache.layers, expected_cache.layers):
        assert (layer.keys.dtype, layer.values.dtype) == (other.keys.dtype, other.values.dtype)
        torch.testing.assert_close(layer.keys, other.keys, atol=0.1, rtol=0.1)
        torch.testing.assert_close(layer.values, other.values, atol=0.1, rtol=0.1)


# Forwards


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forwards_over_it_are_those_over_a_dynamic_cache(architecture, attn_implementation):
    """Text in pieces, across the capacity, with and without a mask; a sliding window is the mask's business."""
    model = tiny_model(architecture, seed=2, attn_implementation=attn_implementation, initializer_range=0.2)
    name, ids = cache_argument(model), prompt_of(300, seed=3)
    caches = GrowingCache(2, max_length=30), DynamicCache(config=model.config)
    start, capacities = 0, set()
    for num_new in (5, 1, 1, 13, 1, 230, 1, 9, 1, 1, 20):
        piece, mask = ids[:, start : start + num_new], torch.ones(1, start + num_new, dtype=torch.long)
        start += num_new
        with torch.no_grad():
            ours, plain = (
                model(piece, attention_mask=mask if start % 2 else None, **{name: cache}).logits for cache in caches
            )
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
        capacities.add(caches[0].capacity)
    assert capacities == {256, 512} and caches[0].get_seq_length() == caches[1].get_seq_length() == start


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_with_gradients_it_is_written_and_what_is_shown_is_of_value(architecture):
    """A forward outside no_grad, as a user makes one by hand, and one after it under no_grad, and inference mode."""
    model = tiny_model(architecture, seed=2)
    name, ids = cache_argument(model), prompt_of(12, seed=3)
    cache = GrowingCache(2)
    first = model(ids[:, :5], **{name: cache}).logits
    assert first.requires_grad
    second = model(ids[:, 5:8], **{name: cache}).logits
    with torch.no_grad():
        third = model(ids[:, 8:10], **{name: cache}).logits
    with torch.inference_mode():
        fourth = model(ids[:, 10:], **{name: cache}).logits
        expected = model(ids).logits
    got = torch.cat([each.detach().clone() for each in (first, second, third, fourth)], dim=1)
    torch.testing.assert_close(got, expected.clone(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        cache.keep(8, [9])
    assert cache.get_seq_length() == 9


def test_storage_that_inference_mode_made_can_be_written_outside():
    cache, expected = GrowingCache(LAYERS), DynamicCache()
    with torch.inference_mode():
        append([cache], 5, KINDS["one unlike"], seed=1)
    append([expected], 5, KINDS["one unlike"], seed=1)
    append([cache, expected], 500, KINDS["one unlike"], seed=2)
    cache.keep(7, [9, 11])
    keep_in(expected, 7, [9, 11])
    assert_holds(cache, expected)


# Copies


def pickled(cache):
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_goes_its_own_way(copied, kind):
    cache, expected = GrowingCache(LAYERS), DynamicCache()
    append([cache, expected], 9, KINDS[kind], seed=1)
    other, other_expected = copied(cache), copy.deepcopy(expected)
    assert_holds(other, other_expected)
    # Written, moved and grown, the copy stays a cache of its own, and so does the first.
    append([other, other_expected], 6, KINDS[kind], seed=2)
    other.keep(10, [12, 14])
    keep_in(other_expected, 10, [12, 14])
    assert_holds(other, other_expected)
    assert_holds(cache, expected)
    append([cache, expected], 5, KINDS[kind], seed=3)
    append([other, other_expected], 600, KINDS[kind], seed=4)
    assert_holds(other, other_expected)
    assert_holds(cache, expected)
    assert not set(addresses(cache)) & set(addresses(other))


def test_an_empty_one_can_be_copied():
    for copied in (copy.deepcopy(GrowingCache(LAYERS)), pickled(GrowingCache(LAYERS))):
        append([copied], 3, KINDS["alike"], seed=1)
        assert copied.get_seq_length() == 3


# In a generation


@pytest.mark.parametrize("make", [oracle_drafter, anti_oracle_drafter])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_generation_copies_no_committed_text(architecture, make, monkeypatch):
    target, prompt = tiny_model(architecture, seed=11), prompt_of(250)
    reference = generate(target, prompt, max_new_tokens=60)
    caches, begin = [], GrowingCache.__init__

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(GrowingCache, "__init__", noted)
    addresses_seen = set()
    hook = target.register_forward_hook(
        lambda *_: addresses_seen.update(cache.storage.tensors[0].data_ptr() for cache in caches[:1])
    )
    drafter = make(reference, block_size=5)
    try:
        output = generate(target, prompt, drafter, max_new_tokens=60)
    finally:
        hook.remove()
    assert torch.equal(output, reference)
    assert drafter.last_generation_stats.num_rounds == (10 if make is oracle_drafter else 60)
    # The first storage was made for the greatest length, so that not even growth copies.
    assert len(addresses_seen) == 1 and caches[0].capacity == 512
