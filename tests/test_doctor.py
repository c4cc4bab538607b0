"""`d3d-hf doctor`, well and with faults that are simulated."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch
from transformers import GenerationMixin

import d3d_hf
from d3d_hf.cli import main
from d3d_hf.decoding import LoopDoor
from d3d_hf.model.candidate_generator import CandidateGeneratorDoor
from d3d_hf.model.drafting_options import DRAFTING_MODES


@pytest.fixture
def doctor(capsys):
    """Runs the command; gives its exit status, its lines by subject, and the list at its end."""

    def doctor():
        status = main(["doctor"])
        lines, _, ending = capsys.readouterr().out.partition("\n\n")
        return status, {line[:16].strip(): line[16:] for line in lines.splitlines()}, ending

    return doctor


def test_well(doctor):
    status, lines, ending = doctor()
    assert status == 0 and ending == "Nothing is wrong.\n"
    assert lines["d3d_hf"] == d3d_hf.__version__
    assert lines["transformers"] == importlib.metadata.version("transformers")
    assert lines["threads"].startswith(f"{torch.get_num_threads()} of torch")
    assert "in place" in lines["hook"]
    for mode in ("sync", "async"):
        assert "32 tokens in " in lines[mode] and "through the loop" in lines[mode]
    assert "32 tokens in 6 target forwards" in lines["sync"]
    assert "through the candidate generator" in lines["second door"]
    assert set(DRAFTING_MODES) < set(lines)


def test_as_a_process_of_its_own():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "d3d_hf.cli", "doctor"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("Nothing is wrong.\n")


def test_without_the_hook(doctor):
    d3d_hf.uninstall_generation_hook()
    try:
        status, lines, ending = doctor()
    finally:
        d3d_hf.install_generation_hook()
    assert status == 1 and "WRONG" in lines["hook"]
    assert "1. hook: not in place" in ending and "Call d3d_hf.install_generation_hook()" in ending


@pytest.mark.parametrize(
    "door, subject, well", [(LoopDoor, "sync", "second door"), (CandidateGeneratorDoor, "second door", "sync")]
)
def test_a_door_whose_contract_has_changed(doctor, monkeypatch, door, subject, well):
    def run(self, call, assisted_decoding):
        raise AttributeError("a private contract has changed")

    monkeypatch.setattr(door, "run", run)
    status, lines, ending = doctor()
    assert status == 1 and "WRONG: ran without drafts instead of through the" in lines[subject]
    assert (
        "AttributeError: a private contract has changed" in ending
        and "Install another release of transformers" in ending
    )
    assert "the ids of plain generation" in lines[well]


def test_a_text_that_is_not_the_targets(doctor, monkeypatch):
    original = GenerationMixin._assisted_decoding

    def wrong(self, *args, **kwargs):
        output = original(self, *args, **kwargs).clone()
        output[0, -1] = (output[0, -1] + 1) % 67
        return output

    wrong._d3d_original = original._d3d_original
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", wrong)
    status, lines, ending = doctor()
    assert status == 1 and all("not that of plain generation" in lines[mode] for mode in DRAFTING_MODES)
    assert "Do not use this mode" in ending


def test_a_generation_that_raises_and_one_that_does_not_draft(doctor, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError("no such thing\nany more")

    fail._d3d_original = GenerationMixin._assisted_decoding._d3d_original
    with monkeypatch.context() as patched:
        patched.setattr(GenerationMixin, "_assisted_decoding", fail)
        status, lines, _ = doctor()
    assert status == 1 and "generate raised RuntimeError: no such thing any more" in lines["sync"]
    monkeypatch.setattr("d3d_hf.testing.oracle_drafter", d3d_hf.testing.anti_oracle_drafter)
    status, lines, ending = doctor()
    assert status == 1 and "32 target forwards for 32 tokens" in lines["sync"] and "hardly anything" in ending


def test_a_release_out_of_range_and_one_that_is_missing(doctor, monkeypatch):
    requirements = ["transformers>=99", "no-such-package", "torch; extra == 'other'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    status, lines, ending = doctor()
    assert status == 1 and "d3d_hf needs >=99" in lines["transformers"] and "torch" not in lines
    assert (
        "Install it: pip install 'transformers>=99'" in ending
        and "Install it: pip install 'no-such-package'" in ending
    )


def test_from_sources_that_are_not_installed(doctor, monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    status, lines, _ = doctor()
    assert status == 0 and "not installed" in lines["package"] and "torch" in lines


def test_a_package_that_cannot_be_imported(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('broken release')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-m", "d3d_hf.cli", "doctor"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 1 and result.stderr == ""
    assert "1. import d3d_hf: ImportError: broken release.\n   Install releases" in result.stdout
