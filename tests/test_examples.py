"""Every script in examples/ runs as it stands, here on tiny random models."""

import ast
import runpy
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).resolve().parent.parent / "examples"
# Script: what its output must hold on tiny models.
TINY = {
    "quickstart": ("same ids: yes", "tokens per round"),
    "streaming_chat": ("> Name three fruits", "tokens, "),
    "sampling": ("temperature 0.7", "the same again"),
    "train_drafter": ("eval_tokens_per_round", "Drafting with it"),
    "prune_drafter": ("without layer", "kept layers"),
    "benchmark": ("d3d-sync", "3 of 3", "Fastest"),
    "two_devices": ("drafter on", "of the drafting was hidden"),
    "export_drafter": ("pard_token 16", "The target goes on"),
}
# Scripts without --tiny, which other tests run, and what the others import.
OTHER = {"demo", "self_prompts", "device_check", "example_models"}


def run(name: str, monkeypatch, *arguments: str):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", TINY)
def test_runs_on_tiny_models(name, monkeypatch, capfd):
    run(name, monkeypatch, "--tiny")
    output = capfd.readouterr().out
    for part in TINY[name]:
        assert part in output, output
    assert "ANOTHER TEXT" not in output and "same ids: no" not in output


def test_none_is_forgotten():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts - OTHER == set(TINY)


def test_trained_drafter_is_saved_where_asked(monkeypatch, tmp_path, capfd):
    from d3d_hf import D3DDrafterForCausalLM

    run("train_drafter", monkeypatch, "--tiny", "--steps", "2", "--output", str(tmp_path / "drafter"))
    drafter = D3DDrafterForCausalLM.from_pretrained(tmp_path / "drafter")
    assert drafter.config.num_hidden_layers == 4 and drafter.config.block_size == 4


@pytest.mark.parametrize("name", sorted(TINY))
def test_says_how_it_is_called(name):
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    assert f"python examples/{name}.py" in docstring
