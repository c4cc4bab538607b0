"""Packed attention and the greedy choice: twins against the definition, transformers' interfaces, the kernels."""

import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from test_packing import lay_out_branches, passes
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from tree_passes import tree_passes

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.kernels import (
    ATTENTION_NAME,
    choose_rows,
    choose_tokens,
    choose_tokens_twin,
    dense_visibility,
    packed_attention,
    packed_attention_twin,
    visibility_of,
)
from d3d_hf.kernels.attention import HEAD_DIMS, has_triton, runs_kernel
from d3d_hf.kernels.floors import pass_cost
from d3d_hf.kernels.visibility import NUM_ROWS, num_rows
from d3d_hf.model import packing
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.block import BlockReader
from d3d_hf.model.extensions import extensions
from d3d_hf.model.packing import PADDING, attention_masks, lay_out, lay_out_tree, visibility_rule
from d3d_hf.testing import ARCHITECTURES, tiny_model


TESTS = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    not has_triton() or Version(importlib.metadata.version("triton")) < Version("3.6"),
    reason="Triton 3.6 or later is not installed",
)


def run(*arguments, **environment) -> str:
    """The output of a Python process in which Triton is imported anew; its end is shown where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=TESTS, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


# What the integers say


@settings(max_examples=60, deadline=None)
@given(passes())
def test_integers_say_what_the_dense_mask_says(case):
    layout = lay_out_branches(*case)
    num_tokens, num_keys = layout.num_tokens, layout.num_cached + layout.num_tokens
    for window in (None, 1, 4):
        rule = visibility_rule(layout, window)
        expected = rule(0, 0, torch.arange(num_tokens)[:, None], torch.arange(num_keys)[None])
        if num_tokens:
            visibility = visibility_of(layout, window, num_tokens + 3)
            seen = dense_visibility(visibility, num_keys + 8)[0, 0]
            assert torch.equal(seen[:num_tokens, :num_keys], expected)
            assert not seen[num_tokens:].any() and not seen[:, num_keys:].any()  # padding, and what is not written


@settings(max_examples=150, deadline=None)
@given(tree_passes(), st.sampled_from([None, 1, 3, 8]), st.sampled_from([0, 1, 30, 70]))
def test_integers_say_of_trees_what_the_dense_mask_says(layout, window, missing):
    num_tokens, num_keys = layout.num_tokens, layout.num_cached + layout.num_tokens
    expected = packing.dense_visibility(layout, window)[0]
    visibility = visibility_of(layout, window, num_tokens + missing)
    assert visibility.shape == (1, 1, num_rows(num_tokens + missing, has_tree=True), num_tokens + missing)
    seen = dense_visibility(visibility, num_keys + missing + 8)[0, 0]
    is_token = layout.branch_ids[0] != PADDING
    assert torch.equal(seen[:num_tokens, :num_keys][is_token], expected[is_token])
    assert not seen[:num_tokens][~is_token].any() and not seen[num_tokens:].any() and not seen[:, num_keys:].any()


def test_a_tree_of_many_words():
    """Every bit of every word: a chain of 150 nodes, whose words are full, and a star, whose nodes are alone."""
    for parents in (torch.arange(150), torch.zeros(150, dtype=torch.long)):
        layout = lay_out_tree(7, parents, num_cached=3)
        seen = dense_visibility(visibility_of(layout), 3 + layout.num_tokens)[0]
        assert torch.equal(seen, packing.dense_visibility(layout))


def test_passes_without_a_tree_pay_nothing_for_trees():
    """Six rows, however many tokens; a static pass that may hold a tree has the words, all of them empty."""
    layout = lay_out(3, torch.tensor([[2, 2]]), (2000, 2000))
    plain = visibility_of(layout)
    assert plain.shape[2] == num_rows(4003, has_tree=False) == NUM_ROWS
    with_words = visibility_of(lay_out(5, num_cached=9), num_tokens=40, has_tree=True)
    assert with_words.shape[2] == NUM_ROWS + 2 and not with_words[:, :, NUM_ROWS:].any()
    without = visibility_of(lay_out(5, num_cached=9), num_tokens=40)
    assert torch.equal(dense_visibility(with_words, 60), dense_visibility(without, 60))


def test_padding_cannot_be_negative_and_no_tree_is_left_out():
    with pytest.raises(ValueError, match="num_tokens is 4, but the pass has 5"):
        visibility_of(lay_out(5), num_tokens=4)
    with pytest.raises(ValueError, match="has_tree is False, but the pass has a tree"):
        visibility_of(lay_out_tree(1, torch.tensor([0, 0])), has_tree=False)


def test_twin_ignores_places_that_are_not_written():
    layout = lay_out(2, torch.tensor([[6]]), (3,), num_cached=5)
    query, key, value = torch.randn(3, 1, 4, 5, 64).unbind(0)[0], *torch.randn(2, 1, 2, 16, 64)
    visibility = visibility_of(layout)
    expected = packed_attention_twin(query, key[:, :, :10], value[:, :, :10], visibility)
    key[:, :, 10:] = value[:, :, 10:] = float("nan")
    torch.testing.assert_close(packed_attention_twin(query, key, value, visibility), expected)


def test_twin_is_softmax_attention():
    layout = lay_out(3, torch.tensor([[5, 6]]), (2, 3), num_cached=4)
    query, (key, value) = torch.randn(1, 4, 8, 64), torch.randn(2, 1, 2, 12, 64)
    mask = attention_masks(layout, tiny_model().config, torch.float32)
    key_of_all, value_of_all = (states.repeat_interleave(2, dim=1) for states in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key_of_all, value_of_all, mask, scale=0.2)
    got = packed_attention(query, key, value, visibility_of(layout), 0.2)
    torch.testing.assert_close(got, expected.transpose(1, 2))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_tree_is_read_from_the_integers_by_a_whole_model(architecture):
    """No mask is written out, and each path's logits are those of the path alone."""
    ids, parents = torch.randint(2, 60, (1, 19)), torch.tensor([0, 0, 1, 1, 2, 4, 4])
    model = tiny_model(architecture, attn_implementation=ATTENTION_NAME)
    cached = {cache_argument(model): DynamicCache()}
    with torch.no_grad():
        model(input_ids=ids[:, :11], **cached)
        layout = lay_out_tree(1, parents, num_cached=11)
        masks = attention_masks(layout, model.config, torch.float32)
        for mask in masks.values() if isinstance(masks, dict) else (masks,):
            assert mask.dtype == torch.int32 and mask.shape == (1, 1, 7, 8)
        got = model(input_ids=ids[:, 11:], position_ids=layout.position_ids, attention_mask=masks, **cached).logits
        for node in range(1, 8):
            path = [node]
            while path[0]:
                path.insert(0, int(parents[path[0] - 1]))
            alone = torch.cat([ids[:, :11], ids[:, [11 + place for place in path]]], dim=1)
            torch.testing.assert_close(got[:, node], model(input_ids=alone).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": torch.ones(1, 3, 9, 64)}, "give .batch, heads, tokens, head_dim"),
        ({"key": torch.ones(1, 3, 8, 64), "value": torch.ones(1, 3, 8, 64)}, "4 query heads cannot share 3"),
        ({"visibility": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "give torch.int32 of shape .1, 1, 6, 5.*7 rows"),
        ({"visibility": torch.ones(1, 1, 8, 5, dtype=torch.int)}, "or with 7 rows where there is a tree"),
        ({"key": torch.ones(1, 2, 4, 64), "value": torch.ones(1, 2, 4, 64)}, "the KV storage 4 places"),
        ({"num_splits": 0}, "num_splits is 0"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    states = {"query": torch.ones(1, 4, 5, 64), "key": torch.ones(1, 2, 8, 64), "value": torch.ones(1, 2, 8, 64)}
    with pytest.raises(ValueError, match=message):
        packed_attention(**{**states, "visibility": visibility_of(lay_out(5)), **change})


# As an attention implementation of transformers


def packed_logits(drafter, implementation: str, block_attention: str, seed: int = 0) -> list[torch.Tensor]:
    """Logits of a prefill, of a packed pass over its cache, and of training on two texts, one of them padded."""
    drafter.set_attn_implementation(implementation)
    assert drafter._backbone.config._attn_implementation == implementation
    ids = torch.randint(2, 60, (1, 24), generator=torch.Generator().manual_seed(seed))
    bidirectional, cache = block_attention == "bidirectional", DynamicCache()
    prefill = drafter.packed_forward(ids[:, :11], lay_out(11), cache=cache).logits
    layout = lay_out(
        3,
        torch.tensor([[10, 13]]),
        (4, 6),
        num_visible=torch.tensor([[0, 2]]),
        num_cached=11,
        bidirectional=bidirectional,
    )
    packed = drafter.packed_forward(ids[:, 11:], layout, cache=cache).logits
    mask = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
    layout = lay_out(12, torch.tensor([[2, 11], [8, -1]]), (4, 4), context_mask=mask, bidirectional=bidirectional)
    training = drafter.packed_forward(ids[:, :20].repeat(2, 1), layout).logits
    return [prefill, packed, training[layout.branch_ids >= 0]]


@pytest.mark.parametrize("block_attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_backbones_compute_the_same_as_with_dense_masks(architecture, block_attention):
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model(architecture), block_attention=block_attention)
    with torch.no_grad():
        expected = packed_logits(drafter, "eager", block_attention)
        got = packed_logits(drafter, ATTENTION_NAME, block_attention)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_dense_masks():
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("gemma3"))
    gradients = []
    for implementation in ("eager", ATTENTION_NAME):
        drafter.zero_grad()
        torch.stack(
            [x.square().mean() for x in packed_logits(drafter, implementation, "bidirectional")]
        ).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-4, msg=name)


def test_mixed_windows_get_one_tensor_of_integers_each():
    layout = lay_out(3, torch.tensor([[2]]), (4,))
    config = tiny_model("gemma3", attn_implementation=ATTENTION_NAME).config
    masks = attention_masks(layout, config, torch.float32)
    assert masks.keys() == {"full_attention", "sliding_attention"}
    for name, window in (("full_attention", None), ("sliding_attention", config.sliding_window)):
        assert masks[name].shape == (1, 1, 6, 7)
        assert torch.equal(masks[name], visibility_of(layout, window))


def test_generation_is_that_of_sdpa():
    """A drafter and its target, both with packed attention: drafts are accepted and the text is the same."""
    ids = torch.randint(2, 60, (1, 9))
    texts = []
    for implementation in ("sdpa", ATTENTION_NAME):
        target = tiny_model("gemma3", attn_implementation=implementation)
        drafter = D3DDrafterForCausalLM.from_backbone(target)
        assert drafter._backbone.config._attn_implementation == implementation
        options = {"max_new_tokens": 24, "do_sample": False}
        plain = target.generate(ids, **options)
        for mode in ("sync", "async"):
            drafter.generation_config.drafting_mode = mode
            drafted = target.generate(ids, assistant_model=drafter, **options)
            assert torch.equal(drafted, plain)
            assert drafter.last_generation_stats.num_rounds < 24
        texts.append(plain)
    assert torch.equal(*texts)


def test_what_is_not_computed_is_refused():
    attention = AttentionInterface()[ATTENTION_NAME]
    states = [torch.ones(1, 2, 3, 64)] * 3
    with pytest.raises(ValueError, match="Linear computes attention with softcap"):
        attention(torch.nn.Linear(1, 1), *states, None, softcap=30.0)


def test_attention_dropout_reaches_the_weights():
    attention, states = AttentionInterface()[ATTENTION_NAME], torch.randn(3, 1, 2, 5, 64)
    visibility = visibility_of(lay_out(5))
    plain, dropped = (attention(torch.nn.Module(), *states, visibility, dropout=p)[0] for p in (0.0, 0.5))
    assert dropped.isfinite().all() and not torch.allclose(plain, dropped)


def test_both_interfaces_know_the_name():
    assert ATTENTION_NAME in AttentionInterface().valid_keys()
    assert ATTENTION_NAME in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


def test_nothing_needs_triton():
    output = run(
        "-c",
        "import sys\n"
        "sys.modules['triton'] = None\n"  # as where it is not installed
        "import d3d_hf.kernels.attention, torch\n"
        "assert not d3d_hf.kernels.attention.has_triton()\n"
        "print(d3d_hf.kernels.choose_tokens(torch.eye(3)).tokens.tolist())\n",
    )
    assert output.strip().endswith("[0, 1, 2]")


# The greedy choice


def test_choice_is_argmax_and_log_softmax():
    logits = torch.randn(6, 50).bfloat16()
    tokens, best, normalizers = choose_tokens(logits, 40, never_drafted=[7, 45, 60])
    law = logits[:, :40].float().index_fill(1, torch.tensor([7]), float("-inf"))
    assert torch.equal(tokens, law.argmax(dim=1))
    torch.testing.assert_close((best - normalizers).exp(), law.softmax(dim=1).amax(dim=1))


def test_choice_of_ties_and_of_nothing():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("nan")] * 4, [float("nan"), 1.0, float("-inf"), 0.0]])
    choice = choose_tokens_twin(logits)
    assert choice.tokens.tolist() == [1, 0, 1]
    assert choice.logits.tolist() == [3.0, float("-inf"), 1.0]
    assert choice.log_normalizers[1] == float("-inf")


