"""The packed layout: a forest on a text, one structure for verification, drafting and training.

A packed pass holds context tokens, which go on with the text that is cached, and nodes that hang on it:

    [context tokens][tree of tokens][branch 1: visible tokens, mask slots][branch 2: ...] ...

Context tokens are causal. A node of the tree sees the text up to the tree's root, its ancestors and itself: siblings
stand at one position and do not see each other. A branch hangs on one context position or on one node of the tree; its
slots see what that one sees, and their own branch. Nothing sees anything else.

Four small integers per token say all of it but the tree, whatever the attention implementation:

- `position_ids`: RoPE, windows and visibility go by position, never by storage index;
- `branch_ids`: `CONTEXT`, a branch number from 1, `NODE` of the tree, or `PADDING`;
- `context_limits`: the last text position that the token sees;
- `branch_limits`: the last position of its own branch that the token sees.

The key `k` is visible to the query `q` iff `k` is context and stands at or before `context_limits[q]`, or both are
in one branch and `k` stands at or before `branch_limits[q]`, or `k` is a node and `ancestors[q, k]`. The KV cache
holds text only, at positions `0 .. num_cached - 1`. Pure functions; tensors stay on the device of those passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


CONTEXT = 0
PADDING = -1
NODE = -2


@dataclass(frozen=True)
class PackedLayout:
    """
    Positions and visibility of one packed pass. All tensors are `torch.LongTensor` of shape `(batch, tokens)`, but
    `is_mask_slot` (`torch.BoolTensor`).

    Attributes:
        position_ids: Position of each token in its sequence.
        branch_ids: `CONTEXT` (0), the branch's number from 1, `NODE` (-2), or `PADDING` (-1).
        context_limits: Last text position that the token sees.
        branch_limits: Last position of its own branch that the token sees.
        is_mask_slot: Whether the token is the mask embedding.
        num_cached (`int`): Context tokens in the KV cache before this pass.
        is_plain_causal (`bool`): No branches, no padding, no siblings: an ordinary causal forward.
        ancestors (`torch.BoolTensor` of shape `(batch, tokens, tokens)`, *optional*):
            Whether the second token is a node of the tree that the first one is or hangs on. `None` without a tree.
    """

    position_ids: torch.LongTensor
    branch_ids: torch.LongTensor
    context_limits: torch.LongTensor
    branch_limits: torch.LongTensor
    is_mask_slot: torch.BoolTensor
    num_cached: int = 0
    is_plain_causal: bool = False
    ancestors: torch.BoolTensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.position_ids.shape[1]

    def to(self, device: torch.device) -> "PackedLayout":
        """The layout on another device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)


