"""
The same schedules, played through event by event: what `schedules.py` says in closed form, done the long way.

Verdicts are drawn token by token, drafts carry over from the round that made them to the round that verifies them, and
forwards are jobs on devices. At every start and end of a job the speeds of all that run are worked out anew: where the
jobs of a device together ask for more bandwidth or arithmetic than it has, all of them slow down alike.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .acceptance import AcceptanceProfile, first_slots
from .forward_times import Demand
from .schedules import Plan, Schedule


@dataclass
class _Job:
    demand: Demand
    when_done: Callable[[], None]
    left: float = 1.0  # share of its work


@dataclass
class _Device:
    jobs: list[_Job] = field(default_factory=list)

    def speed(self) -> float:
        """Of every job on the device, in shares of its speed alone."""
        memory = sum(job.demand.memory_ms / job.demand.alone_ms for job in self.jobs)
        compute = sum(job.demand.compute_ms / job.demand.alone_ms for job in self.jobs)
        return 1 / max(1.0, memory, compute)


class _Clock:
    """Runs jobs and timers to their ends, earliest first."""

    def __init__(self, devices: list[_Device]):
        self.now_ms = 0.0
        self._devices = devices
        self._timers = []

    def after(self, delay_ms: float, what: Callable[[], None]):
        self._timers.append((self.now_ms + delay_ms, what))

    def step(self):
        """Goes on to the next event, and does what follows from it."""
        ends = [
            (job.left * job.demand.alone_ms / device.speed(), job, device)
            for device in self._devices
            for job in device.jobs
        ]
        next_end = min(ends, key=lambda end: end[0], default=(float("inf"), None, None))
        next_timer = min(self._timers, key=lambda timer: timer[0], default=(float("inf"), None))
        wait_ms = min(next_end[0], next_timer[0] - self.now_ms)
        for device in self._devices:
            speed = device.speed()
            for job in device.jobs:
                job.left -= wait_ms * speed / job.demand.alone_ms
        self.now_ms += wait_ms
        if next_timer[0] - self.now_ms <= 0:
            self._timers.remove(next_timer)
            next_timer[1]()
        else:
            _, job, device = next_end
            device.jobs.remove(job)
            job.when_done()


class _Decoding:
    """One text being written: what happens when a forward ends."""

    def __init__(self, target, drafter, profile: AcceptanceProfile, plan: Plan, seed: int):
        self._profile, self._plan = profile, plan
        self._verification, self._drafting = functools.cache(target.demand), functools.cache(drafter.demand)
        self._random = random.Random(seed)
        self._target_device = _Device()
        self._draft_device = _Device() if plan.schedule is Schedule.TWO_DEVICES else self._target_device
        devices = [self._target_device]
        if self._draft_device is not self._target_device:
            devices.append(self._draft_device)
        self.clock = _Clock(devices)
        self.num_tokens = self.num_rounds = 0
        self._draft = ()  # the chances of its tokens
        self._num_accepted = 0
        self._waiting_for = 0

    def start(self):
        if self._plan.is_asynchronous:
            self._start_both()
        else:
            self._start_draft()

    def _start_draft(self):
        demand = self._drafting(*self._plan.serial_pass(self._num_accepted))
        self._draft = first_slots(self._profile.slots, self._plan.draft_length)
        self._draft_device.jobs.append(_Job(demand, self._start_verification))

    def _start_verification(self):
        self._waiting_for += 1
        num_tokens = len(self._draft) + 1
        self._target_device.jobs.append(_Job(self._verification(num_tokens, num_tokens), self._end_part))

    def _start_both(self):
        passes = [self._drafting(*sizes) for sizes in self._plan.packed_passes(len(self._draft))]
        self._waiting_for += 1
        self._start_passes(passes)
        self._start_verification()

    def _start_passes(self, passes: list[Demand]):
        if passes:
            self._draft_device.jobs.append(_Job(passes[0], lambda: self._start_passes(passes[1:])))
        else:
            self._end_part()

    def _end_part(self):
        self._waiting_for -= 1
        if self._waiting_for == 0:
            self._judge()
            self.clock.after(self._plan.overhead_ms, self._next_round)

    def _judge(self):
        self._num_accepted = 0
        for chance in self._draft:
            if self._random.random() >= chance:
                break
            self._num_accepted += 1
        self.num_tokens += self._num_accepted + 1
        self.num_rounds += 1

    def _next_round(self):
        plan = self._plan
        if not plan.is_asynchronous:
            self._start_draft()
            return
        is_guessed = self._random.random() < self._profile.hit_rate(plan.num_guesses)
        if is_guessed:
            self._draft = first_slots(self._profile.slots, plan.draft_length)
        elif plan.has_masked_branches:
            self._draft = first_slots(self._profile.masked_slots, plan.draft_length)
        else:
            self._draft = ()
        self._start_both()


@dataclass(frozen=True)
class Simulated:
    """
    Attributes:
        tokens_per_round (`float`): Mean over the rounds.
        round_ms (`float`): Mean over the rounds.
        num_rounds (`int`): Rounds played through.
    """

    tokens_per_round: float
    round_ms: float
    num_rounds: int

    @property
    def ms_per_token(self) -> float:
        return self.round_ms / self.tokens_per_round


def simulate(
    target, drafter, profile: AcceptanceProfile, plan: Plan, num_rounds: int = 20_000, seed: int = 0
) -> Simulated:
    """
    Plays a plan through. The first round of an asynchronous one has no draft, as in a real generation.

    Args:
        target, drafter, profile, plan: As in [`predict`].
        num_rounds (`int`, *optional*, defaults to 20000): Rounds; the means are known to about 0.7 over its root.
        seed (`int`, *optional*, defaults to 0): Of the verdicts.

    Raises:
        ValueError: Fewer than one round.
    """
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}: give at least 1.")
    decoding = _Decoding(target, drafter, profile, plan, seed)
    decoding.start()
    while decoding.num_rounds < num_rounds:
        decoding.clock.step()
    tokens, elapsed_ms = decoding.num_tokens, decoding.clock.now_ms + plan.overhead_ms
    return Simulated(tokens / num_rounds, elapsed_ms / num_rounds, num_rounds)


__all__ = ["Simulated", "simulate"]
