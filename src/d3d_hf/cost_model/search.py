"""The best block size, draft length, guesses and depth, by trying them all."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from .acceptance import AcceptanceProfile
from .schedules import Plan, Prediction, Schedule, predict


@dataclass(frozen=True)
class Choice:
    """
    Attributes:
        plan ([`Plan`]): The way to draft.
        num_layers (`int`): Of the drafter.
        prediction ([`Prediction`]): What it gives.
    """

    plan: Plan
    num_layers: int
    prediction: Prediction


def best_choice(
    target,
    drafter_of: Callable[[int], object],
    profiles: Mapping[int, AcceptanceProfile],
    schedule: Schedule,
    block_sizes: Iterable[int],
    draft_lengths: Iterable[int] | None = None,
    guess_counts: Iterable[int] = (0, 1, 2, 3),
    base: Plan | None = None,
    plain_overhead_ms: float = 0.0,
) -> Choice:
    """
    The fastest plan of one schedule. A slot's chance of acceptance is taken not to hang on how many slots follow it.

    Args:
        target: As in [`predict`].
        drafter_of (`Callable`): The drafter's forward for a number of layers.
        profiles (mapping of `int` to [`AcceptanceProfile`]): How good the drafter is at each depth to try.
        schedule ([`Schedule`]): Order of drafting and verifying.
        block_sizes (iterable of `int`): Block sizes to try.
        draft_lengths (iterable of `int`, *optional*): Draft lengths to try; every one up to the block size by default.
        guess_counts (iterable of `int`, *optional*, defaults to 0 to 3): Asynchronous: guesses to try.
        base ([`Plan`], *optional*): Whose other settings hold.
        plain_overhead_ms (`float`, *optional*, defaults to 0): As in [`predict`].

    Raises:
        ValueError: Nothing is left to try.
    """
    base = base or Plan(schedule, 1)
    draft_lengths = None if draft_lengths is None else sorted(set(draft_lengths))
    guess_counts = (0,) if schedule is Schedule.SERIAL else tuple(guess_counts)
    best = None
    for num_layers, profile in profiles.items():
        drafter = drafter_of(num_layers)
        for block_size in block_sizes:
            for length in draft_lengths or range(1, block_size + 1):
                for num_guesses in guess_counts:
                    if length > block_size or (num_guesses == 0 and not base.has_masked_branches):
                        continue
                    plan = replace(
                        base,
                        schedule=schedule,
                        block_size=block_size,
                        draft_length=length,
                        num_guesses=num_guesses,
                    )
                    prediction = predict(target, drafter, profile, plan, plain_overhead_ms)
                    if best is None or prediction.speedup > best.prediction.speedup:
                        best = Choice(plan, num_layers, prediction)
    if best is None:
        raise ValueError("No plan is left to try: give a depth, a block size, and a draft length within it.")
    return best


__all__ = ["Choice", "best_choice"]
