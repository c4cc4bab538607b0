"""Training of drafters: examples, losses, the trainer, and acceptance as a metric."""

from .arguments import D3DTrainingArguments
from .trainer import D3DTrainer


__all__ = ["D3DTrainer", "D3DTrainingArguments"]
