"""
Triton kernels against their twins, run by Triton's interpreter on the CPU. The interpreter is chosen when Triton is
imported, for the whole process: test_kernels.py runs this file in one of its own, and so does

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels_interpreted.py
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from tree_passes import tree_passes, with_branch

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.kernels import attention_interface, choose_tokens_twin, packed_attention_twin, visibility_of
from d3d_hf.kernels.attention import HEAD_DIMS
from d3d_hf.model.packing import PADDING, lay_out, lay_out_tree
from d3d_hf.testing import tiny_model


if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_kernels.py", allow_module_level=True)
pytest.importorskip("triton")

import triton_interpreter

from d3d_hf.kernels import attention_triton, token_choice_triton


triton_interpreter.mend()

# Errors relative to the norm, against the twin in float64: rounding of the output and, at 16 bits, of the weights.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """What a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that torch.empty and the like give
    assert torch.ones(1).new_empty(3, dtype=torch.float32).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def error_by_norm(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@st.composite
def passes(draw):
    """(layout, window, padding tokens): up to 300 cached tokens, 17 branches, 16 slots each."""
    num_cached = draw(st.one_of(st.just(0), st.integers(1, 300)))
    num_branches = draw(st.integers(0, 17))
    context_length = draw(st.integers(0 if num_cached and num_branches else 1, 18))
    num_context = num_cached + context_length
    num_slots = draw(st.lists(st.integers(1, 16), min_size=num_branches, max_size=num_branches))
    # Mostly on the tokens of the pass, as in drafting, and now and then deep in the cache.
    first = draw(st.sampled_from([max(0, num_cached - 1), 0]))
    anchors = draw(st.lists(st.integers(first, num_context - 1), min_size=num_branches, max_size=num_branches))
    num_visible = [draw(st.integers(0, 2)) for _ in num_slots]
    layout = lay_out(
        context_length,
        torch.tensor([anchors]) if anchors else None,
        num_slots,
        num_visible=torch.tensor([num_visible]),
        num_cached=num_cached,
        bidirectional=draw(st.booleans()),
    )
    window = draw(st.one_of(st.none(), st.integers(1, 150)))
    return layout, window, draw(st.integers(0, 5))


LONG = lay_out(9, torch.tensor([[299 + a for a in range(9)]]), (8,) * 9, num_cached=300)
CAUSAL = lay_out(3, torch.tensor([[70, 66, 40]]), (5, 1, 16), num_cached=68, bidirectional=False)


DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (5, 1)])
SPLITS = st.sampled_from([None, 1, 2, 5])


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=passes(), head_dim=st.sampled_from(HEAD_DIMS), dtype=DTYPES, heads=HEADS, num_splits=SPLITS)
@example(case=(LONG, None, 0), head_dim=128, dtype=torch.bfloat16, heads=(8, 2), num_splits=4)
@example(case=(LONG, 40, 7), head_dim=64, dtype=torch.float16, heads=(4, 1), num_splits=3)
@example(case=(CAUSAL, None, 2), head_dim=80, dtype=torch.bfloat16, heads=(2, 2), num_splits=2)
@example(case=(CAUSAL, 9, 0), head_dim=96, dtype=torch.float32, heads=(2, 1), num_splits=7)
@example(case=(CAUSAL, 70, 0), head_dim=256, dtype=torch.bfloat16, heads=(4, 1), num_splits=1)
def test_attention_kernel_equals_its_twin(case, head_dim, dtype, heads, num_splits):
    layout, window, padding = case
    assert_equals_twin(layout, window, padding, head_dim, dtype, heads, num_splits)


def wide_tree(num_nodes: int, num_cached: int, context_length: int = 1):
    """Two children each, with a branch on a leaf and one on the text."""
    layout = lay_out_tree(context_length, torch.arange(1, num_nodes + 1) // 2, num_cached)
    return with_branch(with_branch(layout, layout.num_tokens - 1, 3, 1), 0, 4, 2)


CHAIN_AS_TREE = lay_out_tree(3, torch.arange(127), num_cached=130)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    layout=tree_passes(max_cached=200, max_nodes=70),
    window=st.one_of(st.none(), st.integers(1, 150)),
    padding=st.sampled_from([0, 1, 5, 40]),
    head_dim=st.sampled_from([64, 80, 128]),
    dtype=DTYPES,
    heads=HEADS,
    num_splits=SPLITS,
)
@example(wide_tree(64, 97), None, 0, 64, torch.bfloat16, (4, 2), 3)
@example(wide_tree(127, 31, context_length=2), 5, 3, 64, torch.float32, (2, 1), 2)
@example(wide_tree(31, 0), None, 33, 64, torch.float16, (2, 2), 1)
@example(wide_tree(1, 64), 3, 2, 96, torch.bfloat16, (1, 1), 1)
@example(CHAIN_AS_TREE, None, 0, 64, torch.float32, (1, 1), 1)
@example(CHAIN_AS_TREE, 40, 6, 256, torch.bfloat16, (3, 1), 2)
def test_attention_kernel_equals_its_twin_on_trees(layout, window, padding, head_dim, dtype, heads, num_splits):
    assert_equals_twin(layout, window, padding, head_dim, dtype, heads, num_splits)


