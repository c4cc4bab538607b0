"""Simpler ways to choose the layers that go, which progressive pruning has to beat."""

from collections.abc import Sequence

import torch

from ..model.backbones import resolve_kept_layers
from .measurements import Measurements
from .removal import prunable_layers, skip_layers
from .scoring import Accepted, CalibrationSet, entering_hidden_states


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


def compare_with_baselines(
    steps: Sequence[dict],
    full: Accepted,
    drafter,
    indices: list[int],
    measurements: Measurements,
    is_trained: bool,
) -> list[dict]:
    """
    Simpler choices of as many layers, on the same evaluation rows.

    Args:
        steps (sequence of `dict`): Of progressive pruning, those to compare; with what was `accepted` after each.
        full ([`Accepted`]): With all layers.
        drafter ([`D3DDrafterForCausalLM`]): With all layers, as it is measured.
        indices (`list[int]`): Original indices of its layers.
        measurements ([`Measurements`]): Of this pruning.
        is_trained (`bool`): Whether the progressively pruned drafter had a recovery.

    Returns:
        `list[dict]`, one per step.
    """
    if not steps:
        return []
    results, evaluation, num_layers = measurements.results, measurements.evaluation, measurements.num_layers
    influence = results.recall("influence", lambda: block_influence(drafter, measurements.calibration))
    ways = (
        lambda count: removed_evenly(num_layers, count),
        lambda count: removed_from_end(num_layers, count),
        lambda count: removed_by_influence(influence, count),
    )
    comparisons = []
    for step in steps:
        count = step["num_removed"]
        by = {"progressive": {name: step[name] for name in ("acceptance_length", "retention", "retention_interval")}}
        for name, way in zip(BASELINES, ways):
            removed = way(count)

            def compute(removed=removed):
                with skip_layers(drafter, removed):
                    return measurements.accepted(drafter, evaluation).to_lists()

            accepted = Accepted.from_lists(results.recall(f"{name}_{count:03d}", compute))
            by[name] = {
                "removed_layers": [indices[layer] for layer in removed],
                "acceptance_length": accepted.length,
                "retention": accepted.retention(full),
                "retention_interval": accepted.retention_interval(full),
                # Above 1: progressive pruning keeps more, on the same texts.
                "progressive_over_this": step["accepted"].retention(accepted) if accepted.tokens.sum() else None,
                "progressive_over_this_interval": (
                    step["accepted"].retention_interval(accepted) if accepted.tokens.sum() else None
                ),
            }
        comparisons.append(
            {
                "num_removed": count,
                "best": max(by, key=lambda name: by[name]["acceptance_length"]),
                "is_progressive_trained": is_trained,
                "by": by,
            }
        )
    return comparisons


__all__ = [
    "BASELINES",
    "block_influence",
    "compare_with_baselines",
    "removed_by_influence",
    "removed_evenly",
    "removed_from_end",
]
