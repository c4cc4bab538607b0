"""Benchmarks: methods measured side by side on prompts, statistics, results as JSON, table, page and plots."""

from .methods import METHOD_NAMES, Contestants, Method, parse_methods
from .report import summarise
from .runner import RowStore, Runner
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
