"""What one block of a drafter says: the outputs of its slots, and the chain of its likeliest tokens.

With a chained head each mask slot's law is corrected by the tokens before it, left to right. The correction is a small
change of the hidden state, so of a slot's vocabulary only the likeliest tokens before it are looked at again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .extensions import extensions


# Tokens that a chained head chooses among at each slot.
SHORTLIST = 64


@dataclass
class Block:
    """
    Attributes:
        hidden_states (`torch.Tensor` of shape `(rows, hidden)`): Last ones of consecutive places.
        logits (`torch.Tensor` of shape `(rows, embedding_rows)`): Of the same rows.
        bonus (`int`, *optional*):
            The token that stands at the first row, if that is a mask slot; `None` if the first row saw its token.
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor
    bonus: int | None = None


def draftable(logits: torch.Tensor, vocab_size: int, never_drafted: Iterable[int] = ()) -> torch.Tensor:
    """
    Logits of the tokens that may be drafted.

    Args:
        logits (`torch.Tensor` of shape `(..., embedding_rows)`): A drafter's.
        vocab_size (`int`): The target's; ids beyond are left out.
        never_drafted (iterable of `int`): Ids that get -inf, the mask token's above all.

    Returns:
        `torch.Tensor` of shape `(..., at most vocab_size)`.
    """
    logits = logits[..., :vocab_size]
    never = [token for token in never_drafted if token < logits.shape[-1]]
    return logits.index_fill(-1, torch.tensor(never, device=logits.device), float("-inf")) if never else logits


class BlockReader:
    """
    Reads the blocks of one drafter for one target.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter.
        vocab_size (`int`): The target's; no token beyond it is drafted.
    """

    def __init__(self, drafter, vocab_size: int):
        self._drafter, self._vocab_size = drafter, vocab_size
        mask = drafter.config.mask_token_id
        self._never_drafted = () if mask is None else (mask,)
        self._num_embeddings = drafter.get_input_embeddings().weight.shape[0]

    @torch.no_grad()
    def chain(self, block: Block, num_tokens: int) -> torch.LongTensor:
        """
        The likeliest tokens, each given those before it.

        Returns:
            `torch.LongTensor` of shape `(num_tokens,)`.
        """
        head, logits, hidden_states = self._drafter.chained_head, block.logits[:num_tokens], block.hidden_states
        if head is None:
            return self._likeliest(logits)
        tokens, state = [], None
        if block.bonus is None:
            standing = self._likeliest(logits[:1])
            tokens.append(standing)
        else:
            standing = torch.tensor([block.bonus], device=logits.device)
        slots = slice(len(tokens), num_tokens)
        hidden_states, logits = hidden_states[slots], self.draftable(logits[slots])
        parts, shortlist = head.hidden_part(hidden_states), self._drafter.shortlist(logits, SHORTLIST)
        for slot in range(hidden_states.shape[0]):
            correction, state = head.step(parts[slot], self.embed(standing)[0], state)
            if shortlist is None:
                standing = self._likeliest(self._drafter.project((hidden_states[slot] + correction)[None]))
            else:
                candidates, values, rows = (part[slot] for part in shortlist)
                standing = candidates[(values.float() + (rows @ correction).float()).argmax()][None]
            tokens.append(standing)
        return torch.cat(tokens)

    def draftable(self, logits: torch.Tensor) -> torch.Tensor:
        return draftable(logits, self._vocab_size, self._never_drafted)

    def embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        return self._drafter.get_input_embeddings()(self.embeddable(tokens))

    def embeddable(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """`tokens` with those that the drafter has no embedding for replaced by its last one: a guess is as good."""
        return tokens.clamp(max=self._num_embeddings - 1)

    def _likeliest(self, logits: torch.Tensor) -> torch.LongTensor:
        """The likeliest token of each row of shape `(rows, embedding_rows)`."""
        if logits.is_cuda and extensions.choose_tokens is not None:  # one reading instead of a copy
            return extensions.choose_tokens(logits, self._vocab_size, self._never_drafted).tokens
        return self.draftable(logits).argmax(dim=-1)


__all__ = ["SHORTLIST", "Block", "BlockReader", "draftable"]
