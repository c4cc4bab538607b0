"""The report of a pruning: JSON beside the weights, a table for the model card, and curves."""

import os
from collections.abc import Mapping

from .resumable_run import write_json


REPORT_NAME = "pruning_report.json"
PLOT_NAME = "pruning.png"


def write_report(report: Mapping, folder: str):
    write_json(os.path.join(folder, REPORT_NAME), report, indent=1)


def as_markdown(report: Mapping) -> str:
    """The report's table for a model card: a line per removal, and how the baselines do at the same depth."""
    sets, full, data = list(report["data"]["evaluation"]), report["full"], report["data"]
    recovery, training = report["settings"]["recovery"], "no training in between"
    if recovery is not None:
        every = recovery.get("every", 1)
        training = f"{recovery['num_steps']} training steps after " + ("each" if every == 1 else f"every {every}")
    lines = [
        f"Layers were chosen on {sum(data['calibration'].values())} responses and measured on "
        f"{sum(data['evaluation'].values())} others, at {data['num_positions']['evaluation']} positions; {training}.",
        "",
        "| Layers | Removed | Acceptance length | Retention (95%) | "
        + "".join(f"{name} | " for name in sets)
        + "Packed pass, ms |",
        "|---" * (5 + len(sets)) + "|",
        f"| {report['drafter']['num_layers']} | | {full['acceptance_length']:.2f} | 1 | "
        + "1 | " * len(sets)
        + f"{full['packed_pass_ms']:.1f} |",
    ]
    for step in report["steps"]:
        low, high = step["retention_interval"]
        lines.append(
            f"| {len(step['kept_layers'])} | {step['removed_layer']} | {step['acceptance_length']:.2f} | "
            f"{step['retention']:.3f} ({low:.3f} to {high:.3f}) | "
            + "".join(f"{step['by_set'][name]['retention']:.3f} | " for name in sets)
            + f"{step['packed_pass_ms']:.1f} |"
        )
    if full["trained"]:
        last = report["steps"][-1]
        low, high = last["retention_of_trained_interval"]
        lines += [
            "",
            f"Against the full-depth drafter after the same trainings, {last['num_removed']} removed keep "
            f"{last['retention_of_trained']:.3f} ({low:.3f} to {high:.3f}).",
        ]
    for comparison in report["baselines"]:
        retained = [f"{name.replace('_', ' ')} {values['retention']:.3f}" for name, values in comparison["by"].items()]
        if comparison["is_progressive_trained"]:
            retained[0] += " (trained, the others not)"
        lines += ["", f"{comparison['num_removed']} removed, retention: {', '.join(retained)}."]
    return "\n".join(lines)


def plot_report(report: Mapping, path: str):
    """
    Draws acceptance length, retention, parameters and measured milliseconds against the layers removed, and what each
    layer's removal would have cost at each step.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing the report needs matplotlib: pip install d3d_hf[plot]") from error
    full = {
        **report["full"],
        "num_removed": 0,
        "retention": 1.0,
        "retention_interval": [1.0, 1.0],
    }
    points = [full, *report["steps"]]
    depths = [point["num_removed"] for point in points]
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplot_mosaic([["acceptance", "retention", "parameters", "ms"], ["impact"] * 4])

    def curve(axis, name, scale=1.0, interval=None, label=None):
        axis.plot(depths, [point[name] * scale for point in points], "o-", label=label)
        if interval is not None:
            low, high = zip(*(point[interval] for point in points))
            axis.fill_between(depths, low, high, alpha=0.2)
        axis.set_xlabel("layers removed")
        axis.xaxis.get_major_locator().set_params(integer=True)

    curve(axes["acceptance"], "acceptance_length", interval="acceptance_interval")
    axes["acceptance"].set_title("acceptance length")
    curve(axes["retention"], "retention", interval="retention_interval", label="progressive")
    for name in report["baselines"][0]["by"] if report["baselines"] else ():
        if name != "progressive":
            axes["retention"].plot(
                [comparison["num_removed"] for comparison in report["baselines"]],
                [comparison["by"][name]["retention"] for comparison in report["baselines"]],
                "x--",
                label=name.replace("_", " "),
            )
    axes["retention"].legend()
    axes["retention"].set_title("share of the acceptance length kept")
    curve(axes["parameters"], "num_parameters", scale=1e-6)
    axes["parameters"].set_title("parameters, millions")
    curve(axes["ms"], "packed_pass_ms", label="packed pass")
    curve(axes["ms"], "synchronous_pass_ms", label="synchronous pass")
    axes["ms"].set_ylim(bottom=0)
    axes["ms"].legend()
    axes["ms"].set_title("milliseconds, measured")

    num_original = 1 + max(full["kept_layers"])
    impacts = [[float("nan")] * num_original for _ in report["steps"]]
    for row, step in zip(impacts, report["steps"]):
        for score in step["scores"]:
            row[score["layer"]] = score["impact"]
    axis = axes["impact"]
    if impacts:
        image = axis.imshow(impacts, aspect="auto", cmap="viridis_r", interpolation="none")
        axis.plot([step["removed_layer"] for step in report["steps"]], range(len(impacts)), "rx", label="removed")
        axis.set_yticks(range(len(impacts)), [step["num_removed"] for step in report["steps"]])
        figure.colorbar(image, ax=axis, label="acceptance length lost")
        axis.legend(loc="upper right")
    axis.set_xlabel("layer, by its original index")
    axis.set_ylabel("step")
    figure.savefig(path, dpi=120)


__all__ = ["PLOT_NAME", "REPORT_NAME", "as_markdown", "plot_report", "write_report"]
