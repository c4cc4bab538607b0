"""Which way of drafting pays: bookkeeping over the rounds of one generation, without clocks or threads.

Each mode is tried for a round or two, the one that emits most tokens per second is kept, and the others are looked at
again now and then, the more seldom the longer nothing changes. A mode that could not win even if all went well is not
tried: an asynchronous round takes at least the longer of the verification and the packed pass.
"""

from dataclasses import dataclass, field


MODES = ("none", "sync", "async")
# Means forget: a round weighs this much less with each that follows.
_MEMORY = 0.95
# Rounds that drafting gets before it is judged: a few unlucky ones say little. Fewer if a round takes as long as
# several verifications, half as many when it is looked at again.
_TRIAL_ROUNDS, _LEAST_ROUNDS = 10, 2
# Rounds in a row without an accepted token that end a trial; and a look at a drafter of which hardly one ever was. A
# drafter that pays rarely has two such rounds in a row, and a trial costs what a useless one must not.
_PATIENCE, _PATIENCE_WITH_USELESS = 2, 1
# Rounds until the modes that were not chosen are looked at again, for a drafter of which tokens were accepted and for
# one without, how this grows, and where it ends: a draft must first read all that was written since the last one.
_NEXT_LOOK, _NEXT_LOOK_AT_USELESS, _LOOK_GROWTH, _LATEST_LOOK = 16, 96, 4, 512
# Tokens in the time of one verification from which on plain decoding cannot win.
_CLEAR_GAIN = 1.5
# What another mode must promise to be tried, and gain to replace the present one.
_MARGIN = 1.03


class _Mean:
    def __init__(self):
        self._sum, self._weight = 0.0, 0.0

    def add(self, value: float):
        self._sum, self._weight = _MEMORY * self._sum + value, _MEMORY * self._weight + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


@dataclass
class ModeEstimate:
    """What a round of one mode emits and takes. A round that had to catch up counts for its tokens alone."""

    tokens: _Mean = field(default_factory=_Mean)
    seconds: _Mean = field(default_factory=_Mean)

    @property
    def tokens_per_second(self) -> float | None:
        """`None` before the first round that counts."""
        if self.tokens.value is None or self.seconds.value is None:
            return None
        return self.tokens.value / max(self.seconds.value, 1e-9)


class ModeSelector:
    """
    Chooses the mode of each round of one generation: `"none"`, `"sync"` or `"async"`.

    Attributes:
        choices (`list[dict]`): Every change: `{"round": int, "mode": str, "reason": str}`, in order.
        estimates (`dict[str, ModeEstimate]`): By mode.
    """

    def __init__(self):
        self.choices: list[dict] = []
        self.estimates = {mode: ModeEstimate() for mode in MODES}
        self._num_rounds = 0
        self._mode = None
        self._counts_time = False
        # (mode, whether the round's time counts, reason). The first round is the target's prefill, the first draft the
        # drafter's.
        self._planned = [
            ("none", False, "prefill"),
            ("sync", False, "trial"),
            *[("sync", True, "trial")] * _TRIAL_ROUNDS,
        ]
        self._num_fruitless, self._patience = 0, _PATIENCE
        self._num_tried, self._num_allowed = 0, _TRIAL_ROUNDS
        self._is_first_plan = True
        self._verify_seconds = _Mean()
        self._num_looks, self._next_look = 0, 0

    def record(self, num_tokens: int, seconds: float, verify_seconds: float):
        """
        The round that was chosen last has ended.

        Args:
            num_tokens (`int`): Tokens that it emitted.
            seconds (`float`): From the begin of its draft to that of the next.
            verify_seconds (`float`): The target's share of it.
        """
        if self._num_rounds > 1:
            self.estimates[self._mode].tokens.add(num_tokens)
            if self._counts_time:
                self.estimates[self._mode].seconds.add(seconds)
            if self._mode == "sync":
                self._verify_seconds.add(verify_seconds)
                self._num_fruitless = self._num_fruitless + 1 if num_tokens == 1 else 0
                self._num_tried += 1

    @property
    def mean_verify_seconds(self) -> float | None:
        """Of verifications of a draft; `None` before the first."""
        return self._verify_seconds.value

    def choose(self, async_seconds: float | None = None) -> str:
        """
        The mode of the round that begins.

        Args:
            async_seconds (`float`, *optional*):
                What an asynchronous round would take at least; `None` if that mode is out of the question.
        """
        if self._num_fruitless >= self._patience or self._has_tried_enough():
            self._planned = [trial for trial in self._planned if trial[0] != "sync"]
        if not self._planned:
            self._plan(async_seconds)
        if self._planned:
            mode, self._counts_time, reason = self._planned.pop(0)
        else:
            mode, self._counts_time = self._best(), True
            reason = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in self._rates().items())
        if mode != self._mode:
            self.choices.append({"round": self._num_rounds, "mode": mode, "reason": reason})
        self._mode = mode
        self._num_rounds += 1
        return mode

    def _plan(self, async_seconds: float | None):
        """Puts other modes on the plan, if it is time for them and they may win."""
        if not self._is_first_plan and self._num_rounds < self._next_look:
            return
        reason = "trial" if self._is_first_plan else "look"
        is_useless = self.estimates["sync"].tokens.value < 1.2
        best = self._best()
        rate = self._rates()[best]
        if best == "none":
            self._planned += [("sync", False, reason), *[("sync", True, reason)] * (_TRIAL_ROUNDS // 2)]
            self._num_fruitless, self._patience = 0, _PATIENCE_WITH_USELESS if is_useless else _PATIENCE
            self._num_tried, self._num_allowed = 0, _TRIAL_ROUNDS // 2
        elif rate * self._verify_seconds.value < _CLEAR_GAIN:  # one token takes no longer than several
            self._planned.append(("none", True, reason))
        if async_seconds is not None and best != "async":
            tokens = self.estimates["async"].tokens.value or self.estimates["sync"].tokens.value
            if tokens / async_seconds > _MARGIN * max(rate, 1 / self._verify_seconds.value):
                # The round that first packs has no packed draft yet.
                self._planned += [("async", False, reason), ("async", True, reason), ("async", True, reason)]
        interval = _NEXT_LOOK_AT_USELESS if is_useless else _NEXT_LOOK * max(1.0, self._cost())
        self._next_look = self._num_rounds + min(round(interval) * _LOOK_GROWTH**self._num_looks, _LATEST_LOOK)
        self._num_looks += 1
        self._is_first_plan = False

    def _cost(self) -> float:
        """How many verifications a synchronous round takes as long as."""
        return (self.estimates["sync"].seconds.value or 0.0) / (self._verify_seconds.value or 1.0)

    def _has_tried_enough(self) -> bool:
        if self.estimates["sync"].seconds.value is None:
            return False
        return self._num_tried >= max(_LEAST_ROUNDS, round(self._num_allowed / max(self._cost(), 1.0)))

    def _rates(self) -> dict[str, float]:
        rates = {mode: estimate.tokens_per_second for mode, estimate in self.estimates.items()}
        return {mode: rate for mode, rate in rates.items() if rate is not None}

    def _best(self) -> str:
        rates = self._rates()
        best = max(rates, key=rates.get)
        if self._mode in rates and rates[best] < _MARGIN * rates[self._mode]:
            return self._mode
        return best


__all__ = ["MODES", "ModeEstimate", "ModeSelector"]
