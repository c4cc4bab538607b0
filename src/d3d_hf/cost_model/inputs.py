"""Acceptance profiles and forward times out of JSON: what the commands of this package write, or you."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .acceptance import check_probabilities
from .forward_times import MeasuredForward


@dataclass(frozen=True)
class GivenAcceptance:
    """
    What a file says of acceptance.

    Attributes:
        slots (`tuple[float, ...]`): Conditional chances of a draft that sees the bonus.
        masked_slots (`tuple[float, ...]`, *optional*): Of a masked branch, where the file tells them apart.
        bonus_hit_rates (`tuple[float, ...]`, *optional*): Of one, two, ... guesses.
    """

    slots: tuple[float, ...]
    masked_slots: tuple[float, ...] | None = None
    bonus_hit_rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class GivenTimes:
    """
    Attributes:
        target ([`MeasuredForward`]): The target's.
        drafters (mapping of `int` to [`MeasuredForward`]): The drafter's for each number of layers.
        plain_overhead_ms, round_overhead_ms (`float`): Of a plain token and of a round, outside the models.
    """

    target: MeasuredForward
    drafters: Mapping[int, MeasuredForward] = field(default_factory=dict)
    plain_overhead_ms: float = 0.0
    round_overhead_ms: float = 0.0


def read_json(path: str | Path) -> dict:
    """
    Raises:
        ValueError: There is no such file, or it holds no JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON ({error}): give a JSON file.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__}: give a JSON file with an object.")
    return content


def read_acceptance(path: str | Path, dataset: str | None = None, method: str | None = None) -> GivenAcceptance:
    """
    A profile out of one of these:

    - what `d3d-hf bench` writes: `results` is a list of objects with `dataset`, `method` and `slot_acceptance`, the
      conditional probability of each slot. Of several rows that fit, `d3d-sync` is taken, else another D3D method,
      whose verdicts are those of several kinds of drafts, else the first;
    - what `d3d-hf evaluate --output` writes, which tells masked branches and hit rates too; its chances of being
      accepted up to a slot become conditional ones;
    - an object with `slot_acceptance` and, if known, `masked_slot_acceptance` and `bonus_hit_rates`.

    Args:
        path (`str`): The file.
        dataset, method (`str`, *optional*): Of the row of a benchmark; the first row with a profile by default.

    Raises:
        ValueError: The file holds no profile, or none of that data set and method.
    """
    content = read_json(path)
    if "slot_acceptance" in content:
        return _given(content)
    results = content.get("results")
    if isinstance(results, dict) and "drafts" in results:
        return _of_evaluation(results)
    if not isinstance(results, list):
        raise ValueError(
            f"{str(path)!r} has neither slot_acceptance nor results of a benchmark or an evaluation: give a file that "
            f"d3d-hf bench or d3d-hf evaluate wrote."
        )
    rows = [row for row in results if isinstance(row, dict) and row.get("slot_acceptance")]
    for name, wanted in (("dataset", dataset), ("method", method)):
        if wanted is not None:
            rows = [row for row in rows if row.get(name) == wanted]
    if not rows:
        found = sorted({f"{row.get('dataset')}/{row.get('method')}" for row in results if isinstance(row, dict)})
        raise ValueError(
            f"{str(path)!r} has no slot_acceptance for dataset {dataset or 'any'} and method {method or 'any'}: its "
            f"rows are {', '.join(found) or 'none'}."
        )
    return _given(min(rows, key=_order))


def _order(row: Mapping) -> int:
    name = str(row.get("method"))
    return 0 if name == "d3d-sync" else 1 if name.startswith("d3d") else 2


def _given(row: Mapping) -> GivenAcceptance:
    optional = {
        field_name: None if row.get(name) is None else check_probabilities(name, row[name])
        for field_name, name in (("masked_slots", "masked_slot_acceptance"), ("bonus_hit_rates", "bonus_hit_rates"))
    }
    return GivenAcceptance(check_probabilities("slot_acceptance", row["slot_acceptance"]), **optional)


def _of_evaluation(results: Mapping) -> GivenAcceptance:
    hits = results.get("bonus_hit_rate") or {}
    rates = [hits[count]["mean"] for count in sorted(hits, key=int)]
    return GivenAcceptance(
        conditional([slot["mean"] for slot in results["drafts"]["synchronous"]["acceptance_by_slot"] if slot]),
        conditional([slot["mean"] for slot in results["drafts"]["masked"]["acceptance_by_slot"] if slot]),
        tuple(rates) or None,
    )


def conditional(accepted_up_to: list[float]) -> tuple[float, ...]:
    """From the chances of being accepted up to each slot to the chance of each slot if those before are accepted."""
    before = [1.0, *accepted_up_to[:-1]]
    return tuple(min(1.0, here / earlier) if earlier else 0.0 for here, earlier in zip(accepted_up_to, before))


def read_retention(path: str | Path) -> dict[int, float]:
    """
    Share of the acceptance length for each number of layers: from `pruning_report.json`, or an object that maps
    numbers of layers to shares.

    Raises:
        ValueError: It is neither.
    """
    content = read_json(path)
    if "steps" in content and "full" in content:
        shares = {len(content["full"]["kept_layers"]): 1.0}
        return shares | {len(step["kept_layers"]): float(step["retention"]) for step in content["steps"]}
    try:
        shares = {int(layers): float(share) for layers, share in content.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is no pruning report, nor an object of layers and shares: give pruning_report.json, or "
            f'{{"30": 1.0, "24": 0.97}}.'
        ) from error
    if not shares or not all(layers >= 1 and share > 0 for layers, share in shares.items()):
        raise ValueError(f"{str(path)!r} maps layers to shares {shares}: give layers of at least 1, shares above 0.")
    return shares


def read_times(path: str | Path) -> GivenTimes:
    """
    Forward times: an object with `target` (`forward_ms`: numbers of tokens to milliseconds), `drafters` (a list of
    objects with `num_layers` and `forward_ms`) and, if known, `plain_overhead_ms` and `round_overhead_ms`.
    `d3d-hf predict --measure --times-output FILE` writes one.

    Raises:
        ValueError: Something of it is missing or unusable.
    """
    content = read_json(path)
    try:
        target = MeasuredForward(content["target"]["forward_ms"])
        drafters = {int(row["num_layers"]): MeasuredForward(row["forward_ms"]) for row in content["drafters"]}
        overheads = {name: float(content.get(name, 0.0)) for name in ("plain_overhead_ms", "round_overhead_ms")}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} lacks forward times ({type(error).__name__}: {error}): give an object with "
            f'"target": {{"forward_ms": {{"1": 24.5, "9": 32.0}}}} and "drafters": [{{"num_layers": 30, "forward_ms": '
            f"{{...}}}}]."
        ) from error
    if not drafters:
        raise ValueError(f"{str(path)!r} has no drafters: give the forward times of at least one.")
    if min(overheads.values()) < 0:
        raise ValueError(f"{str(path)!r} has a negative overhead: {overheads}.")
    return GivenTimes(target, drafters, **overheads)


__all__ = [
    "GivenAcceptance",
    "GivenTimes",
    "conditional",
    "read_acceptance",
    "read_json",
    "read_retention",
    "read_times",
]
