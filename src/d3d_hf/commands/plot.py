"""`d3d-hf plot`: pictures of what `d3d-hf bench` and `d3d-hf prune` wrote."""

import argparse
import os

from .arguments import UsageError, one_line


def add_command(commands):
    parser = commands.add_parser(
        "plot",
        help="draw speedups, acceptance by slot, and depth against speed",
        description="Draws benchmark results and pruning reports as PNG: speedup.png, acceptance.png by slot, and, of "
        "drafters of several depths or pruning reports, depth.png. Needs matplotlib: pip install d3d_hf[plot].",
        allow_abbrev=False,
    )
    parser.add_argument("reports", metavar="FILE", nargs="+", help="JSON of bench, or pruning_report.json")
    parser.add_argument("--output-dir", metavar="FOLDER", help="(default: that of the first file)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = os.path.dirname(args.reports[0]) or "." if args.output_dir is None else args.output_dir
    if args.output_dir is not None and not os.path.isdir(folder):
        raise UsageError(f"--output-dir {folder!r} is no folder: give one that exists")
    reports = {}
    for path in args.reports:
        name = _distinct_name(path, reports)
        reports[name] = _read(path)
    from ..bench.plots import plot_reports

    try:
        drawn = plot_reports(reports, folder)
    except ImportError as error:
        raise UsageError(one_line(error)) from error
    if not drawn:
        raise UsageError(f"{', '.join(args.reports)}: no method ran, so there is nothing to draw")
    for path in drawn:
        print(f"Wrote {path}")
    return 0


def _distinct_name(path: str, taken) -> str:
    """The file's name for a legend; with its folder's, or all of it, where another has the same."""
    parts = os.path.abspath(path).split(os.sep)
    names = (os.sep.join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next((name for name in names if name not in taken), path)


def _read(path: str) -> dict:
    import json

    from ..bench.page import is_bench_report

    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path!r} cannot be read as JSON: {one_line(error)}") from error
    if not is_bench_report(report) and not (
        isinstance(report, dict) and {"steps", "full", "drafter"} <= report.keys()
    ):
        raise UsageError(f"{path!r} holds no results of `d3d-hf bench` and no pruning report: give one of these")
    return report


__all__ = ["add_command", "run"]
