"""Where the next draft comes from, automatically: round by round the way that emits most tokens per second here."""

import time

import torch

from ..model.generation_hook import Call
from .async_drafts import AsyncDrafts
from .draft_tree import DraftTree
from .drafts import Drafts
from .mode_selector import ModeSelector


class AutoDrafts(AsyncDrafts):
    """
    Measures the target's forward, synchronous drafts and packed passes in the first rounds and goes on with the
    fastest of drafting asynchronously, synchronously or not at all; see [`ModeSelector`]. The first round runs the
    target's prefill alone.

    Args:
        call, takes_trees: As in [`Drafts`].
    """

    mode = "auto"

    def __init__(self, call: Call, takes_trees: bool = True):
        super().__init__(call, takes_trees)
        self._selector = ModeSelector()
        self.stats.mode_choices = self._selector.choices
        self._way = None
        self._round_start, self._length_before = None, 0
        self._passes = []  # (tokens fed, seconds) of synchronous drafts

    def next(self, text: torch.LongTensor, room: int) -> DraftTree:
        now = time.perf_counter()
        if self._round_start is not None:
            num_new_tokens = len(text) - self._length_before
            verify_s = now - self._verify_start
            self._selector.record(num_new_tokens, now - self._round_start, verify_s)
        self._way = self._selector.choose(self._least_async_seconds())
        if self._pending is None:
            self._session.prepare()  # before the clock starts: compiling is no part of what a round takes
        self._round_start, self._length_before = time.perf_counter(), len(text)
        return super().next(text, room)

    def _draft(self, text: torch.LongTensor, depth: int) -> DraftTree | None:
        if self._way == "async" and self._pending is not None:
            return super()._draft(text, depth)
        self._discard_pending()
        self._branch_logits = None
        if self._way == "none":
            return None
        num_fed = text.shape[0] - self._session.num_cached + self._block_size - 1
        start = time.perf_counter()
        tree = Drafts._draft(self, text, depth)
        tree = tree or DraftTree.empty()
        tree.tokens.cpu()  # waits for the device
        self._passes.append((num_fed, time.perf_counter() - start))
        return tree

    def _prepare_next(self, text: torch.LongTensor, tree: DraftTree, room: int):
        if self._way == "async":
            super()._prepare_next(text, tree, room)

    def _discard_pending(self):
        """Lets the packed pass end: the session is not to be used meanwhile. The caller's CPU threads come back."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._take(pending)
        self._cpu_share.restore()

    def _least_async_seconds(self) -> float | None:
        """
        What an asynchronous round would take at least: the verification beside it, or the packed pass, whose time is
        guessed from those of passes over more and fewer tokens.
        """
        verify_s = self._selector.mean_verify_seconds
        num_packed = self.options.num_packed_tokens(self._block_size)
        if verify_s is None or len(self._passes) < 2 or not self._session.would_pack_compiled(num_packed):
            return None
        num_fed, seconds = min(self._passes[1:], key=lambda fed: fed[1])
        most_fed, most_seconds = self._passes[0]  # the prompt's
        slope = 0.0
        if most_fed > 2 * num_fed:
            slope = max(0.0, (most_seconds - seconds) / (most_fed - num_fed))
        return max(verify_s, seconds + slope * (num_packed - num_fed))


__all__ = ["AutoDrafts"]
