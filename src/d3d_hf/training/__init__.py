"""Training of drafters: data, examples, losses, the trainer, and acceptance as a metric."""

from .arguments import D3DTrainingArguments
from .responses import check_responses, load_responses
from .trainer import D3DTrainer


__all__ = ["D3DTrainer", "D3DTrainingArguments", "check_responses", "load_responses"]
