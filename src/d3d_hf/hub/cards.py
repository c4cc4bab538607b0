"""Model cards: one template, filled from what lies beside a drafter's weights and from results in JSON files.

A card's folder may hold the drafter (config.json with its training recipe, trainer_state.json, pruning_report.json)
and holds card.yaml, which says what no other file knows:

    license: apache-2.0
    language: [en]
    datasets: [openai/gsm8k]          # of the training
    repo_id: org/d3d-name             # optional, for the lines of use
    results: [../../results/x.json]   # of benchmarks, relative to the folder
    published: ../../published.json   # optional: the paper's figures, shown apart
    summary, training, limits: texts, without figures
    target, base_model, layers: only where there is no config.json
"""

import json
import os
import re
import shlex
import textwrap
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..model.configuration_d3d import D3DConfig


CARD_NAME = "README.md"
FACTS_NAME = "card.yaml"
_TEMPLATE = Path(__file__).with_name("card_template.md")
_TAGS = ["d3d", "speculative-decoding", "diffusion-drafting", "d3d_hf"]
_KNOWN_FACTS = {
    "license": str,
    "license_name": str,
    "license_link": str,
    "language": list,
    "datasets": list,
    "repo_id": str,
    "results": list,
    "published": str,
    "summary": str,
    "training": str,
    "limits": str,
    "target": str,
    "base_model": str,
    "layers": str,
}
# Name of a prompt file: title, and dataset on the Hub.
_BENCHMARKS = {
    "gsm8k": ("GSM8K", "openai/gsm8k"),
    "math500": ("MATH-500", "HuggingFaceH4/MATH-500"),
    "humaneval": ("HumanEval", "openai/openai_humaneval"),
    "mbpp": ("MBPP", "google-research-datasets/mbpp"),
    "livecodebench": ("LiveCodeBench", "livecodebench/code_generation_lite"),
    "mt-bench": ("MT-Bench", "HuggingFaceH4/mt_bench_prompts"),
}
# "org/name" or "name", as the Hub has them: nothing else may stand as a base model or data set in a card's metadata.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def make_card(folder: str | os.PathLike) -> ModelCard:
    r"""
    The card of a folder of `hub_cards/`.

    Args:
        folder (`str` or `os.PathLike`): With card.yaml, and the drafter if there is one.

    Returns:
        `huggingface_hub.ModelCard`: `str(card)` is the text of README.md.

    Raises:
        ValueError: card.yaml or one of the JSON files is missing or cannot be used; the message names it.
    """
    folder = Path(folder)
    facts = read_facts(folder / FACTS_NAME)
    config = D3DConfig.from_pretrained(folder) if (folder / "config.json").is_file() else None
    reports = [(path, _read_report(folder / path)) for path in facts.get("results", ())]
    name = folder.resolve().name
    published = _read_json(folder / facts["published"]) if "published" in facts else None
    target = facts.get("target") if config is None else config.target_name_or_path
    if target is None:
        raise ValueError(f"{folder / FACTS_NAME} and the config name no target: add a line 'target: org/name'.")
    card = ModelCard.from_template(
        card_data(name, facts, config, reports),
        template_path=str(_TEMPLATE),
        name=name,
        repo_id=facts.get("repo_id", f"hub_cards/{name}"),
        summary=_wrapped(facts["summary"]),
        is_adapter=config is not None and config.adapter_base is not None,
        facts=_drafter_rows(facts, config, target),
        benchmarks=[_benchmark(report, path) for path, report in reports],
        planned=[title for title, _ in _BENCHMARKS.values()],
        published=_published_rows(published, target),
        published_source=None if published is None else published["source"],
        published_layers=None if published is None else _published_layers(published["pruning"]),
        pruning=_pruning(folder),
        training=_wrapped(facts["training"]),
        recipe=_recipe_rows(folder, config),
        limits=_wrapped(facts["limits"]),
    )
    card.content = re.sub(r"\n{3,}", "\n\n", card.content).rstrip() + "\n"
    return card


