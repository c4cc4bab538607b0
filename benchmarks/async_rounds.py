"""
What the asynchronous loop costs, and what it hides, with the two forwards replaced by sleeps.

The models are tiny; a verification sleeps 100 ms and a packed pass 90 ms, with the interpreter lock released, as on
two devices. Measured: the round against the longer of the two, the time to the first token against plain generation,
the loop's own time at two context lengths without any sleep, and what the statistics cost of that.

    python benchmarks/async_rounds.py --output async_rounds.json
"""

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers.generation.streamers import BaseStreamer

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.bench.synthetic import ImposedAcceptance
from d3d_hf.decoding.async_drafts import AsyncDrafts
from d3d_hf.decoding.worker import InlineWorker
from d3d_hf.model.generation_stats import GenerationStats
from d3d_hf.testing import tiny_model
from d3d_hf.training.provenance import provenance


VERIFY_S, DRAFT_S = 0.100, 0.090
CONTEXTS = (256, 8192)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of each measurement (default: %(default)s)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        report = {"simulated": simulated_devices(), "own_loop": []}
        for mode, tree_size in (("sync", 0), ("sync", 32), ("async", 0)):
            report["own_loop"] += [own_loop(n, args.rounds, mode, tree_size) for n in CONTEXTS]
    for name, value in report["simulated"].items():
        print(f"{name:34} {value:.3f}")
    for row in report["own_loop"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.output is not None:
        args.output.write_text(json.dumps({**report, **provenance(sys.argv)}, indent=1))


def pair(max_positions: int = 512):
    """A target and a drafter that is its copy."""
    target = tiny_model("llama", seed=5, max_position_embeddings=max_positions)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=8)
    drafter.generation_config.num_bonus_guesses = 0  # one forward per packed pass
    drafter.generation_config.draft_tree_size = 0
    drafter.generation_config.on_draft_error = "raise"
    return target, drafter


def prompt_of(length: int) -> torch.LongTensor:
    return torch.randint(2, 67, (1, length), generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def slowed(model, method: str, seconds: float):
    original = getattr(model, method)

    @functools.wraps(original)
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(model, method, slow)
    try:
        yield
    finally:
        delattr(model, method)


class FirstToken(BaseStreamer):
    """Remembers when the first new token came."""

    def __init__(self):
        self.num_puts, self.time = 0, None

    def put(self, value):
        self.num_puts += 1
        if self.num_puts == 2:  # the first is the prompt
            self.time = time.perf_counter()

    def end(self):
        pass


def simulated_devices() -> dict[str, float]:
    target, drafter = pair()
    prompt, rows = prompt_of(32), {}
    times_to_first = {"plain": [], "async": []}
    with slowed(target, "forward", VERIFY_S), slowed(drafter, "packed_forward", DRAFT_S):
        for mode in ("sync", "async"):
            drafter.generation_config.drafting_mode = mode
            start = time.perf_counter()
            target.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter)
            stats = drafter.last_generation_stats
            rows[f"{mode}_round_ms"] = 1e3 * (time.perf_counter() - start) / stats.num_rounds
        rows["async_overlap"] = stats.overlap
        for _ in range(5):
            for name, assistant in (("plain", None), ("async", drafter)):
                streamer, start = FirstToken(), time.perf_counter()
                target.generate(
                    prompt, max_new_tokens=4, do_sample=False, assistant_model=assistant, streamer=streamer
                )
                times_to_first[name].append(1e3 * (streamer.time - start))
    rows["longer_of_the_two_ms"] = 1e3 * max(VERIFY_S, DRAFT_S)
    for name, times in times_to_first.items():
        rows[f"{name}_time_to_first_token_ms"] = statistics.median(times)
    rows["time_to_first_token_ratio"] = statistics.median(times_to_first["async"]) / statistics.median(
        times_to_first["plain"]
    )
    return rows


class Stopwatch:
    """Sums the time spent in a method of an object or class while it is used as a context manager."""

    def __init__(self, owner, method: str):
        self._owner, self._method, self.seconds, self.calls = owner, method, 0.0, 0

    def __enter__(self):
        original = self._original = getattr(self._owner, self._method)

        @functools.wraps(original)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        setattr(self._owner, self._method, timed)
        return self

    def __exit__(self, *exc_info):
        setattr(self._owner, self._method, self._original)


class Rounds:
    """The clock of an own loop: starts with a forward of the target, and stands where the last one begins."""

    def __init__(self, watches: dict[str, Stopwatch], warm: int):
        self._watches, self._warm = watches, warm
        self._num_forwards, self._start, self.sums, self.seconds = 0, None, {}, 0.0

    @property
    def count(self) -> int:
        return self._num_forwards - self._warm - 1

    def begin(self):
        self._num_forwards += 1
        now = time.perf_counter()
        if self._num_forwards == self._warm + 1:
            self._start = now
            for watch in self._watches.values():
                watch.seconds = 0.0
        elif self._start is not None:
            self.seconds = now - self._start
            self.sums = {name: watch.seconds for name, watch in self._watches.items()}


def own_loop(context_length: int, num_rounds: int, mode: str, tree_size: int) -> dict:
    """
    Milliseconds a round outside both models. The packed schedule, with three guesses of each bonus, runs on the
    caller's thread, so that nothing runs beside what is measured; two tokens of each draft are accepted.
    """
    target, drafter = pair(max_positions=context_length + 1024)
    options = drafter.generation_config
    options.drafting_mode, options.num_bonus_guesses, options.draft_tree_size = mode, 3, tree_size
    warm, num_new_tokens = 5, 3 * (num_rounds + 7)
    imposed = ImposedAcceptance([1.0, 1.0, 0.0], 67, max_length=context_length + num_new_tokens + 16)
    imposed.impose_on_target(target)
    imposed.impose_on_drafter(drafter)
    make_worker = AsyncDrafts._make_worker
    AsyncDrafts._make_worker = lambda self, drafter: InlineWorker()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, AsyncDrafts, "_make_worker", make_worker)
        watches = {
            "target": Stopwatch(target, "forward"),
            "passes": Stopwatch(drafter, "packed_forward"),
            "heads": Stopwatch(drafter, "project"),
            "imposing": Stopwatch(imposed, "draft"),
            "drafts": Stopwatch(GenerationStats, "record_draft"),
            "verdicts": Stopwatch(GenerationStats, "record_verdict"),
        }
        for watch in watches.values():
            stack.enter_context(watch)
        rounds, forward = Rounds(watches, warm), target.forward

        @functools.wraps(forward)
        def begun(*args, **kwargs):
            rounds.begin()
            return forward(*args, **kwargs)

        target.forward = begun
        stack.callback(setattr, target, "forward", forward)
        prompt = prompt_of(context_length)
        target.generate(prompt, max_new_tokens=num_new_tokens, do_sample=False, assistant_model=drafter)
    sums, count = rounds.sums, rounds.count
    model = sums["passes"] + sums["heads"]
    beside_target = rounds.seconds - sums["target"] - sums["imposing"]
    recording = sums["drafts"] + sums["verdicts"]
    return {
        "mode": mode,
        "tree_size": tree_size,
        "context": context_length,
        "rounds": count,
        "own_ms": round(1e3 * (beside_target - model) / count, 3),
        "model_ms": round(1e3 * model / count, 3),
        "target_ms": round(1e3 * sums["target"] / count, 3),
        "statistics_ms": round(1e3 * recording / count, 4),
        "statistics_share_of_round": round(recording / beside_target, 4),
    }


if __name__ == "__main__":
    main()
