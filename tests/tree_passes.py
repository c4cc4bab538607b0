"""Random passes with a tree of tokens, for tests of what reads them; branches may hang on the text or on nodes."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from d3d_hf.model.packing import PADDING, PackedLayout, lay_out_tree


def with_branch(layout: PackedLayout, host: int, num_slots: int, number: int, is_padding: bool = False):
    """A layout and, behind it, a branch of mask slots that see what a token of the pass sees, and each other."""
    steps = torch.arange(1, num_slots + 1)[None]
    positions = layout.position_ids[:, host : host + 1] + steps
    ancestors = torch.nn.functional.pad(layout.ancestors, (0, num_slots, 0, num_slots))
    ancestors[:, layout.num_tokens :] = ancestors[:, host : host + 1]
    columns = {
        "position_ids": positions,
        "branch_ids": torch.full_like(positions, PADDING if is_padding else number),
        "context_limits": layout.context_limits[:, host : host + 1].expand_as(steps),
        "branch_limits": positions[:, -1:].expand_as(steps),
        "is_mask_slot": torch.ones_like(positions, dtype=torch.bool),
    }
    joined = {name: torch.cat([getattr(layout, name), column], dim=1) for name, column in columns.items()}
    return replace(layout, **joined, ancestors=ancestors)


@st.composite
def tree_passes(draw, max_cached: int = 12, max_nodes: int = 20) -> PackedLayout:
    """Text, a tree that may have one node or none beside another, and up to three branches, some of them padding."""
    context_length, num_nodes = draw(st.integers(1, 10)), draw(st.integers(1, max_nodes))
    parents = [draw(st.integers(0, node)) for node in range(num_nodes)]
    layout = lay_out_tree(context_length, torch.tensor(parents), num_cached=draw(st.integers(0, max_cached)))
    for number in range(1, 1 + draw(st.integers(0, 3))):
        host = draw(st.integers(0, context_length + num_nodes - 1))
        layout = with_branch(layout, host, draw(st.integers(1, 5)), number, draw(st.booleans()))
    return layout


__all__ = ["tree_passes", "with_branch"]
