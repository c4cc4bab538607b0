"""`d3d-hf predict`: what drafting gives on what hardware, before anything is trained or bought."""

import argparse
import dataclasses
import json
import os

from .arguments import UsageError, one_line, real_number, whole_number


_DEVICES = ("h200", "h100", "a100", "rtx4090", "cpu-2-cores")
_SCHEDULES = ("serial", "one-device", "two-devices")


def add_command(commands):
    parser = commands.add_parser(
        "predict",
        help="predict tokens per round, round time and speedup, and the best settings",
        description="Predicts what a drafter gives, for drafting after each verdict (serial) and while the target "
        "verifies, on one device and on two: expected tokens per round, time of a round, speedup over plain decoding; "
        "as asked for, and with the best block size, draft length, guesses and depth. Times come from the shapes of "
        "the models and a device's bandwidth and arithmetic (--hardware), from a file (--times), or are measured here "
        "(--measure). Assumptions are printed; nothing printed is a measurement but what --measure took.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", metavar="NAME", help="shape (qwen3-8b, ...), or folder or Hub name of a model")
    parser.add_argument("--drafter", metavar="NAME", help="its backbone: shape, or folder or Hub name")
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--hardware", choices=_DEVICES, help="times from its peaks")
    times.add_argument("--times", metavar="FILE", help="JSON of forward times against numbers of tokens")
    times.add_argument("--measure", action="store_true", help="measure the forwards here, with random weights")
    parser.add_argument("--times-output", metavar="FILE", help="write what --measure took, for --times")
    parser.add_argument(
        "--bandwidth", type=real_number(1e-3), metavar="TB/s", help="within reach, in the place of the hardware's"
    )
    parser.add_argument(
        "--flops", type=real_number(1e-3), metavar="TFLOP/s", help="within reach, in the place of the hardware's"
    )
    parser.add_argument(
        "--acceptance",
        metavar="P,P,...|FILE",
        help="conditional chance of each draft token, or a JSON file of d3d-hf bench or d3d-hf evaluate",
    )
    parser.add_argument(
        "--tokens-per-round",
        type=real_number(1),
        metavar="X",
        help="in its place: equal chances with which a draft of --block-size tokens emits so many",
    )
    parser.add_argument("--masked-acceptance", metavar="P,P,...", help="of branches that do not see the bonus")
    parser.add_argument("--bonus-hit-rates", metavar="P,P,...", help="of one, two, ... guesses of the bonus")
    parser.add_argument("--dataset", metavar="NAME", help="row of a benchmark file")
    parser.add_argument("--method", metavar="NAME", help="row of a benchmark file")
    parser.add_argument("--schedule", choices=_SCHEDULES, nargs="+", default=_SCHEDULES, help="(default: all of them)")
    parser.add_argument("--block-size", type=whole_number(1), metavar="N", help="(default: slots of the profile)")
    parser.add_argument("--draft-length", type=whole_number(1), metavar="N", help="(default: the block size)")
    parser.add_argument("--num-guesses", type=whole_number(0), default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--no-masked-branches", action="store_true", help="guesses alone")
    parser.add_argument("--slot-guesses", action="store_true", help="guesses without a first small forward")
    parser.add_argument(
        "--num-layers", type=whole_number(1), metavar="N", help="of the drafter with this acceptance (default: all)"
    )
    parser.add_argument(
        "--retention", metavar="FILE", help="share of the acceptance length by layers: pruning_report.json, or a map"
    )
    parser.add_argument("--context", type=whole_number(0), metavar="N", help="tokens in the cache (default: 1024)")
    parser.add_argument("--batch-size", type=whole_number(1), metavar="N", help="sequences (default: 1)")
    parser.add_argument("--round-overhead", type=real_number(0), metavar="MS", help="of a round, outside the models")
    parser.add_argument("--plain-overhead", type=real_number(0), metavar="MS", help="of a plain token")
    parser.add_argument(
        "--max-block-size", type=whole_number(1), default=16, metavar="N", help="of the search (default: %(default)s)"
    )
    parser.add_argument("--simulate", type=whole_number(1), metavar="ROUNDS", help="play each plan through as well")
    parser.add_argument("--output", metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "--update-page", metavar="FILE", nargs="+", help="write the tables of Markdown pages anew, and nothing else"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("output", "times_output"):
        path = getattr(args, name)
        if path is not None and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
            raise UsageError(
                f"--{name.replace('_', '-')} {path!r} is no file that can be written: give one in an existing folder"
            )
    if args.update_page:
        return _update_pages(args.update_page)
    try:
        return _predict(args)
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error


def _update_pages(paths: list[str]) -> int:
    from ..cost_model.pages import update_page

    for path in paths:
        try:
            update_page(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--update-page {path!r}: {one_line(error)}") from error
    return 0


def _predict(args: argparse.Namespace) -> int:
    from ..cost_model import Plan, Schedule, best_choice, predict, simulate
    from ..cost_model.inputs import read_retention

    if (args.acceptance is None) == (args.tokens_per_round is None):
        raise UsageError(
            "give either --acceptance, chances such as 0.9,0.85,0.8 or a JSON file, or --tokens-per-round with "
            "--block-size"
        )
    if args.tokens_per_round is not None and args.block_size is None:
        raise UsageError("--tokens-per-round needs --block-size: give the draft tokens of a round that emits so many")
    if not (args.hardware or args.times or args.measure or (args.bandwidth and args.flops)):
        raise UsageError("no times are given: give --hardware, --times FILE, --measure, or --bandwidth and --flops")
    if args.times is None and not (args.target and args.drafter):
        raise UsageError("--target and --drafter are missing: give shapes, such as qwen3-8b and qwen3-1.7b")
    if args.times_output and not args.measure:
        raise UsageError("--times-output needs --measure: without it nothing is measured")
    profile, assumed = _profile(args)
    block_size = args.block_size or len(profile.slots)
    plans = [
        Plan(
            schedule,
            block_size,
            args.draft_length,
            0 if schedule is Schedule.SERIAL else args.num_guesses,
            has_masked_branches=not args.no_masked_branches,
            has_guess_forward=not args.slot_guesses,
        )
        for schedule in map(Schedule, dict.fromkeys(args.schedule))
    ]
    given_retention = None if args.retention is None else read_retention(args.retention)
    models = _models(args, block_size)
    retention = _retention(args, given_retention, models)
    num_layers = args.num_layers or models.num_layers
    if num_layers not in retention:
        raise UsageError(
            f"--num-layers {num_layers} has no retained acceptance: its drafter is known at "
            f"{', '.join(map(str, retention))} layers; give --retention with it"
        )
    profiles = {layers: profile if share == 1 else profile.retaining(share) for layers, share in retention.items()}
    rows = []
    for plan in plans:
        plan = dataclasses.replace(plan, overhead_ms=models.round_overhead_ms)
        prediction = predict(
            models.target, models.drafter(num_layers), profiles[num_layers], plan, models.plain_overhead_ms
        )
        best = best_choice(
            models.target,
            models.drafter,
            profiles,
            plan.schedule,
            range(1, args.max_block_size + 1),
            base=plan,
            plain_overhead_ms=models.plain_overhead_ms,
        )
        for what, chosen, layers, found in (
            ("as given", plan, num_layers, prediction),
            ("best", best.plan, best.num_layers, best.prediction),
        ):
            row = _row(chosen.schedule.value, what, chosen, layers, found)
            if args.simulate:
                simulated = simulate(
                    models.target, models.drafter(layers), profiles[layers], chosen, num_rounds=args.simulate
                )
                row["simulated_speedup"] = found.plain_ms / simulated.ms_per_token
            rows.append(row)
    assumptions = [*models.assumptions, *assumed]
    if args.output:
        _write(args, models, profile, retention, assumptions, rows)
    _print(rows, assumptions)
    return 0


@dataclasses.dataclass
class _Models:
    """Forwards of the target and, by depth, of the drafter, and what was assumed for them."""

    target: object
    drafter: object
    num_layers: int
    is_bounded: bool  # no deeper drafter exists
    plain_overhead_ms: float
    round_overhead_ms: float
    assumptions: list[str]


def _numbers(text: str, name: str) -> tuple[float, ...]:
    from ..cost_model.acceptance import check_probabilities

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{name} {text!r} is no list of numbers: give chances such as 0.9,0.85,0.8") from None
    return check_probabilities(name, values)


def _profile(args):
    """The acceptance profile, and what had to be assumed of it."""
    from ..cost_model import AcceptanceProfile, constant_profile
    from ..cost_model.acceptance import BONUS_HIT_RATES, MASKED_RETENTION
    from ..cost_model.inputs import GivenAcceptance, read_acceptance

    if args.acceptance is None:
        given = GivenAcceptance(constant_profile(args.tokens_per_round, args.block_size))
    elif args.acceptance.endswith(".json") or os.path.exists(args.acceptance):
        given = read_acceptance(args.acceptance, args.dataset, args.method)
    else:
        given = GivenAcceptance(_numbers(args.acceptance, "--acceptance"))
    masked, rates = given.masked_slots, given.bonus_hit_rates
    if args.masked_acceptance is not None:
        masked = _numbers(args.masked_acceptance, "--masked-acceptance")
    if args.bonus_hit_rates is not None:
        rates = _numbers(args.bonus_hit_rates, "--bonus-hit-rates")
    assumed = ["rounds are independent; slots beyond the profile are as good as its last"]
    if masked is None:
        assumed.append(f"a masked branch keeps {MASKED_RETENTION:g} of the tokens per round")
    if rates is None:
        assumed.append(
            f"one, two, three guesses hit the bonus in {', '.join(map(str, BONUS_HIT_RATES))} of the rounds"
        )
    return AcceptanceProfile(given.slots, masked, rates or BONUS_HIT_RATES), assumed


def _models(args, block_size: int) -> _Models:
    from ..cost_model import HARDWARE, Hardware, RooflineForward, with_layers_between
    from ..cost_model.inputs import GivenTimes, read_times

    overheads = {"plain_overhead_ms": args.plain_overhead, "round_overhead_ms": args.round_overhead}
    if args.times or args.measure:
        for name in ("context", "batch_size"):
            if args.times and getattr(args, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} does not go with --times: the times hold for what was measured"
                )
        if args.batch_size is not None:
            raise UsageError("--batch-size does not go with --measure: one sequence is measured")
        if args.bandwidth or args.flops:
            raise UsageError("--bandwidth and --flops go with shapes: leave out --times and --measure")
        times: GivenTimes = read_times(args.times) if args.times else _measure(args, block_size)
        overheads = {name: getattr(times, name) if value is None else value for name, value in overheads.items()}
        return _Models(
            times.target,
            lambda layers: with_layers_between(times.drafters, layers),
            max(times.drafters),
            is_bounded=False,
            **overheads,
            assumptions=[
                "times between two measured numbers of tokens or depths lie on a straight line",
                "on one device, memory is busy for the time of the fewest tokens, arithmetic by the best throughput",
            ],
        )
    hardware = HARDWARE[args.hardware] if args.hardware else Hardware("given", 1.0, 1.0, layer_latency_ms=0.0)
    given = {}
    if args.bandwidth:
        given |= {"peak_bandwidth": 1e12 * args.bandwidth, "bandwidth_efficiency": 1.0}
    if args.flops:
        given |= {"peak_flops": 1e12 * args.flops, "flops_efficiency": 1.0}
    hardware = dataclasses.replace(hardware, **given)
    context = 1024 if args.context is None else args.context
    target_config, drafter_config = _config(args.target, "--target"), _config(args.drafter, "--drafter")

    def forward(config, num_layers=None):
        return RooflineForward(config, hardware, context, args.batch_size or 1, num_layers)

    return _Models(
        forward(target_config),
        lambda layers: forward(drafter_config, layers),
        drafter_config.num_hidden_layers,
        is_bounded=True,
        **{name: value or 0.0 for name, value in overheads.items()},
        assumptions=[
            f"{hardware.bandwidth / 1e12:.3g} TB/s and {hardware.flops / 1e12:.4g} TFLOP/s within reach "
            f"({hardware.bandwidth_efficiency:.2g} and {hardware.flops_efficiency:.2g} of the peaks), and "
            f"{1e3 * hardware.layer_latency_ms:g} us a layer",
            f"16-bit weights and cache, {context} tokens of context, batch size {args.batch_size or 1}",
            "forwards that run at once on one device slow each other alike",
        ],
    )


def _config(name: str, argument: str):
    """The text config of a shape's name, a folder or a Hub name."""
    from transformers import AutoConfig

    from ..cost_model.shapes import SHAPE_NAMES, shape_config

    if name in SHAPE_NAMES:
        return shape_config(name)
    try:
        return AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{argument} {name!r} is no shape ({', '.join(SHAPE_NAMES)}) and no model with a config: give one of "
            f"them. {one_line(error)}"
        ) from error


def _measure(args, block_size: int):
    """Times with random weights: of the target, and of the drafter at the depth asked for and at half of it."""
    import copy

    import torch

    from .. import D3DDrafterForCausalLM
    from ..cost_model import MeasuredForward
    from ..cost_model.inputs import GivenTimes
    from ..cost_model.measure import drafter_forward_ms, target_forward_ms
    from ..cost_model.shapes import random_model
    from ..training.provenance import provenance
    from .loading import usable_device

    device = usable_device(None)
    context = 256 if args.context is None else args.context
    config, drafter_config = _config(args.target, "--target"), _config(args.drafter, "--drafter")
    verified = sorted({1, block_size // 2 + 1, block_size + 1, args.max_block_size + 1})
    target_ms = target_forward_ms(random_model(config, torch.bfloat16, device), verified, context)
    packed = (block_size + 1) * (block_size * (1 + args.num_guesses) + 1)
    drafted = sorted({block_size, 2 * block_size, (block_size + 1) ** 2, packed})
    depths = {args.num_layers or drafter_config.num_hidden_layers, drafter_config.num_hidden_layers}
    depths.add(max(1, drafter_config.num_hidden_layers // 2))
    drafters_ms = {}
    for depth in sorted(depths):
        shallow = copy.deepcopy(drafter_config)
        shallow.num_hidden_layers = depth
        model = random_model(shallow, torch.bfloat16, device)
        drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=block_size).eval()
        drafters_ms[depth] = drafter_forward_ms(drafter, drafted, context)
    if args.times_output:
        report = {
            "target": {"name": args.target, "forward_ms": target_ms},
            "drafters": [{"num_layers": depth, "forward_ms": ms} for depth, ms in drafters_ms.items()],
            "drafter": args.drafter,
            "context": context,
            **provenance(args.argv),
        }
        with open(args.times_output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return GivenTimes(MeasuredForward(target_ms), {depth: MeasuredForward(ms) for depth, ms in drafters_ms.items()})


def _retention(args, given: dict[int, float] | None, models: _Models) -> dict[int, float]:
    """Share of the acceptance length for each depth that the search may take."""
    shares = {args.num_layers or models.num_layers: 1.0} if given is None else given
    if models.is_bounded and max(shares) > models.num_layers:
        raise UsageError(
            f"--{'num-layers' if args.retention is None else 'retention'} asks for {max(shares)} layers and the "
            f"drafter has {models.num_layers}: give at most so many"
        )
    return shares


def _row(schedule, what, plan, num_layers, prediction) -> dict:
    return {
        "schedule": schedule,
        "settings": what,
        "num_layers": num_layers,
        "block_size": plan.block_size,
        "draft_length": plan.draft_length,
        "num_guesses": plan.num_guesses,
        "tokens_per_round": prediction.tokens_per_round,
        "draft_ms": prediction.draft_ms,
        "verify_ms": prediction.verify_ms,
        "round_ms": prediction.round_ms,
        "plain_ms": prediction.plain_ms,
        "tokens_per_second": prediction.tokens_per_second,
        "speedup": prediction.speedup,
    }


def _write(args, models, profile, retention, assumptions, rows):
    from ..training.provenance import provenance

    report = {
        "predicted": rows,
        "assumptions": assumptions,
        "acceptance": {
            "slot_acceptance": profile.slots,
            "masked_slot_acceptance": profile.masked_slots,
            "bonus_hit_rates": profile.bonus_hit_rates,
        },
        "retention": retention,
        "plain_overhead_ms": models.plain_overhead_ms,
        "round_overhead_ms": models.round_overhead_ms,
        **provenance(args.argv),
    }
    with open(args.output, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
        file.write("\n")


def _print(rows: list[dict], assumptions: list[str]):
    is_simulated = "simulated_speedup" in rows[0]
    print(
        f"{'':12}{'':10}{'layers':>7}{'block':>7}{'draft':>7}{'guesses':>9}{'tokens/round':>14}{'draft ms':>10}"
        f"{'verify ms':>11}{'round ms':>10}{'tokens/s':>10}{'speedup':>9}" + ("  simulated" if is_simulated else "")
    )
    for row in rows:
        line = (
            f"{row['schedule']:12}{row['settings']:10}{row['num_layers']:7}{row['block_size']:7}"
            f"{row['draft_length']:7}{row['num_guesses']:9}{row['tokens_per_round']:14.2f}{row['draft_ms']:10.2f}"
            f"{row['verify_ms']:11.2f}{row['round_ms']:10.2f}{row['tokens_per_second']:10.1f}{row['speedup']:9.2f}"
        )
        print(line + (f"{row['simulated_speedup']:11.2f}" if is_simulated else ""))
    print(f"\nPlain decoding: {rows[0]['plain_ms']:.2f} ms a token. Predicted, not measured; assumed:")
    for assumption in assumptions:
        print(f"- {assumption}")


__all__ = ["add_command", "run"]
