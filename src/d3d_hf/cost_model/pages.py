"""
The tables of docs/scaling.md and docs/when-it-pays.md, and writing them into the pages.

A page holds its prose and, between the lines `<!-- table: NAME -->` and `<!-- end -->`, what the function of that name
below gives. `d3d-hf predict --update-page` writes the tables anew; a test compares. All of it is predicted, from what
each page's table of assumptions says; the figures of docs/results that go in are read from there.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .acceptance import (
    BONUS_HIT_RATES,
    MASKED_RETENTION,
    AcceptanceProfile,
    constant_profile,
    first_slots,
    tokens_per_round,
)
from .forward_times import RooflineForward
from .hardware import HARDWARE
from .inputs import read_json
from .schedules import Plan, Schedule, needed_tokens_per_round, predict, predict_lookup
from .search import best_choice
from .shapes import shape_config


# Assumed on both pages.
CONTEXT = 1024
SLOT_ACCEPTANCE = 0.85
PRUNED_RETENTION = 0.99
BLOCK_SIZES = (8, 16)
LOOKUP_TOKENS = 10
# Share of a slot's chance of acceptance that is left at a temperature.
TEMPERATURES = {0.0: 1.0, 0.7: 0.9, 1.0: 0.8}

TARGETS = ("qwen3-8b", "qwen3-32b")
# Name in the tables, shape, layers, and whether some were removed.
DRAFTERS = (
    ("8B, 36 layers", "qwen3-8b", 36, False),
    ("8B, 31 layers", "qwen3-8b", 31, True),
    ("1.7B, 28 layers", "qwen3-1.7b", 28, False),
    ("1.7B, 24 layers", "qwen3-1.7b", 24, True),
)
_SCHEDULE_NAMES = {
    Schedule.SERIAL: "serial",
    Schedule.ONE_DEVICE: "one GPU",
    Schedule.TWO_DEVICES: "two GPUs",
}
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def rendered(text: str, results: Path) -> str:
    """
    A page with its tables written anew.

    Args:
        text (`str`): The page.
        results (`Path`): Folder of the measured results that go in.

    Raises:
        ValueError: The page has no tables, or one of an unknown name.
    """
    if not _MARKED.search(text):
        raise ValueError("the page has no lines <!-- table: NAME --> and <!-- end -->: mark where its tables stand.")

    def table(match: re.Match) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"the page has a table {name!r}: choose among {', '.join(TABLES)}.")
        return f"{match[1]}{TABLES[name](results)}\n{match[4]}"

    return _MARKED.sub(table, text)


def update_page(path: str | Path):
    """Writes the tables of a page anew; measured results come from the folder `results` beside it."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(rendered(text, path.parent / "results"), encoding="utf-8")


def _markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


@functools.cache
def _forward(
    shape: str, hardware: str = "h200", num_layers: int | None = None, batch_size: int = 1, context: int = CONTEXT
) -> RooflineForward:
    device = HARDWARE[hardware.removeprefix("2 x ")]
    if hardware.startswith("2 x "):
        device = replace(device, peak_bandwidth=2 * device.peak_bandwidth, peak_flops=2 * device.peak_flops)
    return RooflineForward(shape_config(shape), device, context, batch_size, num_layers)


def _profile(block_size: int, is_pruned: bool = False) -> AcceptanceProfile:
    profile = AcceptanceProfile((SLOT_ACCEPTANCE,) * block_size)
    return profile.retaining(PRUNED_RETENTION) if is_pruned else profile


def _plan(schedule: Schedule, block_size: int, num_guesses: int = 1) -> Plan:
    return Plan(schedule, block_size, num_guesses=0 if schedule is Schedule.SERIAL else num_guesses)


