"""Evaluation of a drafter on text that its target wrote: every kind of draft, after every position of every response.

Nothing is generated. Means over positions say what a drafter has learned; rounds played through say what `generate`
would do with it, which is less, since rounds stop where drafts fail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .acceptance import (
    MAX_GUESSES,
    AcceptedByPosition,
    DraftOutcomes,
    Round,
    bootstrap_interval,
    draft_outcomes,
    mean_metrics,
    play_rounds,
)
from .examples import to_example


KINDS = ("synchronous", "masked", *(f"guess_{count}" for count in range(1, MAX_GUESSES + 1)))
_NUM_GUESSES = {"synchronous": None, "masked": 0} | {f"guess_{count}": count for count in range(1, MAX_GUESSES + 1)}


@dataclass
class _Text:
    """One response: drafts after its positions, but for the last, and its rounds."""

    accepted: AcceptedByPosition  # arrays of shape (positions,)
    truth: np.ndarray  # (positions, block_size + 1)
    rounds: dict[str, list[Round]]


def evaluate_drafter(
    drafter,
    rows: Sequence[Mapping],
    processing_class=None,
    positions_per_pass: int = 32,
    on_text=lambda: None,
) -> dict:
    """
    Measures acceptance at all positions of all responses.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): In eval mode.
        rows (sequence of `Mapping`): The target's own (greedy) responses, in one of `examples.LAYOUTS`.
        processing_class (*optional*): Tokenizer, for rows of `messages`.
        positions_per_pass (`int`, *optional*, defaults to 32):
            Positions drafted from in one pass. Memory grows with it, results do not depend on it.
        on_text (`Callable()`, *optional*): Called after each text.

    Returns:
        `dict` that JSON can hold, every estimate with a 95% bootstrap interval over the texts. `metrics` are the
        means over positions, as [`D3DTrainer`] names them; `drafts` has an entry per kind of draft.

    Raises:
        ValueError: Rows in an unknown layout or of another vocabulary, or no response of at least three tokens.
    """
    if positions_per_pass < 1:
        raise ValueError(f"positions_per_pass is {positions_per_pass}: give at least 1.")
    texts, num_skipped = [], 0
    for row in rows:
        ids, prompt_length = to_example(row, processing_class, drafter.config.vocab_size)
        prompt_length = max(prompt_length, 1)  # nothing predicts a text's first token
        if len(ids) - prompt_length < 2:
            num_skipped += 1
        else:
            texts.append(_evaluate_text(drafter, ids, prompt_length, positions_per_pass))
        on_text()
    if not texts:
        raise ValueError(
            f"None of the {num_skipped} rows has a response of at least two tokens to draft: check where the prompts "
            "end, or give longer responses."
        )
    accepted = AcceptedByPosition(
        *(
            np.concatenate([getattr(text.accepted, name) for text in texts])
            for name in ("synchronous", "masked", "guessed", "rank")
        )
    )
    return {
        "num_texts": len(texts),
        "num_texts_skipped": num_skipped,
        "num_positions": len(accepted.rank),
        "block_size": drafter.config.block_size,
        "metrics": mean_metrics(accepted, np.ones_like(accepted.rank, dtype=bool)),
        "ar_accuracy": _mean_over_positions([text.accepted.rank == 0 for text in texts]),
        "bonus_hit_rate": {
            str(count): _mean_over_positions([text.accepted.rank < count for text in texts])
            for count in range(1, MAX_GUESSES + 1)
        },
        "drafts": {kind: _summarize(texts, kind) for kind in KINDS},
    }


def _evaluate_text(drafter, ids: list[int], prompt_length: int, positions_per_pass: int) -> _Text:
    size, device = drafter.config.block_size, drafter.device
    anchors = np.arange(prompt_length - 1, len(ids) - 1)
    parts = []
    for start in range(0, len(anchors), positions_per_pass):
        part = anchors[start : start + positions_per_pass]
        # What comes later than the last draft is of no use to this pass.
        context = torch.tensor([ids[: part[-1] + size + 2]], device=device)
        parts.append(
            draft_outcomes(
                drafter,
                drafter.config,
                context,
                torch.ones_like(context),
                torch.from_numpy(part)[None].to(device),
            )
        )
    names = ("anchors", "truth", "synchronous", "masked", "guessed", "likeliest")
    outcomes = DraftOutcomes(*(np.concatenate([getattr(part, name) for part in parts], axis=1) for name in names))
    rounds = {
        kind: play_rounds(outcomes, 0, prompt_length, len(ids), num_guesses)
        for kind, num_guesses in _NUM_GUESSES.items()
    }
    accepted = AcceptedByPosition.of(outcomes)
    # After the last but one token there is only the last to draft: it counts for the rounds alone.
    accepted = AcceptedByPosition(
        *(getattr(accepted, name)[0, :-1] for name in ("synchronous", "masked", "guessed", "rank"))
    )
    return _Text(accepted, outcomes.truth[0, :-1], rounds)


def _accepted(text: _Text, kind: str) -> np.ndarray:
    num_guesses = _NUM_GUESSES[kind]
    return text.accepted.synchronous if num_guesses is None else text.accepted.with_guesses(num_guesses)


def _summarize(texts: Sequence[_Text], kind: str) -> dict:
    accepted = [_accepted(text, kind) for text in texts]
    first_slot = 0 if kind == "synchronous" else 1
    size = texts[0].truth.shape[1] - 1
    by_slot = [
        _estimate(
            [float((values > slot).sum()) for values in accepted],
            [float((text.truth[:, first_slot + slot] >= 0).sum()) for text in texts],
        )
        for slot in range(size)
    ]
    length = _mean_over_positions(accepted)
    return {
        "acceptance_length": length,
        "tokens_per_round": _plus_one(length),
        "acceptance_by_slot": by_slot,
        "histogram": _histogram(np.concatenate(accepted)),
        "played_through": _summarize_rounds([text.rounds[kind] for text in texts]),
    }


def _summarize_rounds(rounds: Sequence[Sequence[Round]]) -> dict:
    num_tokens = [sum(played.num_tokens for played in text) for text in rounds]
    num_rounds = [len(text) for text in rounds]
    hits = [[played.is_hit for played in text if played.is_hit is not None] for text in rounds]
    tokens_per_round = _estimate(num_tokens, num_rounds)
    return {
        "tokens_per_round": tokens_per_round,
        "acceptance_length": _plus_one(tokens_per_round, -1),
        "bonus_hit_rate": _estimate([sum(text) for text in hits], [len(text) for text in hits]),
        "num_rounds": sum(num_rounds),
        "num_tokens": sum(num_tokens),
        "histogram": _histogram(np.array([played.num_tokens - 1 for text in rounds for played in text])),
    }


def _mean_over_positions(values: Sequence[np.ndarray]) -> dict:
    return _estimate([float(text.sum()) for text in values], [float(len(text)) for text in values])


def _estimate(totals: Sequence[float], counts: Sequence[float]) -> dict | None:
    """`sum(totals) / sum(counts)` with its interval over the texts; `None` where nothing was counted."""
    pairs = [(total, count) for total, count in zip(totals, counts, strict=True) if count]
    if not pairs:
        return None
    totals, counts = zip(*pairs)
    low, high = bootstrap_interval(totals, counts)
    return {"mean": sum(totals) / sum(counts), "low": low, "high": high}


def _plus_one(estimate: dict, shift: int = 1) -> dict:
    return {name: value + shift for name, value in estimate.items()}


def _histogram(values: np.ndarray) -> dict[str, int]:
    """Accepted draft tokens to how often; keys are strings, as JSON has no others."""
    counts = np.bincount(values)
    return {str(value): int(count) for value, count in enumerate(counts) if count}


__all__ = ["KINDS", "evaluate_drafter"]
