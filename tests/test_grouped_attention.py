"""Attention without repeated keys in compiled layers, against transformers' own."""

import types

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from d3d_hf import compile_target
from d3d_hf.compiled.grouped_attention import ATTENTION_NAME, grouped_sdpa, grouping
from d3d_hf.testing import tiny_model


def states(heads, kv_heads, tokens, places, head_dim=8):
    generator = torch.Generator().manual_seed(heads + tokens)
    shapes = ((heads, tokens), (kv_heads, places), (kv_heads, places))
    return [torch.randn(1, *shape, head_dim, generator=generator) for shape in shapes]


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_grouped_attention_is_sdpa(heads, kv_heads, tokens, is_bool, scaling):
    query, key, value = states(heads, kv_heads, tokens, places=40)
    mask = torch.rand(1, 1, tokens, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[..., 0] = True
    key[:, :, ~mask.any(dim=2)[0, 0]] = 1e4  # what nobody sees must not matter
    if not is_bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    module = types.SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling)
    outputs, weights = grouped_sdpa(module, query, key, value, mask, scaling=scaling)
    assert weights is None and outputs.is_contiguous()
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def test_what_it_does_not_compute_is_left_to_sdpa():
    query, key, value = states(4, 2, tokens=3, places=3)
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None)
    torch.testing.assert_close(grouped_sdpa(module, query, key, value, None)[0], expected)
    with pytest.raises(ValueError, match="softcap"):
        grouped_sdpa(module, query, key, value, torch.ones(1, 1, 3, 3, dtype=torch.bool), softcap=30.0)


def test_layers_are_compiled_with_it_and_the_model_keeps_its_own(monkeypatch):
    seen = []

    def watched(module, query, key, *args, **kwargs):
        seen.append((query.shape[1], key.shape[1]))
        return grouped_sdpa(module, query, key, *args, **kwargs)

    target = tiny_model("llama", seed=3)
    grouping(target.config)  # registers
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, ATTENTION_NAME, watched)
    compile_target(target)
    prompt = torch.arange(2, 12)[None]
    target.generate(prompt, max_new_tokens=4, do_sample=False)
    heads = target.config.num_attention_heads, target.config.num_key_value_heads
    assert heads[0] > heads[1] and set(seen) == {heads}, "keys reach it as they are stored"
    assert target.config._attn_implementation == "sdpa"
    assert grouping(target.config)._attn_implementation == ATTENTION_NAME
    target.set_attn_implementation("eager")
    assert grouping(target.config) is target.config
