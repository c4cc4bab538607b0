"""What is wrong with a command line, in one line, and types of arguments that say it."""

import argparse
import json
import math
from collections.abc import Callable


class UsageError(Exception):
    """What the user asked for cannot be done: one line that names the value and what to give instead."""


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


def template_settings(pairs: list[str]) -> dict:
    """The settings for a chat template that --template-arg KEY=VALUE gave."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--template-arg {pair!r} is no KEY=VALUE: give one like enable_thinking=false")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return settings


def option(name: str) -> str:
    """How an argument is written on the command line."""
    return "--" + name.replace("_", "-")


def one_line(error: BaseException, max_length: int = 300) -> str:
    """An exception's message without line breaks, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else f"{text[:max_length].rstrip()} ..."


__all__ = ["UsageError", "one_line", "option", "real_number", "template_settings", "whole_number"]
