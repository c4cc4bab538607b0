"""
The drafter on a device of its own, drafting while the target verifies: `python examples/two_devices.py`.

With two GPUs the target runs on the first and the drafter on the last. With one device both share it, and a shared
device has to do both works in turn: the overlap is then no gain by itself, as the printed times show.
"""

import argparse
import time

import torch
from example_models import encode, load_drafter, load_target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    target, tokenizer = load_target(args.tiny)
    drafter = load_drafter(target, args.tiny)
    target.to(devices[0])
    drafter.to(devices[-1])
    print(f"target on {target.device}, drafter on {drafter.device}", end="")
    print(": one device, shared by both" if len(devices) == 1 else "")
    if drafter.device.type == "cpu":
        drafter.generation_config.num_bonus_guesses = 0  # fewer branches: a few cores are soon full

    inputs = encode(tokenizer, "Why do leaves turn red in autumn?").to(target.device)
    for mode in (None, "sync", "async"):
        drafter.generation_config.drafting_mode = mode or "auto"
        kwargs = {} if mode is None else {"assistant_model": drafter}
        start = time.perf_counter()
        ids = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, **kwargs)
        seconds = time.perf_counter() - start
        num_new = ids.shape[1] - inputs["input_ids"].shape[1]
        line = f"{mode or 'plain':>5}: {num_new / seconds:5.1f} tokens/s"
        if mode is not None:
            line += f", {drafter.last_generation_stats.tokens_per_round:.2f} tokens per round"
        print(line)
    stats = drafter.last_generation_stats
    print(f"async: {stats.overlap:.0%} of the drafting was hidden, verdicts waited {stats.wait_ms:.0f} ms in all")
    print(f"branches that verdicts selected: {stats.num_hits}")


if __name__ == "__main__":
    main()
