"""`d3d-hf card`: writes a drafter's model card from what lies beside it."""

import argparse
import os
import sys

from .arguments import UsageError, one_line


def add_command(commands):
    parser = commands.add_parser(
        "card",
        help="write a drafter's model card",
        description="Writes README.md of a folder of hub_cards/ from its card.yaml, config.json and reports, and from "
        "the results in JSON files that card.yaml names.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="with card.yaml, and the drafter if there is one")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if README.md would change")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not os.path.isdir(args.folder):
        raise UsageError(f"FOLDER {args.folder!r} is no folder: give one with a card.yaml")
    from ..hub.cards import CARD_NAME, make_card

    try:
        text = str(make_card(args.folder))
    except (OSError, ValueError) as error:
        raise UsageError(one_line(error, max_length=600)) from error
    path = os.path.join(args.folder, CARD_NAME)
    if not args.check:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        print(f"Wrote {path}")
        return 0
    try:
        with open(path, encoding="utf-8") as file:
            is_current = file.read() == text
    except FileNotFoundError:
        is_current = False
    if not is_current:
        print(f"{path} is not what its data say: run `d3d-hf card {args.folder}`", file=sys.stderr)
    return 0 if is_current else 1


__all__ = ["add_command", "run"]
