"""
The tables of docs/when-it-pays.md: which method is fastest, by device, sizes of the models, task and temperature.

Each function is given the folder of the measured results.
"""

from pathlib import Path

from .acceptance import AcceptanceProfile, constant_profile, first_slots, tokens_per_round
from .hardware import HARDWARE
from .inputs import read_json
from .markdown import markdown_table
from .page_assumptions import assumed_forward, assumed_plan, assumed_profile
from .schedules import Schedule, needed_tokens_per_round, predict, predict_lookup
from .search import best_choice


_LOOKUP_TOKENS = 10
# Share of a slot's chance of acceptance that is left at a temperature.
_TEMPERATURES = {0.0: 1.0, 0.7: 0.9, 1.0: 0.8}

_PAIRS = {
    # Device, target, drafter, layers of the drafter.
    "h200": (("qwen3-32b", "qwen3-1.7b"), ("qwen3-32b", "qwen3-8b"), ("qwen3-8b", "qwen3-1.7b"), ("qwen3-8b",) * 2),
    "rtx4090": (("qwen3-8b", "qwen3-1.7b"), ("qwen3-1.7b",) * 2),
    "cpu-2-cores": (("smollm2-1.7b", "smollm2-135m"), ("smollm2-360m", "smollm2-135m"), ("smollm2-135m",) * 2),
}
_DEVICE_NAMES = {"h200": "H200", "rtx4090": "RTX 4090", "cpu-2-cores": "2 CPU cores"}
_BLOCK_SIZE = 8
_STRONG = 6.0


def _tasks(results: Path) -> dict[str, tuple[float, float]]:
    """Tokens per round of a draft of 8 and of prompt lookup, by task, as the embedded target's drafters had them."""

    def measured(dataset: str) -> tuple[float, float]:
        rows = {row["method"]: row["tokens_per_round"] for row in _measured(results, dataset)}
        return rows["d3d-sync+cd"], rows["prompt-lookup"]

    arithmetic = measured("gsm8k")
    return {
        "conversation": measured("mt-bench"),
        "code": measured("humaneval"),
        "arithmetic": arithmetic,
        "arithmetic, stronger drafter": (_STRONG, arithmetic[1]),
    }


def _measured(results: Path, dataset: str) -> list[dict]:
    """Rows of a data set in the benchmark of all methods, of those that ran."""
    rows = read_json(results / f"bench-{dataset}.json")["results"]
    return [row for row in rows if row["dataset"] == dataset and row["num_prompts"]]


def paying_assumptions(results: Path) -> str:
    """What docs/when-it-pays.md takes for granted beyond docs/scaling.md."""
    measured = "measured on the 135M target (docs/results), taken for every size"
    rows = [
        (
            f"Tokens per round, {task}",
            f"{drafted:.2f} drafted in blocks of {_BLOCK_SIZE}, {looked_up:.2f} looked up",
            f"{_STRONG:.2f} is assumed" if drafted == _STRONG else measured,
        )
        for task, (drafted, looked_up) in _tasks(results).items()
    ]
    hardware = HARDWARE["cpu-2-cores"]
    rows += [
        (
            "Chance of a draft token at a temperature",
            ", ".join(f"{share:g} at {t:g}" for t, share in _TEMPERATURES.items()) + " of the greedy one",
            "assumed, for drafts and for prompt lookup alike",
        ),
        ("Prompt lookup", f"{_LOOKUP_TOKENS} draft tokens a round", "transformers' usual setting"),
        (
            "Two CPU cores",
            f"{hardware.bandwidth / 1e9:.1f} GB/s, {hardware.flops / 1e9:.0f} GFLOP/s",
            "compiled 135M target and its layers, docs/lab-notes.md",
        ),
        (
            "Draft length, guesses",
            f"the best up to {_BLOCK_SIZE}, and up to 3",
            "searched for each row",
        ),
    ]
    return markdown_table(("What", "Taken as", "Where from"), rows)


def _methods(device: str, target: str, drafter: str, emitted: float, looked_up: float, factor: float = 1.0) -> dict:
    """Speedups by method, best settings each."""
    target, drafter = assumed_forward(target, device), assumed_forward(drafter, device)

    def at_temperature(slots):
        return tuple(factor * chance for chance in slots)

    slots = at_temperature(constant_profile(emitted, _BLOCK_SIZE))
    lookup = tokens_per_round(at_temperature(constant_profile(looked_up, _LOOKUP_TOKENS)))
    speedups = {
        "nothing": 1.0,
        "prompt lookup": predict_lookup(target, lookup, _LOOKUP_TOKENS).speedup,
    }
    for schedule, name in zip(Schedule, ("D3D sync", "D3D async", "D3D async, two GPUs"), strict=True):
        if schedule is Schedule.TWO_DEVICES and device.startswith("cpu"):
            continue
        layers = drafter.num_layers
        profiles = {layers: AcceptanceProfile(first_slots(slots, _BLOCK_SIZE))}
        choice = best_choice(target, lambda _: drafter, profiles, schedule, [_BLOCK_SIZE])
        speedups[name] = choice.prediction.speedup
    return speedups


