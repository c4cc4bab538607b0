"""
Tokens per round and speed, played through: greedy answers to the prompts of JSONL files (the first of their `turns`),
by plain generation, transformers' prompt lookup, and a drafter, interleaved prompt by prompt in one run.

    python benchmarks/play_through.py --drafter FOLDER --prompts prompts.jsonl --output play_through.json
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.testing import ForwardCounter
from d3d_hf.training.provenance import provenance


METHODS = ("plain", "prompt-lookup", "d3d-sync", "d3d-async")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True, nargs="+", help="JSONL files of `turns`")
    parser.add_argument("--first", type=int, default=0, help="prompt to begin with (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, default=8, help="of each file (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = embedded.load_target()
    drafter = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype=target.dtype)
    keywords = {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 10},
        "d3d-sync": {"assistant_model": drafter},
        "d3d-async": {"assistant_model": drafter},
    }
    results = []
    for path in map(Path, args.prompts):
        lines = path.read_text(encoding="utf-8").splitlines()[args.first :][: args.max_samples]
        answers = {method: [] for method in args.methods}
        for index, line in enumerate(lines):
            messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            for method in args.methods:
                if method.startswith("d3d"):
                    drafter.generation_config.drafting_mode = method.removeprefix("d3d-")
                if index == 0:
                    target.generate(**inputs, max_new_tokens=8, do_sample=False, **keywords[method])  # warm-up
                answers[method].append(answer(target, inputs, args.max_new_tokens, keywords[method]))
        for method in args.methods:
            row = summary(path.stem, method, answers)
            results.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items() if name != "per_prompt"), flush=True)
    if args.output is not None:
        command = [Path(part).name if part.endswith((".jsonl", ".json")) else part for part in sys.argv]
        report = {"results": results, "warm_up": "8 tokens by each method", **provenance(command)}
        args.output.write_text(json.dumps(report, indent=1))


def answer(target, inputs, max_new_tokens: int, kwargs: dict) -> dict:
    with ForwardCounter(target) as forwards:
        start = time.perf_counter()
        output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
        seconds = time.perf_counter() - start
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {"ids": ids, "seconds": seconds, "num_rounds": forwards.count}


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