def lay_out(
    context_length: int,
    anchors: torch.LongTensor | None = None,
    num_slots: Sequence[int] = (),
    *,
    num_visible: torch.LongTensor | None = None,
    num_cached: int = 0,
    context_mask: torch.Tensor | None = None,
    bidirectional: bool = True,
    device: torch.device | str | None = None,
) -> PackedLayout:
    """
    Lays out the context tokens and branches of one packed pass.

    Args:
        context_length (`int`):
            Context tokens in this pass, padding included. May be 0 when every anchor is cached.
        anchors (`torch.LongTensor` of shape `(batch, branches)`, *optional*):
            Position that each branch hangs on, in this pass or in the cache; -1 for a branch that is padding.
        num_slots (sequence of `int`, of length `branches`):
            Slots of each branch, visible ones included; the same in every row.
        num_visible (`torch.LongTensor` of shape `(batch, branches)`, *optional*):
            How many of a branch's first slots hold a visible token instead of the mask. Defaults to none.
        num_cached (`int`, *optional*, defaults to 0):
            Context tokens in the KV cache, at positions `0 .. num_cached - 1`.
        context_mask (`torch.Tensor` of shape `(batch, context_length)`, *optional*):
            0 where a context token is padding, left or right. Positions count the other tokens only.
        bidirectional (`bool`, *optional*, defaults to `True`):
            Whether a mask slot sees all mask slots of its branch or the earlier ones only.
        device (*optional*):
            Where the tensors go if neither `anchors` nor `context_mask` says.

    Returns:
        [`PackedLayout`] over `context_length + sum(num_slots)` tokens.
    """
    given = anchors if anchors is not None else context_mask
    if given is not None:
        device = given.device
    batch = 1 if given is None else given.shape[0]

    # context: causal, so its own position is its limit
    if context_mask is None:
        context_positions = torch.arange(num_cached, num_cached + context_length, device=device).expand(batch, -1)
        context_ids = torch.zeros_like(context_positions)
    else:
        is_token = context_mask.bool()
        context_positions = (num_cached + is_token.long().cumsum(-1) - 1).clamp(min=0)
        context_ids = torch.where(is_token, CONTEXT, PADDING)
    if anchors is None or not num_slots:
        never = torch.zeros_like(context_positions, dtype=torch.bool)
        return PackedLayout(
            context_positions,
            context_ids,
            context_positions,
            context_positions,
            never,
            num_cached,
            is_plain_causal=context_mask is None,
        )

    # branches: slot i of a branch on position c stands at c + 1 + i
    if len(num_slots) != anchors.shape[1]:
        raise ValueError(f"num_slots names {len(num_slots)} branches, anchors has {anchors.shape[1]}: give one each.")
    owner = [branch for branch, slots in enumerate(num_slots) for _ in range(slots)]
    offsets = [offset for slots in num_slots for offset in range(slots)]
    owner = torch.tensor(owner, device=device)  # (slots,)
    offsets = torch.tensor(offsets, device=device)  # (slots,)
    lengths = torch.tensor(list(num_slots), device=device)[owner]  # (slots,)
    slot_anchors = anchors[:, owner]  # (batch, slots)
    slot_positions = slot_anchors + 1 + offsets
    is_mask_slot = torch.ones_like(slot_positions, dtype=torch.bool)
    if num_visible is not None:
        is_mask_slot = offsets >= num_visible[:, owner]
    slot_ids = torch.where(slot_anchors < 0, PADDING, owner + 1)
    slot_limits = slot_positions
    if bidirectional:
        slot_limits = torch.where(is_mask_slot, slot_anchors + lengths, slot_positions)

    return PackedLayout(
        position_ids=torch.cat([context_positions, slot_positions], dim=1),
        branch_ids=torch.cat([context_ids, slot_ids], dim=1),
        context_limits=torch.cat([context_positions, slot_anchors], dim=1),
        branch_limits=torch.cat([context_positions, slot_limits], dim=1),
        is_mask_slot=torch.cat([torch.zeros_like(context_positions, dtype=torch.bool), is_mask_slot], dim=1),
        num_cached=num_cached,
    )


