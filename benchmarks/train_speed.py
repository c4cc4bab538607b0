"""
How fast drafters train: two ratios, measured interleaved in one run.

1. Supervised predictions per second of one packed pass, forward and backward, against the naive way: the same text
   once for its next-token predictions, and one forward and backward per anchor over the text up to it and its block.
   The naive way is measured with logits for all tokens, as an ordinary forward gives them, and (`naive_sparse`) for
   supervised ones alone.
2. Seconds per step of a D3DTrainer against those of a plain Trainer that trains the backbone, with all parameters and
   the same optimizer, on batches with as many input tokens.

    python benchmarks/train_speed.py --output train_speed.json
"""

import argparse
import json
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments, embedded
from d3d_hf.model.packing import lay_out
from d3d_hf.training.losses import token_loss
from d3d_hf.training.provenance import provenance


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the embedded target (default: %(default)s)")
    parser.add_argument("--prompt-length", type=int, default=80)
    parser.add_argument("--response-length", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=16, help="per sequence (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of a trainer, per repeat (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, as --bf16 of the trainer does")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", metavar="FILE", help="JSON")
    return parser.parse_args()


def rows_of(args, count):
    """Random tokens: what they are does not change how long they take."""
    generator = np.random.default_rng(0)
    length = args.prompt_length + args.response_length
    return [
        {"input_ids": generator.integers(10, 40000, length).tolist(), "prompt_length": args.prompt_length}
        for _ in range(count)
    ]


class StepTimes(TrainerCallback):
    """Seconds from the end of one step to the end of the next, loading of data included."""

    def __init__(self, device):
        self.seconds, self._last, self._device = [], None, device

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = None

    def on_step_end(self, args, state, control, **kwargs):
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last is not None:  # the first step warms up
            self.seconds.append(now - self._last)
        self._last = now


def trainer_arguments(args, folder, kind):
    return {
        "output_dir": folder,
        "per_device_train_batch_size": args.batch_size,
        "max_steps": args.steps + 1,
        "learning_rate": 1e-5,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": args.device == "cpu",
        "bf16": args.bf16,
    } | ({"blocks_per_sequence": args.blocks} if kind is D3DTrainingArguments else {})


def packed_and_naive(trainer, args):
    """Functions that run forward and backward of one batch in both ways, and the number of supervised predictions."""
    drafter, dataset = trainer.model, trainer.train_dataset
    examples = [dataset[i] for i in range(args.batch_size)]
    batch = {name: tensor.to(args.device) for name, tensor in trainer.data_collator(examples).items()}
    num_predictions = int((batch["labels"] != -100).sum())
    context_length = batch["context_mask"].shape[1]

    def autocast():
        return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.bf16)

    def finish():
        drafter.zero_grad(set_to_none=True)
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()

    def packed():
        with autocast():
            loss = trainer.compute_loss(drafter, batch)
        loss.backward()
        finish()

    def naive(is_sparse=False):
        for row in range(args.batch_size):
            ids, labels = batch["input_ids"][row : row + 1], batch["labels"][row]
            _backward(drafter, autocast, labels[:context_length], is_sparse, input_ids=ids[:, :context_length])
            for block in range(args.blocks):
                anchor = int(batch["anchors"][row, block])
                slots = slice(context_length + block * args.block_size, context_length + (block + 1) * args.block_size)
                if anchor < 0:
                    continue
                layout = lay_out(
                    anchor + 1,
                    torch.tensor([[anchor]], device=args.device),
                    (args.block_size,),
                    num_visible=batch["num_visible"][row : row + 1, block : block + 1],
                )
                padding = labels.new_full((anchor + 1,), -100)
                _backward(
                    drafter,
                    autocast,
                    torch.cat([padding, labels[slots]]),
                    is_sparse,
                    input_ids=torch.cat([ids[:, : anchor + 1], ids[:, slots]], dim=1),
                    layout=layout,
                )
        finish()

    return packed, naive, num_predictions


