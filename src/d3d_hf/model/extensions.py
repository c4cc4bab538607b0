"""What the package adds to this folder, whose code runs without it where it came with a repository.

The package's `__init__` fills these in; nothing here imports what they are.
"""


class Extensions:
    """One object, imported by name: code that is copied from a repository follows no other import of its folder."""

    warm_up = None  # (drafter, max_context): compiles ahead
    choose_tokens = None  # (logits, vocab_size, never_drafted): the fused greedy choice on GPUs

    @staticmethod
    def storage_for(drafter, compile_drafter: bool | str):
        """KV storage for a session whose passes are to run compiled; `None`: they run eagerly."""
        return None

    @staticmethod
    def count_eager(drafter, seconds: float):
        """Told how long a generation has drafted eagerly, which decides when compiling pays."""


extensions = Extensions()

__all__ = ["Extensions", "extensions"]
