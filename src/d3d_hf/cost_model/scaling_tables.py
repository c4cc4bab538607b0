"""
The tables of docs/scaling.md: forwards, what published speedups imply, packing, batch sizes, contexts, a second GPU.

Each function is given the folder of the measured results.
"""

from collections.abc import Sequence
from pathlib import Path

from .acceptance import BONUS_HIT_RATES, MASKED_RETENTION
from .hardware import HARDWARE
from .inputs import read_json
from .markdown import markdown_table
from .page_assumptions import (
    BLOCK_SIZES,
    CONTEXT,
    PRUNED_RETENTION,
    SLOT_ACCEPTANCE,
    assumed_forward,
    assumed_plan,
    assumed_profile,
)
from .schedules import Schedule, needed_tokens_per_round, predict
from .search import best_choice


_TARGETS = ("qwen3-8b", "qwen3-32b")
# Name in the tables, shape, layers, and whether some were removed.
_DRAFTERS = (
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


def scaling_assumptions(results: Path) -> str:
    """What docs/scaling.md takes for granted."""
    device = HARDWARE["h200"]
    hits = ", ".join(map(str, BONUS_HIT_RATES))
    return markdown_table(
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
    models = [("Qwen3-32B", assumed_forward("qwen3-32b"))]
    models += [(f"Qwen3-{name}", assumed_forward(shape, num_layers=layers)) for name, shape, layers, _ in _DRAFTERS]
    return markdown_table(
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
    for target in _TARGETS:
        name = f"Qwen/Qwen3-{target.removeprefix('qwen3-').upper()}"
        speedup = published[name]["d3d"]
        for drafter_name, shape, layers, is_pruned in _DRAFTERS:
            cells = []
            for block_size in BLOCK_SIZES:
                for schedule in Schedule:
                    prediction = predict(
                        assumed_forward(target),
                        assumed_forward(shape, num_layers=layers),
                        assumed_profile(block_size, is_pruned),
                        assumed_plan(schedule, block_size),
                    )
                    needed = needed_tokens_per_round(speedup, prediction.round_ms, prediction.plain_ms)
                    cells.append(f"{needed:.1f}" if needed <= block_size + 1 else f"({needed:.1f})")
            rows.append((name.removeprefix("Qwen/"), f"{speedup:.2f}x", drafter_name, *cells))
    header = [f"B = {size}, {name}" for size in BLOCK_SIZES for name in _SCHEDULE_NAMES.values()]
    return markdown_table(("Target", "Published", "Drafter", *header), rows)


def packing(results: Path) -> str:
    """What more branches cost and bring."""
    rows = []
    for target in _TARGETS:
        for drafter_name, shape, layers, is_pruned in _DRAFTERS:
            if is_pruned:
                continue
            for block_size in BLOCK_SIZES:
                serial = _predicted(target, shape, layers, assumed_plan(Schedule.SERIAL, block_size), block_size)
                for num_guesses in (0, 1, 3):
                    one, two = (
                        _predicted(target, shape, layers, assumed_plan(schedule, block_size, num_guesses), block_size)
                        for schedule in (Schedule.ONE_DEVICE, Schedule.TWO_DEVICES)
                    )
                    passes = assumed_plan(Schedule.ONE_DEVICE, block_size, num_guesses).packed_passes(block_size)
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
    return markdown_table((*header, *_SCHEDULE_NAMES.values()), rows)


def _predicted(target, shape, layers, plan, block_size, is_pruned=False, batch_size=1, context=CONTEXT):
    return predict(
        assumed_forward(target, batch_size=batch_size, context=context),
        assumed_forward(shape, num_layers=layers, batch_size=batch_size, context=context),
        assumed_profile(block_size, is_pruned),
        plan,
    )


def _against(name: str, values: Sequence[int], targets=_TARGETS) -> str:
    """Speedups of the three schedules, serial / one GPU / two GPUs, against one of the sizes of `assumed_forward`."""
    rows = []
    for target in targets:
        for drafter_name, shape, layers, is_pruned in _DRAFTERS:
            cells = []
            for value in values:
                speedups = (
                    _predicted(target, shape, layers, assumed_plan(schedule, 8), 8, is_pruned, **{name: value}).speedup
                    for schedule in Schedule
                )
                cells.append(" / ".join(f"{speedup:.2f}" for speedup in speedups))
            rows.append((target.removeprefix("qwen3-").upper(), drafter_name, *cells))
    return markdown_table(("Target", "Drafter", *map(str, values)), rows)


def by_batch_size(results: Path) -> str:
    """Speedups against the number of sequences."""
    return _against("batch_size", (1, 4, 16, 64))


def by_context(results: Path) -> str:
    """Speedups against the tokens in the cache."""
    return _against("context", (1024, 8192, 32768))


def second_gpu(results: Path) -> str:
    """The best of each schedule, and what a second GPU brings, per answer and per GPU."""
    rows = []
    for target in _TARGETS:
        one_gpu_ms = assumed_forward(target).demand(1, 1).alone_ms
        for drafter_name, shape, layers, is_pruned in _DRAFTERS:
            best = {
                schedule: best_choice(
                    assumed_forward(target),
                    lambda num_layers, shape=shape: assumed_forward(shape, num_layers=num_layers),
                    {layers: assumed_profile(16, is_pruned)},
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
                assumed_forward(target, "2 x h200"),
                assumed_forward(shape, "2 x h200", num_layers=layers),
                assumed_profile(16, is_pruned),
                best[Schedule.SERIAL].plan,
            )
            names = (target.removeprefix("qwen3-").upper(), drafter_name)
            split_speedup = one_gpu_ms / split.ms_per_token
            rows.append((*names, *settings, f"{gain:.2f}", f"{gain / 2:.2f}", f"{split_speedup:.2f}"))
    header = ("Target", "Drafter", *_SCHEDULE_NAMES.values(), "Second GPU, faster by", "Tokens per GPU")
    return markdown_table((*header, "Serial, both models split over two"), rows)


SCALING_TABLES = (
    scaling_assumptions,
    forward_ms,
    implied,
    packing,
    by_batch_size,
    by_context,
    second_gpu,
)


__all__ = ["SCALING_TABLES"]
