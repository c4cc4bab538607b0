"""
Does the gain grow with the target? Random models of three sizes and one drafter, the same imposed acceptance, eager,
drafts after each verdict: what changes from row to row is how long the target's forward takes.

Beside what was measured stands what the cost model says for the measured times of the forwards, drafting after the
verdict and on a second device. One command, below six minutes with two threads:

    python benchmarks/scale_claim.py --output docs/results/scale-claim.json
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from imposed_rounds import impose, paced, prompt_of, random_drafter

from d3d_hf.cost_model import AcceptanceProfile, MeasuredForward, Plan, predict
from d3d_hf.cost_model.measure import drafter_forward_ms, target_forward_ms
from d3d_hf.cost_model.shapes import random_model, shape_config
from d3d_hf.training.provenance import provenance


TARGETS = ("smollm2-135m", "smollm2-360m", "smollm2-1.7b")
DRAFTER, BLOCK_SIZE, PROMPT = "smollm2-135m", 8, 64
PROFILE = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="(default: all)")
    parser.add_argument("--depths", type=int, nargs="+", default=(10, 30), help="of the drafter (default: 10 30)")
    parser.add_argument("--repeats", type=int, default=4, help="of each generation (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of a generation, about (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    drafters = {
        depth: random_drafter(shape_config(DRAFTER, num_layers=depth, tiny=args.tiny), BLOCK_SIZE)
        for depth in args.depths
    }
    rows = [row for name in args.targets for row in rows_of(name, drafters, args)]
    speedups = {depth: [row["speedup"] for row in rows if row["num_layers"] == depth] for depth in args.depths}
    report = {
        "results": rows,
        "slot_acceptance": PROFILE,
        "gain_grows": {depth: ratios == sorted(ratios) for depth, ratios in speedups.items()},
        "warm_up": "one plain and one drafted generation",
        "seconds": round(time.perf_counter() - start),
        **provenance(sys.argv),
    }
    print(f"the gain grows with the target: {report['gain_grows']}")
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def rows_of(name: str, drafters: dict, args) -> list[dict]:
    """One target beside each drafter, in turns."""
    config = shape_config(name, tiny=args.tiny)
    target, prompt = random_model(config), prompt_of(PROMPT, config.vocab_size)
    num_parameters = sum(p.numel() for p in target.parameters())
    imposed, paces = {}, {depth: [] for depth in drafters}
    target_ms, drafters_ms = {}, {depth: {} for depth in drafters}
    for repeat in range(args.repeats + 1):
        target.__dict__.pop("forward", None)
        collect(target_ms, target_forward_ms(target, (1, BLOCK_SIZE + 1), PROMPT + 20, num_repeats=1))
        for depth, drafter in drafters.items():
            counts = (BLOCK_SIZE, 2 * BLOCK_SIZE, (BLOCK_SIZE + 1) ** 2)
            collect(drafters_ms[depth], drafter_forward_ms(drafter, counts, PROMPT + 20, num_repeats=1))
            acceptance = impose(PROFILE, target, drafter)
            acceptance.num_rounds = imposed.get(depth, 0)
            plain = paced(target, prompt, args.rounds + 4)
            drafted = paced(target, prompt, 4 * args.rounds, assistant_model=drafter)
            imposed[depth] = acceptance.num_rounds
            if repeat:
                paces[depth].append((plain, drafted))
    verification = MeasuredForward(medians(target_ms))
    rows = []
    for depth, pairs in paces.items():
        ratios = sorted(plain.ms_per_token / drafted.ms_per_token for plain, drafted in pairs)
        num_rounds = sum(drafted.num_rounds for _, drafted in pairs)
        drafting = MeasuredForward(medians(drafters_ms[depth]))
        profile = AcceptanceProfile(PROFILE)
        predicted = {
            schedule: predict(verification, drafting, profile, Plan(schedule, BLOCK_SIZE)).speedup
            for schedule in ("serial", "two-devices")
        }
        row = {
            "target": name,
            "num_parameters": num_parameters,
            "num_layers": depth,
            "speedup": statistics.median(ratios),
            "speedup_range": [ratios[0], ratios[-1]],
            "tokens_per_round": sum(drafted.num_tokens for _, drafted in pairs) / num_rounds,
            "round_ms": 1e3 * sum(drafted.seconds for _, drafted in pairs) / num_rounds,
            "plain_ms": statistics.median(plain.ms_per_token for plain, _ in pairs),
            "target_forward_ms": verification.forward_ms,
            "drafter_forward_ms": drafting.forward_ms,
            "predicted_speedup": predicted["serial"],
            "predicted_two_device_speedup": predicted["two-devices"],
        }
        rows.append(row)
        print(
            f"{name:13} drafter of {depth:2} layers: {row['speedup']:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"predicted {row['predicted_speedup']:.2f}; {row['tokens_per_round']:.2f} tokens per round, plain "
            f"{row['plain_ms']:.0f} ms, round {row['round_ms']:.0f} ms",
            flush=True,
        )
    return rows


def collect(samples: dict, forward_ms: dict):
    for count, ms in forward_ms.items():
        samples.setdefault(count, []).append(ms)


def medians(samples: dict) -> dict:
    return {count: statistics.median(ms) for count, ms in samples.items()}


if __name__ == "__main__":
    main()
