"""
Packed attention as an attention implementation of transformers: `attn_implementation="d3d_packed"`.

A packed pass asks the mask interface for its masks, layer type by layer type (packing.py); in the place of a mask this
implementation gives the integers of visibility.py, which any backbone hands on to its attention unread. Every other
forward, a prefill or one of a target, is an ordinary causal one: it gets transformers' own masks and SDPA.
"""

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .attention import packed_attention, packed_attention_twin
from .visibility import visibility_of


ATTENTION_NAME = "d3d_packed"
# Keywords of attention calls that change what is computed, and are not computed here.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "attention_bias")


def packed_mask(*args, mask_function=None, **kwargs) -> torch.Tensor | None:
    """
    The mask function of transformers' mask interface: the visibility of a packed pass, of shape `(batch, 1, rows,
    tokens)`, or what SDPA would get.
    """
    layout = getattr(mask_function, "layout", None)
    if layout is not None:
        return visibility_of(layout, mask_function.sliding_window)
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    return sdpa_mask(*args, **kwargs)


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    The attention function of transformers' attention interface.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(batch, heads, tokens, head_dim)`): Queries.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, places, head_dim)`): The KV storage, see
            `packed_attention`.
        attention_mask (`torch.Tensor`, *optional*): Integers: a packed pass. Otherwise as for SDPA.
        dropout (`float`, *optional*, defaults to 0.0): Of the attention weights.
        scaling (`float`, *optional*): Of the scores. Default: `head_dim ** -0.5`.

    Returns:
        `torch.Tensor` of shape `(batch, tokens, heads, head_dim)`, and `None` in the place of attention weights.

    Raises:
        ValueError: The backbone asks for a soft cap, attention sinks or a bias.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} computes attention with {name}, which {ATTENTION_NAME!r} does not: load the "
                f"model with attn_implementation='eager'."
            )
    if attention_mask is None or attention_mask.dtype != torch.int32:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout:
        return packed_attention_twin(query, key, value, attention_mask, scaling, dropout), None
    return packed_attention(query, key, value, attention_mask, scaling), None


def register_packed_attention():
    """Makes `attn_implementation="d3d_packed"` known to transformers. Idempotent; importing d3d_hf calls it."""
    if ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)
        AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)


__all__ = ["ATTENTION_NAME", "packed_attention_forward", "packed_mask", "register_packed_attention"]
