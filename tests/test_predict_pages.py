"""The pages about scaling say what the cost model says."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from d3d_hf.cli import main
from d3d_hf.cost_model import AcceptanceProfile, Plan, RooflineForward, predict
from d3d_hf.cost_model.hardware import HARDWARE
from d3d_hf.cost_model.page_assumptions import SLOT_ACCEPTANCE, assumed_forward
from d3d_hf.cost_model.pages import TABLES, rendered
from d3d_hf.cost_model.shapes import shape_config


DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("scaling.md", "when-it-pays.md")


@pytest.fixture
def _fresh_forwards():
    assumed_forward.cache_clear()
    yield
    assumed_forward.cache_clear()


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_what_the_functions_give(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    again = rendered(text, DOCS / "results")
    assert text == again, f"write the tables anew: d3d-hf predict --update-page docs/{name}"


def test_every_table_stands_in_a_page():
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
    assert sorted(re.findall(r"<!-- table: (\S+) -->", text)) == sorted(TABLES)


def test_a_cell_is_the_prediction():
    profile = AcceptanceProfile((SLOT_ACCEPTANCE,) * 8)
    target, drafter = (RooflineForward(shape_config(f"qwen3-{size}"), HARDWARE["h200"]) for size in ("32b", "1.7b"))
    expected = [predict(target, drafter, profile, Plan(name, 8)).speedup for name in ("one-device", "two-devices")]
    expected = [f"{speedup:.2f}" for speedup in expected]
    rows = [line.split(" | ") for line in TABLES["packing"](DOCS / "results").splitlines()]
    (row,) = (row for row in rows if row[:4] == ["| 32B", "1.7B, 28 layers", "8", "0"])
    assert [cell.strip(" |") for cell in row[-2:]] == expected


def test_other_hardware_gives_other_tables(monkeypatch, _fresh_forwards):
    before = TABLES["implied"](DOCS / "results")
    assumed_forward.cache_clear()
    monkeypatch.setitem(HARDWARE, "h200", replace(HARDWARE["h200"], peak_flops=1e13))
    assert TABLES["implied"](DOCS / "results") != before


def test_published_figures_are_quoted_as_they_are():
    quoted = json.loads((DOCS / "results" / "published.json").read_text(encoding="utf-8"))
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    for row in quoted["speedups"][:2]:
        assert f"{row['d3d']:.2f}x" in text
        assert f"{row['dflash']:.2f}x" in text


def test_the_command_writes_pages(tmp_path):
    shutil.copytree(DOCS / "results", tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table: forward-ms -->\nold\n<!-- end -->\nAfter.\n")
    assert main(["predict", "--update-page", str(page)]) == 0
    written = page.read_text()
    assert "old" not in written
    assert written.startswith("Before.\n") and written.endswith("After.\n")
    assert TABLES["forward-ms"](DOCS / "results") in written


@pytest.mark.parametrize(
    ("text", "message"), [("No tables.", "has no lines"), ("<!-- table: x -->\n<!-- end -->", "a table 'x'")]
)
def test_pages_without_tables_are_refused(tmp_path, capsys, text, message):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert main(["predict", "--update-page", str(page)]) == 2
    assert message in capsys.readouterr().err
    assert page.read_text() == text
