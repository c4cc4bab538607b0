"""`d3d-hf evaluate`: what a drafter's drafts are worth, on text that its target wrote."""

import argparse
import json
import os
import sys

from .arguments import UsageError, one_line, whole_number


def add_command(commands):
    parser = commands.add_parser(
        "evaluate",
        help="measure a drafter's acceptance on its target's own text",
        description="Measures, teacher-forced on text that the target wrote, how many draft tokens would be accepted: "
        "drafts made after the verdict (synchronous), packed drafts that do not see the bonus (masked), and packed "
        "drafts with one to three guesses of it. Intervals are 95%, over the texts.",
        allow_abbrev=False,
    )
    parser.add_argument("--drafter", metavar="NAME", required=True, help="folder or Hub name")
    parser.add_argument(
        "--data", metavar="PATH", required=True, help="folder that regenerate wrote (greedily), or JSONL file"
    )
    parser.add_argument("--output", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--max-samples", type=whole_number(1), metavar="N", help="the first N rows alone")
    parser.add_argument(
        "--positions-per-pass",
        type=whole_number(1),
        default=32,
        metavar="N",
        help="bounds the memory; the results are the same (default: %(default)s)",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="the target's, for rows of messages and to check the data")
    parser.add_argument(
        "--allow-other-target", action="store_true", help="take the text of another model than the drafter's target"
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--attn-implementation", metavar="NAME", help="eager, sdpa, ... (default: the model's)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = os.path.dirname(args.output or "") or "."
    if args.output is not None and (os.path.isdir(args.output) or not os.path.isdir(folder)):
        raise UsageError(f"--output {args.output!r} is no file that can be written: give one in an existing folder")
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    from ..training.evaluate import evaluate_drafter
    from ..training.provenance import provenance
    from ..training.responses import check_responses, load_responses
    from .loading import load_drafter, load_tokenizer, own_tokenizer, read_drafter_config, usable_device

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    device = usable_device(args.device)
    config = read_drafter_config(args.drafter, "--drafter")
    try:
        rows, metadata = load_responses(args.data)
        if args.tokenizer is not None:
            tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
        else:
            tokenizer = own_tokenizer(args.drafter)
        check_responses(metadata, config, tokenizer, args.allow_other_target)
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error
    if metadata is not None and metadata["generation"]["temperature"] > 0:
        print(
            "The responses were sampled: drafts are compared with them as they are, so that acceptance comes out "
            "lower than on greedy ones.",
            file=sys.stderr,
        )
    rows = rows[: args.max_samples]
    drafter = load_drafter(args.drafter, args.dtype, device, args.attn_implementation)
    try:
        with tqdm(total=len(rows), unit="text", disable=None, file=sys.stderr) as bar:
            results = evaluate_drafter(drafter, rows, tokenizer, args.positions_per_pass, bar.update)
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    if args.output is not None:
        report = provenance(args.argv)
        report["machine"]["device"] = str(device)
        report["dtype"] = str(drafter.dtype).removeprefix("torch.")
        report["drafter"] = {
            "name": args.drafter,
            "target": config.target_name_or_path,
            "num_layers": config.num_hidden_layers,
            "block_size": config.block_size,
        }
        report["data"] = {"path": args.data, "num_rows": len(rows), "metadata": metadata}
        report["positions_per_pass"] = args.positions_per_pass
        report["results"] = results
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    print(as_table(results))
    return 0


def as_table(results: dict) -> str:
    """The main figures of `evaluate_drafter` as plain text."""

    def show(estimate):
        return f"{estimate['mean']:5.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"

    lines = [
        f"{results['num_texts']} texts, {results['num_positions']} positions, blocks of {results['block_size']}",
        f"Next token right: {show(results['ar_accuracy'])}; bonus among the likeliest "
        + ", ".join(f"{count}: {rate['mean']:.2f}" for count, rate in results["bonus_hit_rate"].items()),
        "",
        f"{'':12}{'after every position':^28}{'played through':^28}",
        f"{'draft':12}{'tokens per round':28}{'tokens per round':28}{'bonus guessed':14}accepted up to slot 1, 2, ...",
    ]
    for kind, draft in results["drafts"].items():
        played = draft["played_through"]
        hits = "" if played["bonus_hit_rate"] is None else f"{played['bonus_hit_rate']['mean']:.2f}"
        slots = " ".join(f"{slot['mean']:.2f}" for slot in draft["acceptance_by_slot"] if slot)
        lines.append(
            f"{kind:12}{show(draft['tokens_per_round']):28}{show(played['tokens_per_round']):28}{hits:14}{slots}"
        )
    return "\n".join(lines)


__all__ = ["add_command", "as_table", "run"]
