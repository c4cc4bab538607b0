"""What the package adds to this folder, whose code runs without it where it came with a repository."""

from collections.abc import Callable
from typing import Any


class Extensions:
    """The package's `__init__` fills these in; nothing in this folder imports what they are."""

    # (drafter, max_context): compiles ahead
    warm_up: Callable | None = None
    # (logits, vocab_size, never_drafted): the fused greedy choice on GPUs
    choose_tokens: Callable | None = None

    @staticmethod
    def storage_for(drafter, compile_drafter: bool | str) -> Any:
        """KV storage for a session whose passes are to run compiled; `None`: they run eagerly."""

    @staticmethod
    def count_eager(drafter, seconds: float):
        """Told how long a generation has drafted eagerly, which decides when compiling pays."""


extensions = Extensions()

__all__ = ["extensions"]
