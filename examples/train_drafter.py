"""
Trains a drafter on answers of its target, saves it and drafts with it: `python examples/train_drafter.py`.

It begins as the target's own layers, whose first draft token is right at once. A minute on ten answers shows how it is
done and gains nothing yet: the mask slots begin to learn, the first token loses a little, and hundreds of steps on
hundreds of answers make it good (docs/training.md).
"""

import argparse
import tempfile

import torch
from example_models import load_target, own_answers

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--output", default=None, help="where to save the drafter (default: a temporary folder)")
    args = parser.parse_args()

    target, tokenizer = load_target(args.tiny)
    rows = own_answers(target, tokenizer, num_answers=12, max_new_tokens=16 if args.tiny else 48)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)

    with tempfile.TemporaryDirectory() as folder:
        folder = args.output or folder
        trainer = D3DTrainer(
            drafter.float(),
            D3DTrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=2,
                blocks_per_sequence=8,
                learning_rate=1e-4,
                warmup_steps=2,
                logging_steps=5,
                save_strategy="no",
                bf16=not args.tiny,
                use_cpu=not torch.cuda.is_available(),
                report_to=[],
            ),
            train_dataset=rows[:-2],
            eval_dataset=rows[-2:],
        )
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        for name in ("eval_tokens_per_round", "eval_acceptance_length_masked"):
            print(f"{name}: {before[name]:.2f} before, {after[name]:.2f} after {args.steps} steps")
        trainer.save_model(folder)

        trained = D3DDrafterForCausalLM.from_pretrained(folder, dtype=target.dtype)
        prompt = torch.tensor([rows[0]["input_ids"][: rows[0]["prompt_length"]]])
        target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=trained)
        print(f"Drafting with it: {trained.last_generation_stats.tokens_per_round:.2f} tokens per round")


if __name__ == "__main__":
    main()