def scaling_assumptions(results: Path) -> str:
    """What docs/scaling.md takes for granted."""
    device = HARDWARE["h200"]
    hits = ", ".join(map(str, BONUS_HIT_RATES))
    return _markdown(
        ("What", "Taken as", "Where from"),
        [
            (
                "Bandwidth and arithmetic of an H200",
                f"{device.bandwidth / 1e12:.2f} TB/s, {device.flops / 1e12:.0f} TFLOP/s",
                f"{device.bandwidth_efficiency:g} and {device.flops_efficiency:g} of the data sheet, which a copy and "
                f"a large bf16 product reached",
            ),
            ("Lost between kernels", f"{1e3 * device.layer_latency_ms:g} us a layer", "assumed; CUDA graphs"),
            ("Two forwards at once on one GPU", "slow each other alike", "assumed; never better than the hardware"),
            ("Loop around the models", "0 ms", "an engine's; transformers' own takes more"),
            ("Weights and KV cache", f"16 bits, {CONTEXT} tokens of context, batch size 1", "unless the table says"),
            ("Chance of each draft token", f"{SLOT_ACCEPTANCE:g} if those before it are accepted", "assumed"),
            ("Layers removed", f"keep {PRUNED_RETENTION:g} of the acceptance length", "published for 5 of 36"),
            ("A masked branch", f"{MASKED_RETENTION:g} of the tokens per round", "measured, 135M drafter"),
            ("One, two, three guesses of the bonus", f"hit in {hits} of the rounds", "measured, 135M drafter"),
            ("Guesses", "one, from a first small forward", "unless the table says"),
        ],
    )


def forward_ms(results: Path) -> str:
    """Milliseconds of a forward against its tokens."""
    counts = (1, 9, 17, 81, 153, 324, 1000)
    models = [("Qwen3-32B", _forward("qwen3-32b"))]
    models += [(f"Qwen3-{name}", _forward(shape, num_layers=layers)) for name, shape, layers, _ in DRAFTERS]
    return _markdown(
        ("Tokens in the forward", *map(str, counts)),
        [(name, *(f"{model.demand(n, n).alone_ms:.2f}" for n in counts)) for name, model in models],
    )


def implied(results: Path) -> str:
    """Tokens per round that the published speedups imply."""
    published = {
        row["target"]: row
        for row in read_json(results / "published.json")["speedups"]
        if row["what"].startswith("average")
    }
    rows = []
    for target in TARGETS:
        name = f"Qwen/Qwen3-{target.removeprefix('qwen3-').upper()}"
        speedup = published[name]["d3d"]
        for drafter_name, shape, layers, is_pruned in DRAFTERS:
            cells = []
            for block_size in BLOCK_SIZES:
                for schedule in Schedule:
                    prediction = predict(
                        _forward(target),
                        _forward(shape, num_layers=layers),
                        _profile(block_size, is_pruned),
                        _plan(schedule, block_size),
                    )
                    needed = needed_tokens_per_round(speedup, prediction.round_ms, prediction.plain_ms)
                    cells.append(f"{needed:.1f}" if needed <= block_size + 1 else f"({needed:.1f})")
            rows.append((name.removeprefix("Qwen/"), f"{speedup:.2f}x", drafter_name, *cells))
    header = [f"B = {size}, {name}" for size in BLOCK_SIZES for name in _SCHEDULE_NAMES.values()]
    return _markdown(("Target", "Published", "Drafter", *header), rows)


