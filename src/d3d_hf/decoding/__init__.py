"""Asynchronous packed drafting: the next block is drafted for every verdict while the target verifies this one."""

from .async_generator import AsyncCandidateGenerator
from .auto import AutoCandidateGenerator
from .mode_selector import ModeSelector
from .packed_drafts import PackedDrafts, PackedSession
from .planner import Branch, Calibration, plan_branches
from .worker import InlineWorker, ThreadWorker


__all__ = [
    "AsyncCandidateGenerator",
    "AutoCandidateGenerator",
    "Branch",
    "Calibration",
    "InlineWorker",
    "ModeSelector",
    "PackedDrafts",
    "PackedSession",
    "ThreadWorker",
    "plan_branches",
]
