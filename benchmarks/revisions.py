"""
Two revisions of this repository side by side: the same prompts through both, in turn, one process each.

    python benchmarks/revisions.py --revision 0354e46 --prompts gsm8k.jsonl --count 16 --output revisions.json

The other revision is checked out into a temporary worktree. `--set name=value` sets drafting options for this one. The
two processes take turns, so that neither runs beside the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent


def work(drafter_path: str, options: dict, new_tokens: int):
    """One side: answers each prompt that comes in, plain and drafted for, with times and rounds."""
    import functools

    import torch
    from transformers.generation.candidate_generator import CandidateGenerator

    from d3d_hf import D3DDrafterForCausalLM, embedded

    torch.set_num_threads(2)
    target, tokenizer = embedded.load_target()
    drafter = D3DDrafterForCausalLM.from_pretrained(drafter_path, dtype=target.dtype)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    for kind in CandidateGenerator.__subclasses__():
        if kind.__module__.startswith("d3d_hf") and not hasattr(kind, "num_drafting_tokens"):
            kind.num_drafting_tokens = drafter.config.block_size  # transformers 5.25 reads it, older revisions lack it
    forward = target.forward
    count = 0

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return forward(*args, **kwargs)

    target.forward = counted
    for line in sys.stdin:
        messages = [{"role": "user", "content": json.loads(line)}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = {}
        for name, assistant in (("plain", None), ("drafted", drafter)):
            count, start = 0, time.perf_counter()
            output = target.generate(**inputs, assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False)
            answer[name] = time.perf_counter() - start
        answer |= {"tokens": output.shape[1] - inputs["input_ids"].shape[1], "forwards": count}
        print(json.dumps(answer), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", help="the other one")
    parser.add_argument("--prompts", help="JSONL file of turns")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--drafter", default=str(ROOT / "hub_cards" / "d3d-smollm2-135m"))
    parser.add_argument("--set", nargs="*", default=[], help="name=value: drafting options of this revision")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = {"drafting_mode": "sync"}
    if args.work is not None:
        work(args.drafter, json.loads(args.work), args.new_tokens)
        return
    ours = options | {name: json.loads(value) for name, value in (pair.split("=") for pair in args.set)}
    prompts = [json.loads(line)["turns"][0] for line in open(args.prompts, encoding="utf-8")][: args.count]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, args.revision], cwd=ROOT, check=True)
        sides = {"before": (folder, options), "after": (str(ROOT), ours)}
        workers, rows = {}, {name: [] for name in sides}
        for name, (path, chosen) in sides.items():
            command = [sys.executable, __file__, "--work", json.dumps(chosen)]
            command += ["--drafter", args.drafter, "--new-tokens", str(args.new_tokens)]
            environment = {**os.environ, "PYTHONPATH": f"{path}/src", "HF_HUB_OFFLINE": "1"}
            workers[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        for number, prompt in enumerate([prompts[0], *prompts]):
            order = list(workers) if number % 2 else list(workers)[::-1]
            for name in order:
                workers[name].stdin.write(json.dumps(prompt) + "\n")
                workers[name].stdin.flush()
                row = json.loads(workers[name].stdout.readline())
                if number:  # the first one warms up
                    rows[name].append(row)
            print(number, {name: row[-1] for name, row in rows.items() if row}, flush=True)
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=False)
    report = {"revision": args.revision, "options": ours, "rows": rows, "argv": sys.argv}
    for name, side in rows.items():
        report[name] = {
            "tokens_per_forward": sum(row["tokens"] for row in side) / sum(row["forwards"] for row in side),
            "speedup_median": statistics.median(row["plain"] / row["drafted"] for row in side),
            "ms_per_token": 1e3 * sum(row["drafted"] for row in side) / sum(row["tokens"] for row in side),
            "plain_ms_per_token": 1e3 * sum(row["plain"] for row in side) / sum(row["tokens"] for row in side),
        }
        print(name, {key: round(value, 3) for key, value in report[name].items()})
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
