"""From the chance of each draft token to tokens per round.

A profile holds *conditional* probabilities: entry `j` is the chance that draft token `j` is accepted if all before it
are. A verification keeps the longest accepted prefix and adds one token of the target's own, so a round of a draft of
`g` tokens emits

    1 + p_1 + p_1 p_2 + ... + p_1 ... p_g    tokens on average.

Rounds are taken as independent of each other. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass


# Of the embedded target's drafters (docs/lab-notes.md): tokens per round of a masked branch against a draft that sees
# the bonus, and the share of rounds in which one of so many guesses of the bonus is right. Assumptions elsewhere.
MASKED_RETENTION = 0.85
BONUS_HIT_RATES = (0.72, 0.85, 0.93)


def check_probabilities(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """
    `values` as a tuple of floats.

    Raises:
        ValueError: There are none, or one of them is no probability.
    """
    values = tuple(float(value) for value in values)
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{name} is {list(values)}: give at least one number, each from 0 to 1.")
    return values


def first_slots(slot_acceptance: Sequence[float], draft_length: int) -> tuple[float, ...]:
    """The probabilities of the first `draft_length` slots; slots beyond the end of the profile take its last value."""
    missing = draft_length - len(slot_acceptance)
    return (*slot_acceptance[:draft_length], *slot_acceptance[-1:] * max(missing, 0))


def survival(slot_acceptance: Sequence[float]) -> list[float]:
    """The chance that the draft is accepted up to each slot, that slot included: the running product."""
    chances, product = [], 1.0
    for probability in slot_acceptance:
        product *= probability
        chances.append(product)
    return chances


def tokens_per_round(slot_acceptance: Sequence[float]) -> float:
    """Expected tokens of a round, the bonus included."""
    return 1 + sum(survival(slot_acceptance))


def verdict_law(slot_acceptance: Sequence[float]) -> list[float]:
    """The chance of each number of accepted tokens, from none to all: `len(slot_acceptance) + 1` numbers."""
    reached = [1.0, *survival(slot_acceptance)]
    return [here - beyond for here, beyond in zip(reached, [*reached[1:], 0.0])]


def with_tokens_per_round(slot_acceptance: Sequence[float], wanted: float) -> tuple[float, ...]:
    """
    The profile with every slot's chance scaled by one factor, at most to 1, so that a round emits `wanted` tokens.

    Raises:
        ValueError: No factor gives that many.
    """
    most = tokens_per_round([float(p > 0) for p in slot_acceptance])
    if not 1 <= wanted <= most + 1e-9:
        raise ValueError(
            f"{wanted:.3f} tokens per round was asked of a draft of {len(slot_acceptance)} tokens: give 1 to {most:g}."
        )

    def scaled(factor: float) -> tuple[float, ...]:
        return tuple(min(1.0, factor * p) for p in slot_acceptance)

    low, high = 0.0, 1 / min((p for p in slot_acceptance if p > 0), default=1.0)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(scaled(middle)) < wanted else (low, middle)
    return scaled(high)


def constant_profile(wanted: float, draft_length: int) -> tuple[float, ...]:
    """The profile of equal chances with which a round of so long a draft emits `wanted` tokens."""
    return with_tokens_per_round((1.0,) * draft_length, wanted)


@dataclass(frozen=True)
class AcceptanceProfile:
    """
    How good the drafts of one drafter are.

    Args:
        slots (sequence of `float`): Of a draft that sees the bonus: a synchronous one, or a guess that is right.
        masked_slots (sequence of `float`, *optional*):
            Of a branch that does not see the bonus. By default `slots`, scaled to `MASKED_RETENTION` of its tokens per
            round.
        bonus_hit_rates (sequence of `float`, *optional*, defaults to `BONUS_HIT_RATES`):
            The chance that the bonus is among one, two, ... guesses.

    Raises:
        ValueError: Something is no probability, or the hit rates fall.
    """

    slots: tuple[float, ...]
    masked_slots: tuple[float, ...] | None = None
    bonus_hit_rates: tuple[float, ...] = BONUS_HIT_RATES

    def __post_init__(self):
        slots = check_probabilities("slots", self.slots)
        masked = self.masked_slots
        if masked is None:
            wanted = max(1.0, MASKED_RETENTION * tokens_per_round(slots))
            masked = with_tokens_per_round(slots, wanted) if any(slots) else slots
        rates = check_probabilities("bonus_hit_rates", self.bonus_hit_rates)
        if list(rates) != sorted(rates):
            raise ValueError(f"bonus_hit_rates is {list(rates)}: more guesses cannot hit less, give rising numbers.")
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "masked_slots", check_probabilities("masked_slots", masked))
        object.__setattr__(self, "bonus_hit_rates", rates)

    def hit_rate(self, num_guesses: int) -> float:
        """The chance that the bonus is among so many guesses; more guesses than are known count as the last."""
        return 0.0 if num_guesses == 0 else self.bonus_hit_rates[min(num_guesses, len(self.bonus_hit_rates)) - 1]

    def retaining(self, share: float) -> "AcceptanceProfile":
        """
        The profile of a drafter that keeps `share` of the acceptance length, as one with fewer layers does: each
        slot's chance falls by one factor, and the hit rates stay.

        Raises:
            ValueError: `share` is not above 0, or leads beyond certain acceptance.
        """

        def kept(slots):
            return with_tokens_per_round(slots, 1 + share * (tokens_per_round(slots) - 1)) if any(slots) else slots

        if share <= 0:
            raise ValueError(f"The retained share of the acceptance length is {share}: give a number above 0.")
        return AcceptanceProfile(kept(self.slots), kept(self.masked_slots), self.bonus_hit_rates)


__all__ = [
    "BONUS_HIT_RATES",
    "MASKED_RETENTION",
    "AcceptanceProfile",
    "check_probabilities",
    "constant_profile",
    "first_slots",
    "survival",
    "tokens_per_round",
    "verdict_law",
    "with_tokens_per_round",
]
