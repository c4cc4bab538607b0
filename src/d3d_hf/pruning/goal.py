"""When a pruning stops."""

from dataclasses import dataclass


@dataclass
class PruningGoal:
    """
    When to stop removing layers: at the first of those given.

    Args:
        num_removed (`int`, *optional*): After so many removals.
        min_retention (`float`, *optional*):
            Before the removal that would leave less than this share of the full drafter's acceptance length, measured
            on the evaluation rows.
        max_draft_ms (`float`, *optional*):
            As soon as a packed pass takes no longer than this on this machine: see [`pass_times`].

    Raises:
        ValueError: None is given, or one is out of range.
    """

    num_removed: int | None = None
    min_retention: float | None = None
    max_draft_ms: float | None = None

    def __post_init__(self):
        if all(value is None for value in vars(self).values()):
            raise ValueError("Nothing says when to stop: give num_removed, min_retention or max_draft_ms.")
        if self.num_removed is not None and self.num_removed < 1:
            raise ValueError(f"num_removed is {self.num_removed}: give at least 1.")
        if self.min_retention is not None and not 0 < self.min_retention <= 1:
            raise ValueError(f"min_retention is {self.min_retention}: give a share above 0 and at most 1, as 0.99.")
        if self.max_draft_ms is not None and not self.max_draft_ms > 0:
            raise ValueError(f"max_draft_ms is {self.max_draft_ms}: give a positive number of milliseconds.")


__all__ = ["PruningGoal"]