def lay_out_tree(
    context_length: int,
    parents: torch.LongTensor,
    num_cached: int = 0,
    device: torch.device | str | None = None,
    *,
    anchors: torch.LongTensor | None = None,
    num_slots: int = 0,
    num_visible: torch.LongTensor | None = None,
    bidirectional: bool = True,
) -> PackedLayout:
    """
    Lays out context tokens, a tree of tokens that hangs on the last of them, and branches that hang on nodes of the
    tree. Nothing is read off the device.

    Args:
        context_length (`int`): Context tokens in this pass, at least one.
        parents (`torch.LongTensor` of shape `(nodes,)`):
            Of each node: 0 for the last context token, `i` for the `i`-th node; none stands before its parent.
        num_cached (`int`, *optional*, defaults to 0): Tokens of the text in the KV cache.
        device (*optional*): Of the layout. Default: that of `parents`.
        anchors (`torch.LongTensor` of shape `(branches,)`, *optional*): The node that each branch hangs on, or 0.
        num_slots (`int`, *optional*, defaults to 0): Slots of each branch.
        num_visible, bidirectional: Of the branches, as in [`lay_out`]; `num_visible` of shape `(branches,)`.

    Returns:
        [`PackedLayout`] over `context_length + nodes + branches * num_slots` tokens.
    """
    parents = parents.to(parents.device if device is None else device)
    device = parents.device
    table = ancestor_table(parents)  # (nodes, nodes)
    root = num_cached + context_length - 1
    context = torch.arange(num_cached, root + 1, device=device)
    depths = table.sum(dim=1)
    tree = torch.cat([context, root + depths])
    ids = (torch.arange(tree.shape[0], device=device) >= context_length) * NODE
    tree_rows = torch.nn.functional.pad(table, (0, 0, context_length, 0))  # (context + nodes, nodes)

    num_branches = 0 if anchors is None else anchors.shape[0]
    anchors = torch.zeros(0, dtype=torch.long, device=device) if anchors is None else anchors.to(device)
    offsets = torch.arange(num_slots, device=device)
    anchor_positions = (root + torch.nn.functional.pad(depths, (1, 0))[anchors])[:, None]  # (branches, 1)
    slots = anchor_positions + 1 + offsets  # (branches, slots)
    visible = torch.zeros_like(anchors) if num_visible is None else num_visible.to(device)
    is_mask_slot = offsets >= visible[:, None]
    limits = torch.where(is_mask_slot, anchor_positions + num_slots, slots) if bidirectional else slots
    branch_ids = torch.arange(1, num_branches + 1, device=device).repeat_interleave(num_slots)
    branch_rows = torch.nn.functional.pad(table, (0, 0, 1, 0))[anchors].repeat_interleave(num_slots, dim=0)

    positions = torch.cat([tree, slots.flatten()])
    rows = torch.cat([tree_rows, branch_rows])  # (tokens, nodes)
    num_after = num_branches * num_slots
    return PackedLayout(
        position_ids=positions[None],
        branch_ids=torch.cat([ids, branch_ids])[None],
        context_limits=positions.clamp(max=root)[None],
        branch_limits=torch.cat([tree, limits.flatten()])[None],
        is_mask_slot=torch.cat([torch.zeros_like(tree, dtype=torch.bool), is_mask_slot.flatten()])[None],
        num_cached=num_cached,
        ancestors=torch.nn.functional.pad(rows, (context_length, num_after))[None],
    )


def ancestor_table(parents: torch.LongTensor) -> torch.BoolTensor:
    """
    Whether the second node is the first one or an ancestor of it, of shape `(nodes, nodes)`. By doubling: a table of
    ancestors up to some generation, taken twice, reaches twice as far.
    """
    num_nodes = parents.shape[0]
    places = torch.arange(num_nodes + 1, device=parents.device)
    steps = (parents[:, None] == places[1:]) | (places[1:, None] == places[1:])
    table, reach = steps.float(), 1
    while reach < num_nodes:
        table, reach = (table @ table).clamp(max=1), 2 * reach
    return table.bool()


def visibility_rule(layout: PackedLayout, sliding_window: int | None = None):
    """
    The layout's visibility as a function of indices, in the form that transformers' mask interface takes.

    Args:
        layout ([`PackedLayout`]): The packed pass.
        sliding_window (`int`, *optional*): A key is seen only if it stands less than this many positions back.

    Returns:
        `Callable(batch_idx, head_idx, q_idx, kv_idx) -> torch.BoolTensor`: `q_idx` indexes the pass's tokens, `kv_idx`
        the cached tokens followed by the pass's tokens; index tensors are broadcast against each other. It carries
        `layout` and `sliding_window`, for an implementation that takes no mask.
    """
    batch = layout.position_ids.shape[0]
    cached = torch.arange(layout.num_cached, device=layout.position_ids.device).expand(batch, -1)
    key_positions = torch.cat([cached, layout.position_ids], dim=1)
    key_branches = torch.cat([torch.full_like(cached, CONTEXT), layout.branch_ids], dim=1)

    def is_visible(batch_idx, head_idx, q_idx, kv_idx):
        position, branch = key_positions[batch_idx, kv_idx], key_branches[batch_idx, kv_idx]
        seen = (branch == CONTEXT) & (position <= layout.context_limits[batch_idx, q_idx])
        own_branch = (branch != CONTEXT) & (branch != NODE) & (branch == layout.branch_ids[batch_idx, q_idx])
        seen = seen | (own_branch & (position <= layout.branch_limits[batch_idx, q_idx]))
        if layout.ancestors is not None:
            of_pass = kv_idx - layout.num_cached
            seen = seen | ((of_pass >= 0) & layout.ancestors[batch_idx, q_idx, of_pass.clamp(min=0)])
        if sliding_window is not None:
            seen = seen & (position > layout.position_ids[batch_idx, q_idx] - sliding_window)
        return seen

    is_visible.layout, is_visible.sliding_window = layout, sliding_window
    return is_visible