def _backward(drafter, autocast, labels, is_sparse, **inputs):
    supervised = labels != -100
    if not supervised.any():
        return
    with autocast():
        rows = supervised.nonzero()[:, 0]
        if is_sparse:
            logits = drafter(**inputs, logits_to_keep=rows).logits[0]
        else:
            logits = drafter(**inputs).logits[0, rows]
        loss = token_loss(logits, labels[rows]).sum()
    loss.backward()


def summary(values):
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "count": len(values)}


def main():
    args = parse_arguments()
    target, _ = embedded.load_target(dtype=torch.float32)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=args.block_size, kept_layers=args.layers)
    # The same layers as a plain model: a drafter's own forward is that of its backbone.
    plain = D3DDrafterForCausalLM.from_backbone(target, block_size=args.block_size, kept_layers=args.layers)
    del target
    plain.mask_embedding.requires_grad_(False)
    num_tokens = args.prompt_length + args.response_length + args.blocks * args.block_size
    num_rows = args.batch_size * (args.steps + 1)

    with tempfile.TemporaryDirectory() as folder:
        arguments = D3DTrainingArguments(**trainer_arguments(args, folder, D3DTrainingArguments))
        ours = D3DTrainer(drafter, arguments, train_dataset=rows_of(args, num_rows))
        texts = np.random.default_rng(1).integers(10, 40000, (num_rows, num_tokens)).tolist()
        theirs = Trainer(
            plain,
            TrainingArguments(**trainer_arguments(args, folder, TrainingArguments)),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        )
        times = {"packed": [], "naive": [], "naive_sparse": []}
        steps = {"d3d_trainer": StepTimes(args.device), "plain_trainer": StepTimes(args.device)}
        for trainer, name in ((ours, "d3d_trainer"), (theirs, "plain_trainer")):
            trainer.add_callback(steps[name])
            trainer.remove_callback(PrinterCallback)
            trainer.model.to(args.device)
        packed, naive, num_predictions = packed_and_naive(ours, args)
        drafter.train()
        packed()  # warm-up
        for _ in range(args.repeats):
            for name, work, given in (("packed", packed, ()), ("naive", naive, ()), ("naive_sparse", naive, (True,))):
                start = time.perf_counter()
                work(*given)
                times[name].append(time.perf_counter() - start)
            for trainer in (ours, theirs):
                trainer.train()

    speeds = {name: summary([num_predictions / seconds for seconds in values]) for name, values in times.items()}
    seconds = {name: summary(callback.seconds) for name, callback in steps.items()}
    report = provenance(sys.argv) | {
        "settings": vars(args),
        "input_tokens_per_step": args.batch_size * num_tokens,
        "supervised_predictions": num_predictions,
        "predictions_per_second": speeds,
        "seconds_per_step": seconds,
        "packed_over_naive": speeds["packed"]["median"] / speeds["naive"]["median"],
        "packed_over_naive_sparse": speeds["packed"]["median"] / speeds["naive_sparse"]["median"],
        "d3d_step_over_plain_step": seconds["d3d_trainer"]["median"] / seconds["plain_trainer"]["median"],
    }
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")

    def show(values):
        return f"{values['median']:8.2f} ({values['low']:.2f} to {values['high']:.2f})"

    print(f"{args.layers} layers, {args.batch_size} x {num_tokens} input tokens, {num_predictions} predictions")
    for name, values in speeds.items():
        print(f"{name:14} {show(values)} predictions/s")
    print(
        f"packed over naive: {report['packed_over_naive']:.2f} (goal: at least 8), "
        f"over naive_sparse: {report['packed_over_naive_sparse']:.2f}"
    )
    for name, values in seconds.items():
        print(f"{name:14} {show(values)} s/step")
    print(f"a step of D3DTrainer over a plain one: {report['d3d_step_over_plain_step']:.2f} (goal: at most 1.5)")


if __name__ == "__main__":
    main()
