"""Types of command line arguments whose errors say what to give instead."""

import argparse
import math
from collections.abc import Callable


def whole_number(low: int) -> Callable[[str], int]:
    """A type for argparse: a whole number of at least `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low:
            raise argparse.ArgumentTypeError(f"{text!r} was given: give a whole number of at least {low}")
        return value

    return parse


def real_number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: a finite number from `low` to `high`."""
    wanted = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r} was given: give a number {wanted}")
        return value

    return parse


def one_line(error: BaseException, max_length: int = 300) -> str:
    """An exception's message without line breaks, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else f"{text[:max_length].rstrip()} ..."


__all__ = ["one_line", "real_number", "whole_number"]
