"""A draft: a tree of tokens that hangs on the last token of the text. A chain is a tree without siblings."""

from dataclasses import dataclass

import torch


@dataclass
class DraftTree:
    """
    Attributes:
        tokens (`torch.LongTensor` of shape `(nodes,)`): Any device.
        parents (`torch.LongTensor` of shape `(nodes,)`, *optional*):
            Of each node: 0 for the root, which is the last token of the text, `i` for the `i`-th node, counted from 1;
            none stands before its parent. `None` for a chain.
        chances (`torch.Tensor` of shape `(nodes,)`, *optional*):
            Of each node, how likely the target's own text goes through it, as the drafter has it.
        sources (`list[str]`, *optional*): Of each node, who drafted it: `"model"` or `"text"`. Default: the model.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor | None = None
    chances: torch.Tensor | None = None
    sources: list[str] | None = None

    @classmethod
    def empty(cls) -> "DraftTree":
        return cls(torch.empty(0, dtype=torch.long, device="cpu"))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def first(self, num_nodes: int) -> "DraftTree":
        """The tree of its first nodes."""
        if num_nodes >= len(self):
            return self
        parts = (part if part is None else part[:num_nodes] for part in (self.parents, self.chances, self.sources))
        return DraftTree(self.tokens[:num_nodes], *parts)

    @property
    def is_chain(self) -> bool:
        """Whether it is known to be one, without looking at the device."""
        return self.parents is None

    def read_with(self, choices: torch.LongTensor) -> tuple[list[int], "Paths"]:
        """
        Reads another tensor of integers and the tree itself off the device, together.

        Returns:
            The integers, and [`Paths`].
        """
        parts = [choices, self.tokens] if self.is_chain else [choices, self.tokens, self.parents]
        values = torch.cat([part.to(choices.device, non_blocking=True) for part in parts]).tolist()
        first, size = choices.shape[0], len(self)
        parents = list(range(size)) if self.is_chain else values[first + size :]
        return values[:first], Paths(values[first : first + size], parents)

    def read(self) -> "Paths":
        """The tree itself, read off the device."""
        return self.read_with(self.tokens[:0])[1]


@dataclass
class Paths:
    """A tree on the host: see [`DraftTree`]."""

    tokens: list[int]
    parents: list[int]

    def __post_init__(self):
        nodes = enumerate(zip(self.parents, self.tokens), start=1)
        self._children = {(parent, token): node for node, (parent, token) in nodes}

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that bears a token."""
        return self._children.get((node, token))

    @property
    def depths(self) -> list[int]:
        """Of the root, 0, and of each node: tokens from the text's end."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


__all__ = ["DraftTree", "Paths"]
