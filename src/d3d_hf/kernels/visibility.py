"""
What the tokens of a packed pass see, as six small integers per token instead of a mask of tokens x keys.

They are the four integers of [`PackedLayout`] and two numbers of the whole pass, repeated for each token so that all
of it is one tensor of shape `(batch, 1, 6, tokens)`. transformers hands a 4D tensor through to the attention as it is,
and a CUDA graph reads it from one place on the device, the length of the cache included.
"""

import torch

from ..model.packing import CONTEXT, PADDING, PackedLayout


# Rows of the tensor.
POSITION, BRANCH, CONTEXT_LIMIT, BRANCH_LIMIT, NUM_CACHED, WINDOW = range(6)
NUM_ROWS = 6
# A window that no text fills, small enough that a position less it is still a 32-bit integer.
NO_WINDOW = 2**30


def visibility_of(
    layout: PackedLayout, sliding_window: int | None = None, num_tokens: int | None = None
) -> torch.IntTensor:
    """
    The visibility of a packed pass, on the layout's device.

    Args:
        layout ([`PackedLayout`]): The pass.
        sliding_window (`int`, *optional*): A key is seen only if it stands less than this many positions back.
        num_tokens (`int`, *optional*):
            Tokens of a static pass, those after the layout's own being padding. Default: the layout's.

    Returns:
        `torch.IntTensor` of shape `(batch, 1, 6, num_tokens)`; the rows are `POSITION`, `BRANCH`, `CONTEXT_LIMIT`,
        `BRANCH_LIMIT`, `NUM_CACHED` and `WINDOW`.

    Raises:
        ValueError: `num_tokens` is less than the layout's tokens.
    """
    missing = 0 if num_tokens is None else num_tokens - layout.num_tokens
    if missing < 0:
        raise ValueError(f"num_tokens is {num_tokens}, but the pass has {layout.num_tokens}: give at least as many.")
    positions = layout.position_ids
    rows = [positions, layout.branch_ids, layout.context_limits, layout.branch_limits]
    rows.append(torch.full_like(positions, layout.num_cached))
    rows.append(torch.full_like(positions, NO_WINDOW if sliding_window is None else sliding_window))
    visibility = torch.stack(rows, dim=1).int()  # (batch, 6, tokens)
    if missing:
        padding = visibility[:, :, -1:].repeat(1, 1, missing)
        padding[:, BRANCH] = PADDING
        visibility = torch.cat([visibility, padding], dim=2)
    return visibility[:, None].contiguous()


def dense_visibility(visibility: torch.IntTensor, num_keys: int) -> torch.BoolTensor:
    """
    The same as a mask. Keys are the cached tokens, those of the pass, and places that hold nothing yet.

    Args:
        visibility (`torch.IntTensor` of shape `(batch, 1, 6, tokens)`): See [`visibility_of`].
        num_keys (`int`): Places of the KV storage, at least cached tokens + tokens.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, tokens, num_keys)`. Padding sees nothing and is seen by nothing.
    """
    rows = visibility[:, 0].long()  # (batch, 6, tokens)
    num_tokens = rows.shape[2]
    places = torch.arange(num_keys, device=rows.device)[None]  # (1, keys)
    num_cached = rows[:, NUM_CACHED, :1]  # (batch, 1)
    of_pass = (places - num_cached).clamp(0, num_tokens - 1)
    is_cached, is_of_pass = places < num_cached, (places >= num_cached) & (places < num_cached + num_tokens)
    key_positions = torch.where(is_cached, places, rows[:, POSITION].gather(1, of_pass))[:, None]  # (batch, 1, keys)
    key_branches = torch.where(is_cached, CONTEXT, rows[:, BRANCH].gather(1, of_pass))
    key_branches = torch.where(is_cached | is_of_pass, key_branches, PADDING)[:, None]

    position, branch, context_limit, branch_limit, _, window = rows[..., None].unbind(1)  # (batch, tokens, 1) each
    limit = torch.where(key_branches == CONTEXT, context_limit, branch_limit)
    seen = (key_branches == CONTEXT) | (key_branches == branch)
    seen = seen & (key_positions <= limit) & (key_positions > position - window)
    return (seen & (branch != PADDING) & (key_branches != PADDING))[:, None]


__all__ = [
    "BRANCH",
    "BRANCH_LIMIT",
    "CONTEXT_LIMIT",
    "NO_WINDOW",
    "NUM_CACHED",
    "NUM_ROWS",
    "POSITION",
    "WINDOW",
    "dense_visibility",
    "visibility_of",
]
