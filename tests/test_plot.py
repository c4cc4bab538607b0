"""Pictures of results: what is drawn of which files, and that it is what the JSON says."""

import json
import sys

import pytest

from d3d_hf.bench.plots import depth_points, plot_reports
from d3d_hf.cli import main


def result_of(dataset, method, speedup, drafter=None):
    return {
        "dataset": dataset,
        "method": method,
        "drafter": drafter,
        "num_prompts": 3,
        "speedup": speedup,
        "speedup_interval": [speedup - 0.1, speedup + 0.2],
        "slot_acceptance": [0.9, 0.7, 0.5] if method != "plain" else [],
    }


NOT_RUN = {"dataset": "gsm8k", "method": "dflash", "drafter": None, "num_prompts": 0, "speedup": 0.0, "reason": "none"}


def report_of(results, drafters=("full", 30)):
    name, num_layers = drafters
    settings = {"drafters": {name: {"num_layers": num_layers, "block_size": 8}}}
    return {"title": "Talk", "results": results, "settings": settings, "argv": ["d3d-hf"], "machine": {}}


@pytest.fixture
def full():
    return report_of(
        [
            result_of("gsm8k", "plain", 1.0),
            result_of("gsm8k", "d3d-sync", 1.9, "full"),
            result_of("mt-bench", "plain", 1.0),
            result_of("mt-bench", "d3d-sync", 1.1, "full"),
            NOT_RUN,
        ]
    )


@pytest.fixture
def pruning():
    point = {"acceptance_length": 3.0, "packed_pass_ms": 90.0, "synchronous_pass_ms": 40.0}
    steps = [{**point, "num_removed": n, "acceptance_length": 3.0 - 0.1 * n} for n in (1, 2)]
    return {"full": point, "steps": steps, "drafter": {"num_layers": 30}}


def test_depths_are_told_apart_by_the_drafter(full):
    assert depth_points({"full": full}) == []
    pruned = report_of([result_of("gsm8k", "d3d-sync[pruned]", 2.1, "pruned"), NOT_RUN], ("pruned", 20))
    points = depth_points({"full": full, "pruned": pruned})
    assert [(p["dataset"], p["method"], p["num_layers"], p["speedup"]) for p in points] == [
        ("gsm8k", "d3d-sync", 20, 2.1),
        ("gsm8k", "d3d-sync", 30, 1.9),
        ("mt-bench", "d3d-sync", 30, 1.1),
    ]


def axes_drawn(monkeypatch, reports, folder):
    """The figures by file name, looked at before they are written."""
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn, savefig = {}, figure_module.Figure.savefig

    def keep(figure, path, **kwargs):
        drawn[path.name] = figure.axes
        savefig(figure, path, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", keep)
    paths = plot_reports(reports, folder)
    assert [path.name for path in paths] == list(drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    return drawn


def test_bars_are_as_high_as_the_speedups(monkeypatch, full, tmp_path):
    drawn = axes_drawn(monkeypatch, {"full": full}, tmp_path)
    assert list(drawn) == ["speedup.png", "acceptance.png"]
    (axes,) = drawn["speedup.png"]
    assert sorted(bar.get_height() for bar in axes.patches) == [1.0, 1.0, 1.1, 1.9]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["gsm8k", "mt-bench"]
    assert len(drawn["acceptance.png"]) == 2
    for axes in drawn["acceptance.png"]:
        (line,) = axes.lines
        assert list(line.get_xdata()) == [1, 2, 3] and list(line.get_ydata()) == [0.9, 0.7, 0.5]


def test_pruning_reports_and_depths_share_a_picture(monkeypatch, full, pruning, tmp_path):
    pruned = report_of([result_of("gsm8k", "d3d-sync", 2.1, "pruned")], ("pruned", 20))
    drawn = axes_drawn(monkeypatch, {"full": full, "pruned": pruned, "steps": pruning}, tmp_path)
    speeds, by_depth, by_ms = drawn["depth.png"]
    assert list(speeds.lines[0].get_xdata()) == [20, 30] and list(speeds.lines[0].get_ydata()) == [2.1, 1.9]
    assert list(by_depth.lines[0].get_xdata()) == [30, 29, 28]
    assert list(by_depth.lines[0].get_ydata()) == pytest.approx([3.0, 2.9, 2.8])
    assert [list(line.get_xdata()) for line in by_ms.lines] == [[40.0] * 3, [90.0] * 3]
    assert list(axes_drawn(monkeypatch, {"steps": pruning}, tmp_path)) == ["depth.png"]


def test_the_command_writes_beside_the_first_file(full, pruning, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.json").write_text(json.dumps(full))
    (tmp_path / "pruning_report.json").write_text(json.dumps(pruning))
    assert main(["plot", "a/results.json", "pruning_report.json"]) == 0
    names = ["acceptance.png", "depth.png", "speedup.png"]
    assert sorted(path.name for path in (tmp_path / "a").glob("*.png")) == names
    assert capsys.readouterr().out.count("Wrote") == 3
    assert main(["plot", "pruning_report.json", "--output-dir", "."]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["depth.png"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (("none.json",), "'none.json' cannot be read as JSON"),
        (("text.json",), "'text.json' cannot be read as JSON"),
        (("other.json",), "holds no results of `d3d-hf bench` and no pruning report"),
        (("full.json", "--output-dir", "nowhere"), "--output-dir 'nowhere' is no folder"),
    ],
)
def test_mistakes_are_named_in_one_line(argv, message, full, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("figures")
    (tmp_path / "other.json").write_text('{"results": []}')
    (tmp_path / "full.json").write_text(json.dumps(full))
    assert main(["plot", *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(full, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full.json").write_text(json.dumps(full))
    assert main(["plot", "full.json"]) == 2
    assert "pip install d3d_hf[plot]" in capsys.readouterr().err
