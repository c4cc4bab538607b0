"""
Prompts that a target writes itself: user turns sampled from its bare chat template.

A chat model that is given nothing but the opening of a user turn writes one, in the spread of subjects that it was
tuned on. With them a drafter sees more of its target's language than any one prompt set shows. The answers come from
`d3d-hf regenerate --prompts prompts.jsonl`.

    python examples/self_prompts.py --num-prompts 500 --output prompts.jsonl
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3d_hf import embedded


def opening_of_user_turn(tokenizer) -> list[int]:
    """Token ids of the template up to where the user's words begin."""
    words = "@@@"
    text = tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False)
    return tokenizer(text[: text.index(words)], add_special_tokens=False)["input_ids"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="name or path; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--num-prompts", type=int, default=500)
    parser.add_argument("--max-new-tokens", type=int, default=120, help="longer turns are dropped")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="prompts.jsonl")
    args = parser.parse_args()

    if args.target is None:
        target, tokenizer = embedded.load_target()
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    torch.manual_seed(args.seed)
    opening = torch.tensor([opening_of_user_turn(tokenizer)], device=target.device)
    seen = set()
    with open(args.output, "w") as output:
        while len(seen) < args.num_prompts:
            ids = target.generate(
                opening.expand(args.batch_size, -1),
                attention_mask=torch.ones_like(opening).expand(args.batch_size, -1),
                do_sample=True,
                temperature=args.temperature,
                top_k=0,
                top_p=0.95,
                max_new_tokens=args.max_new_tokens,
                pad_token_id=tokenizer.eos_token_id,
            )
            turns = ids[:, opening.shape[1] :]
            finished = (turns == tokenizer.eos_token_id).any(dim=1)
            for turn in tokenizer.batch_decode(turns[finished], skip_special_tokens=True):
                turn = turn.strip()
                if len(turn) > 10 and turn not in seen and len(seen) < args.num_prompts:
                    seen.add(turn)
                    output.write(json.dumps({"turns": [turn]}) + "\n")
            output.flush()
            print(f"{len(seen)} of {args.num_prompts}", flush=True)


if __name__ == "__main__":
    main()
