"""
Sampling with a drafter: a seed gives the text that it gives without one, up to rounding:
`python examples/sampling.py`.
"""

import argparse

from example_models import encode, load_drafter, load_target
from transformers import GenerationConfig, set_seed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    target, tokenizer = load_target(args.tiny)
    drafter = load_drafter(target, args.tiny)
    inputs = encode(tokenizer, "Write a one-line advertisement for an umbrella.")
    prompt_length = inputs["input_ids"].shape[1]

    def sample(seed: int, **settings):
        # drafting_mode is an option of this call alone: a fixed one, since "auto" is decided by measured times.
        config = GenerationConfig(
            do_sample=True, max_new_tokens=args.max_new_tokens, drafting_mode="sync", pad_token_id=0, **settings
        )
        set_seed(seed)
        return target.generate(**inputs, generation_config=config, assistant_model=drafter)[0, prompt_length:]

    for temperature in (0.3, 0.7, 1.0):
        first, again = (sample(1, temperature=temperature, top_p=0.95) for _ in range(2))
        stats = drafter.last_generation_stats
        repeated = "the same again" if first.tolist() == again.tolist() else "ANOTHER TEXT"
        print(f"temperature {temperature}: {stats.tokens_per_round:.2f} tokens per round, seed 1 gave {repeated}")
        print(f"  {tokenizer.decode(first, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
