"""Where a pruning stands, for whoever waits for it."""

from dataclasses import dataclass


@dataclass
class Progress:
    """
    Where a pruning stands.

    Attributes:
        step (`int`): Removals so far, and the one being worked on.
        num_steps (`int`, *optional*): `None` where it is not known beforehand.
        layer (`int`, *optional*): Original index of the layer that was just left out, if one was.
        done, total (`int`): Layers run; the total covers this step alone where the number of steps is not known.
        num_recalled (`int`): Of `done`, what an earlier run had done.
    """

    step: int
    num_steps: int | None
    layer: int | None = None
    done: int = 0
    total: int = 0
    num_recalled: int = 0


__all__ = ["Progress"]
