"""
A chat that streams as it does without a drafter. Two turns are said for you, more with `--interactive`:
`python examples/streaming_chat.py --interactive`.
"""

import argparse

from example_models import encode, load_drafter, load_target
from transformers import TextStreamer


TURNS = ("Name three fruits that grow on trees.", "Which of them is the sweetest?")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--interactive", action="store_true", help="ask for turns until an empty one")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()

    target, tokenizer = load_target(args.tiny)
    drafter = load_drafter(target, args.tiny)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    for turn in iter(lambda: input("> "), "") if args.interactive else TURNS:
        if not args.interactive:
            print(f"> {turn}")
        messages.append({"role": "user", "content": turn})
        inputs = encode(tokenizer, messages)
        ids = target.generate(
            **inputs,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            streamer=streamer,
            assistant_model=drafter,
        )
        answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        stats = drafter.last_generation_stats
        print(f"[{stats.num_tokens} tokens, {stats.tokens_per_round:.2f} per round]\n")


if __name__ == "__main__":
    main()
