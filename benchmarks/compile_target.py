"""
What `d3d_hf.compile_target` gains on the embedded target, eager and compiled interleaved in one run: the forward over
a few tokens, and greedy generation on the prompts of a JSONL file (the first of their `turns`), plain, with
transformers' prompt lookup and with a drafter.

    python benchmarks/compile_target.py --prompts gsm8k.jsonl --drafter hub_cards/d3d-smollm2-135m --output result.json
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from common import chat_inputs
from transformers import DynamicCache

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.storage import GrowingCache
from d3d_hf.testing import ForwardCounter
from d3d_hf.training.provenance import provenance


METHODS = ("plain", "prompt-lookup", "d3d-sync")
SIDES = ("eager", "compiled")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSONL file of `turns`; without it only forwards are timed")
    parser.add_argument("--drafter", help="for d3d-sync; without it that method is left out")
    parser.add_argument("--first", type=int, default=0, help="prompt to begin with (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[200], help="tokens before the timed forwards")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[1, 9, 17], help="of the timed forwards")
    parser.add_argument("--repeats", type=int, default=20, help="of each timed forward (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    targets = {side: embedded.load_target(dtype)[0] for side in SIDES}
    tokenizer = embedded.load_target(dtype)[1]
    start = time.perf_counter()
    d3d_hf.compile_target(targets["compiled"], max_context=max(*args.context, 500))
    compile_seconds = round(time.perf_counter() - start, 1)
    print(f"compiled in {compile_seconds} s", flush=True)
    report = {"compile_seconds": compile_seconds, "forwards": [], "generation": []}
    for context in args.context:
        for num_tokens in args.num_tokens:
            report["forwards"].append(time_forward(targets, context, num_tokens, args.repeats))
            print_row(report["forwards"][-1])
    if args.prompts is not None:
        report["generation"] = time_generation(targets, tokenizer, args)
    if args.output is not None:
        report |= {"warm_up": "2 forwards; 8 tokens by each method", **provenance(sys.argv)}
        args.output.write_text(json.dumps(report, indent=1))


@torch.no_grad()
def time_forward(targets: dict, context: int, num_tokens: int, repeats: int) -> dict:
    """Milliseconds of one forward over a cached context, eager and compiled in turn."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40000, (1, context + num_tokens), generator=generator)
    caches, wall, cpu = {}, {side: [] for side in SIDES}, {side: [] for side in SIDES}
    for side, target in targets.items():
        cache = DynamicCache() if side == "eager" else GrowingCache(target.config.num_hidden_layers)
        caches[side] = {cache_argument(target): cache, "use_cache": True}
        target(input_ids=ids[:, :context], logits_to_keep=1, **caches[side])
    for repeat in range(repeats + 2):
        for side, target in targets.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            target(input_ids=ids[:, context:], **caches[side])
            wall_ms, cpu_ms = 1e3 * (time.perf_counter() - wall_start), 1e3 * (time.process_time() - cpu_start)
            caches[side][cache_argument(target)].crop(-num_tokens)
            if repeat >= 2:
                wall[side].append(wall_ms)
                cpu[side].append(cpu_ms)
    row = {"context": context, "num_tokens": num_tokens}
    for side in SIDES:
        row[f"{side}_ms"] = round(statistics.median(wall[side]), 1)
        row[f"{side}_range_ms"] = [round(min(wall[side]), 1), round(max(wall[side]), 1)]
        row[f"{side}_cpu_ms"] = round(statistics.median(cpu[side]), 1)
    row["speedup"] = round(statistics.median(a / b for a, b in zip(wall["eager"], wall["compiled"])), 3)
    row["cpu_speedup"] = round(statistics.median(a / b for a, b in zip(cpu["eager"], cpu["compiled"])), 3)
    return row


def time_generation(targets: dict, tokenizer, args) -> list[dict]:
    keywords = {"plain": {}, "prompt-lookup": {"prompt_lookup_num_tokens": 10}}
    if args.drafter is not None:
        drafter = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype=targets["eager"].dtype)
        drafter.generation_config.drafting_mode = "sync"
        keywords["d3d-sync"] = {"assistant_model": drafter}
    answers = {(method, side): [] for method in keywords for side in SIDES}
    for index, inputs in enumerate(chat_inputs(args.prompts, tokenizer, args.first, args.max_samples)):
        for method, side in answers:
            if index == 0:
                targets[side].generate(**inputs, max_new_tokens=8, do_sample=False, **keywords[method])
            answers[method, side].append(answer(targets[side], inputs, args.max_new_tokens, keywords[method]))
    rows = []
    for method, side in answers:
        rows.append(summary(method, side, answers))
        print_row({name: value for name, value in rows[-1].items() if name != "per_prompt"})
    return rows


def answer(target, inputs, max_new_tokens: int, kwargs: dict) -> dict:
    with ForwardCounter(target) as forwards:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
        seconds, cpu_seconds = time.perf_counter() - wall_start, time.process_time() - cpu_start
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {"ids": ids, "seconds": seconds, "cpu_seconds": cpu_seconds, "num_rounds": forwards.count}


def summary(method: str, side: str, answers: dict) -> dict:
    """One row: rates over all prompts; medians and ranges of the paired speedups."""
    own = answers[method, side]
    row = {
        "method": method,
        "target": side,
        "num_prompts": len(own),
        "tokens_per_second": round(sum(len(a["ids"]) for a in own) / sum(a["seconds"] for a in own), 2),
        "tokens_per_round": round(sum(len(a["ids"]) for a in own) / sum(a["num_rounds"] for a in own), 3),
    }
    for name, other in (("plain_eager", ("plain", "eager")), ("same_eager", (method, "eager"))):
        for clock in ("seconds", "cpu_seconds"):
            ratios = sorted(ms_per_token(b, clock) / ms_per_token(a, clock) for a, b in zip(own, answers[other]))
            row[f"against_{name}_by_{clock}"] = round(statistics.median(ratios), 3)
            row[f"against_{name}_by_{clock}_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    row["ids_equal_plain_eager"] = sum(a["ids"] == b["ids"] for a, b in zip(own, answers["plain", "eager"]))
    row["per_prompt"] = [
        {name: value for name, value in a.items() if name != "ids"} | {"num_tokens": len(a["ids"])} for a in own
    ]
    return row


def ms_per_token(answer: dict, clock: str) -> float:
    return 1e3 * answer[clock] / max(1, len(answer["ids"]))


def print_row(row: dict):
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
