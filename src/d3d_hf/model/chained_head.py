"""The chained head: mask slots learn which tokens were chosen before them.

The slots of a block are denoised in one pass, so the slot that predicts a token does not know which token was chosen
just before it, and in a packed draft none of them knows the bonus. The head mends that after the pass, when the tokens
before are known: left to right, a small recurrent state takes in each slot's hidden state and the token that stands
there, and gives a correction of the slot's hidden state before the vocabulary projection:

    state_j = silu(A norm(hidden_j) + B norm(embedding(token at slot j)) + C state_{j-1})
    corrected_j = hidden_j + D state_j

The state is zero before a branch's first mask slot; context and visible tokens are not corrected, they have seen what
came before. Each corrected law is a function of the tokens before it alone, so a draft that is drawn from it left to
right is drawn from exactly the law that is handed over.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization

from .packing import PackedLayout


class ChainedHead(nn.Module):
    """
    Args:
        hidden_size (`int`): Of the backbone.
        size (`int`): Of the recurrent state.
    """

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.hidden_in = nn.Linear(hidden_size, size, bias=False)
        self.token_in = nn.Linear(hidden_size, size, bias=False)
        self.recurrent = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, hidden_size, bias=False)

    def init_weights_of(self, linear: nn.Linear):
        """First weights of one of its maps. It begins as no correction at all."""
        if linear in (self.recurrent, self.out):
            initialization.zeros_(linear.weight)
        else:
            initialization.normal_(linear.weight, std=linear.in_features**-0.5)

    def hidden_part(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What slots' hidden states put into the state: `(..., hidden)` to `(..., size)`."""
        return self.hidden_in(F.layer_norm(hidden_states, hidden_states.shape[-1:]))

    def token_part(self, embeds: torch.Tensor) -> torch.Tensor:
        """What the embeddings of the tokens at the slots put into it: `(..., hidden)` to `(..., size)`."""
        return self.token_in(F.layer_norm(embeds, embeds.shape[-1:]))

    def step(
        self, hidden_part: torch.Tensor, embed: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        One slot.

        Args:
            hidden_part (`torch.Tensor` of shape `(size,)`): Of the slot's hidden state.
            embed (`torch.Tensor` of shape `(hidden,)`): Embedding of the token that stands at the slot.
            state (`torch.Tensor` of shape `(size,)`, *optional*): After the slot before; `None` at the first.

        Returns:
            The correction of shape `(hidden,)` and the state after the slot.
        """
        entering = hidden_part + self.token_part(embed)
        state = F.silu(entering if state is None else entering + self.recurrent(state))
        return self.out(state), state

    def forward(
        self, hidden_states: torch.Tensor, embeds: torch.Tensor, layout: PackedLayout, is_chained: torch.BoolTensor
    ) -> torch.Tensor:
        """
        All slots of a packed pass, given the tokens that stand at them (teacher forcing).

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, tokens, hidden)`): Of the pass.
            embeds (`torch.Tensor` of shape `(batch, tokens, hidden)`): Embeddings of the tokens at each place.
            layout ([`PackedLayout`]): Of the pass.
            is_chained (`torch.BoolTensor` of shape `(batch, tokens)`): Slots to correct; the others stay as they are.

        Returns:
            The corrected hidden states, of shape `(batch, tokens, hidden)`.
        """
        # How deep each slot stands in its branch is the same in every row: branches are laid out alike.
        depths = (layout.position_ids - layout.context_limits)[0] - 1
        slots = (layout.branch_ids[0] != 0).nonzero()[:, 0]  # padding included
        depths = depths[slots]
        branches = (depths == 0).cumsum(0) - 1
        hidden, chained = hidden_states[:, slots], is_chained[:, slots, None]
        entering = self.hidden_part(hidden) + self.token_part(embeds[:, slots])

        state = entering.new_zeros(entering.shape[0], int(branches[-1]) + 1, entering.shape[2])
        corrections = torch.zeros_like(hidden)
        for depth in range(int(depths.max()) + 1):
            here = (depths == depth).nonzero()[:, 0]
            new = F.silu(entering[:, here] + self.recurrent(state[:, branches[here]]))
            new = torch.where(chained[:, here], new, 0)
            state = torch.zeros_like(state).index_copy(1, branches[here], new.to(state.dtype))
            corrections = corrections.index_copy(1, here, self.out(new).to(corrections.dtype))
        return hidden_states.index_copy(1, slots, hidden + corrections)


__all__ = ["ChainedHead"]
