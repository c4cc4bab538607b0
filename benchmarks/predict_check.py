"""
Predicted against measured speedup, on this machine: eager models of the embedded target's shape with random weights,
and acceptance that is imposed, so that nothing needs to be trained.

- *serial*: three draft lengths, two depths of the drafter and two acceptance profiles. Target and drafter run; the
  prediction knows the profile, the times of their forwards alone, and what the loops around tiny models cost.
- *two devices*: the asynchronous loop as it is, with both models replaced by sleeps as long as the forwards measured;
  two draft lengths, the same two depths. There is one machine here, so this checks the schedule and the loop alone.

Forwards, plain and drafted generations take turns. One command, below eight minutes with two threads:

    python benchmarks/predict_check.py --output docs/results/predict-check.json
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from imposed_rounds import impose, paced, prompt_of, random_drafter

from d3d_hf.cost_model import AcceptanceProfile, MeasuredForward, Plan, predict
from d3d_hf.cost_model.acceptance import first_slots, tokens_per_round
from d3d_hf.cost_model.measure import drafter_forward_ms, target_forward_ms
from d3d_hf.cost_model.shapes import random_model, shape_config
from d3d_hf.training.provenance import provenance


SHAPE, BLOCK_SIZE, PROMPT = "smollm2-135m", 8, 128
PROFILES = {"0.9": (0.9,) * 8, "falling": (0.85, 0.75, 0.65, 0.55, 0.5, 0.45, 0.4, 0.4)}
SERIAL_LENGTHS, TWO_DEVICE_LENGTHS = (3, 5, 8), (4, 8)
PLAIN_TOKENS = 20
SLEEPING_VOCABULARY = 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs=2, default=(10, 30), help="of the drafter (default: 10 30)")
    parser.add_argument("--repeats", type=int, default=5, help="of each setting (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=14, help="of a generation, about (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    models = Models(args.depths, args.tiny)
    overheads = {
        "serial": loop_overheads(models.target.config.vocab_size, args.repeats),
        "two-devices": loop_overheads(SLEEPING_VOCABULARY, args.repeats),
    }
    rows = serial_settings(models, overheads["serial"], args)
    rows += two_device_settings(models.forwards(), overheads["two-devices"], args)
    errors = [abs(row["error"]) for row in rows]
    by_schedule = {
        name: statistics.mean(abs(row["error"]) for row in rows if row["schedule"] == name)
        for name in ("serial", "two-devices")
    }
    report = {
        "results": rows,
        "mean_absolute_error": statistics.mean(errors),
        "largest_absolute_error": max(errors),
        "mean_absolute_error_by_schedule": by_schedule,
        "overheads": overheads,
        "forward_ms": models.times(),
        "warm_up": "one generation of each setting",
        "seconds": round(time.perf_counter() - start),
        **provenance(sys.argv),
    }
    print(f"mean absolute error {report['mean_absolute_error']:.3f}, largest {max(errors):.3f}, {by_schedule}")
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


class Models:
    """The target, its drafters by depth, and the times of their forwards so far."""

    def __init__(self, depths, is_tiny: bool):
        config = shape_config(SHAPE, tiny=is_tiny)
        self.target = random_model(config)
        self.drafters = {
            depth: random_drafter(shape_config(SHAPE, num_layers=depth, tiny=is_tiny), BLOCK_SIZE) for depth in depths
        }
        self.prompt = prompt_of(PROMPT, config.vocab_size)
        self._samples = {None: {}, **{depth: {} for depth in depths}}  # None: the target

    def time_forwards(self):
        """One more sample of each forward."""
        verified = (1, *(length + 1 for length in SERIAL_LENGTHS), 5)
        # A serial draft, by what the verdict accepted; a packed one with a masked branch for every verdict.
        drafted = (BLOCK_SIZE, BLOCK_SIZE + 4, 2 * BLOCK_SIZE, 5 * 9, 9 * 9)
        sizes = {"context": PROMPT + 30, "num_repeats": 1}
        forward = self.target.__dict__.pop("forward", None)
        times = {None: target_forward_ms(self.target, verified, **sizes)}
        if forward is not None:
            self.target.forward = forward
        times |= {depth: drafter_forward_ms(drafter, drafted, **sizes) for depth, drafter in self.drafters.items()}
        for name, forward_ms in times.items():
            for count, ms in forward_ms.items():
                self._samples[name].setdefault(count, []).append(ms)

    def times(self) -> dict:
        """Medians, by the number of tokens: of the target and of each drafter."""
        medians = {
            name: {count: statistics.median(ms) for count, ms in samples.items()}
            for name, samples in self._samples.items()
        }
        return {"target": medians.pop(None), "drafters": medians}

    def forwards(self) -> tuple[MeasuredForward, dict[int, MeasuredForward]]:
        times = self.times()
        return (
            MeasuredForward(times["target"]),
            {depth: MeasuredForward(forward_ms) for depth, forward_ms in times["drafters"].items()},
        )


def loop_overheads(vocab_size: int, num_repeats: int) -> dict[str, float]:
    """Milliseconds of a plain token and of a serial round outside the models, with tiny models."""
    config = shape_config(SHAPE, tiny=True)
    config.vocab_size = vocab_size
    target, drafter = random_model(config), random_drafter(config, BLOCK_SIZE)
    prompt = prompt_of(PROMPT, config.vocab_size)
    verify_ms = target_forward_ms(target, (1, BLOCK_SIZE + 1))
    draft_ms = drafter_forward_ms(drafter, (BLOCK_SIZE + 4, BLOCK_SIZE + 5))[BLOCK_SIZE + 4]
    impose(PROFILES["falling"], target, drafter)
    plain, rounds = [], []
    for _ in range(num_repeats + 1):
        plain.append(paced(target, prompt, 60).ms_per_token - verify_ms[1])
        pace = paced(target, prompt, 60, assistant_model=drafter)
        rounds.append(1e3 * pace.seconds / pace.num_rounds - verify_ms[BLOCK_SIZE + 1] - draft_ms)
    return {
        "plain_ms": max(0.0, statistics.median(plain[1:])),
        "round_ms": max(0.0, statistics.median(rounds[1:])),
    }


def serial_settings(models: Models, overheads: dict, args) -> list[dict]:
    settings = [(d, name, g) for d in models.drafters for name in PROFILES for g in SERIAL_LENGTHS]
    imposed = dict.fromkeys(settings)
    paces = {setting: [] for setting in settings}
    for repeat in range(args.repeats + 1):
        models.time_forwards()
        for depth, name, length in settings:
            drafter = models.drafters[depth]
            drafter.generation_config.num_assistant_tokens = length
            acceptance = impose(PROFILES[name], models.target, drafter)
            # Draws go on where the repeat before ended.
            acceptance.num_rounds = imposed[depth, name, length] or 0
            plain = paced(models.target, models.prompt, PLAIN_TOKENS)
            drafted = paced(
                models.target, models.prompt, text_length(name, length, args.rounds), assistant_model=drafter
            )
            imposed[depth, name, length] = acceptance.num_rounds
            if repeat:
                paces[depth, name, length].append((plain, drafted))
        print(f"serial settings: {repeat} of {args.repeats} repeats", flush=True)
    target, drafters = models.forwards()
    rows = []
    for (depth, name, length), pairs in paces.items():
        plan = Plan("serial", BLOCK_SIZE, length, overhead_ms=overheads["round_ms"])
        profile = AcceptanceProfile(PROFILES[name])
        predicted = predict(target, drafters[depth], profile, plan, overheads["plain_ms"])
        rows.append(row_of("serial", depth, name, length, predicted, pairs))
    return rows


def two_device_settings(forwards, overheads: dict, args) -> list[dict]:
    target_times, drafters_times = forwards
    config = shape_config(SHAPE, tiny=True)
    config.vocab_size = SLEEPING_VOCABULARY
    target, drafter = random_model(config), random_drafter(config, BLOCK_SIZE, mode="async")
    prompt, rows = prompt_of(PROMPT, config.vocab_size), []
    for depth, drafter_times in drafters_times.items():
        for name in PROFILES:
            for length in TWO_DEVICE_LENGTHS:
                drafter.generation_config.num_assistant_tokens = length
                impose(PROFILES[name], target, drafter)
                lengthen(target, "forward", target_times.alone_ms)
                drafter.__dict__.pop("packed_forward", None)
                lengthen(drafter, "packed_forward", drafter_times.alone_ms)
                num_tokens = text_length(name, length, args.rounds)
                pairs = [
                    (paced(target, prompt, PLAIN_TOKENS), paced(target, prompt, num_tokens, assistant_model=drafter))
                    for _ in range(max(1, args.repeats // 2))
                ]
                plan = Plan("two-devices", BLOCK_SIZE, length, overhead_ms=overheads["round_ms"])
                profile = AcceptanceProfile(PROFILES[name], PROFILES[name])
                predicted = predict(target_times, drafter_times, profile, plan, overheads["plain_ms"])
                rows.append(row_of("two-devices", depth, name, length, predicted, pairs))
    return rows


def text_length(name: str, length: int, num_rounds: int) -> int:
    """Tokens of a text that takes about so many rounds."""
    return round((num_rounds + 2) * tokens_per_round(first_slots(PROFILES[name], length)))


def lengthen(model, method: str, ms_of):
    """Makes a method last as long as a forward of so many tokens would, without using the machine for it."""
    original = getattr(model, method)

    @functools.wraps(original)
    def lengthened(*args, **kwargs):
        input_ids = args[0] if args else kwargs["input_ids"]
        end = time.perf_counter() + 1e-3 * ms_of(input_ids.shape[1])
        outputs = original(*args, **kwargs)
        time.sleep(max(0.0, end - time.perf_counter()))
        return outputs

    setattr(model, method, lengthened)


def row_of(schedule: str, depth: int, name: str, length: int, predicted, pairs) -> dict:
    """One setting: the speedup is the median over paired generations, its error relative to what was measured."""
    ratios = sorted(plain.ms_per_token / drafted.ms_per_token for plain, drafted in pairs)
    measured = statistics.median(ratios)
    num_rounds = sum(drafted.num_rounds for _, drafted in pairs)
    row = {
        "schedule": schedule,
        "num_layers": depth,
        "profile": name,
        "slot_acceptance": PROFILES[name],
        "draft_length": length,
        "predicted_speedup": predicted.speedup,
        "measured_speedup": measured,
        "measured_range": [ratios[0], ratios[-1]],
        "error": predicted.speedup / measured - 1,
        "predicted_tokens_per_round": predicted.tokens_per_round,
        "measured_tokens_per_round": sum(drafted.num_tokens for _, drafted in pairs) / num_rounds,
        "predicted_round_ms": predicted.round_ms,
        "measured_round_ms": 1e3 * sum(drafted.seconds for _, drafted in pairs) / num_rounds,
        "predicted_plain_ms": predicted.plain_ms,
        "measured_plain_ms": statistics.median(plain.ms_per_token for plain, _ in pairs),
    }
    print(
        f"{schedule:12} {depth:3} layers  {name:8} {length} tokens: predicted {predicted.speedup:.3f} measured "
        f"{measured:.3f}  error {row['error']:+.3f}  rounds {row['predicted_round_ms']:.1f} "
        f"{row['measured_round_ms']:.1f} ms  tokens {row['predicted_tokens_per_round']:.2f} "
        f"{row['measured_tokens_per_round']:.2f}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
