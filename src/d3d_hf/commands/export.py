"""`d3d-hf export`: a drafter in the layout that serving engines run."""

import argparse
import os
import sys

from .arguments import UsageError, one_line, whole_number


def add_command(commands):
    parser = commands.add_parser(
        "export",
        help="write a drafter as a serving engine reads it",
        description="Writes a drafter in the parallel-draft layout of vLLM and TensorRT-LLM: a plain checkpoint of "
        "its backbone's architecture, the mask token in config.json (pard_token), and the tokenizer. Engines run "
        "drafters with causal block attention; a chained head is left out.",
        allow_abbrev=False,
    )
    parser.add_argument("--drafter", metavar="NAME", required=True, help="folder or Hub name")
    parser.add_argument("--format", choices=("vllm",), default="vllm", help="for both engines (default: %(default)s)")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="where to write; must not exist or be empty")
    parser.add_argument("--tokenizer", metavar="NAME", help="the target's (that of the drafter or of its target)")
    parser.add_argument(
        "--mask-token-id",
        type=whole_number(0),
        metavar="ID",
        help="a token that never occurs in texts, to stand in mask slots (the drafter's own, or an unused row)",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    refuse_used_folder(args.output)
    import torch

    from ..hub.parallel_draft import export_parallel_draft, refuse_unexportable
    from .loading import load_drafter, load_tokenizer, own_tokenizer, read_drafter_config

    config = read_drafter_config(args.drafter, "--drafter")
    try:
        refuse_unexportable(config)
    except ValueError as error:
        raise UsageError(f"--drafter {args.drafter!r}: {one_line(error)}") from error
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
    else:
        tokenizer = own_tokenizer(args.drafter, config.target_name_or_path)
    if tokenizer is None:
        raise UsageError(
            f"--drafter {args.drafter!r} comes without a tokenizer: give the target's as --tokenizer NAME"
        )
    drafter = load_drafter(args.drafter, args.dtype, torch.device("cpu"))
    try:
        mask_token_id = export_parallel_draft(drafter, tokenizer, args.output, args.mask_token_id)
    except ValueError as error:
        raise UsageError(f"--drafter {args.drafter!r}: {one_line(error)}") from error
    if drafter.chained_head is not None:
        print("The chained head is left out, which engines cannot run: drafts are those without it.", file=sys.stderr)
    print(
        f"Saved to {args.output}: token {mask_token_id} stands in mask slots, drafts have up to {config.block_size} "
        f"tokens (num_speculative_tokens, max_draft_len)."
    )
    return 0


def refuse_used_folder(folder: str):
    """
    Raises:
        UsageError: A file, or a folder with something in it.
    """
    if os.path.exists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise UsageError(f"--output {folder!r} exists already: give a folder that does not, or an empty one")


__all__ = ["add_command", "refuse_used_folder", "run"]
