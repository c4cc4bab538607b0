"""Measuring for the cost model: the command's --measure, and the benchmarks that compare predictions with runs."""

import json
import sys
from pathlib import Path

import pytest

from d3d_hf.cli import main
from d3d_hf.cost_model.acceptance import tokens_per_round
from d3d_hf.cost_model.measure import drafter_forward_ms, target_forward_ms
from d3d_hf.model.modeling_d3d import D3DDrafterForCausalLM
from d3d_hf.testing import ForwardCounter, tiny_config, tiny_model


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run_benchmark(monkeypatch, tmp_path):
    """Runs `main` of a benchmark, tiny, and returns its report."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str) -> dict:
        output = tmp_path / "report.json"
        monkeypatch.setattr(
            sys, "argv", [f"benchmarks/{name}.py", "--tiny", "--threads", "1", *arguments, "--output", str(output)]
        )
        __import__(name).main()
        return json.loads(output.read_text())

    return run


def test_forwards_are_timed_at_every_number_of_tokens():
    target = tiny_model()
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4).eval()
    with ForwardCounter(target) as forwards:
        times = target_forward_ms(target, (9, 1, 9), context=8, num_repeats=2)
    assert list(times) == [1, 9]
    assert forwards.count == 1 + 2 * 3  # the context, and a warm-up of each
    with ForwardCounter(drafter, "packed_forward") as passes:
        times = drafter_forward_ms(drafter, (1, 4, 5, 12), context=8, num_repeats=1)
    assert list(times) == [1, 4, 5, 12]
    assert passes.count == 1 + 4 * 2
    assert min(times.values()) > 0


def test_measured_times_predict_the_same_when_read_again(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path / "model")
    times, outputs = tmp_path / "times.json", [tmp_path / "measured.json", tmp_path / "read.json"]
    model = ["--target", str(tmp_path / "model"), "--drafter", str(tmp_path / "model")]
    common = ["predict", "--acceptance", "0.9,0.8,0.7", "--max-block-size", "4"]
    assert main([*common, *model, "--measure", "--times-output", str(times), "--output", str(outputs[0])]) == 0
    assert main([*common, "--times", str(times), "--output", str(outputs[1])]) == 0
    measured, read = (json.loads(output.read_text())["predicted"] for output in outputs)
    assert measured == read


def test_mistakes_are_found_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    tiny_config("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(
        "d3d_hf.cost_model.measure.target_forward_ms", lambda *args, **kwargs: pytest.fail("a model was run")
    )
    command = ["predict", "--target", str(tmp_path), "--drafter", str(tmp_path), "--acceptance", "0.9", "--measure"]
    for mistake in (
        ["--draft-length", "2"],
        ["--retention", "none.json"],
        ["--num-guesses", "0", "--no-masked-branches"],
    ):
        assert main([*command, *mistake]) == 2
    assert capsys.readouterr().err.count("d3d-hf: error") == 3


def test_even_draws_follow_the_profile(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from imposed_rounds import EvenlyImposedAcceptance

    profile = (0.9, 0.7, 0.5)
    imposed = EvenlyImposedAcceptance(profile, vocab_size=50)
    emitted = 0
    for start in range(200):
        draft, text = imposed.draft(start, 3).tolist(), imposed.text(start, start + 3, "cpu").tolist()
        emitted += 1 + next((slot for slot in range(3) if draft[slot] != text[slot]), 3)
    assert emitted / 200 == pytest.approx(tokens_per_round(profile), abs=0.02)


def test_predictions_are_compared_with_runs(run_benchmark):
    report = run_benchmark("predict_check", "--repeats", "1", "--rounds", "6", "--depths", "1", "2")
    rows = report["results"]
    assert len(rows) == 20
    assert {row["schedule"] for row in rows} == {"serial", "two-devices"}
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_speedup"] / row["measured_speedup"] - 1)
        # Few rounds, but their verdicts are spread evenly: acceptance is what was asked for, whatever the times are.
        assert row["measured_tokens_per_round"] == pytest.approx(row["predicted_tokens_per_round"], rel=0.25)
    errors = [abs(row["error"]) for row in rows]
    assert report["mean_absolute_error"] == pytest.approx(sum(errors) / len(errors))


def test_targets_of_growing_size_are_compared(run_benchmark):
    report = run_benchmark("scale_claim", "--repeats", "1", "--rounds", "8", "--depths", "1")
    rows = report["results"]
    assert [row["target"] for row in rows] == ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"]
    expected = tokens_per_round(report["slot_acceptance"])
    for row in rows:
        assert row["tokens_per_round"] == pytest.approx(expected, rel=0.25)
    speedups = [row["speedup"] for row in rows]
    assert report["gain_grows"] == {"1": speedups == sorted(speedups)}