def test_choice_of_selected_rows():
    hidden_states, head = torch.randn(9, 16), torch.nn.Linear(16, 30)
    rows = torch.tensor([7, 2, 2])
    choice = choose_rows(hidden_states, rows, head, 25, (3,))
    expected = choose_tokens(head(hidden_states), 25, (3,))
    assert torch.equal(choice.tokens, expected.tokens[rows])


@pytest.mark.parametrize(
    "logits, vocab_size, message",
    [
        (torch.ones(3), None, "give floats of shape .rows, ids."),
        (torch.ones(1, 3, dtype=torch.long), None, "torch.int64"),
        (torch.ones(1, 3), 0, "vocab_size is 0"),
    ],
)
def test_wrong_logits_are_refused(logits, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        choose_tokens(logits, vocab_size)


# The kernels


def test_floor_tables_are_those_of_the_docs():
    docs = (TESTS.parent / "docs" / "gpu.md").read_text()
    tables = run(str(TESTS.parent / "benchmarks" / "gpu_floors.py")).strip().split("\n\n")
    assert len(tables) == 2 and all(table in docs for table in tables)


def test_floor_of_a_pass_is_what_its_tensors_hold():
    """Bytes of a tiny model's weights and cache, the embedding table left out; the slower of two rates decides."""
    model = tiny_model("qwen3", num_layers=3, vocab_size=40)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    cost = pass_cost(model.config, num_tokens=5, num_cached=11, num_rows=2, bytes_per_value=4)
    states = 3 * 8 * (2 * 4 * 5 + 2 * 2 * (11 + 5))  # queries and outputs, keys and values
    assert cost.num_bytes == 4 * (matrices + states + 2 * 2 * 40)
    assert cost.num_flops == 2 * 5 * (matrices - 32 * 40) + 2 * 2 * 32 * 40 + 3 * 4 * 4 * 8 * 5 * 11
    assert cost.floor_ms(bytes_per_s=cost.num_bytes, flops_per_s=2 * cost.num_flops) == 1000
    assert cost.floor_ms(bytes_per_s=2 * cost.num_bytes, flops_per_s=cost.num_flops / 3) == pytest.approx(3000)


@needs_triton
def test_kernels_equal_their_twins_under_the_interpreter():
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_kernels_interpreted.py", TRITON_INTERPRET="1")
    assert " passed" in output and "skipped" not in output and "failed" not in output, output


@needs_triton
def test_kernels_compile_without_spilling(tmp_path):
    """For GPUs that are not here; `compiled_kernels.py` says what is compiled."""
    usage = json.loads(
        run(
            str(TESTS / "compiled_kernels.py"),
            *("sm_80", "sm_89", "sm_90", "gfx942"),
            TRITON_INTERPRET="0",
            TRITON_CACHE_DIR=str(tmp_path),
        )
    )
    # Bytes of stack per thread, against about a thousand of registers; on gfx942 registers, of 512, which Triton 3.6
    # has too few of for trees.
    most_spilled = {"sm_80": 64, "sm_89": 64, "sm_90": 0, "gfx942": 16}
    # Of one block: sm_80 and sm_90 have more than the smallest, sm_89; gfx942 has 64 KiB.
    most_shared = {"sm_80": 99 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
    matrix = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma"}
    for target, kernels in usage.items():
        for name, kernel in kernels.items():
            assert kernel["spills"] <= most_spilled[target], (target, name, kernel)
            assert kernel["shared_bytes"] <= most_shared[target], (target, name, kernel)
            if name.startswith("attention") and "fp32" not in name:
                # Tiles of fewer than 64 rows are too small for the warp-group instruction.
                expected = "mma.sync" if name.endswith(" 16") else matrix[target]
                assert kernel["matrix"] == expected, (target, name, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kernel_on_the_gpu(head_dim, dtype, tolerance):
    layout = lay_out(9, torch.tensor([[1499 + a for a in range(9)]], device="cuda"), (8,) * 9, num_cached=1500)
    query = torch.randn(1, 16, 90, head_dim, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 1, 4, 2048, head_dim, device="cuda", dtype=dtype)
    tree = lay_out_tree(2, torch.arange(81) // 2, num_cached=1507, device="cuda")
    for each, window, num_splits in itertools.product((layout, tree), (None, 700), (None, 1, 3)):
        visibility = visibility_of(each, window, 90)
        assert runs_kernel(query, key, value)
        expected = packed_attention_twin(query.double(), key.double(), value.double(), visibility)
        got = packed_attention(query, key, value, visibility, num_splits=num_splits).double()
        assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.gpu
def test_kernels_in_a_cuda_graph():
    """Captured at one length of the cache and replayed at another."""
    layouts = [lay_out(3, torch.tensor([[n, n + 2]], device="cuda"), (4, 5), num_cached=n) for n in (40, 900)]
    query, (key, value) = torch.randn(1, 8, 12, 128).cuda(), torch.randn(2, 1, 2, 1024, 128).cuda()
    logits = torch.randn(12, 5000, device="cuda")
    visibility = visibility_of(layouts[0])

    def both():
        return packed_attention(query, key, value, visibility), choose_tokens(logits, 4990, (17,))

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended, choice = both()
    visibility.copy_(visibility_of(layouts[1]))
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    expected = packed_attention_twin(query.double(), key.double(), value.double(), visibility)
    assert (attended.double() - expected).norm() <= 2e-6 * expected.norm()
    assert torch.equal(choice.tokens, choose_tokens_twin(logits, 4990, (17,)).tokens)


@pytest.mark.gpu
def test_greedy_drafts_are_chosen_by_the_kernel():
    logits, reader = torch.randn(6, 5000).bfloat16(), reader_of(4990)
    tokens = reader._likeliest(logits.cuda())
    assert torch.equal(tokens.cpu(), reader._likeliest(logits))


def test_greedy_drafts_on_a_gpu_take_the_first_of_equals(monkeypatch):
    """The way of logits on a GPU, with the twin in the place of the kernel."""
    logits, reader = torch.randn(6, 50).bfloat16().round(), reader_of(40)  # ties
    expected = reader._likeliest(logits)
    calls = []

    def choose_on_cpu(logits, *limits):
        calls.append(limits)
        return choose_tokens_twin(logits.as_subclass(torch.Tensor), *limits)

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(extensions, "choose_tokens", choose_on_cpu)
    tokens = reader._likeliest(logits.as_subclass(OnGpu))
    assert calls == [(40, (17,))]
    assert torch.equal(tokens, expected)


def reader_of(vocab_size: int) -> BlockReader:
    return BlockReader(D3DDrafterForCausalLM.from_backbone(tiny_model(), mask_token_id=17), vocab_size)
