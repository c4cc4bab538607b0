"""`d3d-hf predict`: what drafting gives on what hardware, before anything is trained or bought."""

import argparse
import dataclasses
import json
import os

from .arguments import UsageError, one_line
from .predict_models import Models, models_of
from .predict_options import add_options, refuse_conflicts, refuse_unwritable


def add_command(commands):
    parser = commands.add_parser(
        "predict",
        help="predict tokens per round, round time and speedup, and the best settings",
        description="Predicts what a drafter gives, for drafting after each verdict (serial) and while the target "
        "verifies, on one device and on two: expected tokens per round, time of a round, speedup over plain decoding; "
        "as asked for, and with the best block size, draft length, guesses and depth. Times come from the shapes of "
        "the models and a device's bandwidth and arithmetic (--hardware), from a file (--times), or are measured here "
        "(--measure). Assumptions are printed; nothing printed is a measurement but what --measure took.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    refuse_unwritable(args)
    if args.update_page:
        return _update_pages(args.update_page)
    try:
        return _predict(args)
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error


def _update_pages(paths: list[str]) -> int:
    from ..cost_model.pages import update_page

    for path in paths:
        try:
            update_page(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--update-page {path!r}: {one_line(error)}") from error
    return 0


def _predict(args: argparse.Namespace) -> int:
    from ..cost_model import Plan, Schedule, best_choice, predict, simulate
    from ..cost_model.inputs import read_retention

    refuse_conflicts(args)
    profile, assumed = _profile(args)
    block_size = args.block_size or len(profile.slots)
    plans = [
        Plan(
            schedule,
            block_size,
            args.draft_length,
            0 if schedule is Schedule.SERIAL else args.num_guesses,
            has_masked_branches=not args.no_masked_branches,
            has_guess_forward=not args.slot_guesses,
        )
        for schedule in map(Schedule, dict.fromkeys(args.schedule))
    ]
    given_retention = None if args.retention is None else read_retention(args.retention)
    models = models_of(args, block_size)
    retention = _retention(args, given_retention, models)
    num_layers = args.num_layers or models.num_layers
    if num_layers not in retention:
        raise UsageError(
            f"--num-layers {num_layers} has no retained acceptance: its drafter is known at "
            f"{', '.join(map(str, retention))} layers; give --retention with it"
        )
    profiles = {layers: profile if share == 1 else profile.retaining(share) for layers, share in retention.items()}
    rows = []
    for plan in plans:
        plan = dataclasses.replace(plan, overhead_ms=models.round_overhead_ms)
        prediction = predict(
            models.target, models.drafter(num_layers), profiles[num_layers], plan, models.plain_overhead_ms
        )
        best = best_choice(
            models.target,
            models.drafter,
            profiles,
            plan.schedule,
            range(1, args.max_block_size + 1),
            base=plan,
            plain_overhead_ms=models.plain_overhead_ms,
        )
        for what, chosen, layers, found in (
            ("as given", plan, num_layers, prediction),
            ("best", best.plan, best.num_layers, best.prediction),
        ):
            row = _row(chosen.schedule.value, what, chosen, layers, found)
            if args.simulate:
                simulated = simulate(
                    models.target, models.drafter(layers), profiles[layers], chosen, num_rounds=args.simulate
                )
                row["simulated_speedup"] = found.plain_ms / simulated.ms_per_token
            rows.append(row)
    assumptions = [*models.assumptions, *assumed]
    if args.output:
        _write(args, models, profile, retention, assumptions, rows)
    _print(rows, assumptions)
    return 0


def _numbers(text: str, name: str) -> tuple[float, ...]:
    from ..cost_model.acceptance import check_probabilities

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{name} {text!r} is no list of numbers: give chances such as 0.9,0.85,0.8") from None
    return check_probabilities(name, values)


def _profile(args):
    """The acceptance profile, and what had to be assumed of it."""
    from ..cost_model import AcceptanceProfile, constant_profile
    from ..cost_model.acceptance import BONUS_HIT_RATES, MASKED_RETENTION
    from ..cost_model.inputs import GivenAcceptance, read_acceptance

    if args.acceptance is None:
        given = GivenAcceptance(constant_profile(args.tokens_per_round, args.block_size))
    elif args.acceptance.endswith(".json") or os.path.exists(args.acceptance):
        given = read_acceptance(args.acceptance, args.dataset, args.method)
    else:
        given = GivenAcceptance(_numbers(args.acceptance, "--acceptance"))
    masked, rates = given.masked_slots, given.bonus_hit_rates
    if args.masked_acceptance is not None:
        masked = _numbers(args.masked_acceptance, "--masked-acceptance")
    if args.bonus_hit_rates is not None:
        rates = _numbers(args.bonus_hit_rates, "--bonus-hit-rates")
    assumed = ["rounds are independent; slots beyond the profile are as good as its last"]
    if masked is None:
        assumed.append(f"a masked branch keeps {MASKED_RETENTION:g} of the tokens per round")
    if rates is None:
        assumed.append(
            f"one, two, three guesses hit the bonus in {', '.join(map(str, BONUS_HIT_RATES))} of the rounds"
        )
    return AcceptanceProfile(given.slots, masked, rates or BONUS_HIT_RATES), assumed


def _retention(args, given: dict[int, float] | None, models: Models) -> dict[int, float]:
    """Share of the acceptance length for each depth that the search may take."""
    shares = {args.num_layers or models.num_layers: 1.0} if given is None else given
    if models.is_bounded and max(shares) > models.num_layers:
        raise UsageError(
            f"--{'num-layers' if args.retention is None else 'retention'} asks for {max(shares)} layers and the "
            f"drafter has {models.num_layers}: give at most so many"
        )
    return shares


def _row(schedule, what, plan, num_layers, prediction) -> dict:
    return {
        "schedule": schedule,
        "settings": what,
        "num_layers": num_layers,
        "block_size": plan.block_size,
        "draft_length": plan.draft_length,
        "num_guesses": plan.num_guesses,
        "tokens_per_round": prediction.tokens_per_round,
        "draft_ms": prediction.draft_ms,
        "verify_ms": prediction.verify_ms,
        "round_ms": prediction.round_ms,
        "plain_ms": prediction.plain_ms,
        "tokens_per_second": prediction.tokens_per_second,
        "speedup": prediction.speedup,
    }


def _write(args, models, profile, retention, assumptions, rows):
    from ..training.provenance import provenance

    report = {
        "predicted": rows,
        "assumptions": assumptions,
        "acceptance": {
            "slot_acceptance": profile.slots,
            "masked_slot_acceptance": profile.masked_slots,
            "bonus_hit_rates": profile.bonus_hit_rates,
        },
        "retention": retention,
        "plain_overhead_ms": models.plain_overhead_ms,
        "round_overhead_ms": models.round_overhead_ms,
        **provenance(args.argv),
    }
    with open(args.output, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
        file.write("\n")


def _print(rows: list[dict], assumptions: list[str]):
    is_simulated = "simulated_speedup" in rows[0]
    print(
        f"{'':12}{'':10}{'layers':>7}{'block':>7}{'draft':>7}{'guesses':>9}{'tokens/round':>14}{'draft ms':>10}"
        f"{'verify ms':>11}{'round ms':>10}{'tokens/s':>10}{'speedup':>9}" + ("  simulated" if is_simulated else "")
    )
    for row in rows:
        line = (
            f"{row['schedule']:12}{row['settings']:10}{row['num_layers']:7}{row['block_size']:7}"
            f"{row['draft_length']:7}{row['num_guesses']:9}{row['tokens_per_round']:14.2f}{row['draft_ms']:10.2f}"
            f"{row['verify_ms']:11.2f}{row['round_ms']:10.2f}{row['tokens_per_second']:10.1f}{row['speedup']:9.2f}"
        )
        print(line + (f"{row['simulated_speedup']:11.2f}" if is_simulated else ""))
    print(f"\nPlain decoding: {rows[0]['plain_ms']:.2f} ms a token. Predicted, not measured; assumed:")
    for assumption in assumptions:
        print(f"- {assumption}")


__all__ = ["add_command", "run"]
