"""From rows of single prompts to results: one object per data set and method, as JSON, table and page hold it."""

from collections.abc import Mapping, Sequence

from .statistics import accepted_histogram, geometric_mean, paired_speedup, slot_acceptance, spread


# Of a method that cannot run: it gave no tokens. Its `reason` stands beside them.
_NOTHING = {"tokens_per_second": 0.0, "speedup": 0.0, "tokens_per_round": 0.0, "ids_equal": None}


def summarise(rows: Sequence[Mapping], is_greedy: bool) -> list[dict]:
    """
    Args:
        rows (`list[dict]`): As [`Runner`] stores them; plain generation is among them.
        is_greedy (`bool`): Whether ids can be compared with plain generation's.

    Returns:
        `list[dict]`: In the order of the rows. `tokens_per_second` is the median over prompts, beside
        `tokens_per_second_p10` and `_p90`; `speedup` the median of the ratios to plain generation of the same prompt,
        beside its 95% bootstrap interval `speedup_interval`; `tokens_per_round` new tokens over target forwards;
        `accepted_histogram` rounds by accepted tokens; `slot_acceptance` the chance of each slot given those before
        it, decided `slot_decisions` times; `first_token_ms` a median; `round_ms` the mean time of a round,
        `round_cost` the same in plain tokens, which is what `tokens_per_round` must exceed for a speedup; `ids_equal`
        the number of prompts whose ids are plain generation's (`None` when sampling), `differences` where the others
        first part. D3D adds `draft_ms`, `verify_ms` and `wait_ms` per round, `overlap` and `num_hits`. A method that
        cannot run has zeros and a `reason`.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["dataset"], row["method"]), []).append(row)
    plain = {
        dataset: {row["prompt"]: row for row in group}
        for (dataset, method), group in groups.items()
        if method == "plain"
    }
    return [
        _result(dataset, method, sorted(group, key=lambda row: row["prompt"]), plain[dataset], is_greedy)
        for (dataset, method), group in groups.items()
    ]


def _result(dataset: str, method: str, rows: list[Mapping], plain: Mapping[int, Mapping], is_greedy: bool) -> dict:
    result = {"dataset": dataset, "method": method, "drafter": rows[0].get("drafter")}
    ran = [row for row in rows if "turns" in row]
    result["num_prompts"] = len(ran)
    reasons = [row["reason"] for row in rows if "reason" in row]
    if not ran:
        return {**result, **_NOTHING, "reason": reasons[0]}
    turns = [turn for row in ran for turn in row["turns"]]
    rounds = [turn["rounds"] for turn in turns]
    num_rounds = sum(map(len, rounds))
    num_tokens = sum(len(turn["ids"]) for turn in turns)
    seconds = sum(turn["seconds"] for turn in turns)
    rates = spread([1 / _seconds_per_token(row) for row in ran])
    own = [_seconds_per_token(row) for row in ran]
    others = [_seconds_per_token(plain[row["prompt"]]) for row in ran]
    speedup = paired_speedup(own, others)
    acceptance, decisions = slot_acceptance(rounds)
    plain_turns = [turn for row in ran for turn in plain[row["prompt"]]["turns"]]
    plain_token_s = sum(turn["seconds"] for turn in plain_turns) / sum(len(turn["ids"]) for turn in plain_turns)
    result |= {
        "num_tokens": num_tokens,
        "tokens_per_second": rates["median"],
        "tokens_per_second_p10": rates["p10"],
        "tokens_per_second_p90": rates["p90"],
        "speedup": speedup["median"],
        "speedup_interval": [speedup["low"], speedup["high"]],
        "tokens_per_round": num_tokens / num_rounds,
        "acceptance_length": num_tokens / num_rounds - 1,
        "accepted_histogram": {str(count): number for count, number in accepted_histogram(rounds).items()},
        "slot_acceptance": acceptance,
        "slot_decisions": decisions,
        "first_token_ms": 1e3 * spread([turn["first_token_seconds"] for turn in turns])["median"],
        "round_ms": 1e3 * seconds / num_rounds,
        "round_cost": seconds / num_rounds / plain_token_s,
        "peak_memory_bytes": max((row["peak_memory_bytes"] or 0 for row in ran), default=0) or None,
        "weights_bytes": ran[0]["weights_bytes"],
        "ids_equal": sum(row["difference"] is None for row in ran) if is_greedy else None,
    }
    differences = [{"prompt": row["prompt"], **row["difference"]} for row in ran if row.get("difference")]
    if differences:
        result["differences"] = differences
        # A gap of a few roundings is what another shape of a forward explains.
        gaps = [abs(d["logit_gap"]) / d["rounding"] for d in differences if d["logit_gap"] is not None]
        result["largest_gap_in_roundings"] = max(gaps, default=None)
    if "draft_ms" in turns[0]:
        result |= _drafting(turns, num_rounds)
    if reasons:
        result["reason"] = f"{len(reasons)} prompts are missing: {reasons[0]}"
    result["per_prompt"] = [_prompt_row(row) for row in ran]
    return result


def _drafting(turns: list[Mapping], num_rounds: int) -> dict:
    totals = {
        name: sum(turn[name] for turn in turns)
        for name in ("draft_ms", "verify_ms", "wait_ms", "packed_ms", "hidden_ms", "num_errors")
    }
    hits = {}
    for turn in turns:
        for kind, count in turn["num_hits"].items():
            hits[kind] = hits.get(kind, 0) + count
    drafting = {name: totals[name] / num_rounds for name in ("draft_ms", "verify_ms", "wait_ms")}
    drafting["overlap"] = totals["hidden_ms"] / totals["packed_ms"] if totals["packed_ms"] else None
    return {**drafting, "num_hits": hits, "num_errors": totals["num_errors"]}


def _prompt_row(row: Mapping) -> dict:
    turns = row["turns"]
    kept = {
        "prompt": row["prompt"],
        "num_tokens": [len(turn["ids"]) for turn in turns],
        "num_rounds": [len(turn["rounds"]) for turn in turns],
        "seconds": [round(turn["seconds"], 4) for turn in turns],
        "first_token_ms": [round(1e3 * turn["first_token_seconds"], 1) for turn in turns],
    }
    if any(turn.get("mode_choices") for turn in turns):
        kept["mode_choices"] = [turn["mode_choices"] for turn in turns]
    return kept


def _seconds_per_token(row: Mapping) -> float:
    """Of a whole conversation."""
    return sum(turn["seconds"] for turn in row["turns"]) / sum(len(turn["ids"]) for turn in row["turns"])


def averages(results: Sequence[Mapping]) -> list[dict]:
    """Over data sets, of the methods that ran on all: the geometric mean of speedups, the mean of tokens per round."""
    by_method = {}
    for result in results:
        by_method.setdefault(result["method"], []).append(result)
    num_datasets = len({result["dataset"] for result in results})
    return [
        {
            "method": method,
            "num_datasets": num_datasets,
            "speedup": geometric_mean([result["speedup"] for result in own]),
            "tokens_per_round": sum(result["tokens_per_round"] for result in own) / num_datasets,
        }
        for method, own in by_method.items()
        if len(own) == num_datasets and all(result["num_prompts"] for result in own)
    ]


def rounded(value, digits: int = 5):
    """A JSON value whose floats carry so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: rounded(part, digits) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part, digits) for part in value]
    return value


