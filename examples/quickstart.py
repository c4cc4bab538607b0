"""One question, answered with and without a drafter: `python examples/quickstart.py`."""

import argparse
import time

from example_models import compare_ids, encode, load_drafter, load_target


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()

    target, tokenizer = load_target(args.tiny)
    drafter = load_drafter(target, args.tiny)
    inputs = encode(tokenizer, "A farmer has 17 crates of 23 apples each. How many apples is that?")

    answers = {}
    for name, kwargs in (("without drafter", {}), ("with drafter", {"assistant_model": drafter})):
        target.generate(**inputs, max_new_tokens=4, do_sample=False, **kwargs)  # warm-up
        start = time.perf_counter()
        ids = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, **kwargs)
        seconds = time.perf_counter() - start
        answers[name] = ids[0, inputs["input_ids"].shape[1] :]
        print(f"{name:>15}: {len(answers[name])} tokens, {len(answers[name]) / seconds:.1f} tokens/s")

    plain, drafted = answers.values()
    stats = drafter.last_generation_stats
    print(f"       same ids: {compare_ids(plain, drafted)}")
    print(f"{stats.tokens_per_round:>15.2f}  tokens per round, in {stats.num_rounds} rounds")
    print(tokenizer.decode(drafted, skip_special_tokens=True))


if __name__ == "__main__":
    main()
