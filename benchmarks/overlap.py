"""
What asynchronous drafting hides with real models, by the drafter's depth: the embedded target on half of the cores, a
drafter cut from it on the other half, masked branches alone.

Per depth: the target's forward alone and beside the packed pass, the packed pass alone and beside the target, the
share of the drafting time that is hidden (the head and the choice of tokens, made after the verdict, count as not
hidden), and the round. The drafters are untrained: what is measured here does not depend on how much is accepted.

    python benchmarks/overlap.py --prompts gsm8k.jsonl --layers 6 12 30 --output overlap.json
"""

import argparse
import contextlib
import inspect
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from common import chat_inputs

from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.decoding.async_drafts import AsyncDrafts
from d3d_hf.decoding.worker import InlineWorker
from d3d_hf.training.provenance import provenance


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL file of `turns`")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 20, 30], help="depths (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="prompt to begin with (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="per prompt, about (default: %(default)s)")
    parser.add_argument("--slot-budget", type=int, help="draft_slot_budget (default: no bound)")
    parser.add_argument("--eager", action="store_true", help="packed passes run eagerly")
    parser.add_argument("--threads", type=int, default=2, help="of both models together (default: %(default)s)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = embedded.load_target()
    inputs = chat_inputs(args.prompts, tokenizer, args.first, args.max_samples)
    rows = []
    for num_layers in args.layers:
        rows.append(measure(target, drafter_of(target, num_layers, args), inputs, args))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"results": rows, **provenance(sys.argv)}, indent=1))


def drafter_of(target, num_layers: int, args):
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=8, kept_layers=num_layers)
    options = drafter.generation_config
    options.drafting_mode, options.num_bonus_guesses, options.draft_slot_budget = "async", 0, args.slot_budget
    options.compile_drafter, options.on_draft_error = not args.eager, "raise"
    if not args.eager:
        drafter.warmup(max_context=500)
    return drafter


def measure(target, drafter, inputs: list, args) -> dict:
    """One row, of medians over rounds: the two models alone, and both at once, prompt by prompt in turn."""
    times = {"alone": [], "beside": []}
    passes = {"alone": [], "beside": []}
    rounds, hidden, drafting = [], 0.0, 0.0
    for index, prompt in enumerate(inputs):
        for kind in ("alone", "beside"):
            torch.set_num_threads(args.threads // 2 if kind == "alone" else args.threads)
            with timed_forward(target) as forwards, inline() if kind == "alone" else contextlib.nullcontext():
                start = time.perf_counter()
                target.generate(**prompt, max_new_tokens=args.rounds, do_sample=False, assistant_model=drafter)
                seconds = time.perf_counter() - start
            stats = drafter.last_generation_stats
            if index == 0:
                continue  # warms up
            times[kind] += forwards[2:]  # the prefill, and the round beside the drafter's
            passes[kind] += [end - begin for lane, begin, end in stats.spans if lane == "draft"][1:]
            if kind == "beside":
                rounds.append(seconds / stats.num_rounds)
                pass_ms = 1e3 * sum(end - begin for lane, begin, end in stats.spans if lane == "draft")
                hidden += stats.overlap * pass_ms
                drafting += pass_ms + stats.draft_ms - stats.wait_ms
    row = {"layers": drafter.config.backbone_config.num_hidden_layers}
    for name, values in (("target", times), ("packed_pass", passes)):
        for kind in ("alone", "beside"):
            ms = [1e3 * value for value in values[kind]]
            row[f"{name}_{kind}_ms"] = round(statistics.median(ms), 1)
            row[f"{name}_{kind}_quartiles_ms"] = [round(q, 1) for q in statistics.quantiles(ms, n=4)[::2]]
    row["target_slowdown"] = round(row["target_beside_ms"] / row["target_alone_ms"], 3)
    row["hidden_share"] = round(hidden / drafting, 3)
    row["round_ms"] = round(1e3 * statistics.median(rounds), 1)
    return row


@contextlib.contextmanager
def timed_forward(model):
    """Seconds of each forward of `model`."""
    seconds, forward = [], model.forward

    def timed(*args, **kwargs):
        start = time.perf_counter()
        outputs = forward(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return outputs

    timed.__signature__ = inspect.signature(forward)
    model.forward = timed
    try:
        yield seconds
    finally:
        del model.forward


@contextlib.contextmanager
def inline():
    """Packed passes on the caller's thread, so that nothing runs beside the target."""
    original = AsyncDrafts._make_worker
    AsyncDrafts._make_worker = lambda self, drafter: InlineWorker()
    try:
        yield
    finally:
        AsyncDrafts._make_worker = original


if __name__ == "__main__":
    main()
