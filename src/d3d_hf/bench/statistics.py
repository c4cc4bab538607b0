"""The figures of a benchmark, as pure functions on what single generations gave."""

import math
from collections.abc import Iterable, Sequence

import numpy as np


NUM_RESAMPLES = 2000


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, linearly interpolated, of at least one value."""
    p10, median, p90 = np.quantile(np.asarray(values, dtype=float), [0.1, 0.5, 0.9])
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def paired_speedup(
    seconds_per_token: Sequence[float], plain_seconds_per_token: Sequence[float], seed: int = 0
) -> dict[str, float]:
    """
    Speedup over plain generation, prompt by prompt.

    Args:
        seconds_per_token, plain_seconds_per_token (sequence of `float`): Of the same prompts in the same order.
        seed (`int`, *optional*, defaults to 0): Of the bootstrap.

    Returns:
        `dict` with `median` of the ratios, and `low` and `high` of its 95% percentile bootstrap interval over prompts.
    """
    ratios = np.asarray(plain_seconds_per_token, dtype=float) / np.asarray(seconds_per_token, dtype=float)
    draws = np.random.default_rng(seed).integers(len(ratios), size=(NUM_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios: of a doubling and a halving it is 1."""
    return math.exp(sum(map(math.log, values)) / len(values))


def accepted_histogram(generations: Iterable[Sequence[tuple[int, int]]]) -> dict[int, int]:
    """
    Rounds by accepted draft tokens, bonus excluded.

    Args:
        generations: For each generation its rounds, as pairs (draft tokens, new tokens).
    """
    histogram = {}
    for rounds in generations:
        for _, num_new in rounds:
            histogram[num_new - 1] = histogram.get(num_new - 1, 0) + 1
    return dict(sorted(histogram.items()))


def slot_acceptance(generations: Iterable[Sequence[tuple[int, int]]]) -> tuple[list[float], list[int]]:
    """
    How often each slot of a draft is accepted, given that the slots before it are.

    A generation's last round counts for the slots that it accepted and not for the one after them: the text may have
    ended there for other reasons than a rejection.

    Args:
        generations: For each generation its rounds, as pairs (draft tokens, new tokens).

    Returns:
        Probability by slot, and how often the slot was decided; both end before the first slot that never was.
    """
    decided, accepted = [], []

    def count(tally, slot):
        tally.extend([0] * (slot + 1 - len(tally)))
        tally[slot] += 1

    for rounds in generations:
        for index, (num_drafted, num_new) in enumerate(rounds):
            num_accepted = min(num_new - 1, num_drafted)
            for slot in range(num_accepted):
                count(decided, slot)
                count(accepted, slot)
            if num_accepted < num_drafted and index + 1 < len(rounds):
                count(decided, num_accepted)
    accepted.extend([0] * (len(decided) - len(accepted)))
    return [right / total for right, total in zip(accepted, decided)], decided


def expected_tokens_per_round(profile: Sequence[float], num_drafted: int | None = None) -> float:
    """
    Tokens per round that a profile of slot acceptances implies: one, and for each slot the chance that it and all
    before it are accepted.

    Args:
        profile (sequence of `float`): As [`slot_acceptance`] gives it.
        num_drafted (`int`, *optional*): Draft tokens per round; the profile's length by default.
    """
    probabilities = np.cumprod(np.asarray(profile, dtype=float)[:num_drafted])
    return 1.0 + float(probabilities.sum())


__all__ = [
    "NUM_RESAMPLES",
    "accepted_histogram",
    "expected_tokens_per_round",
    "geometric_mean",
    "paired_speedup",
    "slot_acceptance",
    "spread",
]
