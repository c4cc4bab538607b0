"""A draft: a tree of tokens that hangs on the last token of the text. A chain is a tree without siblings."""

from dataclasses import dataclass, field

import torch


@dataclass
class DraftTree:
    """
    Attributes:
        tokens (`torch.LongTensor` of shape `(nodes,)`): Any device.
        parents (`list[int]`):
            Of each node: 0 for the root, which is the last token of the text, `i` for the `i`-th node, counted from 1;
            none stands before its parent.
    """

    tokens: torch.LongTensor
    parents: list[int] = field(default_factory=list)

    @classmethod
    def chain(cls, tokens: torch.LongTensor) -> "DraftTree":
        return cls(tokens, list(range(tokens.shape[0])))

    @classmethod
    def empty(cls) -> "DraftTree":
        return cls(torch.empty(0, dtype=torch.long, device="cpu"))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(len(self.parents)))

    @property
    def depths(self) -> list[int]:
        """Of the root, 0, and of each node: tokens from the text's end."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def children(self, tokens: list[int]) -> dict[tuple[int, int], int]:
        """By parent and token, the node. `tokens` are the tree's own, which may be on another device."""
        return {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, tokens), start=1)}


__all__ = ["DraftTree"]
