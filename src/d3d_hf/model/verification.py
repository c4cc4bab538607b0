"""The maths around a verification, as pure functions on tensors: draft laws, draws, cuts.

Lossless under sampling means one thing here: a draft token is drawn from exactly the law that is handed to the
verifier, and no draft token is dropped because of what was drawn (speculative sampling, arXiv 2211.17192).
"""

from collections.abc import Callable, Iterable

import torch


def fit_vocabulary(logits: torch.Tensor, vocab_size: int, never_drafted: Iterable[int] = ()) -> torch.Tensor:
    """
    Brings drafter logits to the target's vocabulary.

    Args:
        logits (`torch.Tensor` of shape `(..., rows)`): Any float dtype.
        vocab_size (`int`): Width wanted. Missing ids get -inf, ids beyond are cut off.
        never_drafted (iterable of `int`): Ids that get -inf, the mask token's above all.

    Returns:
        `torch.FloatTensor` of shape `(..., vocab_size)`, a new tensor.
    """
    fitted = logits[..., :vocab_size].float()
    missing = vocab_size - fitted.shape[-1]
    if missing > 0:
        fitted = torch.nn.functional.pad(fitted, (0, missing), value=float("-inf"))
    elif fitted.data_ptr() == logits.data_ptr():
        fitted = fitted.clone()
    for token in never_drafted:
        if token < vocab_size:
            fitted[..., token] = float("-inf")
    return fitted


def warp(logits: torch.Tensor, warpers: Iterable[Callable]) -> torch.Tensor:
    """Applies logits warpers that read no ids (temperature, top-k, ...) to `logits` of shape `(rows, vocab)`."""
    no_ids = torch.empty(logits.shape[0], 0, dtype=torch.long, device=logits.device)
    for warper in warpers:
        logits = warper(no_ids, logits)
    return logits


def drawable(logits: torch.Tensor) -> torch.Tensor:
    """
    A law out of any logits, of the same shape: a drafter that overflows costs its drafts, not the generation. NaN
    counts as -inf and +inf as the largest number; a row with nothing but -inf is uniform. Proper laws stay the same.
    """
    law = logits.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    return torch.where(law.isneginf().all(dim=-1, keepdim=True), 0.0, law)


def draw(logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.LongTensor:
    """
    Draws one token per row from `softmax(logits)`.

    Args:
        logits (`torch.FloatTensor` of shape `(rows, vocab)`): The law; -inf entries are never drawn.
        generator (`torch.Generator`, *optional*): On the device of `logits`.

    Returns:
        `torch.LongTensor` of shape `(rows,)`.
    """
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator).squeeze(-1)


def one_hot_law(tokens: torch.LongTensor, vocab_size: int) -> torch.Tensor:
    """Logits of shape `(rows, vocab_size)` of the law that gives each of `tokens` (shape `(rows,)`) for certain."""
    law = torch.full((tokens.shape[0], vocab_size), float("-inf"), device=tokens.device)
    return law.scatter_(1, tokens[:, None], 0.0)


def length_through_eos(tokens: torch.LongTensor, eos_token_ids: torch.LongTensor | None) -> int:
    """
    Draft tokens up to and including the first EOS. Nothing after an EOS can be emitted, so this cut biases nothing.

    Args:
        tokens (`torch.LongTensor` of shape `(length,)`): The draft.
        eos_token_ids (`torch.LongTensor` of shape `(ids,)`, *optional*): On the device of `tokens`.
    """
    if eos_token_ids is not None:
        ends = torch.isin(tokens, eos_token_ids).nonzero()
        if ends.numel():
            return int(ends[0, 0]) + 1
    return tokens.shape[0]


def length_before_stop(
    input_ids: torch.LongTensor, tokens: torch.LongTensor, is_stopped: Callable[[torch.LongTensor], bool]
) -> int:
    """
    Draft tokens before the one that would complete a stop string: the target must emit that one itself, as its bonus,
    for the generation to end on it. The cut depends on the draft, so it is lossless only if the draft was not drawn
    from a law that is handed to the verifier.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, length)`): The text so far.
        tokens (`torch.LongTensor` of shape `(draft_length,)`): The draft.
        is_stopped (`Callable`): Whether ids of shape `(1, any)` end in a stop string.
    """
    text = torch.cat([input_ids, tokens[None]], dim=1)
    for length in range(tokens.shape[0]):
        if is_stopped(text[:, : input_ids.shape[1] + length + 1]):
            return length
    return tokens.shape[0]


__all__ = [
    "draw",
    "drawable",
    "fit_vocabulary",
    "length_before_stop",
    "length_through_eos",
    "one_hot_law",
    "warp",
]
