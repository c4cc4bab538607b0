"""
Draws what runs when, drafting after each verdict and drafting for every verdict, from two runs on simulated devices.

Target and drafter are tiny; each target forward sleeps for `--verify-ms` and each draft for `--draft-ms`, with the
interpreter lock released, as on two devices. A planned drafter is right at each slot with probability `--acceptance`.
The bars are the forwards as they were timed, the numbers the tokens that each verification emitted.

    python benchmarks/timeline.py --output docs/timeline.svg
"""

import argparse
import functools
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.generation.streamers import BaseStreamer

from d3d_hf.testing import acceptance_profile_drafter, tiny_model


MODES = {"sync": "drafting after each verdict", "async": "drafting for every verdict while the target verifies"}
WIDTH, LEFT, LANE, GAP = 900, 70, 26, 6  # pixels
COLORS = {"target": "#4c78a8", "drafter": "#f58518"}


@dataclass
class Span:
    """One forward: whose, begin and end in seconds from the first one's begin, and the tokens that it emitted."""

    lane: str
    start_s: float
    end_s: float
    num_tokens: int = 0


class TokensOfForwards(BaseStreamer):
    """Counts the tokens that each of the target's forwards emitted. The first chunk is the prompt."""

    def __init__(self, spans: list[Span]):
        self._spans, self._has_prompt = spans, False

    def put(self, value):
        if self._has_prompt:
            last = next(span for span in reversed(self._spans) if span.lane == "target")
            last.num_tokens += value.numel()
        self._has_prompt = True

    def end(self):
        pass


def record(mode: str, args: argparse.Namespace) -> list[Span]:
    """Spans of one generation, in order of their begin."""
    target = tiny_model("llama", seed=5)
    prompt = torch.randint(2, 67, (1, 16), generator=torch.Generator().manual_seed(0))
    reference = target.generate(prompt, max_new_tokens=args.max_new_tokens, do_sample=False)
    drafter = acceptance_profile_drafter(reference, [args.acceptance], block_size=8)
    drafter.generation_config.drafting_mode = mode
    drafter.generation_config.num_bonus_guesses = 0  # one forward per packed pass
    drafter.generation_config.draft_tree_size = 0
    drafter.generation_config.on_draft_error = "raise"
    spans = []
    streamer = TokensOfForwards(spans)

    def timed(lane, method, seconds):
        @functools.wraps(method)
        def forward(*args, **kwargs):
            start = time.perf_counter()
            outputs = method(*args, **kwargs)
            time.sleep(max(0.0, seconds - (time.perf_counter() - start)))
            spans.append(Span(lane, start, time.perf_counter()))
            return outputs

        return forward

    target.forward = timed("target", target.forward, 1e-3 * args.verify_ms)
    drafter.packed_forward = timed("drafter", drafter.packed_forward, 1e-3 * args.draft_ms)
    ids = target.generate(
        prompt, max_new_tokens=args.max_new_tokens, do_sample=False, assistant_model=drafter, streamer=streamer
    )
    if not torch.equal(ids, reference):
        raise RuntimeError(f"The ids of the {mode} run are not those of plain generation.")
    origin = min(span.start_s for span in spans)
    for span in spans:
        span.start_s, span.end_s = span.start_s - origin, span.end_s - origin
    return sorted(spans, key=lambda span: span.start_s)


def draw(runs: dict[str, list[Span]], caption: str) -> str:
    """
    The SVG of several runs, one below the other, each with a lane for the target and one for the drafter.

    Args:
        runs (`dict[str, list[Span]]`): Heading of each run to its spans.
        caption (`str`): A line below.
    """
    scale = (WIDTH - LEFT - 10) / max(span.end_s for spans in runs.values() for span in spans)
    parts, y = [], 8
    for heading, spans in runs.items():
        emitted, ms = sum(span.num_tokens for span in spans), 1e3 * spans[-1].end_s
        parts.append(_text(LEFT, y + 14, f"{heading}: {emitted} tokens in {ms:.0f} ms", weight="bold"))
        y += 22
        for lane in COLORS:
            parts.append(_text(LEFT - 8, y + 17, lane, anchor="end"))
            for span in (span for span in spans if span.lane == lane):
                x = LEFT + scale * span.start_s
                width = scale * (span.end_s - span.start_s)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 1):.1f}" height="{LANE}" rx="2" '
                    f'fill="{COLORS[lane]}"/>'
                )
                if span.num_tokens:
                    parts.append(_text(x + width / 2, y + 17, f"+{span.num_tokens}", anchor="middle", fill="white"))
            y += LANE + GAP
        y += 12
    parts.append(_text(LEFT, y + 6, caption, size=11))
    height = y + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, anchor="start", size=13, weight="normal", fill="#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{text}</text>'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify-ms", type=float, default=200, help="of a target forward (default: %(default)s)")
    parser.add_argument("--draft-ms", type=float, default=160, help="of a drafter's pass (default: %(default)s)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of each slot (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {heading: record(mode, args) for mode, heading in MODES.items()}
    caption = (
        f"Timed forwards of tiny models, slowed to {args.verify_ms:g} ms (target) and {args.draft_ms:g} ms (drafter); "
        f"planned drafts, right at each slot with probability {args.acceptance:g}. +n: tokens emitted."
    )
    args.output.write_text(draw(runs, caption), encoding="utf-8")
    for heading, spans in runs.items():
        num_rounds = sum(span.lane == "target" for span in spans)
        print(f"{heading}: {num_rounds} target forwards, {1e3 * spans[-1].end_s:.0f} ms")


if __name__ == "__main__":
    main()
