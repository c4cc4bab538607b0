"""Which branches a packed pass gets when there is no room for all: likely verdicts first, guesses where they pay.

Pure bookkeeping. The chance that a draft token is accepted comes from the drafter's own confidence in it, corrected by
how often tokens of such confidence were accepted so far. A plan says which drafts exist, never what is drawn, and is
made before the verdict is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass


# Bounds of confidence within which tokens count as alike.
_BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.95)
# The drafter's own word counts as much as so many observations.
_PRIOR_WEIGHT = 4.0
# Measured on the embedded target (docs/lab-notes.md): chance of a bonus to be the guess of each rank, and tokens of a
# round after a masked draft and after one whose guess is right.
_HIT_CHANCES = (0.74, 0.18, 0.05)
_MASKED_TOKENS, _GUESSED_TOKENS = 3.65, 4.31


@dataclass(frozen=True)
class Branch:
    """A branch for the verdict that accepts `num_accepted` tokens: masked, or for one guess of the bonus."""

    num_accepted: int
    guess: int | None = None


class Calibration:
    """How good the drafter's confidence is as the chance of acceptance, learned from the verdicts of a generation."""

    def __init__(self):
        self._accepted = [0.0] * (len(_BOUNDS) + 1)
        self._judged = [0.0] * (len(_BOUNDS) + 1)

    def record(self, confidences: Sequence[float], num_accepted: int):
        """A verdict: the tokens up to the first rejected one were judged."""
        for place, confidence in enumerate(confidences[: num_accepted + 1]):
            self._judged[_bin(confidence)] += 1
            self._accepted[_bin(confidence)] += place < num_accepted

    def chance(self, confidence: float) -> float:
        """That a token of such confidence is accepted if all before it are."""
        bin_ = _bin(confidence)
        return (self._accepted[bin_] + _PRIOR_WEIGHT * confidence) / (self._judged[bin_] + _PRIOR_WEIGHT)

    def verdict_chances(self, confidences: Sequence[float]) -> list[float]:
        """Chance of each verdict, from no token accepted to all: `len(confidences) + 1` numbers that sum to 1."""
        chances, survival = [], 1.0
        for confidence in confidences:
            accepted = self.chance(confidence)
            chances.append(survival * (1 - accepted))
            survival *= accepted
        return [*chances, survival]


def _bin(confidence: float) -> int:
    return sum(confidence >= bound for bound in _BOUNDS)


def plan_branches(
    guesses: Sequence[Sequence[int]],
    max_branches: int | None = None,
    verdict_chances: Sequence[float] | None = None,
) -> list[Branch]:
    """
    The branches of a packed pass: without a bound a masked one for every verdict and all guesses; with one, those that
    are worth most expected tokens.

    Args:
        guesses (sequence of sequences of `int`):
            For each verdict, from no token accepted to all, guessed bonuses, best first; may be empty.
        max_branches (`int`, *optional*): At most so many.
        verdict_chances (sequence of `float`, *optional*): Of each verdict; all alike by default.
    """
    chances = verdict_chances or [1.0] * len(guesses)
    valued = []
    for num_accepted, tokens in enumerate(guesses):
        valued.append((chances[num_accepted] * _MASKED_TOKENS, Branch(num_accepted)))
        for rank, token in enumerate(tokens):
            hit_chance = _HIT_CHANCES[min(rank, len(_HIT_CHANCES) - 1)]
            gain = hit_chance * (_GUESSED_TOKENS - _MASKED_TOKENS)
            valued.append((chances[num_accepted] * gain, Branch(num_accepted, token)))
    valued.sort(key=lambda pair: -pair[0])
    return [branch for _, branch in valued][:max_branches]


__all__ = ["Branch", "Calibration", "plan_branches"]
