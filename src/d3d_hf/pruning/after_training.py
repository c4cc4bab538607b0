"""Pruning of the drafter that a trainer has trained, with the trainer's own data."""

import os
from collections.abc import Mapping, Sequence

from ..training.trainer import D3DTrainer
from .goal import PruningGoal
from .loop import prune_drafter
from .recovery import Recovery


def prune_after_training(
    trainer: D3DTrainer,
    calibration: Mapping[str, Sequence[Mapping]],
    evaluation: Mapping[str, Sequence[Mapping]],
    goal: PruningGoal,
    output_dir: str | None = None,
    recovery_steps: int = 0,
    **kwargs,
) -> tuple:
    """
    Prunes a trainer's drafter layer by layer: [`prune_drafter`] with the trainer's arguments and training data, which
    recover it by `recovery_steps` steps after each removal. The trainer's own model is not changed.

    Args:
        trainer ([`D3DTrainer`]): Whose drafter it is.
        calibration, evaluation, goal, kwargs: As in `prune_drafter`.
        output_dir (`str`, *optional*): Default: `pruned` in the trainer's.
        recovery_steps (`int`, *optional*, defaults to 0): 0 for no training.

    Returns:
        The pruned drafter and the report.
    """
    recovery = None
    if recovery_steps:
        recovery = Recovery(recovery_steps, trainer.args, trainer.train_dataset, trainer.processing_class)
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(drafter, "get_base_model"):
        drafter = drafter.get_base_model()
    output_dir = output_dir or os.path.join(trainer.args.output_dir, "pruned")
    kwargs.setdefault("processing_class", trainer.processing_class)
    return prune_drafter(drafter, calibration, evaluation, output_dir, goal, recovery, **kwargs)


__all__ = ["prune_after_training"]
