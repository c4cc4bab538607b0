"""Arguments of drafter training, on top of transformers' own."""

from dataclasses import dataclass

from transformers import TrainingArguments

from .options import DrafterTrainingOptions


@dataclass
class D3DTrainingArguments(DrafterTrainingOptions, TrainingArguments):
    """`TrainingArguments` plus what is particular to drafters: the arguments of [`DrafterTrainingOptions`]."""

    def __post_init__(self):
        super().__post_init__()
        self.check()


__all__ = ["D3DTrainingArguments"]
