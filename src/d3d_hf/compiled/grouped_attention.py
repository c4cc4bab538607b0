"""
Attention of a few tokens over a long KV storage, for compiled layers.

Under a mask transformers' SDPA attention repeats keys and values for every query head that shares them (GQA), in each
layer of each pass: over long storage that copies more than the weights are. Here the query heads that share a head
become rows of one product instead, and the storage is read as it stands.
"""

import copy

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface


ATTENTION_NAME = "d3d_grouped_sdpa"
# Keywords of attention calls that change what is computed; SDPA attention knows what to do, or refuses.
_LEFT_TO_SDPA = ("softcap", "s_aux", "position_bias", "output_attentions")


def grouped_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Transformers' SDPA attention without repeated keys; its twin is `ALL_ATTENTION_FUNCTIONS["sdpa"]`.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(batch, heads, tokens, head_dim)`): Queries.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, places, head_dim)`): The KV storage.
        attention_mask (`torch.Tensor` of shape `(batch, 1, tokens, places)`, *optional*): As for SDPA.
        dropout (`float`, *optional*, defaults to 0.0): Of the attention weights.
        scaling (`float`, *optional*): Of the scores. Default: `head_dim ** -0.5`.

    Returns:
        `torch.Tensor` of shape `(batch, tokens, heads, head_dim)`, and `None` in the place of attention weights.
    """
    kv_heads, num_tokens = key.shape[1], query.shape[2]
    num_shared = query.shape[1] // kv_heads
    is_left = any(kwargs.get(name) is not None and kwargs[name] is not False for name in _LEFT_TO_SDPA)
    if num_shared == 1 or attention_mask is None or attention_mask.shape[1] != 1 or is_left:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    rows = query.unflatten(1, (kv_heads, num_shared)).flatten(2, 3)
    mask = attention_mask[:, :, None].expand(-1, -1, num_shared, -1, -1).flatten(2, 3)
    outputs = nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    outputs = outputs.unflatten(2, (num_shared, num_tokens)).flatten(1, 2)  # (batch, heads, tokens, head_dim)
    return outputs.transpose(1, 2).contiguous(), None


def grouping(config):
    """A copy of a layer's config under which its SDPA attention is grouped, or the config itself if it has another."""
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return config
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(ATTENTION_NAME, grouped_sdpa)
    grouped = copy.copy(config)
    grouped._attn_implementation_internal = ATTENTION_NAME  # its property would write to sub-configs, which are shared
    return grouped if grouped._attn_implementation == ATTENTION_NAME else config


__all__ = ["ATTENTION_NAME", "grouped_sdpa", "grouping"]
