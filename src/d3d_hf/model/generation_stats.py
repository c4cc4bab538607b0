"""What a generation with a drafter did, round by round, summed up."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class RoundTree(NamedTuple):
    """
    A draft and its verdict.

    Attributes:
        tokens (`list[int]`): Of each node.
        parents (`list[int]`): Of each node: 0 for the text's end, `i` for the `i`-th node, counted from 1.
        path (`list[int]`): The accepted nodes.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]

    @property
    def depths(self) -> list[int]:
        """Of the root, 0, and of each node: tokens from the text's end."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def ranks(self) -> list[int]:
        """Of each node: its place among its siblings, from 1."""
        seen, ranks = {}, []
        for parent in self.parents:
            seen[parent] = seen.get(parent, 0) + 1
            ranks.append(seen[parent])
        return ranks


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
        accepted_from (`dict[str, int]`):
            Where accepted draft tokens came from: `"rank 1"` (the likeliest of its siblings), `"rank 2"` and so on, or
            `"text"`, what followed in the text before.
        ranked_by (`str`):
            How siblings were ranked: by the drafter's `"law"`, or by the `"noise"` that the target will draw with too.
        ranking_reason (`str`, *optional*): Why by the law, in a generation that samples.
        trees (`list[RoundTree]`): Of each round with a draft.
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
    accepted_from: dict[str, int] = field(default_factory=dict)
    ranked_by: str = "law"
    ranking_reason: str | None = None
    trees: list[RoundTree] = field(default_factory=list)
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

    @property
    def nodes_per_round(self) -> float:
        """Mean draft tokens that the target verified per round; 0.0 before the first round."""
        return self.num_drafted / self.num_rounds if self.num_rounds else 0.0

    @property
    def depth_per_round(self) -> float:
        """Mean depth of the drafts; 0.0 before the first."""
        return sum(max(tree.depths) for tree in self.trees) / len(self.trees) if self.trees else 0.0

    def plot(self, path, tree: int | None = None, tokenizer=None):
        """
        Draws the same timeline as a PNG, or one round's tree; needs the `plot` extra.

        Args:
            path (`str` or `os.PathLike`): Of the PNG.
            tree (`int`, *optional*): Index into `trees`: draws this one, what was accepted in another colour.
            tokenizer (*optional*): Writes tokens as text instead of ids.

        Raises:
            ValueError: There is no such tree.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Drawing needs matplotlib: pip install d3d_hf[plot]") from error
        if tree is not None:
            if not -len(self.trees) <= tree < len(self.trees):
                raise ValueError(f"tree is {tree}, but the generation drafted {len(self.trees)} trees: give an index.")
            _tree_figure(Figure, self.trees[tree], tokenizer).savefig(path, dpi=150)
            return
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

    def record_tree(self, tree: RoundTree, sources: list[str] | None = None):
        """
        A draft and its verdict.

        Args:
            tree ([`RoundTree`]): Both.
            sources (`list[str]`, *optional*): Of each node: `"model"` or `"text"`. Default: the model.
        """
        self.trees.append(tree)
        ranks = tree.ranks if tree.path else []
        for node in tree.path:
            is_of_text = sources is not None and sources[node - 1] == "text"
            source = "text" if is_of_text else f"rank {ranks[node - 1]}"
            self.accepted_from[source] = self.accepted_from.get(source, 0) + 1

    def record_verdict(self, num_new_tokens: int, start_s: float, end_s: float):
        self.num_rounds += 1
        self.num_tokens += num_new_tokens
        self.verify_ms += 1e3 * (end_s - start_s)
        self.spans.append(("verify", start_s, end_s))
        accepted = num_new_tokens - 1
        self.num_accepted[accepted] = self.num_accepted.get(accepted, 0) + 1


def _tree_figure(figure_class, tree: RoundTree, tokenizer):
    """A tree from left to right, each level a column, children beside their parents."""
    depths, children = tree.depths, {}
    for node, parent in enumerate(tree.parents, start=1):
        children.setdefault(parent, []).append(node)
    heights, num_leaves = {}, 0

    def place(node: int):
        nonlocal num_leaves
        below = children.get(node, [])
        for child in below:
            place(child)
        if not below:
            num_leaves += 1
        heights[node] = sum(heights[child] for child in below) / len(below) if below else -float(num_leaves)

    place(0)
    figure = figure_class(figsize=(1.6 * (max(depths) + 1), 0.3 * num_leaves + 0.6), layout="constrained")
    axes = figure.add_subplot()
    accepted = {0, *tree.path}
    for node, parent in enumerate(tree.parents, start=1):
        ends = (depths[parent], depths[node]), (heights[parent], heights[node])
        axes.plot(*ends, color="C2" if node in accepted else "0.75", linewidth=2 if node in accepted else 0.8)
        token = tree.tokens[node - 1]
        label = str(token) if tokenizer is None else repr(tokenizer.decode([token]))[1:-1]
        color = "C2" if node in accepted else "0.4"
        axes.annotate(
            label,
            (depths[node], heights[node]),
            color=color,
            fontsize=8,
            va="center",
            ha="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.plot(0, heights[0], "o", color="C2")
    axes.set_axis_off()
    return figure


__all__ = ["GenerationStats", "RoundTree"]
