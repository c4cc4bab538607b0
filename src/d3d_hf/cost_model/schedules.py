"""
What a way of drafting gives: expected tokens and time of a round, in closed form.

- *serial*: draft, verify, draft, verify.
- *one device*: the drafter packs the block after every verdict while the target verifies, on the same device. Two
  forwards that run at once are slowed by one factor, so much that together they use neither more bandwidth nor more
  arithmetic than there is; what is left of the longer one goes on alone. Such a round is never shorter than the longer
  forward, nor than the sum of both in memory time or in arithmetic.
- *two devices*: the same without sharing.

Rounds are independent, so tokens per second are the expected tokens of a round over its expected time. Prefill, the
first round, and texts that end within a block are left out. Pure functions; `simulation.py` is their twin.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import AcceptanceProfile, first_slots, tokens_per_round, verdict_law
from .forward_times import Demand


class Schedule(enum.StrEnum):
    """Ways to order drafting and verifying."""

    SERIAL = "serial"
    ONE_DEVICE = "one-device"
    TWO_DEVICES = "two-devices"


@dataclass(frozen=True)
class Plan:
    """
    One way to draft.

    Args:
        schedule ([`Schedule`]): Order of drafting and verifying.
        block_size (`int`): Slots of a branch.
        draft_length (`int`, *optional*): Draft tokens of a round, at most `block_size`, the default.
        num_guesses (`int`, *optional*, defaults to 0): Asynchronous: guesses of the bonus after each verdict.
        has_masked_branches (`bool`, *optional*, defaults to `True`): Asynchronous: a branch that serves any bonus.
        has_guess_forward (`bool`, *optional*, defaults to `True`):
            Asynchronous: guesses come from a first small forward; else they are known for nothing.
        overhead_ms (`float`, *optional*, defaults to 0): Of a round, outside both models; nothing hides it.

    Raises:
        ValueError: A number is out of range, or an asynchronous plan has no branches.
    """

    schedule: Schedule
    block_size: int
    draft_length: int | None = None
    num_guesses: int = 0
    has_masked_branches: bool = True
    has_guess_forward: bool = True
    overhead_ms: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "schedule", Schedule(self.schedule))
        if self.draft_length is None:
            object.__setattr__(self, "draft_length", self.block_size)
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}: give at least 1.")
        if not 1 <= self.draft_length <= self.block_size:
            raise ValueError(f"draft_length is {self.draft_length}: give 1 to block_size, {self.block_size}.")
        if self.num_guesses < 0:
            raise ValueError(f"num_guesses is {self.num_guesses}: give at least 0.")
        if self.overhead_ms < 0:
            raise ValueError(f"overhead_ms is {self.overhead_ms}: give at least 0.")
        if self.is_asynchronous and not self.has_masked_branches and self.num_guesses == 0:
            raise ValueError("An asynchronous plan has neither guesses nor masked branches: give it one of them.")

    @property
    def is_asynchronous(self) -> bool:
        return self.schedule is not Schedule.SERIAL

    def packed_passes(self, num_drafted: int) -> list[tuple[int, int]]:
        """
        Tokens and logits of each forward that a packed draft takes while so many draft tokens are verified: after any
        verdict the cache lacks them and the token before them.
        """
        num_verdicts = num_drafted + 1
        num_branches = num_verdicts * (self.has_masked_branches + self.num_guesses)
        slots = num_branches * self.block_size
        if self.num_guesses and self.has_guess_forward:
            return [(num_verdicts, num_verdicts), (slots, slots)]
        return [(num_verdicts + slots, slots)]

    def serial_pass(self, num_accepted: int) -> tuple[int, int]:
        """Tokens and logits of a draft after a verdict: the accepted tokens, the bonus, and mask slots."""
        return num_accepted + self.block_size, self.draft_length


@dataclass(frozen=True)
class RoundKind:
    """A share of the rounds: those that verify a draft of `draft_length` tokens with these chances of acceptance."""

    probability: float
    slot_acceptance: tuple[float, ...]

    @property
    def draft_length(self) -> int:
        return len(self.slot_acceptance)


def round_kinds(plan: Plan, profile: AcceptanceProfile) -> list[RoundKind]:
    """The kinds of rounds of a plan: by whether the bonus of the round before was guessed."""
    seeing = first_slots(profile.slots, plan.draft_length)
    if not plan.is_asynchronous:
        return [RoundKind(1.0, seeing)]
    hit_rate = profile.hit_rate(plan.num_guesses)
    other = first_slots(profile.masked_slots, plan.draft_length) if plan.has_masked_branches else ()
    kinds = [RoundKind(hit_rate, seeing), RoundKind(1 - hit_rate, other)]
    return [kind for kind in kinds if kind.probability > 0]


@dataclass(frozen=True)
class Prediction:
    """
    Attributes:
        tokens_per_round (`float`): Expected, bonus included.
        round_ms (`float`): Expected.
        draft_ms, verify_ms (`float`): Of a round's drafting and of its verification, each alone.
        plain_ms (`float`): Of a token without drafts.
    """

    tokens_per_round: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    plain_ms: float

    @property
    def ms_per_token(self) -> float:
        return self.round_ms / self.tokens_per_round

    @property
    def tokens_per_second(self) -> float:
        """Of each sequence."""
        return 1e3 / self.ms_per_token

    @property
    def speedup(self) -> float:
        """Against plain decoding."""
        return self.plain_ms / self.ms_per_token


def overlapped_ms(verification: Demand, passes: Sequence[Demand]) -> float:
    """Time until a verification and the drafter's passes, one after another, have both ended on one device."""
    elapsed_ms, left_ms = 0.0, verification.alone_ms  # of the verification, as if it were alone
    for draft in passes:
        slowdown = _slowdown(verification, draft)
        together_ms = min(left_ms, draft.alone_ms)
        elapsed_ms += slowdown * together_ms + (draft.alone_ms - together_ms)
        left_ms -= together_ms
    return elapsed_ms + left_ms


