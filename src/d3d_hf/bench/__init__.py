"""Benchmarks: methods measured side by side on prompts, statistics, results as JSON, table, page and plots."""

from .methods import METHOD_NAMES, Contestants, Method, parse_methods
from .report import summarise
from .synthetic import ImposedAcceptance


__all__ = [
    "METHOD_NAMES",
    "Contestants",
    "ImposedAcceptance",
    "Method",
    "RowStore",
    "Runner",
    "parse_methods",
    "summarise",
]


def __getattr__(name: str):
    """What runs whole benchmarks is imported when it is asked for: it needs peft, unlike imposed acceptance."""
    if name in ("RowStore", "Runner"):
        from . import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
