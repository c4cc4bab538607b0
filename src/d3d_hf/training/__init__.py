"""Training of drafters: data, examples, losses, the trainer, and acceptance as a metric."""

import importlib


# Imported when they are asked for: the trainer needs peft, which measuring does not, and the options of the command
# line need nothing.
_HOMES = {
    "D3DTrainer": "trainer",
    "D3DTrainingArguments": "arguments",
    "check_responses": "responses",
    "load_responses": "responses",
}

__all__ = ["D3DTrainer", "D3DTrainingArguments", "check_responses", "load_responses"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
