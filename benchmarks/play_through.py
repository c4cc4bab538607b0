"""
Tokens per round and speed, played through: greedy answers to the prompts of JSONL files (the first of their `turns`),
by plain generation, transformers' prompt lookup, and a drafter, interleaved prompt by prompt in one run. Methods that
end in `+ct` verify with a target that `compile_target` has compiled; the others with the same target as it is.

    python benchmarks/play_through.py --drafter FOLDER --prompts prompts.jsonl --output play_through.json
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from common import chat_inputs, own_command

from d3d_hf import D3DDrafterForCausalLM, compile_target, embedded
from d3d_hf.testing import ForwardCounter
from d3d_hf.training.provenance import provenance


METHODS = ("plain", "prompt-lookup", "d3d-sync", "d3d-async", "d3d-auto")
COMPILED = "+ct"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True, nargs="+", help="JSONL files of `turns`")
    parser.add_argument("--first", type=int, default=0, help="prompt to begin with (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, default=8, help="of each file (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    every = [method + suffix for suffix in ("", COMPILED) for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=every, default=["plain", "prompt-lookup", "d3d-sync"])
    parser.add_argument("--compile-drafter", action="store_true", help="run the drafter's passes compiled")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = embedded.load_target()
    drafter = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype=target.dtype)
    targets = {False: target, True: None}
    if any(method.endswith(COMPILED) for method in args.methods):
        targets[True] = compile_target(copy.deepcopy(target), max_context=512)
    if args.compile_drafter:
        drafter.warmup(max_context=512)
    results = []
    for path in map(Path, args.prompts):
        prompts = chat_inputs(path, tokenizer, args.first, args.max_samples)
        answers = {method: [] for method in args.methods}
        for index, inputs in enumerate(prompts):
            # The order turns from prompt to prompt, so that no method always runs on a warm or a cold machine.
            turn = index % len(args.methods)
            for method in args.methods[turn:] + args.methods[:turn]:
                verifier = targets[method.endswith(COMPILED)]
                kwargs = keywords_of(method.removesuffix(COMPILED), drafter)
                if index == 0:
                    verifier.generate(**inputs, max_new_tokens=8, do_sample=False, **kwargs)  # warm-up
                answers[method].append(answer(verifier, inputs, args.max_new_tokens, kwargs))
            print(f"{path.stem}: {index + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
        for method in args.methods:
            row = summary(path.stem, method, answers)
            results.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items() if name != "per_prompt"), flush=True)
    if args.output is not None:
        report = {"results": results, "warm_up": "8 tokens by each method", **provenance(own_command())}
        args.output.write_text(json.dumps(report, indent=1))


def keywords_of(method: str, drafter) -> dict:
    if method.startswith("d3d-"):
        drafter.generation_config.drafting_mode = method.removeprefix("d3d-")
        return {"assistant_model": drafter}
    return {"prompt_lookup_num_tokens": 10} if method == "prompt-lookup" else {}


def answer(target, inputs, max_new_tokens: int, kwargs: dict) -> dict:
    with ForwardCounter(target) as forwards:
        start = time.perf_counter()
        output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
        seconds = time.perf_counter() - start
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    row = {"ids": ids, "seconds": seconds, "num_rounds": forwards.count}
    drafter = kwargs.get("assistant_model")
    if drafter is not None:
        stats = drafter.last_generation_stats
        row |= {"draft_ms": round(stats.draft_ms), "verify_ms": round(stats.verify_ms)}
        if stats.mode == "async":
            row |= {"overlap": round(stats.overlap, 3), "wait_ms": round(stats.wait_ms), "hits": stats.num_hits}
        if stats.mode == "auto":
            row["mode_choices"] = stats.mode_choices
    return row


def summary(dataset: str, method: str, answers: dict) -> dict:
    """One row: rates over all prompts, and the median and range of the paired speedups."""
    own, plain = answers[method], answers.get("plain")
    num_tokens, seconds = sum(len(a["ids"]) for a in own), sum(a["seconds"] for a in own)
    row = {
        "dataset": dataset,
        "method": method,
        "num_prompts": len(own),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "tokens_per_round": round(num_tokens / sum(a["num_rounds"] for a in own), 3),
    }
    if plain is not None:
        rates = [[len(a["ids"]) / a["seconds"] for a in side] for side in (own, plain)]
        ratios = sorted(ours / theirs for ours, theirs in zip(*rates))
        row["speedup"] = round(statistics.median(ratios), 3)
        row["speedup_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
        row["ids_equal"] = sum(a["ids"] == b["ids"] for a, b in zip(own, plain))
    row["per_prompt"] = [{name: value for name, value in a.items() if name != "ids"} for a in own]
    return row


if __name__ == "__main__":
    main()