def dense_visibility(layout: PackedLayout, sliding_window: int | None = None) -> torch.BoolTensor:
    """
    The same rule written out for whole tensors: a mask of shape `(batch, tokens, num_cached + tokens)`. Its twin is
    [`visibility_rule`], one pair of tokens at a time.
    """
    positions, branches = layout.position_ids, layout.branch_ids
    cached = torch.arange(layout.num_cached, device=positions.device)
    text = cached <= layout.context_limits[..., None]  # (batch, tokens, cached)
    keys, queries = positions[:, None], branches[..., None]
    seen = (branches == CONTEXT)[:, None] & (keys <= layout.context_limits[..., None])
    own = (queries == branches[:, None]) & (queries != CONTEXT) & (queries != NODE)
    seen = seen | (own & (keys <= layout.branch_limits[..., None]))  # (batch, tokens, tokens)
    if layout.ancestors is not None:
        seen = seen | layout.ancestors
    if sliding_window is not None:
        first = positions[..., None] - sliding_window
        text, seen = text & (cached > first), seen & (keys > first)
    return torch.cat([text, seen], dim=-1)


def layer_windows(config) -> dict[str, int | None]:
    """
    Layer types of a backbone config and the sliding window of each (`None`: full attention).

    Raises:
        ValueError: A layer type that is neither full nor sliding attention.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention" if window is None else "sliding_attention"]
    windows = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(windows))
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {unknown}, which cannot be packed: choose a backbone whose "
            f"layers are all full or sliding attention."
        )
    return {layer_type: windows[layer_type] for layer_type in sorted(set(layer_types))}


def attention_masks(layout: PackedLayout, config, dtype: torch.dtype):
    """
    The masks of a packed pass in the form that the backbone takes.

    Args:
        layout ([`PackedLayout`]): The packed pass.
        config (`PreTrainedConfig`): The backbone's; names the attention implementation and the layer types.
        dtype (`torch.dtype`): Of the activations (additive masks are made in it).

    Returns:
        `None` if the pass is an ordinary causal one, for which the backbone makes its own masks; one mask of shape
        `(batch, 1, tokens, num_cached + tokens)`, or the implementation's own kind, if all layers have one window; a
        `dict` from layer type to mask if the windows are mixed.
    """
    if layout.is_plain_causal:
        return None
    implementation = config._attn_implementation
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS or "flash" in implementation:
        raise ValueError(
            f"attn_implementation is {implementation!r}, which takes no packed mask: load the drafter with "
            f"attn_implementation='sdpa', 'eager' or 'flex_attention'."
        )
    batch, num_tokens = layout.position_ids.shape

    def make(window):
        if implementation in ("sdpa", "eager"):
            seen = dense_visibility(layout, window)[:, None]
            return seen if implementation == "sdpa" else additive(seen, dtype)
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            batch_size=batch,
            q_length=num_tokens,
            kv_length=layout.num_cached + num_tokens,
            q_offset=0,
            kv_offset=0,
            mask_function=visibility_rule(layout, window),
            attention_mask=None,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            dtype=dtype,
            device=layout.position_ids.device,
            config=config,
        )

    windows = layer_windows(config)
    masks = {layer_type: make(window) for layer_type, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def additive(seen: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added to the scores: 0 where a key is seen, the least number elsewhere."""
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, hidden.new_zeros(()), hidden)


__all__ = [
    "CONTEXT",
    "NODE",
    "PADDING",
    "PackedLayout",
    "additive",
    "ancestor_table",
    "attention_masks",
    "dense_visibility",
    "lay_out",
    "lay_out_tree",
    "layer_windows",
    "visibility_rule",
]
