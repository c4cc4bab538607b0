"""
What the tokens of a packed pass see, as small integers per token instead of a mask of tokens x keys.

They are the four integers of [`PackedLayout`] and two numbers of the whole pass, repeated for each token so that all
of it is one tensor of shape `(batch, 1, 6, tokens)`. In a pass with a tree more rows follow, the ancestors of each
token as bits of 32-bit words: bit `j` of word `w` says whether token `32 w + j` of the pass is a node that the token
is or hangs on. transformers hands a 4D tensor through to the attention as it is, and a CUDA graph reads it from one
place on the device, the length of the cache included.
"""

import torch

from ..model.packing import CONTEXT, NODE, PADDING, PackedLayout


# Rows of the tensor, before the words of a tree.
POSITION, BRANCH, CONTEXT_LIMIT, BRANCH_LIMIT, NUM_CACHED, WINDOW = range(6)
NUM_ROWS = 6
# Tokens that one word of a tree speaks of.
WORD_BITS = 32
# A window that no text fills, small enough that a position less it is still a 32-bit integer.
NO_WINDOW = 2**30


def num_rows(num_tokens: int, has_tree: bool) -> int:
    """Rows of the tensor for a pass of so many tokens."""
    return NUM_ROWS + (-(-num_tokens // WORD_BITS) if has_tree else 0)


def visibility_of(
    layout: PackedLayout,
    sliding_window: int | None = None,
    num_tokens: int | None = None,
    has_tree: bool | None = None,
) -> torch.IntTensor:
    """
    The visibility of a packed pass, on the layout's device.

    Args:
        layout ([`PackedLayout`]): The pass.
        sliding_window (`int`, *optional*): A key is seen only if it stands less than this many positions back.
        num_tokens (`int`, *optional*):
            Tokens of a static pass, those after the layout's own being padding. Default: the layout's.
        has_tree (`bool`, *optional*):
            Whether there are words of a tree, which a static pass may hold without having one. Default: if the layout
            has one.

    Returns:
        `torch.IntTensor` of shape `(batch, 1, rows, num_tokens)`; the rows are `POSITION`, `BRANCH`, `CONTEXT_LIMIT`,
        `BRANCH_LIMIT`, `NUM_CACHED` and `WINDOW`, and with a tree as many words as the tokens need, see [`num_rows`].

    Raises:
        ValueError: `num_tokens` is less than the layout's tokens, or the layout's tree is to be left out.
    """
    missing = 0 if num_tokens is None else num_tokens - layout.num_tokens
    if missing < 0:
        raise ValueError(f"num_tokens is {num_tokens}, but the pass has {layout.num_tokens}: give at least as many.")
    if has_tree is False and layout.ancestors is not None:
        raise ValueError("has_tree is False, but the pass has a tree: leave it out.")
    positions = layout.position_ids
    rows = [positions, layout.branch_ids, layout.context_limits, layout.branch_limits]
    rows.append(torch.full_like(positions, layout.num_cached))
    rows.append(torch.full_like(positions, NO_WINDOW if sliding_window is None else sliding_window))
    visibility = torch.stack(rows, dim=1).int()  # (batch, 6, tokens)
    if missing:
        padding = visibility[:, :, -1:].repeat(1, 1, missing)
        padding[:, BRANCH] = PADDING
        visibility = torch.cat([visibility, padding], dim=2)
    if has_tree or layout.ancestors is not None:
        batch, _, width = visibility.shape
        words = visibility.new_zeros(batch, num_rows(width, True) - NUM_ROWS, width)
        if layout.ancestors is not None:
            words[:, :, : layout.num_tokens] = _in_words(layout.ancestors, words.shape[1])
        visibility = torch.cat([visibility, words], dim=1)
    return visibility[:, None].contiguous()


def _in_words(ancestors: torch.BoolTensor, num_words: int) -> torch.IntTensor:
    """A table of shape `(batch, tokens, tokens)` as bits: `(batch, words, tokens)`."""
    missing = num_words * WORD_BITS - ancestors.shape[2]
    bits = torch.nn.functional.pad(ancestors.int(), (0, missing)).unflatten(2, (num_words, WORD_BITS))
    shifts = torch.arange(WORD_BITS, dtype=torch.int, device=ancestors.device)
    return (bits << shifts).sum(dim=3, dtype=torch.int).transpose(1, 2)


def dense_visibility(visibility: torch.IntTensor, num_keys: int) -> torch.BoolTensor:
    """
    The same as a mask. Keys are the cached tokens, those of the pass, and places that hold nothing yet.

    Args:
        visibility (`torch.IntTensor` of shape `(batch, 1, rows, tokens)`): See [`visibility_of`].
        num_keys (`int`): Places of the KV storage, at least cached tokens + tokens.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, tokens, num_keys)`. Padding sees nothing and is seen by nothing.
    """
    rows, words = visibility[:, 0, :NUM_ROWS].long(), visibility[:, 0, NUM_ROWS:]
    num_tokens = rows.shape[2]
    places = torch.arange(num_keys, device=rows.device)[None]  # (1, keys)
    num_cached = rows[:, NUM_CACHED, :1]  # (batch, 1)
    of_pass = (places - num_cached).clamp(0, num_tokens - 1)
    is_cached, is_of_pass = places < num_cached, (places >= num_cached) & (places < num_cached + num_tokens)
    key_positions = torch.where(is_cached, places, rows[:, POSITION].gather(1, of_pass))[:, None]  # (batch, 1, keys)
    key_branches = torch.where(is_cached, CONTEXT, rows[:, BRANCH].gather(1, of_pass))
    key_branches = torch.where(is_cached | is_of_pass, key_branches, PADDING)[:, None]

    position, branch, context_limit, branch_limit, _, window = rows[..., None].unbind(1)  # (batch, tokens, 1) each
    seen = (key_branches == CONTEXT) & (key_positions <= context_limit)
    is_own = (key_branches == branch) & (branch != CONTEXT) & (branch != NODE)
    seen = seen | (is_own & (key_positions <= branch_limit))
    if words.shape[1]:
        shifts = torch.arange(WORD_BITS, dtype=torch.int, device=words.device)
        bits = (words.transpose(1, 2)[..., None] >> shifts & 1).bool().flatten(2)  # (batch, tokens, tokens and more)
        seen = seen | (bits.gather(2, of_pass[:, None].expand(-1, num_tokens, -1)) & is_of_pass[:, None])
    seen = seen & (key_positions > position - window)
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
    "WORD_BITS",
    "dense_visibility",
    "num_rows",
    "visibility_of",
]
