"""The options of `d3d-hf predict`, and what cannot be asked for together."""

import argparse
import os

from .arguments import UsageError, option, real_number, whole_number


DEVICES = ("h200", "h100", "a100", "rtx4090", "cpu-2-cores")
SCHEDULES = ("serial", "one-device", "two-devices")


def add_options(parser: argparse.ArgumentParser):
    parser.add_argument("--target", metavar="NAME", help="shape (qwen3-8b, ...), or folder or Hub name of a model")
    parser.add_argument("--drafter", metavar="NAME", help="its backbone: shape, or folder or Hub name")
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--hardware", choices=DEVICES, help="times from its peaks")
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
    parser.add_argument("--schedule", choices=SCHEDULES, nargs="+", default=SCHEDULES, help="(default: all of them)")
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


def refuse_unwritable(args: argparse.Namespace):
    for name in ("output", "times_output"):
        path = getattr(args, name)
        if path is not None and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
            raise UsageError(f"{option(name)} {path!r} is no file that can be written: give one in an existing folder")


def refuse_conflicts(args: argparse.Namespace):
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


__all__ = ["DEVICES", "SCHEDULES", "add_options", "refuse_conflicts", "refuse_unwritable"]
