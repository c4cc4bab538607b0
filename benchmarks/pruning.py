"""
Pruning, measured. Two parts, each a command of its own:

    python benchmarks/pruning.py scoring --drafter FOLDER --data answers --output pruning-scoring.json
    python benchmarks/pruning.py depths --drafter FOLDER --report pruning_report.json --depths 0 4 8 \\
        --prompts prompts.jsonl --output pruning-depths.json

`scoring`: one step of progressive pruning with hidden states shared between candidates against a full pass for each,
interleaved, on the same texts and positions, and whether the scores are the same.

`depths`: the speed of `generate` with the drafter at several depths, layers removed in the order of a report that was
made without recovery training, and of other pruned drafters (`--also`), against plain generation of the same prompts,
interleaved. With several values of `--drafting-mode`, in each.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
from common import chat_inputs

from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.pruning import remove_layers
from d3d_hf.pruning.removal import original_indices
from d3d_hf.pruning.scoring import CalibrationSet, accepted_without_each, accepted_without_each_naively
from d3d_hf.testing import ForwardCounter
from d3d_hf.training.provenance import provenance
from d3d_hf.training.responses import load_responses


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    scoring = parts.add_parser("scoring")
    scoring.add_argument("--data", required=True, help="responses of the drafter's target")
    scoring.add_argument("--first", type=int, default=0, help="row to begin with (default: %(default)s)")
    scoring.add_argument("--texts", type=int, default=2, help="in one pass (default: %(default)s)")
    scoring.add_argument("--positions", type=int, default=32, help="per text (default: %(default)s)")
    scoring.add_argument("--repeats", type=int, default=3)
    depths = parts.add_parser("depths")
    depths.add_argument("--report", required=True, help="pruning_report.json of the drafter")
    depths.add_argument("--depths", type=int, nargs="+", required=True, help="layers removed, 0 for none")
    depths.add_argument("--also", nargs="+", default=[], metavar="FOLDER", help="drafters after recovery training")
    depths.add_argument("--compile-drafter", action="store_true")
    depths.add_argument("--num-bonus-guesses", type=int, help="of asynchronous drafts")
    depths.add_argument("--prompts", required=True, nargs="+", help="JSONL files of `turns`")
    depths.add_argument("--max-samples", type=int, default=4, help="of each file (default: %(default)s)")
    depths.add_argument("--max-new-tokens", type=int, default=96)
    depths.add_argument("--drafting-mode", nargs="+", choices=("sync", "async"), default=("sync",))
    for part in (scoring, depths):
        part.add_argument("--drafter", required=True)
        part.add_argument("--threads", type=int, default=2)
        part.add_argument("--output", help="JSON")
    return parser.parse_args()


def measure_scoring(args) -> dict:
    drafter = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype="auto")
    rows = load_responses(args.data)[0][args.first :][: args.texts]
    batch = CalibrationSet(rows, drafter.config, args.positions, args.texts).batch(0)
    ways = {"shared": accepted_without_each, "naive": accepted_without_each_naively}
    wall, cpu, scores = ({name: [] for name in ways} for _ in range(3))
    with torch.no_grad():
        drafter.packed_forward(batch.input_ids, batch.layout, logits_to_keep=None)  # warm-up
    for _ in range(args.repeats):
        for name, way in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            scores[name].append([accepted.length for accepted in way(drafter, batch)])
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
            print(f"{name:8} {wall[name][-1]:7.2f} s, {cpu[name][-1]:7.2f} s of processor", flush=True)
    gaps = [
        abs(left - right) for pair in zip(scores["shared"], scores["naive"]) for left, right in zip(*pair, strict=True)
    ]
    results = {
        "num_layers": drafter.config.num_hidden_layers,
        "tokens_per_pass": batch.input_ids.numel(),
        "seconds": {name: summary(values) for name, values in wall.items()},
        "processor_seconds": {name: summary(values) for name, values in cpu.items()},
        "naive_over_shared": summary([n / s for n, s in zip(wall["naive"], wall["shared"])]),
        "naive_over_shared_processor": summary([n / s for n, s in zip(cpu["naive"], cpu["shared"])]),
        "largest_score_difference": max(gaps),
    }
    ratio = results["naive_over_shared"]
    print(f"naive over shared: {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}; goal: at least 1.7)")
    print(f"largest difference between scores: {max(gaps):.2g} (goal: at most 1e-5)")
    return results


def measure_depths(args) -> dict:
    with open(args.report, encoding="utf-8") as file:
        report = json.load(file)
    if report["settings"]["recovery"] is not None:
        sys.exit(f"{args.report} is of a pruning with recovery training, whose depths cannot be made anew")
    target, tokenizer = embedded.load_target()
    drafters = {depth: drafter_at(args.drafter, report, depth, target.dtype) for depth in args.depths}
    for folder in args.also:
        name = os.path.basename(os.path.normpath(folder))
        drafters[name] = D3DDrafterForCausalLM.from_pretrained(folder, dtype=target.dtype)
    for drafter in drafters.values():
        drafter.generation_config.compile_drafter = args.compile_drafter
        if args.num_bonus_guesses is not None:
            drafter.generation_config.num_bonus_guesses = args.num_bonus_guesses
    answers = []
    for path in args.prompts:
        for inputs in chat_inputs(path, tokenizer, max_samples=args.max_samples):
            runs = [("plain", None, None)]
            runs += [(mode, depth, drafter) for mode in args.drafting_mode for depth, drafter in drafters.items()]
            for mode, depth, drafter in runs:
                kwargs = {}
                if drafter is not None:
                    drafter.generation_config.drafting_mode = mode
                    kwargs["assistant_model"] = drafter
                if not any((a["mode"], a["depth"]) == (mode, depth) for a in answers):
                    target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, **kwargs)  # warm-up
                with ForwardCounter(target) as forwards:
                    start = time.perf_counter()
                    output = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, **kwargs)
                    seconds = time.perf_counter() - start
                num_tokens = output.shape[1] - inputs["input_ids"].shape[1]
                rate = num_tokens / seconds
                answers.append(
                    {
                        "dataset": os.path.basename(path).removesuffix(".jsonl"),
                        "mode": mode,
                        "depth": depth,
                        "num_tokens": num_tokens,
                        "num_rounds": forwards.count,
                        "tokens_per_second": rate,
                        "speedup": rate
                        / next(a for a in reversed(answers) if a["mode"] == "plain")["tokens_per_second"]
                        if mode != "plain"
                        else 1.0,
                    }
                )
    rows = []
    for mode in args.drafting_mode:
        for depth, drafter in drafters.items():
            own = [answer for answer in answers if (answer["mode"], answer["depth"]) == (mode, depth)]
            rows.append(
                {
                    "mode": mode,
                    "depth": depth,
                    "num_layers": drafter.config.num_hidden_layers,
                    "num_prompts": len(own),
                    "tokens_per_round": sum(a["num_tokens"] for a in own) / sum(a["num_rounds"] for a in own),
                    "speedup": summary([a["speedup"] for a in own]),
                }
            )
            speedup = rows[-1]["speedup"]
            print(
                f"{mode:6} {depth!s:>2} removed: {rows[-1]['tokens_per_round']:.2f} tokens per round, "
                f"{speedup['median']:.2f} times plain ({speedup['low']:.2f} to {speedup['high']:.2f})",
                flush=True,
            )
    best = {
        mode: max((row for row in rows if row["mode"] == mode), key=lambda row: row["speedup"]["median"])["depth"]
        for mode in args.drafting_mode
    }
    print("fastest, layers removed:", ", ".join(f"{mode} {depth}" for mode, depth in best.items()))
    return {"depths": rows, "fastest": best, "answers": answers}


def drafter_at(name: str, report: dict, depth: int, dtype: torch.dtype):
    drafter = D3DDrafterForCausalLM.from_pretrained(name, dtype=dtype)
    gone = {step["removed_layer"] for step in report["steps"][:depth]}
    if len(gone) != depth:
        sys.exit(f"the report has {len(report['steps'])} removals, --depths asks for {depth}")
    if gone:
        remove_layers(drafter, [i for i, layer in enumerate(original_indices(drafter)) if layer in gone])
    return drafter


def summary(values) -> dict:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "count": len(values)}


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    results = {"scoring": measure_scoring, "depths": measure_depths}[args.part](args)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump({**provenance(sys.argv), "settings": {"threads": args.threads}, **results}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