def assert_equals_twin(layout, window, padding, head_dim, dtype, heads, num_splits):
    num_tokens = layout.num_tokens + padding
    num_filled = layout.num_cached + num_tokens
    visibility = visibility_of(layout, window, num_tokens)
    query = torch.randn(1, heads[0], num_tokens, head_dim).to(dtype)
    key, value = torch.randn(2, 1, heads[1], num_filled + 11, head_dim).to(dtype)
    key[:, :, num_filled:] = value[:, :, num_filled:] = float("nan")  # not written yet
    expected = packed_attention_twin(query.double(), key.double(), value.double(), visibility)
    got = attention_triton.launch(query, key, value, visibility, head_dim**-0.5, num_splits)
    assert got.dtype == dtype and got.shape == expected.shape and got.isfinite().all()
    assert (got[padding_of(layout, num_tokens)] == 0).all()
    assert error_by_norm(got, expected) <= TOLERANCES[dtype]


def padding_of(layout, num_tokens: int) -> torch.BoolTensor:
    is_padding = torch.ones(1, num_tokens, dtype=torch.bool)
    is_padding[:, : layout.num_tokens] = layout.branch_ids == PADDING
    return is_padding


def test_rows_of_a_batch_and_strides_of_their_own():
    """Contexts with padding on the left, and states that are views of one tensor, as projections give them."""
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    layout = lay_out(7, torch.tensor([[6, 3], [4, -1]]), (4, 3), context_mask=mask)
    visibility = visibility_of(layout, 5)
    states = torch.randn(2, layout.num_tokens, 4 + 2 + 2, 64).transpose(1, 2)
    query, key, value = states.split([4, 2, 2], dim=1)
    expected = packed_attention_twin(query.double(), key.double(), value.double(), visibility, 0.3)
    got = attention_triton.launch(query, key, value, visibility, 0.3, 2)
    assert error_by_norm(got, expected) <= TOLERANCES[torch.float32]


def test_the_length_of_the_cache_is_read_from_the_visibility():
    """As in a replayed graph: the same storage and shapes, another number in the tensor."""
    short, long = (lay_out(2, torch.tensor([[n, n + 1]]), (3, 3), num_cached=n) for n in (20, 90))
    visibility = visibility_of(short)
    key, value = torch.randn(2, 1, 2, 128, 64)
    query = torch.randn(1, 2, 8, 64)
    for layout in (short, long):
        visibility.copy_(visibility_of(layout))
        filled = layout.num_cached + layout.num_tokens
        expected = packed_attention_twin(
            *(x.double() for x in (query, key[:, :, :filled], value[:, :, :filled])), visibility
        )
        got = attention_triton.launch(query, key, value, visibility, 64**-0.5, 2)
        assert error_by_norm(got, expected) <= TOLERANCES[torch.float32]


@st.composite
def logits_and_limits(draw):
    num_rows, num_ids = draw(st.integers(1, 5)), draw(st.sampled_from([1, 67, 4095, 4097, 9000]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = (8 * torch.randn(num_rows, num_ids + 3, generator=generator)).to(dtype)[:, :num_ids]
    if draw(st.booleans()):
        logits = logits.round()  # ties
    fault = draw(st.sampled_from([None, float("nan"), float("-inf")]))
    if fault is not None:
        logits[0, : draw(st.sampled_from([1, num_ids]))] = fault
    vocab_size = draw(st.sampled_from([num_ids, num_ids + 9, max(1, num_ids - 60)]))
    never = draw(st.lists(st.integers(0, num_ids + 5), max_size=3))
    return logits, vocab_size, [*never, *draw(st.sampled_from([[], logits[-1:].argmax(dim=1).tolist()]))]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(logits_and_limits())
def test_choice_kernel_equals_its_twin(case):
    logits, vocab_size, never = case
    width = min(vocab_size, logits.shape[1])
    never = [token for token in never if token < width]
    expected = choose_tokens_twin(logits, width, never)
    tokens, best, normalizers = token_choice_triton.launch(logits, width, never)
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(best, expected.logits)
    torch.testing.assert_close(normalizers, expected.log_normalizers, rtol=1e-6, atol=1e-6)


def test_a_backbone_runs_on_the_kernel(monkeypatch):
    """Packed logits of mixed windows and shared heads, over a cache, through transformers' interfaces."""
    backbone = tiny_model("gemma3")
    logits, calls = [], []

    def run_kernel(query, key, value, visibility, scaling):
        calls.append(query.shape)
        return attention_triton.launch(query, key, value, visibility, scaling, 2)

    monkeypatch.setattr(attention_interface, "packed_attention", run_kernel)
    ids = torch.randint(2, 60, (1, 24))
    for implementation in ("eager", "d3d_packed"):
        drafter = D3DDrafterForCausalLM.from_backbone(backbone)
        drafter.set_attn_implementation(implementation)
        cache = DynamicCache()
        with torch.no_grad():
            drafter.packed_forward(ids[:, :13], lay_out(13), cache=cache)
            layout = lay_out(3, torch.tensor([[12, 15]]), (4, 4), num_cached=13)
            logits.append(drafter.packed_forward(ids[:, 13:], layout, cache=cache).logits)
    assert calls == [(1, 4, 11, 8)] * 2  # a packed pass of two layers
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
