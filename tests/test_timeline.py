"""The picture of what runs when, benchmarks/timeline.py."""

import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import timeline


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_recorded_rounds(mode):
    spans = timeline.record(mode, Namespace(max_new_tokens=12, acceptance=1.0, verify_ms=5, draft_ms=3))
    assert spans[0].start_s == 0
    by_lane = {lane: [span for span in spans if span.lane == lane] for lane in ("target", "drafter")}
    assert sum(span.num_tokens for span in by_lane["target"]) == 12
    assert len(by_lane["target"]) < 6 and by_lane["drafter"]
    for lane in by_lane.values():
        assert all(before.end_s <= after.start_s for before, after in zip(lane, lane[1:]))
    if mode == "sync":
        assert all(before.end_s <= after.start_s for before, after in zip(spans, spans[1:]))


def test_bars_are_drawn_to_scale():
    spans = [timeline.Span("target", 0.0, 1.0, 3), timeline.Span("drafter", 1.0, 1.5), timeline.Span("target", 1.5, 2)]
    svg = timeline.draw({"one run": spans}, "a caption")
    bars = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', svg)]
    (first, first_width), (second, second_width), (draft, draft_width) = bars  # a lane at a time
    unit = second - first
    assert first_width + 1 == pytest.approx(unit / 1.5, abs=0.2)
    assert draft_width == pytest.approx(second_width, abs=0.2) == pytest.approx(unit / 3 - 1, abs=0.2)
    assert draft == pytest.approx(first + unit / 1.5, abs=0.2)
    assert "one run: 3 tokens in 2000 ms" in svg and "+3" in svg and "+0" not in svg and "a caption" in svg
