"""The device script runs: on the CPU as it stands, and the way it takes on a GPU with a stand-in for CUDA graphs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.cpp_extension
from fake_graphs import FakeGraphs

from d3d_hf.compiled import drafter as drafter_module
from d3d_hf.compiled import target as target_module


SCRIPT = Path(__file__).parents[1] / "examples" / "device_check.py"


def load_script():
    spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.utils.cpp_extension.get_cxx_compiler() is None, reason="needs a C++ compiler")
def test_the_script_runs_on_a_cpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "device_check.json").read_text())
    assert content["is_complete"] and content["settings"]["is_tiny"]
    assert set(content["parts"]) == {"kernels", "models", "packed pass", "overlap", "generate"}
    assert str(tmp_path) not in json.dumps(content)
    for row in content["parts"]["packed pass"]:
        assert row["eager_ms"] > 0 and row["compiled_ms"] > 0 and row["num_tokens"] == 9 + 9 * 8
    for row in content["parts"]["generate"]:
        wanted = 1 if "plain" in row["row"] else 3
        assert row["tokens_per_round"] >= wanted
        assert row.get("mode") in (None, "sync", "async") and row.get("mode", "plain") in row["row"]


def test_the_way_of_a_gpu(tmp_path, monkeypatch):
    """Target and drafter graphed, in every part; a row for which no time is left is listed, what was made is kept."""
    script, fake = load_script(), FakeGraphs()
    for module in (script, drafter_module, target_module):
        monkeypatch.setattr(module, "graphs_for", lambda device: fake)
    report = script.Report(tmp_path, {}, minutes=10)
    check = script.Check(report, torch.device("cpu"), is_tiny=True)
    check.seconds = 0.0
    check.run_all()
    assert report.finish() == 0, report.content["failed"]
    assert check.attention == "d3d_packed"
    parts = report.content["parts"]
    assert all(row["graphed_ms"] > 0 for row in parts["packed pass"])
    for row in parts["overlap"]:
        for kinds in ("eager target, eager draft", "eager target, graphed draft", "graphed target, graphed draft"):
            assert row[kinds]["both_ms"] > 0 and row[kinds]["times_limit"] > 0
    rows = {row["row"]: row for row in parts["generate"]}
    assert sum("graphed target" in name for name in rows) == sum("eager target" in name for name in rows) == 6
    assert all("speedup" in row for name, row in rows.items() if "plain" not in name)
    assert all("times_limit" in row for name, row in rows.items() if "async" in name)

    before = len(parts["kernels"])
    report._end = 0.0
    check.kernels()
    assert len(parts["kernels"]) == before and report.finish() == 0
    content = json.loads((tmp_path / "device_check.json").read_text())
    assert len(content["skipped"]) == before and not content["is_complete"]


def test_a_row_that_fails_is_no_end(tmp_path):
    script = load_script()
    report = script.Report(tmp_path, {}, minutes=10)

    def fail():
        raise RuntimeError("no such kernel\nsecond line")

    assert report.attempt("kernels", "first", 0, fail) is None
    assert report.attempt("kernels", "second", 0, lambda: {"ms": 1.0}) == {"ms": 1.0}
    assert report.finish() == 1
    content = json.loads((tmp_path / "device_check.json").read_text())
    assert content["failed"] == [{"part": "kernels", "row": "first", "error": "RuntimeError: no such kernel"}]
    assert content["parts"] == {"kernels": [{"row": "second", "ms": 1.0}]}


@pytest.mark.parametrize(("words", "error"), [(["--minutes", "0"], "give more than 0"), ([], "no CUDA device")])
def test_wrong_calls(tmp_path, words, error, monkeypatch, capsys):
    script = load_script()
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--out", str(tmp_path / "out"), *words])
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main()
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()