def read_facts(path: Path) -> dict:
    """
    Raises:
        ValueError: The file is missing, no YAML, lacks a text, or has unknown lines or wrong types.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: write what the card is to say of licence, data and limits into it.")
    try:
        facts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path} holds no names and values: write lines like 'license: apache-2.0'.")
    for name, value in facts.items():
        if name not in _KNOWN_FACTS:
            raise ValueError(f"{path} has the line {name!r}, which no card knows: use {', '.join(_KNOWN_FACTS)}.")
        if not isinstance(value, _KNOWN_FACTS[name]):
            raise ValueError(f"{path}: {name!r} is {value!r}, which must be a {_KNOWN_FACTS[name].__name__}.")
    for name in ("license", "summary", "training", "limits"):
        if not facts.get(name, "").strip():
            raise ValueError(f"{path} says nothing about {name!r}: add it.")
    return facts


def card_data(name: str, facts: dict, config: D3DConfig | None, reports=()) -> ModelCardData:
    """
    The metadata block of a card.

    Args:
        name (`str`): Of the drafter.
        facts (`dict`): Of card.yaml.
        config ([`D3DConfig`], *optional*): The drafter's.
        reports (sequence of `(path, dict)`, *optional*): Benchmark JSON.

    Raises:
        ValueError: A data set is no name on the Hub.
    """
    base_model, relation = _base_model(facts, config)
    for dataset in facts.get("datasets", ()):
        if not _is_hub_id(dataset):
            raise ValueError(
                f"The data set {dataset!r} is no name on the Hub: write it as owner/name, or leave it out."
            )
    results = [result for _, report in reports for result in _eval_results(report)]
    return ModelCardData(
        model_name=name if results else None,
        eval_results=results or None,
        base_model=base_model,
        base_model_relation=relation,
        datasets=facts.get("datasets") or None,
        language=facts.get("language") or None,
        library_name="transformers",
        license=facts["license"],
        license_name=facts.get("license_name"),
        license_link=facts.get("license_link"),
        pipeline_tag="text-generation",
        tags=_TAGS,
    )


def _base_model(facts: dict, config: D3DConfig | None) -> tuple[str | None, str | None]:
    """The model that the drafter's weights come from, if it is one of the Hub, and how the drafter relates to it."""
    if config is None:
        name, relation = facts.get("base_model", facts.get("target")), "finetune"
    elif config.adapter_base is not None:
        name, relation = config.adapter_base, "adapter"
    else:
        recipe = config.training_recipe or {}
        name = facts.get("base_model") or recipe.get("backbone") or config.backbone_config.name_or_path
        relation = "finetune"
    return (name, relation) if _is_hub_id(name) else (None, None)


def _is_hub_id(name) -> bool:
    return isinstance(name, str) and not os.path.exists(name) and _HUB_ID.fullmatch(name) is not None


def _eval_results(report: dict) -> list[EvalResult]:
    results = []
    for row in report["results"]:
        if not row["method"].startswith("d3d"):
            continue
        title, dataset = _BENCHMARKS.get(row["dataset"], (row["dataset"], row["dataset"]))
        for metric, label in (("tokens_per_round", "Tokens per round"), ("speedup", "Speedup")):
            if row.get(metric):  # 0 where a method could not run
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=dataset,
                        dataset_name=title,
                        metric_type=metric,
                        metric_name=f"{label} ({row['method']})",
                        metric_value=row[metric],
                    )
                )
    return results


def _drafter_rows(facts: dict, config: D3DConfig | None, target: str) -> list[tuple[str, str]]:
    link = f"[{target}](https://huggingface.co/{target})" if _is_hub_id(target) else f"`{Path(target).name}`"
    rows = [("Target", link)]
    if config is None:
        rows += [("Layers", facts.get("layers", "not decided")), ("State", "template: nothing is trained or uploaded")]
        return rows
    layers = str(config.num_hidden_layers)
    if config.kept_layers is not None:
        layers += f", kept of the original: {', '.join(map(str, config.kept_layers))}"
    rows += [
        ("Architecture", config.backbone_config.model_type),
        ("Layers", layers),
        ("Block size", config.block_size),
        ("Block attention", config.block_attention),
        ("Mask", "an embedding of its own" if config.mask_token_id is None else f"token {config.mask_token_id}"),
    ]
    if config.chained_head_size is not None:
        rows.append(("Chained head", f"state of {config.chained_head_size}"))
    return rows


def _benchmark(report: dict, path: str) -> dict:
    """One results file as the template shows it."""
    machine, versions = report["machine"], report["versions"]
    accelerators = ", ".join(machine["accelerators"]) or "no accelerator"
    temperature = report.get("settings", {}).get("temperature")
    decoding = f"Temperature {temperature:g}" if temperature else "Greedy"
    heading = (
        f"{decoding}, played through, all methods interleaved in one run on {machine['num_threads']} threads of "
        f"{machine['processor']} ({machine['num_cores']} cores, {accelerators}), torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {report.get('date') or 'date not recorded'}."
    )
    origin = f"From `{os.path.basename(path)}` (commit {(report.get('git_commit') or 'unknown')[:12]}), made by"
    return {
        "heading": heading,
        "rows": [_result_row(row) for row in report["results"]],
        "origin": origin,
        "command": shlex.join(["python", *report["argv"]] if report["argv"][0].endswith(".py") else report["argv"]),
    }


