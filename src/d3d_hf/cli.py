"""The command line, `d3d-hf COMMAND ...` or `python -m d3d_hf.cli COMMAND ...`: parsing, and errors of one line."""

import argparse
import importlib
import os
import sys

from .commands.arguments import UsageError


# Each is a module of d3d_hf.commands with `add_command(commands)`, which adds a parser and sets its `run(args)`. Such
# a module imports what its work needs inside `run`, so that --help needs neither torch nor transformers.
_COMMANDS = (
    "generate",
    "info",
    "doctor",
    "regenerate",
    "train",
    "evaluate",
    "bench",
    "plot",
    "predict",
    "prune",
    "import_checkpoint",
    "export",
    "card",
    "push",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"{message} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from . import __version__

    parser = _Parser(
        prog="d3d-hf",
        description="Decoupled diffusion drafting (D3D) for transformers: the same text, in fewer target forwards.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"d3d-hf {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        importlib.import_module(f".commands.{name}", __package__).add_command(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """
    Runs one command.

    Args:
        argv (`list[str]`, *optional*): The arguments after the program's name; those of the process by default.

    Returns:
        `int`: The exit status: 0, 1 where nobody reads the output any more, 2 for a usage error (one line on stderr),
        130 after Ctrl-C.
    """
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = make_parser().parse_args(argv)
        args.argv = ["d3d-hf", *argv]
        if getattr(args, "needs_package", True):
            from .decoding import seam  # noqa: F401  the package waits for this: see d3d_hf/__init__.py
        status = args.run(args)
        _leave_process_group()
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"d3d-hf: error: {error}", file=sys.stderr)
        return 2
    except SystemExit as ending:  # argparse ends --help and --version with it
        return ending.code or 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _leave_process_group():
    """Under `accelerate launch`: threads that a process group still has may abort the interpreter's exit."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


__all__ = ["main", "make_parser"]


if __name__ == "__main__":
    sys.exit(main())
