"""docs/results.md, written from the JSON of benchmark runs and never by hand."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .methods import COMPILED_TARGET
from .report import COLUMNS, averages, table_rows


_INTRODUCTION = """\
# Results

Written by `d3d-hf bench --page docs/results.md --from docs/results/bench-*.json`; the figures are in the JSON files
named below.

A round is one forward of the target with the draft before it, a round in plain tokens its time beside the time of a
token of plain generation in the same run: a method is faster than plain generation where its tokens per round exceed
that. Speedups are medians over prompts of the ratio to plain generation of the same prompt, measured beside it, in an
order that turns from prompt to prompt, with a 95% bootstrap interval over prompts. `+cd` is a drafter whose passes are
compiled, `+ct` a compiled target; their speedups too are over plain generation with the eager target. Peak memory is
that of the whole process, which holds the models of all methods. Ids are compared with plain generation's; of the
first difference the gap of the two logits is given in roundings (ulp) of the dtype.
"""
_NOTHING_YET = "\nNothing is measured yet.\n"


def results_page(reports: Mapping[str, Mapping]) -> str:
    """
    Args:
        reports (`Mapping[str, dict]`): Benchmark JSON by file name, in the order of the page.

    Returns:
        `str`: Markdown.
    """
    sections = [_section(name, report) for name, report in reports.items()]
    return _INTRODUCTION + ("".join([*sections, "\n".join(_overall(reports.values()))]) or _NOTHING_YET)


def read_reports(paths: Sequence[str | Path]) -> dict[str, dict]:
    """
    Benchmark JSON by file name, for [`results_page`].

    Raises:
        ValueError: A file that is none.
    """
    reports = {}
    for path in map(Path, paths):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from error
        if not is_bench_report(report):
            raise ValueError(f"{str(path)!r} holds no results of `d3d-hf bench`: give a file that it wrote.")
        reports[path.name] = report
    return reports


def is_bench_report(report) -> bool:
    """Whether a JSON value is what `d3d-hf bench` writes."""
    return isinstance(report, Mapping) and {"title", "results", "settings", "argv", "machine"} <= report.keys()


def _section(name: str, report: Mapping) -> str:
    settings, machine, versions = report["settings"], report["machine"], report["versions"]
    decoding = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    accelerators = ", ".join(machine["accelerators"]) or "no accelerator"
    drafters = ", ".join(settings["drafters"]) or "none"
    lines = [
        "",
        f"## {report['title']}",
        "",
        f"Target {settings['target']} in {settings['dtype']}, drafter {drafters}; {decoding}, "
        f"{settings['max_new_tokens']} new tokens at most; CPU threads: {machine['num_threads']} of "
        f"{machine['processor']} ({machine['num_cores']} cores, {accelerators}), torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {report['date']}, commit "
        f"{(report['git_commit'] or 'unknown')[:12]}. Warm-up: {report['warm_up']}.",
        "",
        _markdown_row(COLUMNS),
        "|---" * len(COLUMNS) + "|",
        *map(_markdown_row, table_rows(report["results"])),
    ]
    if report["averages"] and report["averages"][0]["num_datasets"] > 1:
        lines += _ranking(sorted(report["averages"], key=lambda average: -average["speedup"]))
    lines += _slots(report["results"])
    findings = _findings(report["results"])
    lines += [""] * bool(findings) + [f"- {finding}" for finding in findings]
    lines += ["", f"From `docs/results/{name}`: `{shlex.join(report['argv'])}`", ""]
    return "\n".join(lines)


def _slots(results: Sequence[Mapping]) -> list[str]:
    """A table of the chance that each slot of a draft is accepted, given the ones before it."""
    drafted = [result for result in results if result.get("slot_acceptance")]
    if not drafted:
        return []
    num_slots = max(len(result["slot_acceptance"]) for result in drafted)
    heading = ["Data set", "Method", *(f"Slot {slot + 1}" for slot in range(num_slots))]
    rows = []
    for result in drafted:
        chances = [f"{chance:.2f}" for chance in result["slot_acceptance"]]
        rows.append([result["dataset"], result["method"], *chances, *[""] * (num_slots - len(chances))])
    title = "Chance that a slot of a draft is accepted, given that those before it are:"
    return ["", title, "", _markdown_row(heading), "|---" * len(heading) + "|", *map(_markdown_row, rows)]


def _findings(results: Sequence[Mapping]) -> list[str]:
    """How D3D stands against the best of the others on each data set and target, and why it loses where it does."""
    findings, explained = [], []
    for dataset in dict.fromkeys(result["dataset"] for result in results):
        ran = [result for result in results if result["dataset"] == dataset and result["num_prompts"]]
        compared = []
        for is_compiled in (False, True):
            over_target = [result for result in ran if result["method"].endswith(COMPILED_TARGET) == is_compiled]
            ours, others = _parted(over_target)
            if not ours or not others:
                continue
            best, rival = _fastest(ours), _fastest(others)
            compared.append((best, rival))
            ratio = best["speedup"] / rival["speedup"]
            text = (
                f"{dataset}, {'compiled' if is_compiled else 'eager'} target: the fastest D3D method is "
                f"{best['method']}, {ratio:.2f} times {rival['method']}"
            )
            if ratio < 1:
                explained.append(best)
                text += (
                    f": it loses. Its rounds take {best['round_cost']:.2f} plain tokens' time for "
                    f"{best['tokens_per_round']:.2f} tokens, those of {rival['method']} {rival['round_cost']:.2f} for "
                    f"{rival['tokens_per_round']:.2f}"
                )
            findings.append(text + ".")
        if len(compared) == 2:
            best, rival = _fastest(best for best, _ in compared), compared[0][1]
            findings.append(
                f"{dataset}: the fastest of all D3D methods, {best['method']}, is "
                f"{best['speedup'] / rival['speedup']:.2f} times {rival['method']}, the fastest that transformers has "
                f"without this package."
            )
    for result in results:
        is_slow = result["method"].startswith("d3d-") and result["num_prompts"] and result["speedup"] < 1
        if is_slow and result not in explained:
            findings.append(
                f"{result['dataset']}, {result['method']} is slower than plain generation: a round takes "
                f"{result['round_cost']:.2f} plain tokens' time and gives {result['tokens_per_round']:.2f} tokens."
            )
    return findings


def _parted(results: Sequence[Mapping]) -> tuple[list[Mapping], list[Mapping]]:
    """Results of D3D, and of the others."""
    ours = [result for result in results if result["method"].startswith("d3d-")]
    return ours, [result for result in results if result not in ours]


def _fastest(results: Iterable[Mapping]) -> Mapping:
    return max(results, key=lambda result: result["speedup"])


def _overall(reports: Iterable[Mapping]) -> list[str]:
    """Greedy runs of the same models and length together, each method that ran on all of their data sets."""
    groups = {}
    for report in reports:
        settings = report["settings"]
        if settings["temperature"] == 0:
            models = (settings["target"], *settings["drafters"])
            groups.setdefault((*models, settings["dtype"], settings["max_new_tokens"]), []).extend(report["results"])
    lines = []
    for (target, *_, num_tokens), results in groups.items():
        ranked = sorted(averages(results), key=lambda average: -average["speedup"])
        if not ranked or ranked[0]["num_datasets"] < 2:
            continue
        datasets = ", ".join(dict.fromkeys(result["dataset"] for result in results))
        lines += [
            "",
            "## On average",
            "",
            f"Greedy, {num_tokens} new tokens at most, target {target}: geometric means over {datasets}.",
            *_ranking(ranked),
            "",
        ]
    return lines


def _ranking(ranked: Sequence[Mapping]) -> list[str]:
    rows = [[a["method"], f"{a['speedup']:.2f}", f"{a['tokens_per_round']:.2f}"] for a in ranked]
    heading = ["Method, over all data sets", "Speedup (geometric mean)", "Tokens per round"]
    return ["", _markdown_row(heading), "|---" * len(heading) + "|", *map(_markdown_row, rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


__all__ = ["is_bench_report", "read_reports", "results_page"]
