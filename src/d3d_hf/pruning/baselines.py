"""Simpler ways to choose the layers that go, which progressive pruning has to beat."""

import torch

from ..model.backbones import resolve_kept_layers
from .removal import prunable_layers
from .scoring import CalibrationSet, entering_hidden_states


BASELINES = ("evenly", "from_end", "block_influence")


def removed_evenly(num_layers: int, num_removed: int) -> list[int]:
    """Those left are evenly spread, first and last among them."""
    kept = resolve_kept_layers(num_layers - num_removed, num_layers)
    return [index for index in range(num_layers) if index not in kept]


def removed_from_end(num_layers: int, num_removed: int) -> list[int]:
    return list(range(num_layers - num_removed, num_layers))


def removed_by_influence(influence: list[float], num_removed: int) -> list[int]:
    """Those of least block influence, all at once."""
    return sorted(sorted(range(len(influence)), key=lambda index: influence[index])[:num_removed])


@torch.no_grad()
def block_influence(drafter, calibration: CalibrationSet) -> list[float]:
    """
    How much each layer turns the hidden states: one minus the cosine between what enters and what leaves it, averaged
    over all tokens of the calibration passes (arXiv 2403.03853).

    Args:
        drafter ([`D3DDrafterForCausalLM`]): In eval mode.
        calibration ([`CalibrationSet`]): Texts and positions.

    Returns:
        `list[float]`, one per layer.
    """
    totals, count = torch.zeros(len(prunable_layers(drafter)), dtype=torch.float64), 0
    for number in range(calibration.num_batches):
        batch = calibration.batch(number, drafter.device)
        is_token = batch.layout.branch_ids >= 0
        states = [state[is_token].float() for state in entering_hidden_states(drafter, batch)]
        for layer, (entering, leaving) in enumerate(zip(states, states[1:])):
            totals[layer] += float((1 - torch.cosine_similarity(entering, leaving, dim=-1)).sum())
        count += int(is_token.sum())
    return (totals / count).tolist()


__all__ = ["BASELINES", "block_influence", "removed_by_influence", "removed_evenly", "removed_from_end"]
