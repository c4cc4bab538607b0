"""Asynchronous packed drafting: the next block is drafted for every verdict while the target verifies this one."""

from .auto import AutoCandidateGenerator
from .generator import AsyncCandidateGenerator
from .mode_selector import ModeSelector
from .packed_drafts import Branch, PackedDrafts, PackedSession, plan_branches
from .worker import InlineWorker, ThreadWorker


__all__ = [
    "AsyncCandidateGenerator",
    "AutoCandidateGenerator",
    "Branch",
    "InlineWorker",
    "ModeSelector",
    "PackedDrafts",
    "PackedSession",
    "ThreadWorker",
    "plan_branches",
]
