"""Asynchronous packed drafting: the next block is drafted for every verdict while the target verifies this one."""

from .generator import AsyncCandidateGenerator
from .packed_drafts import Branch, PackedDrafts, PackedSession, plan_branches
from .worker import InlineWorker, ThreadWorker


__all__ = [
    "AsyncCandidateGenerator",
    "Branch",
    "InlineWorker",
    "PackedDrafts",
    "PackedSession",
    "ThreadWorker",
    "plan_branches",
]