def packing(results: Path) -> str:
    """What more branches cost and bring."""
    rows = []
    for target in TARGETS:
        for drafter_name, shape, layers, is_pruned in DRAFTERS:
            if is_pruned:
                continue
            for block_size in BLOCK_SIZES:
                serial = _predicted(target, shape, layers, _plan(Schedule.SERIAL, block_size), block_size)
                for num_guesses in (0, 1, 3):
                    one, two = (
                        _predicted(target, shape, layers, _plan(schedule, block_size, num_guesses), block_size)
                        for schedule in (Schedule.ONE_DEVICE, Schedule.TWO_DEVICES)
                    )
                    passes = _plan(Schedule.ONE_DEVICE, block_size, num_guesses).packed_passes(block_size)
                    rows.append(
                        (
                            target.removeprefix("qwen3-").upper(),
                            drafter_name,
                            block_size,
                            num_guesses,
                            sum(num_tokens for num_tokens, _ in passes),
                            f"{one.draft_ms:.1f}",
                            f"{one.verify_ms:.1f}",
                            f"{one.tokens_per_round:.2f}",
                            *(f"{prediction.speedup:.2f}" for prediction in (serial, one, two)),
                        )
                    )
    header = ("Target", "Drafter", "B", "Guesses", "Packed tokens", "Packed, ms", "Verify, ms", "Tokens per round")
    return _markdown((*header, *_SCHEDULE_NAMES.values()), rows)


def _predicted(target, shape, layers, plan, block_size, is_pruned=False, batch_size=1, context=CONTEXT):
    return predict(
        _forward(target, batch_size=batch_size, context=context),
        _forward(shape, num_layers=layers, batch_size=batch_size, context=context),
        _profile(block_size, is_pruned),
        plan,
    )


def _against(name: str, values: Sequence[int], targets=TARGETS) -> str:
    """Speedups of the three schedules, serial / one GPU / two GPUs, against one of the sizes of `_forward`."""
    rows = []
    for target in targets:
        for drafter_name, shape, layers, is_pruned in DRAFTERS:
            cells = []
            for value in values:
                speedups = (
                    _predicted(target, shape, layers, _plan(schedule, 8), 8, is_pruned, **{name: value}).speedup
                    for schedule in Schedule
                )
                cells.append(" / ".join(f"{speedup:.2f}" for speedup in speedups))
            rows.append((target.removeprefix("qwen3-").upper(), drafter_name, *cells))
    return _markdown(("Target", "Drafter", *map(str, values)), rows)


def by_batch_size(results: Path) -> str:
    """Speedups against the number of sequences."""
    return _against("batch_size", (1, 4, 16, 64))


def by_context(results: Path) -> str:
    """Speedups against the tokens in the cache."""
    return _against("context", (1024, 8192, 32768))


def second_gpu(results: Path) -> str:
    """The best of each schedule, and what a second GPU brings, per answer and per GPU."""
    rows = []
    for target in TARGETS:
        one_gpu_ms = _forward(target).demand(1, 1).alone_ms
        for drafter_name, shape, layers, is_pruned in DRAFTERS:
            best = {
                schedule: best_choice(
                    _forward(target),
                    lambda num_layers, shape=shape: _forward(shape, num_layers=num_layers),
                    {layers: _profile(16, is_pruned)},
                    schedule,
                    BLOCK_SIZES,
                    guess_counts=(0, 1, 2, 3),
                )
                for schedule in Schedule
            }
            one = max(best[Schedule.SERIAL], best[Schedule.ONE_DEVICE], key=lambda c: c.prediction.speedup)
            two = best[Schedule.TWO_DEVICES]
            gain = two.prediction.speedup / one.prediction.speedup
            settings = (
                f"{choice.prediction.speedup:.2f} ({choice.plan.draft_length} of {choice.plan.block_size}"
                + ("" if schedule is Schedule.SERIAL else f", {choice.plan.num_guesses} guesses")
                + ")"
                for schedule, choice in best.items()
            )
            split = predict(
                _forward(target, "2 x h200"),
                _forward(shape, "2 x h200", num_layers=layers),
                _profile(16, is_pruned),
                best[Schedule.SERIAL].plan,
            )
            names = (target.removeprefix("qwen3-").upper(), drafter_name)
            split_speedup = one_gpu_ms / split.ms_per_token
            rows.append((*names, *settings, f"{gain:.2f}", f"{gain / 2:.2f}", f"{split_speedup:.2f}"))
    header = ("Target", "Drafter", *_SCHEDULE_NAMES.values(), "Second GPU, faster by", "Tokens per GPU")
    return _markdown((*header, "Serial, both models split over two"), rows)


