"""Training of drafters: data, examples, losses, the trainer, and acceptance as a metric."""

from .arguments import D3DTrainingArguments
from .responses import check_responses, load_responses


__all__ = ["D3DTrainer", "D3DTrainingArguments", "check_responses", "load_responses"]


def __getattr__(name: str):
    """The trainer is imported when it is asked for: it needs peft, which measuring does not."""
    if name == "D3DTrainer":
        from .trainer import D3DTrainer

        return D3DTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
