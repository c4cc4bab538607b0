"""Which branches a packed pass gets when there is no room for all: likely verdicts first, guesses where they pay.

Pure bookkeeping. How likely each verdict is comes from the chances of the tree's nodes; what branches are worth is
learned from the rounds of the generation. A plan says which drafts exist, never what is drawn, and is made before the
verdict is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass


# Until it was seen otherwise: a guess of each rank is right so often, so many tokens more follow a right guess than a
# masked branch, and so many those; and observations that this counts as much as.
_HIT_CHANCES, _GUESSED_GAIN, _MASKED_TOKENS, _PRIOR_WEIGHT = (0.6, 0.2, 0.1), 0.5, 2.0, 8.0


@dataclass(frozen=True)
class Branch:
    """
    A branch for the verdict that ends at a node of the draft (0: at the text's end): masked, or for one guess of the
    bonus.
    """

    node: int
    guess: int | None = None


class BranchValues:
    """What branches are worth, learned from verdicts."""

    def __init__(self):
        self._hits = [_PRIOR_WEIGHT * chance for chance in _HIT_CHANCES]
        self._trials = [_PRIOR_WEIGHT] * len(_HIT_CHANCES)
        self._tokens = {
            "masked": _PRIOR_WEIGHT * _MASKED_TOKENS,
            "guessed": _PRIOR_WEIGHT * (_MASKED_TOKENS + _GUESSED_GAIN),
        }
        self._rounds = dict.fromkeys(self._tokens, _PRIOR_WEIGHT)

    def record_guesses(self, guesses: Sequence[int], bonus: int):
        """The guesses that were made for the verdict that came, best first, and its bonus."""
        for rank, guess in enumerate(guesses[: len(self._hits)]):
            self._trials[rank] += 1
            self._hits[rank] += guess == bonus

    def record_round(self, kind: str, num_tokens: int):
        """Tokens of a round whose draft came from a `"masked"` or a `"guessed"` branch."""
        if kind in self._tokens:
            self._rounds[kind] += 1
            self._tokens[kind] += num_tokens

    @property
    def masked(self) -> float:
        """Tokens of a round after a masked branch."""
        return self._tokens["masked"] / self._rounds["masked"]

    def guess(self, rank: int) -> float:
        """Tokens that a guess of a rank adds to what the masked branch gives."""
        rank = min(rank, len(self._hits) - 1)
        gain = self._tokens["guessed"] / self._rounds["guessed"] - self.masked
        return max(gain, 0.01) * self._hits[rank] / self._trials[rank]


def verdict_chances(chances: Sequence[float], parents: Sequence[int]) -> list[float]:
    """
    How likely the verdict ends at each node, the text's end first.

    Args:
        chances (sequence of `float`): That the target's text goes through each node.
        parents (sequence of `int`): Of each node: 0 for the text's end, `i` for the `i`-th node.
    """
    ends = [1.0, *chances]
    for parent, chance in zip(parents, chances):
        ends[parent] -= chance
    return [max(end, 1e-3) for end in ends]


def plan_branches(
    guesses: Sequence[Sequence[int]],
    max_branches: int | None = None,
    verdict_chances: Sequence[float] | None = None,
    values: BranchValues | None = None,
) -> list[Branch]:
    """
    The branches of a packed pass: without a bound a masked one for every verdict and all guesses; with one, those that
    are worth most expected tokens.

    Args:
        guesses (sequence of sequences of `int`): For each node, the text's end first, guessed bonuses, best first.
        max_branches (`int`, *optional*): At most so many.
        verdict_chances (sequence of `float`, *optional*): Of each verdict; all alike by default.
        values ([`BranchValues`], *optional*): What branches are worth. Default: as before the first verdict.
    """
    values = values or BranchValues()
    chances = verdict_chances or [1.0] * len(guesses)
    valued = []
    for node, tokens in enumerate(guesses):
        valued.append((chances[node] * values.masked, Branch(node)))
        for rank, token in enumerate(tokens):
            valued.append((chances[node] * values.guess(rank), Branch(node, token)))
    valued.sort(key=lambda pair: -pair[0])
    return [branch for _, branch in valued][:max_branches]


__all__ = ["Branch", "BranchValues", "plan_branches", "verdict_chances"]
