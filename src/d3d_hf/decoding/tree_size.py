"""How large a draft tree is: the size that promises most tokens per second, decided before anything is drawn.

What a tree of `n` nodes gains is one token and the sum of their chances, corrected by how often nodes of such chance
came true; what it costs is the drafter's share of the round and the target's pass over `n` tokens more, both measured
here, never assumed.
"""

import threading
import weakref
from collections.abc import Sequence


TREE_SIZES = (4, 8, 16, 24, 32, 48, 64)
# Before anything was measured.
_FIRST_SIZE = 16
# Rows of a pass that its time is learned from; a prompt's prefill says nothing of few rows.
_MOST_ROWS = 160
# Measurements forget: one weighs this much less with each that follows.
_MEMORY = 0.9
# Until two sizes were measured: each row more costs so much of a pass over one, worth so many measurements.
_PRIOR_SLOPE, _PRIOR_WEIGHT = 1 / 40, 1.0
# Bounds of chances within which nodes count as alike, and observations that the drafter's own word counts as much as.
_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
_WORD_WEIGHT = 8.0


class Calibration:
    """How good chances are that the drafter gives, learned from the verdicts of a generation."""

    def __init__(self):
        self._expected = [0.0] * (len(_BOUNDS) + 1)
        self._accepted = [0.0] * (len(_BOUNDS) + 1)

    def record(self, chances: Sequence[float], are_accepted: Sequence[bool]):
        """The verdict on a tree's nodes."""
        for chance, is_accepted in zip(chances, are_accepted):
            bin_ = _bin(chance)
            self._expected[bin_] += chance
            self._accepted[bin_] += is_accepted

    def chance(self, chance: float) -> float:
        """That a node comes true of which the drafter says so."""
        if chance <= 0.0:
            return 0.0
        bin_ = _bin(chance)
        weight = _WORD_WEIGHT * chance
        return min(1.0, chance * (self._accepted[bin_] + weight) / (self._expected[bin_] + weight))


def _bin(chance: float) -> int:
    return sum(chance >= bound for bound in _BOUNDS)


class PassCosts:
    """
    What a pass of the target over so many rows takes: what was measured at this size, else a line through all sizes.
    """

    def __init__(self):
        self._measured: dict[int, tuple[int, float]] = {}  # by rows: how often, and seconds
        self._lock = threading.Lock()
        self._sums = [0.0] * 5  # of weights, rows, seconds, rows², rows·seconds

    def record(self, rows: int, seconds: float):
        if rows > _MOST_ROWS:
            return
        with self._lock:
            count, before = self._measured.get(rows, (0, seconds))
            # The first pass of a size may have compiled or captured something: it holds until there is a second.
            after = seconds if count < 2 else 0.7 * before + 0.3 * min(seconds, 3 * before)
            self._measured[rows] = count + 1, after
            if count == 0 and len(self._measured) > 1:
                return
            new = (1.0, rows, seconds, rows * rows, rows * seconds)
            self._sums = [_MEMORY * old + value for old, value in zip(self._sums, new)]

    def seconds(self, rows: int) -> float | None:
        """`None` before the first measurement."""
        count, known = self._measured.get(rows, (0, None))
        if count > 1 or not self._measured:
            return known
        weight, sum_rows, sum_seconds, squares, products = self._sums
        mean_rows, mean_seconds = sum_rows / weight, sum_seconds / weight
        variance = squares / weight - mean_rows**2
        covariance = products / weight - mean_rows * mean_seconds
        # The prior is one measurement some rows away from the mean.
        prior = mean_seconds * _PRIOR_SLOPE / (1 + mean_rows * _PRIOR_SLOPE)
        spread = _PRIOR_WEIGHT * 64.0 / weight
        slope = max(0.0, (covariance + spread * prior) / (variance + spread))
        return max(mean_seconds + slope * (rows - mean_rows), 0.2 * mean_seconds)


_costs = weakref.WeakKeyDictionary()
_costs_lock = threading.Lock()


def costs_of(target) -> PassCosts:
    """What is known of a target's passes in this process; compiled ones are another matter."""
    with _costs_lock:
        return _costs.setdefault(target, {}).setdefault(type(target), PassCosts())


class SizeRule:
    """
    Args:
        costs ([`PassCosts`]): Of the target.
        sizes (sequence of `int`): To choose from, ascending.
    """

    def __init__(self, costs: PassCosts, sizes: Sequence[int] = TREE_SIZES):
        self.costs, self._sizes = costs, tuple(sizes)
        self.calibration = Calibration()
        self._draft_seconds, self._last = None, _FIRST_SIZE

    @property
    def most(self) -> int:
        """Nodes that are worth building: one size more than was chosen last."""
        return next((size for size in self._sizes if size > self._last), self._sizes[-1])

    def record_draft(self, seconds: float):
        """What a draft took, the tree included."""
        before = self._draft_seconds
        self._draft_seconds = seconds if before is None else 0.7 * before + 0.3 * min(seconds, 3 * before)

    def choose(self, chances: Sequence[float]) -> int:
        """
        Nodes to verify.

        Args:
            chances (sequence of `float`): Of all nodes, descending.
        """
        gains, total = [1.0], 1.0
        for chance in chances:
            total += self.calibration.chance(chance)
            gains.append(total)
        if self._draft_seconds is None or self.costs.seconds(1) is None:
            return min(len(chances), _FIRST_SIZE)
        best, best_rate = len(chances), 0.0
        for size in self._sizes:
            size = min(size, len(chances))
            rate = gains[size] / (self._draft_seconds + self.costs.seconds(size + 1))
            if rate > best_rate:
                best, best_rate = size, rate
        self._last = best
        return best


__all__ = ["TREE_SIZES", "Calibration", "PassCosts", "SizeRule", "costs_of"]
