"""
Attention of a packed pass: context tokens and all branches against the KV cache and each other.

The keys stand in one storage: the cached context, at positions `0, 1, ...`, then the tokens of the pass, then places
that hold nothing yet. What each query sees follows from the integers of visibility.py. Query heads that share a head
of keys and values (GQA) are rows of one tile, so that keys are neither repeated nor read once per query head.

`packed_attention` runs the Triton kernel on a GPU; `packed_attention_twin` says in torch what it computes.
"""

import functools
import importlib.util

import torch

from .visibility import NUM_ROWS, dense_visibility, num_rows


HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. It is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: torch.IntTensor,
    scaling: float | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """
    Attention of the tokens of a packed pass.

    On a GPU it launches on the current stream and reads nothing back, so that it can be captured into a CUDA graph:
    the number of cached tokens is read by the kernel, shapes are all that the launch depends on. Without Triton, on
    other devices, for other head sizes and dtypes than `HEAD_DIMS` and `DTYPES` and where gradients are wanted it is
    [`packed_attention_twin`].

    Args:
        query (`torch.Tensor` of shape `(batch, heads, tokens, head_dim)`): Of the pass.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, places, head_dim)`):
            The KV storage, the tokens of the pass included, at the places after the cached ones. Places after those
            are not read.
        visibility (`torch.IntTensor` of shape `(batch, 1, rows, tokens)`): See `visibility_of`.
        scaling (`float`, *optional*): Of the scores. Default: `head_dim ** -0.5`.
        num_splits (`int`, *optional*):
            Parts that the keys are divided into, each read by other processors and merged by log-sum-exp afterwards.
            Default: as many as the device has room for.

    Returns:
        `torch.Tensor` of shape `(batch, tokens, heads, head_dim)` in the dtype of `query`; zero for padding.

    Raises:
        ValueError: Shapes that do not fit each other.
    """
    _check_shapes(query, key, value, visibility, num_splits)
    if not runs_kernel(query, key, value):
        return packed_attention_twin(query, key, value, visibility, scaling)
    from .attention_triton import launch

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.cuda.device(query.device):  # Triton launches on the current one
        return launch(query, key, value, visibility, scaling, num_splits)


def packed_attention_twin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: torch.IntTensor,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """
    What [`packed_attention`] computes, written out: a mask, a softmax in float32 (float64 for float64 inputs), and a
    weighted sum. Differentiable.

    Args:
        query, key, value, visibility, scaling: As in [`packed_attention`].
        dropout (`float`, *optional*, defaults to 0.0): Share of the attention weights that is dropped.

    Returns:
        `torch.Tensor` of shape `(batch, tokens, heads, head_dim)` in the dtype of `query`; zero for padding.
    """
    num_shared = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], num_shared))  # (batch, kv_heads, shared, tokens, head_dim)
    scores = scaling * torch.einsum("bhgtd,bhkd->bhgtk", grouped.to(exact), key.to(exact))
    seen = dense_visibility(visibility, key.shape[2])[:, :, None]  # (batch, 1, 1, tokens, keys)
    weights = scores.masked_fill(~seen, torch.finfo(exact).min).softmax(dim=-1)
    weights = torch.nn.functional.dropout(weights.masked_fill(~seen, 0.0), dropout)  # nothing seen: all zero
    # A place that holds nothing may hold anything, and zero times NaN is NaN.
    values = value.to(exact).masked_fill(~seen.any(dim=3)[:, :, 0, :, None], 0.0)
    outputs = torch.einsum("bhgtk,bhkd->bthgd", weights, values)
    return outputs.flatten(2, 3).to(query.dtype)


def runs_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether [`packed_attention`] runs the kernel for these states, and not its twin."""
    needs_grad = torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value))
    return (
        query.is_cuda
        and has_triton()
        and not needs_grad
        and query.shape[-1] in HEAD_DIMS
        and value.shape[-1] == query.shape[-1]
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
    )


def _check_shapes(query, key, value, visibility, num_splits):
    batch, num_heads, num_tokens, head_dim = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"query is {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: give (batch, heads, "
            f"tokens, head_dim) and twice (batch, kv_heads, places, head_dim)."
        )
    if num_heads % key.shape[1]:
        raise ValueError(f"{num_heads} query heads cannot share {key.shape[1]} heads of keys: give a divisor.")
    with_tree = num_rows(num_tokens, has_tree=True)
    shapes = [(batch, 1, rows, num_tokens) for rows in (NUM_ROWS, with_tree)]
    if visibility.shape not in shapes or visibility.dtype != torch.int32:
        raise ValueError(
            f"visibility is {visibility.dtype} of shape {tuple(visibility.shape)}: give torch.int32 of shape "
            f"{shapes[0]}, or with {with_tree} rows where there is a tree, as visibility_of makes it."
        )
    if num_tokens > key.shape[2]:
        raise ValueError(f"The pass has {num_tokens} tokens, the KV storage {key.shape[2]} places: write them first.")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}: give at least 1.")


__all__ = ["DTYPES", "HEAD_DIMS", "has_triton", "packed_attention", "packed_attention_twin", "runs_kernel"]
