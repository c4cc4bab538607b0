"""
Choices at inference, on whole answers: one or several denoising steps, with and without the chained head, and what to
draft under sampling. Tokens per round and milliseconds of drafting per round, interleaved prompt by prompt in one run.

    python benchmarks/drafting_choices.py --drafter FOLDER --prompts prompts.jsonl --output choices.json
"""

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path

import torch
from common import chat_inputs

from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.training.provenance import provenance


def choices() -> dict[str, tuple[dict, dict]]:
    """Name: drafting options (`chained_head` is this script's), arguments of generate."""
    rows = {}
    for num_steps in (1, 2, 3):
        rows[f"greedy, {num_steps} denoising steps"] = ({"num_denoising_steps": num_steps}, {"do_sample": False})
    for num_steps in (1, 2, 3):
        options = {"num_denoising_steps": num_steps, "chained_head": False}
        rows[f"greedy, {num_steps} denoising steps, no chained head"] = (options, {"do_sample": False})
    for temperature in (0.6, 1.0):
        for name, tree_size in (("chains", 0), ("trees of 16", 16)):
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            rows[f"temperature {temperature}, {name}"] = ({"draft_tree_size": tree_size}, sampling)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL file of `turns`")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-samples", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--compile-drafter", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = embedded.load_target()
    drafter = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype=target.dtype)
    drafter.generation_config.drafting_mode = "sync"
    drafter.generation_config.compile_drafter = args.compile_drafter
    collected = {name: [] for name in choices()}
    for index, inputs in enumerate(chat_inputs(args.prompts, tokenizer, args.first, args.max_samples)):
        for name, (options, kwargs) in choices().items():
            torch.manual_seed(index)
            with chosen(drafter, **options):
                target.generate(**inputs, max_new_tokens=args.max_new_tokens, assistant_model=drafter, **kwargs)
            collected[name].append(drafter.last_generation_stats)
    rows = [row(name, stats) for name, stats in collected.items()]
    for result in rows:
        print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"results": rows, **provenance(sys.argv)}, indent=1))


@contextlib.contextmanager
def chosen(drafter, num_denoising_steps: int = 1, chained_head: bool = True, draft_tree_size: int = 0):
    head = drafter.chained_head
    drafter.generation_config.num_denoising_steps = num_denoising_steps
    drafter.generation_config.draft_tree_size = draft_tree_size
    if not chained_head:
        drafter.chained_head = None
    try:
        yield
    finally:
        drafter.chained_head = head


def row(name: str, stats: list) -> dict:
    tokens, rounds = sum(s.num_tokens for s in stats), sum(s.num_rounds for s in stats)
    return {
        "choice": name,
        "prompts": len(stats),
        "tokens_per_round": round(tokens / rounds, 3),
        "draft_ms_per_round": round(statistics.median(s.draft_ms / s.num_rounds for s in stats), 1),
        "verify_ms_per_round": round(statistics.median(s.verify_ms / s.num_rounds for s in stats), 1),
    }


if __name__ == "__main__":
    main()
