"""Pictures of results: speedups, acceptance by slot, and what depth costs and gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_reports(reports: Mapping[str, Mapping], folder: str | Path) -> list[Path]:
    """
    Draws what there is to draw, as PNG files; needs the `plot` extra.

    Args:
        reports (`Mapping[str, dict]`): By name: what `d3d-hf bench` or `d3d-hf prune` wrote.
        folder (`str` or `Path`): Where `speedup.png`, `acceptance.png` and `depth.png` go.

    Returns:
        `list[Path]`: The files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing results needs matplotlib: pip install d3d_hf[plot]") from error
    results = _distinct([result for report in reports.values() for result in report.get("results", ())])
    prunings = {name: report for name, report in reports.items() if "steps" in report}
    depths = depth_points(reports)
    drawn = []
    for name, draw, data in (
        ("speedup.png", _draw_speedups, results),
        ("acceptance.png", _draw_acceptance, [result for result in results if result["slot_acceptance"]]),
        ("depth.png", _draw_depths, (depths, prunings) if depths or prunings else None),
    ):
        if data:
            figure = Figure(layout="constrained")
            draw(figure, data)
            path = Path(folder) / name
            figure.savefig(path, dpi=120)
            drawn.append(path)
    return drawn


def _distinct(results: Sequence[Mapping]) -> list[Mapping]:
    """Results of methods that ran; of several reports on one data set the first counts."""
    distinct = {}
    for result in results:
        if result["num_prompts"]:
            distinct.setdefault((result["dataset"], result["method"]), result)
    return list(distinct.values())


def depth_points(reports: Mapping[str, Mapping]) -> list[dict]:
    """
    Speed against a drafter's depth, of benchmark results whose drafters have different depths.

    Returns:
        `list[dict]` with `dataset`, `method` (without the drafter's name), `num_layers`, `speedup`, by depth.
    """
    points = []
    for report in reports.values():
        drafters = report.get("settings", {}).get("drafters") or {}
        for result in report.get("results", ()):
            if result["num_prompts"] and result["method"].startswith("d3d-") and result["drafter"] in drafters:
                points.append(
                    {
                        "dataset": result["dataset"],
                        "method": result["method"].replace(f"[{result['drafter']}]", ""),
                        "num_layers": drafters[result["drafter"]]["num_layers"],
                        "speedup": result["speedup"],
                    }
                )
    is_varied = len({point["num_layers"] for point in points}) > 1
    return sorted(points, key=lambda point: point["num_layers"]) if is_varied else []


def _color(number: int) -> str:
    """Matplotlib's default cycle has ten colours; every method has one of its own, the same in all pictures."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    palette = colormaps["tab20"]
    return to_hex(palette((2 * number + number // 10) % 20))


def _draw_speedups(figure, results: Sequence[Mapping]):
    datasets = list(dict.fromkeys(result["dataset"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    figure.set_size_inches(2 + 0.35 * len(datasets) * (len(methods) + 1), 4.5)
    axes = figure.add_subplot()
    width = 1 / (len(methods) + 1)
    for number, method in enumerate(methods):
        own = {result["dataset"]: result for result in results if result["method"] == method}
        places = [place + number * width for place, dataset in enumerate(datasets) if dataset in own]
        found = [own[dataset] for dataset in datasets if dataset in own]
        heights = [result["speedup"] for result in found]
        # A bootstrap interval of a median may end at the median itself, and rounding must not turn it inside out.
        below = [max(0.0, result["speedup"] - result["speedup_interval"][0]) for result in found]
        above = [max(0.0, result["speedup_interval"][1] - result["speedup"]) for result in found]
        axes.bar(places, heights, width, yerr=[below, above], capsize=2, label=method, color=_color(number))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([place + (len(methods) - 1) * width / 2 for place in range(len(datasets))], datasets)
    axes.set(ylabel="speedup over plain generation", ylim=(0, None))
    figure.legend(loc="outside right upper")


def _draw_acceptance(figure, results: Sequence[Mapping]):
    datasets = list(dict.fromkeys(result["dataset"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    figure.set_size_inches(3 + 3.2 * len(datasets), 4)
    grid = figure.subplots(1, len(datasets), sharey=True, squeeze=False)
    for axes, dataset in zip(grid[0], datasets):
        for result in results:
            if result["dataset"] == dataset:
                color = _color(methods.index(result["method"]))
                slots = range(1, 1 + len(result["slot_acceptance"]))
                axes.plot(slots, result["slot_acceptance"], "o-", label=result["method"], color=color)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(title=dataset, xlabel="draft slot", ylim=(0, 1.05))
        axes.legend()
    grid[0][0].set_ylabel("chance to be accepted, given the slots before")


def _draw_depths(figure, data):
    points, prunings = data
    figure.set_size_inches(5 * (bool(points) + 2 * bool(prunings)), 4)
    all_axes = list(figure.subplots(1, bool(points) + 2 * bool(prunings), squeeze=False)[0])
    if points:
        axes = all_axes.pop(0)
        for curve in dict.fromkeys((point["dataset"], point["method"]) for point in points):
            own = [point for point in points if (point["dataset"], point["method"]) == curve]
            depths, speedups = [p["num_layers"] for p in own], [p["speedup"] for p in own]
            axes.plot(depths, speedups, "o-", label=", ".join(curve))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="layers of the drafter", ylabel="speedup over plain generation", ylim=(0, None))
        axes.legend()
    for name, report in prunings.items():
        steps = [report["full"], *report["steps"]]
        depths = [report["drafter"]["num_layers"] - step.get("num_removed", 0) for step in steps]
        lengths = [step["acceptance_length"] for step in steps]
        by_depth, by_ms = all_axes
        by_depth.xaxis.get_major_locator().set_params(integer=True)
        by_depth.plot(depths, lengths, "o-", label=name)
        by_ms.plot([step["synchronous_pass_ms"] for step in steps], lengths, "o-", label=f"{name}, synchronous")
        by_ms.plot([step["packed_pass_ms"] for step in steps], lengths, "x--", label=f"{name}, packed")
        for axes, label in ((by_depth, "layers of the drafter"), (by_ms, "milliseconds of a pass")):
            axes.set(xlabel=label, ylabel="acceptance length")
            axes.legend()


__all__ = ["depth_points", "plot_reports"]
