"""What the results of a pruning hang on: a run that was ended is taken up again only where all of it is the same."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from ..training.examples import to_example
from .goal import PruningGoal
from .recovery import Recovery


def pruning_settings(
    drafter,
    calibration: Mapping[str, Sequence[Mapping]],
    evaluation: Mapping[str, Sequence[Mapping]],
    goal: PruningGoal,
    recovery: Recovery | None,
    dtype: torch.dtype,
    processing_class,
    **options,
) -> dict:
    """The settings in a form that JSON can hold; models and rows by their digests, `options` as they are."""
    return {
        "drafter": _fingerprint(drafter),
        "calibration": {name: _digest(rows, processing_class) for name, rows in calibration.items()},
        "evaluation": {name: _digest(rows, processing_class) for name, rows in evaluation.items()},
        "goal": asdict(goal),
        "recovery": _recovery_settings(recovery),
        **options,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _digest(rows: Sequence[Mapping], processing_class) -> str:
    digest = hashlib.sha256()
    for row in rows:
        ids, prompt_length = to_example(row, processing_class)
        digest.update(json.dumps([prompt_length, *map(int, ids)]).encode())
    return digest.hexdigest()[:16]


def _fingerprint(drafter) -> str:
    """Tells drafters apart by their shapes and a few of their weights."""
    digest = hashlib.sha256()
    for name, parameter in drafter.named_parameters():
        if ".original_module." in name:  # what an adapter replaces as a whole, and is not stored with it
            continue
        few = parameter.detach().flatten()[:16].float().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + few)
    return digest.hexdigest()[:16]


def _recovery_settings(recovery: Recovery | None) -> dict | None:
    if recovery is None:
        return None
    names = (
        "ar_loss_weight",
        "block_loss_decay",
        "blocks_per_sequence",
        "chain_dropout",
        "denoising_mask_ratio",
        "gradient_accumulation_steps",
        "learning_rate",
        "per_device_train_batch_size",
        "seed",
        "visible_token_share",
        "weight_decay",
    )
    arguments = {name: getattr(recovery.arguments, name) for name in names}
    scheduler = recovery.arguments.lr_scheduler_type
    return {
        "num_steps": recovery.num_steps,
        "every": recovery.every,
        "rows": _digest(recovery.rows, recovery.processing_class),
        "lr_scheduler_type": getattr(scheduler, "value", scheduler),
        **arguments,
    }


__all__ = ["pruning_settings"]
