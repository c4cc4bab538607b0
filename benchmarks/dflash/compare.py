"""
DFlash against D3D under equal terms: a drafter of each kind for one target, with as many layers (both start from the
same layers of the target), on the same answers, for as many steps of as many texts and blocks.

The DFlash drafter reads the target's hidden states and borrows its embedding and head; the D3D drafter reads tokens
alone and has its own. Both are then evaluated teacher-forced on held-out answers, from the same positions, and
`--generate` prompts of these are answered by transformers' own generate with each. A run that was ended goes on from
its last checkpoint, and one whose drafters are there evaluates them.

    python benchmarks/dflash/compare.py --data answers.jsonl --layers 5 --steps 300 --output-dir run
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from dflash_drafter import make_dflash_drafter, unused_token
from dflash_training import DFlashTrainer, StepTimer, collate, drafts_after
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.testing import ForwardCounter
from d3d_hf.training import D3DTrainer, D3DTrainingArguments, load_responses
from d3d_hf.training.acceptance import (
    AcceptedByPosition,
    accepted_lengths,
    bootstrap_interval,
    draft_outcomes,
    evenly_spread,
)
from d3d_hf.training.examples import to_example
from d3d_hf.training.provenance import provenance


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="name or path; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--data", required=True, help="answers of the target: JSONL, or a folder of d3d-hf regenerate")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=("dflash", "d3d"), default=["dflash", "d3d"])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=8, help="draft tokens per block (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="texts per step (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=16, help="per text (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--dflash-learning-rate", type=float, help="if another than the D3D drafter's")
    parser.add_argument("--chained-head-size", type=int, help="gives the D3D drafter a chained head")
    parser.add_argument("--random-start", action="store_true", help="DFlash from random weights")
    parser.add_argument("--mask-token-id", type=int, help="DFlash; default: an added token that no answer holds")
    parser.add_argument("--max-length", type=int, default=400, help="longer texts are left out (default: %(default)s)")
    parser.add_argument("--eval-rows", type=int, default=16, help="from the data's end (default: %(default)s)")
    parser.add_argument("--eval-positions", type=int, default=32, help="per held-out answer (default: %(default)s)")
    parser.add_argument("--generate", type=int, default=4, help="held-out prompts to answer (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--logging-steps", type=int, default=10)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for name in ("layers", "block_size", "steps", "batch_size", "blocks", "eval_rows", "eval_positions", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: give at least 1")
    return args


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.target is None:
        target, tokenizer = embedded.load_target()
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    rows, _ = load_responses(args.data)
    examples = [to_example(row, tokenizer, target.config.vocab_size) for row in rows]
    kept = [(row, example) for row, example in zip(rows, examples) if len(example[0]) <= args.max_length]
    if len(kept) <= args.eval_rows:
        raise SystemExit(
            f"{args.data} holds {len(kept)} answers of at most {args.max_length} tokens: --eval-rows must leave some."
        )
    if args.mask_token_id is None:
        args.mask_token_id = unused_token(tokenizer, examples)
    results = compare(
        target,
        [row for row, _ in kept[: -args.eval_rows]],
        [example for _, example in kept[-args.eval_rows :]],
        args,
    )
    settings = {k: v for k, v in vars(args).items() if k not in ("data", "output_dir", "target")}
    results = [{"dataset": Path(args.data).stem, **row} for row in results]
    report = {"results": results, "settings": settings, "num_train_rows": len(kept) - args.eval_rows}
    (args.output_dir / "report.json").write_text(json.dumps({**report, **provenance(sys.argv)}, indent=1))


def compare(target, train_rows: list, held_out: list[tuple[list[int], int]], args: argparse.Namespace) -> list[dict]:
    """
    Trains both drafters, or takes those that are there, and evaluates them.

    Args:
        target (`PreTrainedModel`): The target.
        train_rows (`list`): Rows in a layout of `d3d_hf.training.examples`.
        held_out (`list[tuple[list[int], int]]`): Ids of prompt and answer, and the prompt's length.
        args (`argparse.Namespace`): As on the command line, with a `mask_token_id`.

    Returns:
        `list[dict]`: One row per method.
    """
    trainers = {"dflash": train_dflash, "d3d": train_d3d}
    loaders = {"dflash": AutoModel, "d3d": D3DDrafterForCausalLM}
    results = []
    for method in args.methods:
        final = args.output_dir / method / "final"
        if not final.is_dir():
            training = arguments(method, args)
            trainer = trainers[method](target, train_rows, training, args)
            trainer.add_callback(StepTimer(method))
            trainer.train(resume_from_checkpoint=get_last_checkpoint(training.output_dir))
            weights = trainer.model.parameters()
            recipe = {
                "num_trained_parameters": sum(p.numel() for p in weights if p.requires_grad),
                "log": [entry for entry in trainer.state.log_history if "loss" in entry],
            }
            trainer.model.to(target.dtype).save_pretrained(final)
            (final / "training_log.json").write_text(json.dumps(recipe, indent=1))
            del trainer
        drafter = loaders[method].from_pretrained(final, dtype=target.dtype).to(target.device).eval()
        recipe = json.loads((final / "training_log.json").read_text())
        row = {"method": method, "num_layers": args.layers, "steps": args.steps}
        row |= teacher_forced(method, drafter, target, held_out, args)
        row |= generated(method, drafter, target, held_out[: args.generate], args.max_new_tokens)
        row |= {"num_trained_parameters": recipe["num_trained_parameters"]}
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        results.append({**row, "training_log": recipe["log"]})
    return results


def arguments(method: str, args: argparse.Namespace) -> D3DTrainingArguments:
    folder = args.output_dir / method
    folder.mkdir(parents=True, exist_ok=True)
    learning_rate = args.learning_rate
    if method == "dflash" and args.dflash_learning_rate is not None:
        learning_rate = args.dflash_learning_rate
    return D3DTrainingArguments(
        output_dir=str(folder),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        blocks_per_sequence=args.blocks,
        learning_rate=learning_rate,
        warmup_steps=max(1, args.steps // 20),
        lr_scheduler_type="cosine",
        logging_steps=args.logging_steps,
        save_steps=args.save_steps,
        save_total_limit=1,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
        seed=args.seed,
    )


def train_dflash(target, train_rows, training: D3DTrainingArguments, args: argparse.Namespace) -> DFlashTrainer:
    torch.manual_seed(args.seed)
    calibration_ids = None
    if not args.random_start:
        calibration_ids = torch.tensor([to_example(train_rows[0])[0]], device=target.device)
    drafter = make_dflash_drafter(target, args.layers, args.block_size, args.mask_token_id, calibration_ids)
    return DFlashTrainer(drafter, training, target, train_rows)


def train_d3d(target, train_rows, training: D3DTrainingArguments, args: argparse.Namespace) -> D3DTrainer:
    torch.manual_seed(args.seed)
    drafter = D3DDrafterForCausalLM.from_backbone(
        target, args.block_size, kept_layers=args.layers, chained_head_size=args.chained_head_size
    )
    return D3DTrainer(drafter.float(), training, train_dataset=train_rows)


@torch.no_grad()
def teacher_forced(method: str, drafter, target, held_out, args: argparse.Namespace) -> dict:
    """Acceptance from evenly spread positions of each answer, from its first token on, where both kinds draft."""
    totals, counts, accepted_at = [], [], np.zeros(args.block_size + 1, dtype=int)
    for ids, prompt_length in held_out:
        anchors = evenly_spread(prompt_length + 1, len(ids), args.eval_positions)
        batch = collate([{"input_ids": ids, "anchors": anchors}])
        inputs = [batch[name].to(target.device) for name in ("input_ids", "context_mask", "anchors")]
        if method == "d3d":
            accepted = AcceptedByPosition.of(draft_outcomes(drafter, drafter.config, *inputs)).synchronous
        else:
            drafts = drafts_after(drafter, target, *inputs).cpu().numpy()
            truth = np.full_like(drafts, -1)
            for i, anchor in enumerate(anchors[anchors >= 0]):
                text = ids[anchor + 1 : anchor + 1 + drafts.shape[2]]
                truth[0, i, : len(text)] = text
            accepted = accepted_lengths(drafts, truth)
        accepted = accepted[0, anchors >= 0]
        totals.append(int((accepted + 1).sum()))
        counts.append(len(accepted))
        accepted_at += np.bincount(accepted, minlength=args.block_size + 1)
    low, high = bootstrap_interval(totals, counts)
    reached = accepted_at[::-1].cumsum()[::-1]  # positions where at least so many tokens were accepted
    return {
        "acceptance_length": round(sum(totals) / sum(counts) - 1, 3),
        "tokens_per_round": round(sum(totals) / sum(counts), 3),
        "tokens_per_round_interval": [round(low, 3), round(high, 3)],
        "accepted_by_slot": [round(share, 3) for share in (reached[1:] / reached[0]).tolist()],
    }


def generated(method: str, drafter, target, held_out, max_new_tokens: int) -> dict:
    """Greedy answers to the prompts by plain generate and with the drafter; speeds are of this moment's machine."""
    if not held_out:
        return {}
    kwargs = {"assistant_model": drafter}
    if method == "dflash":
        kwargs["speculation_type"] = "dflash"
    else:
        drafter.generation_config.drafting_mode = "sync"
    num_tokens = num_rounds = num_equal = 0
    seconds = {"plain": 0.0, "drafted": 0.0}
    for ids, prompt_length in held_out:
        prompt = torch.tensor([ids[:prompt_length]], device=target.device)
        common = {"max_new_tokens": max_new_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        start = time.perf_counter()
        plain = target.generate(prompt, **common)
        seconds["plain"] += time.perf_counter() - start
        with ForwardCounter(target) as forwards:
            start = time.perf_counter()
            drafted = target.generate(prompt, **common, **kwargs)
            seconds["drafted"] += time.perf_counter() - start
        num_tokens += drafted.shape[1] - prompt_length
        num_rounds += forwards.count
        num_equal += torch.equal(plain, drafted)
    return {
        "generated_tokens_per_round": round(num_tokens / num_rounds, 3),
        "generated_speedup": round(seconds["plain"] / seconds["drafted"], 3),
        "ids_equal": f"{num_equal} of {len(held_out)}",
    }


if __name__ == "__main__":
    main()