def _ratio(device: str, target: str, drafter: str) -> str:
    times = [assumed_forward(name, device).demand(1, 1).alone_ms for name in (drafter, target)]
    return f"{times[0] / times[1]:.2f}"


def _best(speedups: dict) -> str:
    on_one = {name: value for name, value in speedups.items() if "two GPUs" not in name}
    return max(on_one, key=on_one.get)


def by_task(results: Path) -> str:
    """Which method is fastest, by device, sizes and task."""
    rows = []
    for device, pairs in _PAIRS.items():
        for target, drafter in pairs:
            for task, (emitted, looked_up) in _tasks(results).items():
                speedups = _methods(device, target, drafter, emitted, looked_up)
                shown = [f"{value:.2f}" for name, value in speedups.items() if name != "nothing"]
                shown += [""] * (4 - len(shown))
                cells = (_DEVICE_NAMES[device], target, drafter, _ratio(device, target, drafter), task)
                rows.append((*cells, *shown, f"**{_best(speedups)}**"))
    header = ("Device", "Target", "Drafter", "Drafter's time", "Task", "Lookup", "Sync", "Async", "Async, two GPUs")
    return markdown_table((*header, "Fastest on one device"), rows)


def paying_measured(results: Path) -> str:
    """Measured speedups of drafting after the verdict and of prompt lookup, by task."""
    methods = ("prompt-lookup", "d3d-sync+cd")
    lines = []
    for dataset in ("gsm8k", "humaneval", "mt-bench"):
        speedups = {row["method"]: row["speedup"] for row in _measured(results, dataset)}
        best = max(speedups[name] for name in methods)
        lines.append(
            (dataset, *(f"**{speedups[m]:.2f}**" if speedups[m] == best else f"{speedups[m]:.2f}" for m in methods))
        )
    return markdown_table(("Prompts", "Prompt lookup", "D3D sync, drafter compiled"), lines)


def by_temperature(results: Path) -> str:
    """Which method is fastest, by temperature."""
    rows = []
    for device, (target, drafter) in (("h200", _PAIRS["h200"][0]), ("cpu-2-cores", _PAIRS["cpu-2-cores"][2])):
        for task, (emitted, looked_up) in list(_tasks(results).items())[:3]:
            for temperature, factor in _TEMPERATURES.items():
                speedups = _methods(device, target, drafter, emitted, looked_up, factor)
                shown = [f"{speedups[name]:.2f}" for name in ("prompt lookup", "D3D sync", "D3D async")]
                cells = (_DEVICE_NAMES[device], target, drafter, task, f"{temperature:g}")
                rows.append((*cells, *shown, f"**{_best(speedups)}**"))
    header = ("Device", "Target", "Drafter", "Task", "Temperature", "Lookup", "Sync", "Async", "Fastest on one device")
    return markdown_table(header, rows)


def break_even(results: Path) -> str:
    """Tokens per round that a draft of 8 needs to be as fast as plain decoding, and as prompt lookup."""
    looked_up = _tasks(results)["arithmetic"][1]
    rows = []
    for device, pairs in _PAIRS.items():
        for target, drafter in pairs:
            models = assumed_forward(target, device), assumed_forward(drafter, device)
            lookup = predict_lookup(models[0], looked_up, _LOOKUP_TOKENS).speedup
            cells = []
            for schedule in Schedule:
                if schedule is Schedule.TWO_DEVICES and device.startswith("cpu"):
                    cells.append("")
                    continue
                found = predict(*models, assumed_profile(_BLOCK_SIZE), assumed_plan(schedule, _BLOCK_SIZE))
                cells.append(
                    " / ".join(
                        f"{needed_tokens_per_round(speedup, found.round_ms, found.plain_ms):.1f}"
                        for speedup in (1.0, lookup)
                    )
                )
            rows.append((_DEVICE_NAMES[device], target, drafter, _ratio(device, target, drafter), *cells))
    return markdown_table(("Device", "Target", "Drafter", "Drafter's time", "Sync", "Async", "Async, two GPUs"), rows)


PAYING_TABLES = (
    paying_assumptions,
    paying_measured,
    by_task,
    by_temperature,
    break_even,
)


__all__ = ["PAYING_TABLES"]