# Of the table where its reader's terminal is not known.
_WIDTH = 150
COLUMNS = (
    "Data set",
    "Method",
    "Prompts",
    "Tokens/s (p10 to p90)",
    "Speedup (95%)",
    "Tokens per round",
    "Round, in plain tokens",
    "First token (ms)",
    "Memory (MB)",
    "Hidden drafting",
    "Ids equal",
)


def table_rows(results: Sequence[Mapping]) -> list[list[str]]:
    """The results as texts, by `COLUMNS`; a method that did not run has its reason in the place of figures."""
    rows = []
    for result in results:
        head = [result["dataset"], result["method"], str(result["num_prompts"])]
        if not result["num_prompts"]:
            rows.append([*head, f"not run: {result['reason']}", *[""] * (len(COLUMNS) - 4)])
            continue
        low, high = result["speedup_interval"]
        p10, p90 = result["tokens_per_second_p10"], result["tokens_per_second_p90"]
        memory, overlap = result["peak_memory_bytes"], result.get("overlap")
        rows.append(
            [
                *head,
                f"{result['tokens_per_second']:.1f} ({p10:.1f} to {p90:.1f})",
                f"{result['speedup']:.2f} ({low:.2f} to {high:.2f})",
                f"{result['tokens_per_round']:.2f}",
                f"{result['round_cost']:.2f}",
                f"{result['first_token_ms']:.0f}",
                "" if memory is None else f"{memory / 1e6:.0f}",
                "" if overlap is None else f"{overlap:.0%}",
                _equality(result),
            ]
        )
    return rows


def _equality(result: Mapping) -> str:
    if result["ids_equal"] is None:
        return "sampled"
    text = f"{result['ids_equal']} of {result['num_prompts']}"
    gap = result.get("largest_gap_in_roundings")
    return text if gap is None else f"{text} (gap {gap:.1f} ulp)"


def print_table(results: Sequence[Mapping]):
    """The table on stdout, by rich where it is installed, else as plain lines."""
    rows = table_rows(results)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in (COLUMNS, *rows):
            print("  ".join(cell for cell in row if cell))
        return
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    for dataset in dict.fromkeys(result["dataset"] for result in results):
        table = Table(title=dataset, title_justify="left")
        for column in COLUMNS[1:]:
            table.add_column(column, no_wrap=column == "Method", overflow="fold")
        own = [(result, row) for result, row in zip(results, rows) if row[0] == dataset]
        for result, row in own:
            if result["num_prompts"]:
                table.add_row(*row[1:])
        console.print(table)
        for result, _ in own:
            if not result["num_prompts"]:
                print(f"{result['method']} did not run: {result['reason']}")


__all__ = [
    "COLUMNS",
    "averages",
    "print_table",
    "rounded",
    "summarise",
    "table_rows",
]
