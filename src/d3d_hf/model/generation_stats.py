"""What a generation with a drafter did, round by round, summed up."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class GenerationStats:
    """
    Statistics of one generation, kept up to date while it runs.

    Attributes:
        num_rounds (`int`): Verified rounds: one draft and one target forward each.
        num_tokens (`int`): Tokens emitted in them.
        num_drafted (`int`): Draft tokens handed to the target.
        num_accepted (`dict[int, int]`): Histogram: accepted draft tokens (bonus excluded) to number of rounds.
        draft_ms (`float`): Time in drafting calls, on the caller's thread.
        verify_ms (`float`): Time between a draft and its verdict: the target's forward and transformers' own loop.
        mode (`str`): `"auto"`, `"sync"` or `"async"`.
        door (`str`): What the generation ran in: `"loop"`, `"candidate generator"`, or `"plain"`, without drafts.
        door_reason (`str`, *optional*): Why not in the loop.
        mode_choices (`list[dict]`):
            Of `"auto"`: each change of the way of drafting, with the round from which it holds and the reason.
        num_hits (`dict[str, int]`):
            Asynchronous rounds by the branch that the verdict selected: `"masked"`, `"guessed"`, or `"none"`.
        wait_ms (`float`): Asynchronous: time that verdicts waited for their packed pass; part of `draft_ms`.
        num_errors (`int`): Packed passes that failed.
        spans (`list[tuple[str, float, float]]`):
            What ran when: lane (`"verify"` or `"draft"`), begin and end in seconds of `time.perf_counter()`.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: dict[int, int] = field(default_factory=dict)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    mode: str = "sync"
    door: str = "loop"
    door_reason: str | None = None
    mode_choices: list[dict] = field(default_factory=list)
    num_hits: dict[str, int] = field(default_factory=dict)
    wait_ms: float = 0.0
    num_errors: int = 0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean accepted draft tokens per round, bonus excluded; 0.0 before the first round."""
        return max(self.tokens_per_round - 1, 0.0)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted per round; papers print it as tau. 0.0 before the first round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def overlap(self) -> float:
        """Share of the time in packed passes that is hidden behind verifications; 0.0 if there was none."""
        verifying = [(start, end) for lane, start, end in self.spans if lane == "verify"]
        drafting = [(start, end) for lane, start, end in self.spans if lane == "draft"]
        hidden, first = 0.0, 0
        for start, end in drafting:  # both lanes are in order of time
            while first < len(verifying) and verifying[first][1] <= start:
                first += 1
            for begin, finish in verifying[first:]:
                if begin >= end:
                    break
                hidden += min(end, finish) - max(start, begin)
        total = sum(end - start for start, end in drafting)
        return hidden / total if total else 0.0

    def to_trace(self, path):
        """Writes a Chrome trace, which Perfetto opens, with one lane for the target and one for the drafter."""
        lanes = {"verify": (1, "target"), "draft": (2, "drafter")}
        origin = min((start for _, start, _ in self.spans), default=0.0)
        events = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in lanes.values()
        ]
        for lane, start, end in self.spans:
            times = {"ts": 1e6 * (start - origin), "dur": 1e6 * (end - start)}
            events.append({"ph": "X", "pid": 1, "tid": lanes[lane][0], "name": lane, "cat": lane, **times})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def plot(self, path):
        """Draws the same timeline as a PNG; needs the `plot` extra."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Drawing the timeline needs matplotlib: pip install d3d_hf[plot]") from error
        figure = Figure(figsize=(10, 1.8), layout="constrained")
        axes = figure.add_subplot()
        origin = min((start for _, start, _ in self.spans), default=0.0)
        for row, (lane, label, color) in enumerate((("draft", "drafter", "C1"), ("verify", "target", "C0"))):
            bars = [(1e3 * (start - origin), 1e3 * (end - start)) for name, start, end in self.spans if name == lane]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.3)
            axes.text(-0.005, row, label, transform=axes.get_yaxis_transform(), ha="right", va="center")
        axes.set(yticks=[], xlabel="ms")
        figure.savefig(path, dpi=150)

    def record_draft(self, num_drafted: int, draft_ms: float):
        self.num_drafted += num_drafted
        self.draft_ms += draft_ms

    def record_verdict(self, num_new_tokens: int, start_s: float, end_s: float):
        self.num_rounds += 1
        self.num_tokens += num_new_tokens
        self.verify_ms += 1e3 * (end_s - start_s)
        self.spans.append(("verify", start_s, end_s))
        accepted = num_new_tokens - 1
        self.num_accepted[accepted] = self.num_accepted.get(accepted, 0) + 1


__all__ = ["GenerationStats"]
