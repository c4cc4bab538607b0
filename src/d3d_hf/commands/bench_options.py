"""The options of `d3d-hf bench`, and what cannot be asked for together."""

import argparse
import os

from .arguments import UsageError, option, real_number, whole_number


DATASETS = "gsm8k,math500,aime25,humaneval,mbpp,livecodebench,mt-bench"
PROMPT_TOKENS, BLOCK_SIZE = 128, 8  # where a shape is all that is known of a model
_METHODS = "plain,prompt-lookup,assisted,dflash,d3d-sync,d3d-async,d3d-auto"
_SHAPE_ONLY = ("prompt_tokens", "block_size")


def add_options(parser: argparse.ArgumentParser):
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="NAME",
        help="folder or Hub name (default: HuggingFaceTB/SmolLM2-135M-Instruct), or shape:qwen3-8b and the like: "
        "random weights, needs --acceptance",
    )
    models.add_argument(
        "--drafter",
        metavar="NAME",
        action="append",
        default=[],
        help="folder, Hub name, or shape:NAME[:LAYERS]; may be repeated",
    )
    models.add_argument("--dflash", metavar="NAME", help="a DFlash drafter of the target, for the method dflash")
    models.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    models.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    models.add_argument("--drafter-device", metavar="NAME", help="of the D3D drafters (default: the target's)")
    models.add_argument("--attn-implementation", metavar="NAME", help="eager, sdpa, ... (default: the model's)")
    models.add_argument("--trust-remote-code", action="store_true", help="run code that repositories bring")

    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--methods",
        metavar="LIST",
        default=_METHODS,
        help="by commas; with +ct for a compiled target, of D3D with +cd for compiled drafts (on a GPU: CUDA graphs), "
        "e.g. d3d-sync+cd+ct; plain is always measured (default: %(default)s)",
    )
    what.add_argument(
        "--datasets", metavar="LIST", help=f"by commas: names or JSONL files of turns (default: {DATASETS})"
    )
    what.add_argument(
        "--first", type=whole_number(0), default=0, metavar="N", help="prompt to begin with (default: 0)"
    )
    what.add_argument("--max-samples", type=whole_number(1), metavar="N", help="prompts of each data set at most")
    what.add_argument(
        "--max-new-tokens", type=whole_number(2), default=256, metavar="N", help="of each turn (default: %(default)s)"
    )
    what.add_argument("--temperature", type=real_number(0), default=0.0, metavar="T", help="0 is greedy (default: 0)")
    what.add_argument("--top-k", type=whole_number(0), metavar="K", help="0 is off (default: the target's own)")
    what.add_argument("--top-p", type=real_number(0, 1), metavar="P", help="1 is off (default: the target's own)")
    what.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of sampling (default: 0)")
    what.add_argument("--threads", type=whole_number(1), metavar="N", help="CPU threads (default: torch's choice)")
    what.add_argument("--template-arg", metavar="KEY=VALUE", action="append", default=[], help="for the chat template")

    drafting = parser.add_argument_group("drafting, of every D3D method")
    drafting.add_argument("--num-assistant-tokens", type=whole_number(1), metavar="N", help="draft tokens per round")
    drafting.add_argument("--num-bonus-guesses", type=whole_number(0), metavar="N", help="of d3d-async and d3d-auto")
    drafting.add_argument("--draft-slot-budget", type=whole_number(1), metavar="N", help="of d3d-async and d3d-auto")

    synthetic = parser.add_argument_group(
        "imposed acceptance",
        "Models do all their work and a script decides what is accepted, so that speed can be measured without "
        "trained drafters. Of the methods without D3D, plain alone runs.",
    )
    synthetic.add_argument(
        "--acceptance",
        metavar="LIST",
        help="chance of each slot of a draft, given the ones before: 0.9,0.85,...; the last one holds for the rest",
    )
    synthetic.add_argument(
        "--prompt-tokens",
        type=whole_number(1),
        metavar="N",
        help=f"with shape: targets, which read random tokens (default: {PROMPT_TOKENS})",
    )
    synthetic.add_argument(
        "--block-size", type=whole_number(2), metavar="N", help=f"of shape: drafters (default: {BLOCK_SIZE})"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="FILE", help="JSON of the results; FILE.rows keeps what is done so far")
    output.add_argument("--title", metavar="TEXT", help="heading on the page of results")
    output.add_argument("--page", metavar="FILE", help="measure nothing: write this page from results (--from)")
    output.add_argument("--from", metavar="FILE", nargs="+", dest="sources", help="JSON files for --page")


def acceptance_profile(text: str | None) -> list[float] | None:
    if text is None:
        return None
    from ..cost_model.acceptance import check_probabilities

    try:
        return list(check_probabilities("--acceptance", [float(part) for part in text.split(",")]))
    except ValueError:
        raise UsageError(
            f"--acceptance {text!r} is no list of chances: give numbers from 0 to 1, like 0.9,0.85,0.8"
        ) from None


def refuse_conflicts(args: argparse.Namespace, profile: list[float] | None):
    from ..bench.models import is_shape

    is_random = is_shape(args.target)
    shapes = [name for name in (args.target, *args.drafter) if is_shape(name)]
    if shapes and profile is None:
        raise UsageError(f"{shapes[0]!r} has random weights, which accept nothing: give --acceptance 0.9,0.85,...")
    if is_random and args.first:
        raise UsageError(f"--first {args.first} is for data sets, and --target {args.target!r} reads random prompts")
    if is_random and args.datasets is not None:
        raise UsageError(
            f"--datasets {args.datasets!r} needs a tokenizer and --target {args.target!r} has none: leave it out, and "
            "give --prompt-tokens N for the length of its random prompts"
        )
    if is_random and not all(map(is_shape, args.drafter)):
        raise UsageError(f"--target {args.target!r} has no vocabulary of its own: give drafters like shape:qwen3-1.7b")
    for name in _SHAPE_ONLY:
        if getattr(args, name) is not None and not shapes:
            raise UsageError(f"{option(name)} {getattr(args, name)} is for models like shape:qwen3-8b: leave it out")
    if args.temperature == 0:
        for name in ("top_k", "top_p"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"{option(name)} {getattr(args, name)} does nothing at --temperature 0, which is greedy: give a "
                    "--temperature above 0, or leave it out"
                )
    if args.output is not None:
        folder = os.path.dirname(args.output) or "."
        if os.path.isdir(args.output) or not os.path.isdir(folder):
            raise UsageError(
                f"--output {args.output!r} is no file that can be written: give one in an existing folder"
            )
        if os.path.exists(args.output):
            raise UsageError(f"--output {args.output!r} is there already: give another name, or delete it")


def names_of_drafters(drafters: list[str]) -> list[str]:
    """Short names for the rows, without folders."""
    names = [os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name for name in drafters]
    if len(set(names)) < len(names):
        raise UsageError(f"--drafter: {', '.join(drafters)} would have the same name in the results: rename a folder")
    return names


__all__ = [
    "BLOCK_SIZE",
    "DATASETS",
    "PROMPT_TOKENS",
    "acceptance_profile",
    "add_options",
    "names_of_drafters",
    "refuse_conflicts",
]