def _slowdown(first: Demand, second: Demand) -> float:
    """By which two forwards that run at once are slowed, so that no resource is used beyond what it has."""
    memory = first.memory_ms / first.alone_ms + second.memory_ms / second.alone_ms
    compute = first.compute_ms / first.alone_ms + second.compute_ms / second.alone_ms
    return max(1.0, memory, compute)


def predict(target, drafter, profile: AcceptanceProfile, plan: Plan, plain_overhead_ms: float = 0.0) -> Prediction:
    """
    What a plan gives.

    Args:
        target, drafter ([`RooflineForward`] or [`MeasuredForward`]):
            Whose `demand(num_tokens, num_logits)` says what a forward needs.
        profile ([`AcceptanceProfile`]): How good the drafts are.
        plan ([`Plan`]): The way to draft.
        plain_overhead_ms (`float`, *optional*, defaults to 0): Of a plain token, outside the model.
    """
    plain_ms = target.demand(1, 1).alone_ms + plain_overhead_ms
    kinds = round_kinds(plan, profile)
    emitted = draft_ms = verify_ms = round_ms = 0.0
    for kind in kinds:
        verification = target.demand(kind.draft_length + 1, kind.draft_length + 1)
        if plan.is_asynchronous:
            passes = [drafter.demand(*sizes) for sizes in plan.packed_passes(kind.draft_length)]
            drafting = sum(draft.alone_ms for draft in passes)
            if plan.schedule is Schedule.TWO_DEVICES:
                both = max(verification.alone_ms, drafting)
            else:
                both = overlapped_ms(verification, passes)
        else:
            # The next draft takes in what this round accepted.
            drafting = sum(
                chance * drafter.demand(*plan.serial_pass(num_accepted)).alone_ms
                for num_accepted, chance in enumerate(verdict_law(kind.slot_acceptance))
            )
            both = verification.alone_ms + drafting
        emitted += kind.probability * tokens_per_round(kind.slot_acceptance)
        draft_ms += kind.probability * drafting
        verify_ms += kind.probability * verification.alone_ms
        round_ms += kind.probability * both
    return Prediction(emitted, round_ms + plan.overhead_ms, draft_ms, verify_ms, plain_ms)


def needed_tokens_per_round(speedup: float, round_ms: float, plain_ms: float) -> float:
    """Tokens of a round that a speedup over plain decoding implies."""
    return speedup * round_ms / plain_ms


def predict_lookup(target, emitted: float, num_drafted: int = 10, overhead_ms: float = 0.0) -> Prediction:
    """
    Prompt lookup, whose drafts cost nothing but their verification.

    Args:
        target: As in [`predict`].
        emitted (`float`): Tokens of a round, as measured.
        num_drafted (`int`, *optional*, defaults to 10): Draft tokens of a round.
        overhead_ms (`float`, *optional*, defaults to 0): Of a round, outside the model.
    """
    verify_ms = target.demand(num_drafted + 1, num_drafted + 1).alone_ms
    return Prediction(emitted, verify_ms + overhead_ms, 0.0, verify_ms, target.demand(1, 1).alone_ms)


__all__ = [
    "Plan",
    "Prediction",
    "RoundKind",
    "Schedule",
    "needed_tokens_per_round",
    "overlapped_ms",
    "predict",
    "predict_lookup",
    "round_kinds",
]