# docs/when-it-pays.md

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
            ", ".join(f"{share:g} at {t:g}" for t, share in TEMPERATURES.items()) + " of the greedy one",
            "assumed, for drafts and for prompt lookup alike",
        ),
        ("Prompt lookup", f"{LOOKUP_TOKENS} draft tokens a round", "transformers' usual setting"),
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
    return _markdown(("What", "Taken as", "Where from"), rows)


def _methods(device: str, target: str, drafter: str, emitted: float, looked_up: float, factor: float = 1.0) -> dict:
    """Speedups by method, best settings each."""
    target, drafter = _forward(target, device), _forward(drafter, device)

    def at_temperature(slots):
        return tuple(factor * chance for chance in slots)

    slots = at_temperature(constant_profile(emitted, _BLOCK_SIZE))
    lookup = tokens_per_round(at_temperature(constant_profile(looked_up, LOOKUP_TOKENS)))
    speedups = {
        "nothing": 1.0,
        "prompt lookup": predict_lookup(target, lookup, LOOKUP_TOKENS).speedup,
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
    times = [_forward(name, device).demand(1, 1).alone_ms for name in (drafter, target)]
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
    return _markdown((*header, "Fastest on one device"), rows)


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
    return _markdown(("Prompts", "Prompt lookup", "D3D sync, drafter compiled"), lines)


def by_temperature(results: Path) -> str:
    """Which method is fastest, by temperature."""
    rows = []
    for device, (target, drafter) in (("h200", _PAIRS["h200"][0]), ("cpu-2-cores", _PAIRS["cpu-2-cores"][2])):
        for task, (emitted, looked_up) in list(_tasks(results).items())[:3]:
            for temperature, factor in TEMPERATURES.items():
                speedups = _methods(device, target, drafter, emitted, looked_up, factor)
                shown = [f"{speedups[name]:.2f}" for name in ("prompt lookup", "D3D sync", "D3D async")]
                cells = (_DEVICE_NAMES[device], target, drafter, task, f"{temperature:g}")
                rows.append((*cells, *shown, f"**{_best(speedups)}**"))
    header = ("Device", "Target", "Drafter", "Task", "Temperature", "Lookup", "Sync", "Async", "Fastest on one device")
    return _markdown(header, rows)


def break_even(results: Path) -> str:
    """Tokens per round that a draft of 8 needs to be as fast as plain decoding, and as prompt lookup."""
    looked_up = _tasks(results)["arithmetic"][1]
    rows = []
    for device, pairs in _PAIRS.items():
        for target, drafter in pairs:
            models = _forward(target, device), _forward(drafter, device)
            lookup = predict_lookup(models[0], looked_up, LOOKUP_TOKENS).speedup
            cells = []
            for schedule in Schedule:
                if schedule is Schedule.TWO_DEVICES and device.startswith("cpu"):
                    cells.append("")
                    continue
                found = predict(*models, _profile(_BLOCK_SIZE), _plan(schedule, _BLOCK_SIZE))
                cells.append(
                    " / ".join(
                        f"{needed_tokens_per_round(speedup, found.round_ms, found.plain_ms):.1f}"
                        for speedup in (1.0, lookup)
                    )
                )
            rows.append((_DEVICE_NAMES[device], target, drafter, _ratio(device, target, drafter), *cells))
    return _markdown(("Device", "Target", "Drafter", "Drafter's time", "Sync", "Async", "Async, two GPUs"), rows)


TABLES: dict[str, Callable[[Path], str]] = {
    table.__name__.replace("_", "-"): table
    for table in (
        scaling_assumptions,
        forward_ms,
        implied,
        packing,
        by_batch_size,
        by_context,
        second_gpu,
        paying_assumptions,
        paying_measured,
        by_task,
        by_temperature,
        break_even,
    )
}


__all__ = ["TABLES", "rendered", "update_page"]
