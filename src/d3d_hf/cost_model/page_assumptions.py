"""What docs/scaling.md and docs/when-it-pays.md both take for granted, as the cost model takes it."""

import functools
from dataclasses import replace

from .acceptance import AcceptanceProfile
from .forward_times import RooflineForward
from .hardware import HARDWARE
from .schedules import Plan, Schedule
from .shapes import shape_config


CONTEXT = 1024
SLOT_ACCEPTANCE = 0.85
PRUNED_RETENTION = 0.99
BLOCK_SIZES = (8, 16)


@functools.cache
def assumed_forward(
    shape: str, hardware: str = "h200", num_layers: int | None = None, batch_size: int = 1, context: int = CONTEXT
) -> RooflineForward:
    device = HARDWARE[hardware.removeprefix("2 x ")]
    if hardware.startswith("2 x "):
        device = replace(device, peak_bandwidth=2 * device.peak_bandwidth, peak_flops=2 * device.peak_flops)
    return RooflineForward(shape_config(shape), device, context, batch_size, num_layers)


def assumed_profile(block_size: int, is_pruned: bool = False) -> AcceptanceProfile:
    profile = AcceptanceProfile((SLOT_ACCEPTANCE,) * block_size)
    return profile.retaining(PRUNED_RETENTION) if is_pruned else profile


def assumed_plan(schedule: Schedule, block_size: int, num_guesses: int = 1) -> Plan:
    return Plan(schedule, block_size, num_guesses=0 if schedule is Schedule.SERIAL else num_guesses)


__all__ = [
    "BLOCK_SIZES",
    "CONTEXT",
    "PRUNED_RETENTION",
    "SLOT_ACCEPTANCE",
    "assumed_forward",
    "assumed_plan",
    "assumed_profile",
]
