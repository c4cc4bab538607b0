"""Training after removals, with the same trainer and arguments as any other."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..training.arguments import D3DTrainingArguments
from ..training.trainer import D3DTrainer


@dataclass
class Recovery:
    """
    Trains a drafter a little after each removal: its adapter if it carries one, all weights otherwise.

    Args:
        num_steps (`int`): Optimizer steps of each training.
        arguments ([`D3DTrainingArguments`]): Of each training. Its `max_steps`, `output_dir` and saving are set here,
            and its seed moves on from one training to the next.
        rows (sequence of `Mapping`): Training data in one of the layouts of `training.examples`.
        processing_class (*optional*): Tokenizer, for rows of `messages`.
        every (`int`, *optional*, defaults to 1):
            Removals that share a training. After the last one there is a training in any case, if their number is
            known beforehand. Few long trainings recover more than many short ones.

    Raises:
        ValueError: No steps, no rows, or a training after every 0 removals.
    """

    num_steps: int
    arguments: D3DTrainingArguments
    rows: Sequence[Mapping]
    processing_class: object = None
    every: int = 1

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"num_steps of the recovery is {self.num_steps}: give at least 1, or no recovery.")
        if self.every < 1:
            raise ValueError(f"every is {self.every}: give the removals that share a training, at least 1.")
        if not len(self.rows):
            raise ValueError("The recovery training has no rows: give responses that the target wrote.")

    def train(self, drafter, number: int, folder: str):
        """
        The `number`-th training. What it does hangs on the drafter and on `number` alone.

        Args:
            drafter ([`D3DDrafterForCausalLM`]): Is trained in place and put back into eval mode.
            number (`int`): From 1.
            folder (`str`): For what the trainer may want to write.
        """
        arguments = copy.copy(self.arguments)
        arguments.max_steps, arguments.output_dir = self.num_steps, folder
        arguments.seed = self.arguments.seed + number
        arguments.data_seed = None
        arguments.save_strategy, arguments.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
        arguments.load_best_model_at_end = False
        uses_cache = drafter.config.use_cache if hasattr(drafter.config, "use_cache") else None
        for module in drafter.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module.set_adapter(module.active_adapters)  # frozen when it was loaded
        trainer = D3DTrainer(drafter, arguments, train_dataset=self.rows, processing_class=self.processing_class)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        drafter.zero_grad(set_to_none=True)
        if uses_cache is not None:
            drafter.config.use_cache = uses_cache
        drafter.eval()


__all__ = ["Recovery"]
