"""
The greedy choice of draft tokens and its probability, from logits as the projection leaves them.

The vocabulary is read once, in the dtype of the logits: neither float32 logits nor probabilities are ever stored.
`choose_tokens` runs the Triton kernel on a GPU; `choose_tokens_twin` says in torch what it computes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .attention import has_triton


class TokenChoice(NamedTuple):
    """
    Attributes:
        tokens (`torch.LongTensor` of shape `(rows,)`): The likeliest token of each row; of several the first.
        logits (`torch.FloatTensor` of shape `(rows,)`): Its logit.
        log_normalizers (`torch.FloatTensor` of shape `(rows,)`):
            Log-sum-exp of the row: the token's probability is `exp(logits - log_normalizers)`.
    """

    tokens: torch.LongTensor
    logits: torch.Tensor
    log_normalizers: torch.Tensor


def choose_tokens(
    logits: torch.Tensor, vocab_size: int | None = None, never_drafted: Sequence[int] = ()
) -> TokenChoice:
    """
    The likeliest token of each row. On a GPU it launches on the current stream and reads nothing back.

    Args:
        logits (`torch.Tensor` of shape `(rows, embedding_rows)`): Any float dtype. NaN counts as -inf.
        vocab_size (`int`, *optional*): Ids from here on are not chosen. Default: all are.
        never_drafted (sequence of `int`, *optional*): Ids that are not chosen either, the mask token's above all.

    Returns:
        [`TokenChoice`]. A row in which nothing can be chosen gives token 0 and -inf twice.

    Raises:
        ValueError: `logits` is not a matrix of floats, or `vocab_size` is no number of tokens.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)}: give floats of shape (rows, ids)."
        )
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}: give a number of tokens, at least 1.")
    width = logits.shape[1] if vocab_size is None else min(vocab_size, logits.shape[1])
    never_drafted = sorted({token for token in never_drafted if 0 <= token < width})
    if not _runs_kernel(logits):
        return choose_tokens_twin(logits, width, never_drafted)
    from .token_choice_triton import launch

    with torch.cuda.device(logits.device):  # Triton launches on the current one
        return TokenChoice(*launch(logits, width, never_drafted))


def choose_tokens_twin(
    logits: torch.Tensor, vocab_size: int | None = None, never_drafted: Sequence[int] = ()
) -> TokenChoice:
    """What [`choose_tokens`] computes, written out; same arguments, same result."""
    law = logits[:, :vocab_size].float()
    law = law.masked_fill(law.isnan(), float("-inf"))
    if never_drafted:
        law = law.index_fill(1, torch.tensor(list(never_drafted), device=law.device), float("-inf"))
    best = law.amax(dim=1)
    tokens = (law == best[:, None]).int().argmax(dim=1)  # the first of equals
    return TokenChoice(tokens, best, law.logsumexp(dim=1))


def choose_rows(
    hidden_states: torch.Tensor,
    rows: torch.LongTensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int | None = None,
    never_drafted: Sequence[int] = (),
) -> TokenChoice:
    """
    The likeliest tokens after the selected places of a packed pass: a gather, the projection and one reading of its
    logits. `rows` may have been made on the device, so that nothing waits for it.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): Last hidden states of the pass.
        rows (`torch.LongTensor` of shape `(rows,)`): Places of the selected branch, on the same device.
        project (`Callable`): From hidden states `(rows, hidden)` to logits `(rows, embedding_rows)`.
        vocab_size, never_drafted: As in [`choose_tokens`].

    Returns:
        [`TokenChoice`].
    """
    return choose_tokens(project(hidden_states.index_select(0, rows)), vocab_size, never_drafted)


def _runs_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and has_triton() and logits.dtype != torch.float64


__all__ = ["TokenChoice", "choose_rows", "choose_tokens", "choose_tokens_twin"]
