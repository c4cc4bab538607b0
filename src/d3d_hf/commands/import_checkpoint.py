"""`d3d-hf import`: a published parallel drafter as a D3D drafter."""

import argparse
import sys

from .arguments import UsageError, one_line, whole_number


def add_command(commands):
    parser = commands.add_parser(
        "import",
        help="make a D3D drafter of a published parallel drafter",
        description="Makes a D3D drafter of a plain checkpoint that was trained as a parallel drafter (PARD models, "
        "what `d3d-hf export` wrote, and others of that layout). What its config says (pard_token, mask_token_id, "
        "block_size) need not be given.",
        allow_abbrev=False,
    )
    parser.add_argument("--from", dest="source", metavar="NAME", required=True, help="folder or Hub name")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="where to write; must not exist or be empty")
    parser.add_argument("--block-size", type=whole_number(1), metavar="N", help="draft tokens of one pass")
    parser.add_argument(
        "--mask-token-id", type=whole_number(0), metavar="ID", help="the token that stands in mask slots"
    )
    parser.add_argument("--target", metavar="NAME", help="whose tokenizer and vocabulary the drafter must fit")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .export import refuse_used_folder

    refuse_used_folder(args.output)
    from safetensors import SafetensorError
    from transformers import AutoConfig

    from .. import embedded
    from ..hub.parallel_draft import check_same_tokens, draft_settings, import_parallel_draft
    from ..model.configuration_d3d import D3DConfig
    from .loading import load_tokenizer, own_tokenizer

    target_config, target_tokenizer = None, None
    try:
        config = AutoConfig.from_pretrained(args.source)
        if args.target is not None:
            target_config = AutoConfig.from_pretrained(embedded.resolve(args.target)).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--from {args.source!r} or --target cannot be found or read: {one_line(error)}") from error
    if isinstance(config, D3DConfig):
        raise UsageError(f"--from {args.source!r} is a D3D drafter already: load it with from_pretrained")
    tokenizer = own_tokenizer(args.source)
    try:
        _, mask_token_id = draft_settings(config, args.block_size, args.mask_token_id)
        if args.target is None:
            print("Without --target it is not checked whose tokenizer the drafter shares.", file=sys.stderr)
        elif tokenizer is None:
            print(f"--from {args.source!r} has no tokenizer: only the vocabulary's size is checked.", file=sys.stderr)
        else:
            target_tokenizer = load_tokenizer(args.target, "--target")
            check_same_tokens(tokenizer, target_tokenizer, unused={mask_token_id})
        drafter = import_parallel_draft(
            args.source,
            block_size=args.block_size,
            mask_token_id=args.mask_token_id,
            target=args.target,
            vocab_size=None if target_config is None else target_config.vocab_size,
            dtype=args.dtype,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"--from {args.source!r}: {one_line(error, max_length=600)}") from error
    drafter.save_pretrained(args.output)
    if target_tokenizer or tokenizer:
        (target_tokenizer or tokenizer).save_pretrained(args.output)
    print(f"Saved to {args.output}: blocks of {drafter.config.block_size}, mask token {drafter.config.mask_token_id}.")
    return 0


__all__ = ["add_command", "run"]
