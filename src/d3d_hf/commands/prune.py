"""`d3d-hf prune`: removes layers of a drafter, one by one, those that the acceptance length needs least."""

import argparse
import os
import sys

from .arguments import UsageError, one_line, real_number, whole_number


def add_command(commands):
    parser = commands.add_parser(
        "prune",
        help="remove the layers that a drafter needs least",
        description="Scores every layer of a drafter by the acceptance length without it, removes the cheapest, and "
        "so on. The first rows of each data set are for the choice of layers; the rows after them are for the report, "
        "which lies beside the pruned drafter. The same command again goes on with a run that was ended.",
        epilog="Arguments of the training that --recovery-steps asks for are those of `d3d-hf train` and come last, "
        "after two dashes: d3d-hf prune ... --recovery-steps 20 -- --learning-rate 1e-4 --bf16",
        allow_abbrev=False,
    )
    parser.add_argument("--drafter", metavar="NAME", required=True, help="folder or Hub name")
    parser.add_argument(
        "--calibration",
        metavar="PATH",
        nargs="+",
        required=True,
        help="folders that regenerate wrote (greedily), or JSONL files; each is a data set of its own in the report",
    )
    parser.add_argument(
        "--calibration-rows",
        type=whole_number(1),
        metavar="N",
        help="rows of each data set to choose layers on (default: half)",
    )
    parser.add_argument(
        "--evaluation-rows",
        type=whole_number(1),
        metavar="N",
        help="rows after those to measure the report on (default: all)",
    )
    parser.add_argument("--output", metavar="FOLDER", required=True, help="for the pruned drafter and its report")
    parser.add_argument("--remove", type=whole_number(1), metavar="N", help="stop after N layers")
    parser.add_argument(
        "--min-retention",
        type=real_number(0, 1),
        metavar="SHARE",
        help="stop before less than this share of the acceptance length is left, e.g. 0.99",
    )
    parser.add_argument(
        "--max-draft-ms",
        type=real_number(0),
        metavar="MS",
        help="stop once a packed pass takes no longer than this on this machine",
    )
    parser.add_argument("--recovery-steps", type=whole_number(1), metavar="N", help="train so much after each removal")
    parser.add_argument(
        "--recovery-every",
        type=whole_number(1),
        metavar="N",
        help="train after every N removals, and after the last (default: 1)",
    )
    parser.add_argument("--recovery-data", metavar="PATH", help="responses to train on; none of the rows above")
    parser.add_argument(
        "--train-reference",
        action="store_true",
        help="also give the full-depth drafter the recovery's trainings, for a fair comparison",
    )
    parser.add_argument(
        "--compare",
        choices=("all", "last", "none"),
        default="last",
        help="at which depths to measure simpler choices of layers (default: %(default)s)",
    )
    parser.add_argument(
        "--positions", type=whole_number(1), default=32, metavar="N", help="drafts per response (default: %(default)s)"
    )
    parser.add_argument(
        "--texts-per-pass",
        type=whole_number(1),
        default=4,
        metavar="N",
        help="bounds the memory (default: %(default)s)",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="the target's, for rows of messages and to check the data")
    parser.add_argument(
        "--allow-other-target", action="store_true", help="take the text of another model than the drafter's target"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the drafter as it is measured and saved; recovery trains float32 weights (default: %(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--attn-implementation", metavar="NAME", help="eager, sdpa, ... (default: the model's)")
    parser.add_argument("training_options", nargs="*", metavar="-- TRAINING OPTIONS", help="see below")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _refuse_conflicts(args)
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    from ..pruning import PruningGoal, prune_drafter
    from ..pruning.report import as_markdown
    from .loading import load_tokenizer, own_tokenizer, read_drafter_config, usable_device

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    device = usable_device(args.device)
    config = read_drafter_config(args.drafter, "--drafter")
    try:
        goal = PruningGoal(args.remove, args.min_retention, args.max_draft_ms)
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    if args.remove is not None and args.remove >= config.num_hidden_layers:
        raise UsageError(
            f"--remove is {args.remove} and --drafter {args.drafter!r} has {config.num_hidden_layers} layers: remove "
            f"at most {config.num_hidden_layers - 1}"
        )
    tokenizer = load_tokenizer(args.tokenizer, "--tokenizer") if args.tokenizer else own_tokenizer(args.drafter)
    calibration, evaluation = _split(args, config, tokenizer)
    recovery = _recovery(args, config, tokenizer)
    drafter, dtype = _load_drafter(args, config, device)

    with tqdm(unit="layer", disable=None, file=sys.stderr) as bar:

        def show(progress):
            of = "" if progress.num_steps is None else f" of {progress.num_steps}"
            layer = "" if progress.layer is None else f", layer {progress.layer}"
            bar.set_description(f"step {progress.step}{of}{layer}", refresh=False)
            # What an earlier run did says nothing about this one's speed.
            bar.n, bar.total, bar.initial = progress.done, progress.total, progress.num_recalled
            bar.refresh()

        try:
            _, report = prune_drafter(
                drafter,
                calibration,
                evaluation,
                args.output,
                goal,
                recovery,
                train_reference=args.train_reference,
                compare=args.compare,
                positions_per_text=args.positions,
                texts_per_pass=args.texts_per_pass,
                measured_dtype=dtype,
                processing_class=tokenizer,
                argv=args.argv,
                on_progress=show,
            )
        except ValueError as error:
            raise UsageError(one_line(error, max_length=1000)) from error
    print(as_markdown(report))
    if report["stopped_by"] == "min_retention" and not report["steps"]:
        print(f"Every removal costs more than --min-retention {args.min_retention} allows.", file=sys.stderr)
    print(f"Saved to {args.output}", file=sys.stderr)
    return 0


def _refuse_conflicts(args: argparse.Namespace):
    if args.recovery_steps is None:
        given = {
            "--recovery-data": args.recovery_data,
            "--recovery-every": args.recovery_every,
            "--train-reference": args.train_reference,
            "training options": " ".join(args.training_options),
        }
        for name, value in given.items():
            if value:
                raise UsageError(f"{name} ({value!r}) without --recovery-steps: give it as well, or leave this out")
    elif args.recovery_data is None:
        raise UsageError(f"--recovery-steps {args.recovery_steps} has nothing to train on: give --recovery-data")
    if os.path.exists(args.output) and not os.path.isdir(args.output):
        raise UsageError(f"--output {args.output!r} is a file: give a folder")


def _split(args: argparse.Namespace, config, tokenizer) -> tuple[dict, dict]:
    """Rows of each data set to choose layers on, and to report on."""
    calibration, evaluation = {}, {}
    for path in args.calibration:
        rows = _load_rows(path, config, tokenizer, args.allow_other_target)
        name = os.path.basename(os.path.normpath(path)).removesuffix(".jsonl")
        if name in calibration:
            raise UsageError(f"--calibration names {name!r} twice: give data sets of different names")
        count = args.calibration_rows or len(rows) // 2
        calibration[name] = rows[:count]
        evaluation[name] = rows[count:][: args.evaluation_rows]
        if not calibration[name] or not evaluation[name]:
            raise UsageError(
                f"--calibration {path!r} has {len(rows)} rows, which leaves {len(evaluation[name])} to evaluate on "
                f"after {len(calibration[name])} to choose layers on: give more rows, or a smaller --calibration-rows"
            )
    return calibration, evaluation


def _load_rows(path: str, config, tokenizer, allow_other_target: bool) -> list[dict]:
    from ..training.examples import to_example
    from ..training.responses import check_responses, load_responses

    try:
        rows, metadata = load_responses(path)
        check_responses(metadata, config, tokenizer, allow_other_target)
        examples = [to_example(row, tokenizer, config.vocab_size) for row in rows]
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error
    return [
        {"input_ids": ids, "prompt_length": prompt_length}
        for ids, prompt_length in examples
        if len(ids) - max(prompt_length, 1) >= 2  # fewer leave nothing to draft
    ]


def _recovery(args: argparse.Namespace, config, tokenizer):
    if args.recovery_steps is None:
        return None
    from transformers import HfArgumentParser

    from ..pruning import Recovery
    from ..training import D3DTrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise UsageError(f"{message} (see d3d-hf train --help)")

    try:
        training, unknown = Parser(D3DTrainingArguments, allow_abbrev=False).parse_args_into_dataclasses(
            ["--disable_tqdm", "True", "--report_to", "none", *args.training_options],
            return_remaining_strings=True,
            look_for_args_file=False,
        )
    except (ValueError, ImportError) as error:
        raise UsageError(one_line(error)) from error
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no option of training: see d3d-hf train --help")
    rows = _load_rows(args.recovery_data, config, tokenizer, args.allow_other_target)
    return Recovery(args.recovery_steps, training, rows, tokenizer, args.recovery_every or 1)


def _load_drafter(args: argparse.Namespace, config, device):
    """The drafter, an adapter left beside its base, and the dtype that it is measured in."""
    import torch

    from .loading import load_drafter

    dtype = args.dtype if args.recovery_steps is None else "float32"
    drafter = load_drafter(args.drafter, dtype, device, args.attn_implementation, merge_adapter=False)
    if args.recovery_steps is None:
        return drafter, drafter.dtype
    measured = (config.dtype or drafter.dtype) if args.dtype == "auto" else args.dtype
    return drafter, getattr(torch, measured) if isinstance(measured, str) else measured


__all__ = ["add_command", "run"]
