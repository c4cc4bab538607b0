"""
What each part of the training recipe is worth: short runs at equal steps, each with one setting changed.

A drafter of all the embedded target's layers is trained from the start for each variant, on the same answers in the
same order, and evaluated teacher-forced on answers that no variant saw. `--variants` picks some; a run that was ended
goes on with the variants that are missing from the output. `chained head, frozen` trains the head alone on top of
`--drafter`.

    python benchmarks/ablations.py --data answers.jsonl --steps 60 --output ablations.json
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments, embedded
from d3d_hf.training.examples import to_example
from d3d_hf.training.provenance import provenance


# Name: arguments of training, arguments of from_backbone, LoRA rank (None: all weights).
VARIANTS = {
    "baseline": ({}, {}, 64),
    "ar_loss_weight 0": ({"ar_loss_weight": 0.0}, {}, 64),
    "ar_loss_weight 0.1": ({"ar_loss_weight": 0.1}, {}, 64),
    "causal slots": ({}, {"block_attention": "causal"}, 64),
    "block_loss_decay 0.6": ({"block_loss_decay": 0.6}, {}, 64),
    "block_loss_decay 1.0": ({"block_loss_decay": 1.0}, {}, 64),
    "visible_token_share 0": ({"visible_token_share": 0.0}, {}, 64),
    "visible_token_share 0.8": ({"visible_token_share": 0.8}, {}, 64),
    "LoRA 16": ({}, {}, 16),
    "all weights": ({"learning_rate": 3e-4}, {}, None),
    "chained head": ({}, {"chained_head_size": 256}, 64),
}
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="JSONL file of the target's answers, as token ids")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--max-length", type=int, default=220, help="longer texts are left out")
    parser.add_argument("--eval-rows", type=int, default=20, help="from the data's end")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, "chained head, frozen"], default=list(VARIANTS))
    parser.add_argument("--drafter", help="for `chained head, frozen`: a drafter without one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [json.loads(line) for line in Path(args.data).read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(to_example(row)[0]) <= args.max_length]
    train_rows, eval_rows = rows[: -args.eval_rows], rows[-args.eval_rows :]
    report = {"results": []}
    if args.output.exists():
        report = json.loads(args.output.read_text())
    done = {result["variant"] for result in report["results"]}
    target, _ = embedded.load_target(dtype=torch.float32)
    for variant in args.variants:
        if variant in done:
            continue
        report["results"].append(run(variant, target, train_rows, eval_rows, args))
        report |= {"num_train_rows": len(train_rows), "num_eval_rows": len(eval_rows), **provenance(sys.argv)}
        args.output.write_text(json.dumps(report, indent=1))
        print(json.dumps(report["results"][-1]), flush=True)


def run(variant: str, target, train_rows, eval_rows, args) -> dict:
    torch.manual_seed(0)
    peft_config = None
    if variant == "chained head, frozen":
        training, rank = {"learning_rate": 2e-3, "chain_dropout": 0.0}, None
        source = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype=torch.float32)
        drafter = D3DDrafterForCausalLM.from_backbone(target, chained_head_size=256)
        drafter.load_state_dict(source.state_dict(), strict=False)
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith("chained_head."))
    else:
        training, model, rank = VARIANTS[variant]
        drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=8, **model)
        if rank is not None:
            peft_config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGET_MODULES)
    settings = {
        "learning_rate": 1e-3,
        "ar_loss_weight": 0.5,
        "block_loss_decay": 0.8,
        "visible_token_share": 0.5,
        "blocks_per_sequence": 12,
        **training,
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = D3DTrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            warmup_steps=max(1, args.steps // 10),
            lr_scheduler_type="cosine",
            logging_steps=args.steps,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
            seed=0,
            **settings,
        )
        trainer = D3DTrainer(
            drafter, arguments, train_dataset=train_rows, eval_dataset=eval_rows, peft_config=peft_config
        )
        before = trainer.evaluate() if variant == "chained head, frozen" else None
        trainer.train()
        after = trainer.evaluate()
    row = {"variant": variant, "steps": args.steps, "lora_rank": rank, **settings, **figures(after)}
    if before is not None:
        row["before"] = figures(before)
    return {**row, "seconds": round(time.perf_counter() - start)}


def figures(metrics: dict) -> dict:
    names = ("acceptance_length", "tokens_per_round", "ar_accuracy", "bonus_hit_rate")
    kept = {name: value for name, value in metrics.items() if name.removeprefix("eval_").startswith(names)}
    return {name.removeprefix("eval_"): round(value, 4) for name, value in kept.items()}


if __name__ == "__main__":
    main()