def _result_row(row: dict) -> list[str]:
    def figure(name, digits=2):
        return f"{row[name]:.{digits}f}" if row.get(name) else "not measured"

    number = row["num_prompts"]
    title, _ = _BENCHMARKS.get(row["dataset"], (row["dataset"], None))
    rates = [figure("tokens_per_round"), figure("tokens_per_second", 1), figure("speedup")]
    equal = f"{row['ids_equal']} of {number}" if row.get("ids_equal") is not None else "not measured"
    return [title, row["method"], number, *rates, equal]


def _published_rows(published: dict | None, target: str) -> list[list[str]]:
    def show(value):
        return "not given" if value is None else f"{value:.2f}x"

    rows = [] if published is None else published["speedups"]
    return [
        [row["target"], row["what"], show(row.get("d3d")), show(row.get("dflash"))]
        for row in rows
        if row["target"] == target
    ]


def _published_layers(pruning: dict) -> str:
    return (
        f"{pruning['num_removed']} of {pruning['num_layers']} removed, over {pruning['retention_above']:.0%} of the "
        f"acceptance length kept"
    )


def _pruning(folder: Path) -> str | None:
    path = folder / "pruning_report.json"
    if not path.is_file():
        return None
    from ..pruning.report import as_markdown

    return as_markdown(_read_json(path))


def _recipe_rows(folder: Path, config: D3DConfig | None) -> list[tuple[str, str]]:
    """The training recipe of the config, and the end of trainer_state.json, in the order of a reader's questions."""
    recipe = dict((config and config.training_recipe) or {})
    data, evaluation = dict(recipe.pop("data", {})), recipe.pop("evaluation", None)
    for name in ("versions", "continued_from"):
        recipe.pop(name, None)
    rows = []
    if data:
        rows.append(("Data", data.get("source")))
        rows.append(("Rows", _inline(data.get("num_rows"))))
        template = data.get("chat_template")
        if template is not None:
            settings = template.get("settings") or {}
            thinking = settings.get("enable_thinking")
            rows.append(
                ("Chat template", f"the target's, sha256 {template['sha256'][:12]}, settings {_inline(settings)}")
            )
            rows.append(("Thinking", "the template's default" if thinking is None else ("on" if thinking else "off")))
        rows.append(("Generation", _inline(data.get("generation"))))
    rows += [(name.replace("_", " ").capitalize(), _inline(value)) for name, value in recipe.items()]
    if evaluation:
        rows += [(f"Held out: {name.replace('_', ' ')}", f"{value:.3f}") for name, value in evaluation.items()]
    state_path = folder / "trainer_state.json"
    if state_path.is_file():
        losses = [entry["loss"] for entry in _read_json(state_path)["log_history"] if "loss" in entry]
        if losses:
            rows.append(("Last training loss", f"{losses[-1]:.3f}"))
    return [(label, value) for label, value in rows if value not in (None, "")]


def _wrapped(text: str) -> str:
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(
        textwrap.fill(paragraph, width=120, break_long_words=False, break_on_hyphens=False) for paragraph in paragraphs
    )


def _inline(value) -> str | None:
    """A value of JSON on one line of a table."""
    if value is None:
        return None
    if isinstance(value, dict):
        text = ", ".join(f"{name} {_inline(part)}" for name, part in value.items() if part is not None) or "none"
    elif isinstance(value, list):
        text = ", ".join(map(str, value))
    else:
        text = str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _read_report(path: Path) -> dict:
    """Benchmark JSON, with what a card must say of it."""
    report = _read_json(path)
    missing = [name for name in ("results", "argv", "machine", "versions") if not report.get(name)]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: a card shows no figures of unknown origin.")
    for row in report["results"]:
        if not {"dataset", "method", "num_prompts"} <= row.keys():
            raise ValueError(f"{path} has a row without dataset, method or num_prompts: {row}.")
    return report


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: give a file that a command of this package wrote.")
    return content


__all__ = ["CARD_NAME", "FACTS_NAME", "card_data", "make_card", "read_facts"]
