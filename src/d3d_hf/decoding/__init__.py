"""What happens in `generate(..., assistant_model=drafter)`: draft, target pass, walk, commit. See loop.py."""

from .loop import LoopDoor, decode, make_drafts


__all__ = ["LoopDoor", "decode", "make_drafts"]
