"""Model cards: those of hub_cards/ are what their data say, and show no figure that no JSON backs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.cli import main
from d3d_hf.hub.cards import card_data, make_card
from d3d_hf.testing import tiny_model


ROOT = Path(__file__).resolve().parent.parent
CARDS = sorted((ROOT / "hub_cards").iterdir())
TEMPLATES = ("d3d-qwen3-32b", "d3d-qwen3-8b", "d3d-qwen3-8b-pruned")
TEXTS = {"license": "mit", "summary": "A drafter.", "training": "As usual.", "limits": "Small."}


def numbers_in(value) -> set[float]:
    """All numbers of a JSON value, those within its texts and commands included."""
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, (int, float)):
        return {float(value)}
    if isinstance(value, str):
        return {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", value)}
    parts = value.values() if isinstance(value, dict) else value
    return set().union(*map(numbers_in, parts)) if value else set()


def backing(folder: Path) -> set[float]:
    """The numbers that the JSON files behind a card hold."""
    facts = yaml.safe_load((folder / "card.yaml").read_text())
    paths = [folder / path for path in [*facts.get("results", ()), *filter(None, [facts.get("published")])]]
    paths += folder.glob("*.json")
    return set().union(*(numbers_in(json.loads(path.read_text())) for path in paths))


def figures_of(card: ModelCard) -> list[str]:
    """What a reader takes for a figure: numbers in table cells, decimals and percentages anywhere else."""
    text = re.sub(r"```.*?```", "", card.text, flags=re.S)
    text = re.sub(r"arXiv[ .:/\w]*\d|\(https?://\S+\)|\(commit \w+\)|`[^`]*`|sha256 \w+", "", text)
    text = re.sub(r"torch \S+,|transformers \S+,|\d{4}-\d\d-\d\d", "", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    in_tables = [
        number for cell in cells for number in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?=x?(?:[ ,;:)]|$))", cell)
    ]
    elsewhere = re.findall(r"(?<![\w.-])\d+\.\d+|\d+(?=%)", "\n".join(set(text.splitlines()) - set(rows)))
    return in_tables + elsewhere


def is_backed(figure: str, known: set[float]) -> bool:
    digits = len(figure.partition(".")[2])
    return any(f"{scale * number:.{digits}f}" == figure for number in known for scale in (1, 100))


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_cards_are_what_their_data_say(folder):
    card = make_card(folder)
    assert (folder / "README.md").read_text(encoding="utf-8") == str(card), f"run: d3d-hf card {folder.name}"
    loaded = ModelCard.load(folder / "README.md")
    assert loaded.data.base_model and loaded.data.license and loaded.data.library_name == "transformers"
    assert loaded.data.pipeline_tag == "text-generation" and "d3d" in loaded.data.tags
    known = backing(folder)
    unbacked = [figure for figure in figures_of(card) if not is_backed(figure, known)]
    assert not unbacked, f"{folder.name} shows figures that no JSON backs: {unbacked}"
    shown = {result.metric_value for result in loaded.data.eval_results or ()}
    assert shown <= known


def test_the_check_of_figures_can_fail():
    known = backing(ROOT / "hub_cards" / "d3d-qwen3-8b")
    for text in ("It reaches 5.01 tokens.", "Over 98% of it.", "| GSM8K | 9.99 |", "| Rows | 123 |"):
        figures = figures_of(ModelCard(f"---\nlicense: mit\n---\n{text}\n"))
        assert len(figures) == 1 and not is_backed(figures[0], known), text


def test_templates_measure_nothing_and_mark_what_is_the_papers():
    assert {folder.name for folder in CARDS} == {"d3d-smollm2-135m", *TEMPLATES}
    for name in TEMPLATES:
        text = (ROOT / "hub_cards" / name / "README.md").read_text()
        results, _, published = text.partition("### Published figures")
        assert results.count("not measured") == 18 and "5.00x" not in results and "7.48x" not in results
        assert "The paper's, not measured by this project" in published and "2611.06425" in published
        assert ("5.71x" in published) == (name == "d3d-qwen3-32b")


@pytest.fixture
def folder(tmp_path):
    """A drafter with everything that a card may be filled from."""
    folder = tmp_path / "hub" / "my-drafter"
    drafter = D3DDrafterForCausalLM.from_backbone(
        tiny_model("qwen3", num_layers=3), block_size=4, kept_layers=[0, 2], target_name_or_path="org/target"
    )
    drafter.config.training_recipe = {
        "backbone": "org/base",
        "num_steps": 12,
        "data": {
            "source": "answers",
            "num_rows": {"train": 5},
            "chat_template": {"sha256": "ab" * 32, "settings": {"enable_thinking": False}},
            "generation": {"temperature": 0.7},
        },
        "evaluation": {"tokens_per_round": 2.5},
    }
    drafter.save_pretrained(folder)
    (folder / "card.yaml").write_text(yaml.safe_dump({**TEXTS, "results": ["bench.json"]}))
    report = {
        "argv": ["benchmarks/compile_target.py", "--drafter", "a b"],
        "date": "2026-01-02",
        "git_commit": "0" * 40,
        "machine": {"processor": "Some CPU", "num_cores": 2, "num_threads": 1, "accelerators": ["Some GPU"]},
        "versions": {"torch": "2.9", "transformers": "5.23.0"},
        "results": [
            {"dataset": "gsm8k", "method": "d3d-sync", "num_prompts": 3, "tokens_per_round": 2.25, "speedup": 1.5},
            {"dataset": "own set", "method": "plain", "num_prompts": 3, "tokens_per_second": 7.0, "ids_equal": 3},
        ],
    }
    (folder / "bench.json").write_text(json.dumps(report))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 3.0}, {"loss": 1.25}]}))
    return folder


def rewrite(path, **fields):
    facts = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**facts, **fields}))


def test_a_card_is_filled_from_all_its_sources(folder, capsys):
    assert main(["card", str(folder)]) == 0
    text = (folder / "README.md").read_text()
    for part in (
        "| GSM8K | d3d-sync | 3 | 2.25 | not measured | 1.50 | not measured |",
        "| own set | plain | 3 | not measured | 7.0 | not measured | 3 of 3 |",
        "1 threads of Some CPU (2 cores, Some GPU), torch 2.9, transformers 5.23.0, 2026-01-02",
        "python benchmarks/compile_target.py --drafter 'a b'",
        "| Layers | 2, kept of the original: 0, 2 |",
        "settings enable_thinking False",
        "| Thinking | off |",
        "| Last training loss | 1.250 |",
        "| Held out: tokens per round | 2.500 |",
        "[org/target](https://huggingface.co/org/target)",
    ):
        assert part in text, part
    data = ModelCard(text).data
    assert (data.base_model, data.base_model_relation, data.datasets) == ("org/base", "finetune", None)
    assert {(r.dataset_type, r.metric_type, r.metric_value) for r in data.eval_results} == {
        ("openai/gsm8k", "tokens_per_round", 2.25),
        ("openai/gsm8k", "speedup", 1.5),
    }
    assert main(["card", str(folder), "--check"]) == 0
    rewrite(folder / "card.yaml", limits="Other limits.")
    assert main(["card", str(folder), "--check"]) == 1
    assert "is not what its data say" in capsys.readouterr().err


def test_a_pruning_report_is_shown(folder):
    step = {
        "kept_layers": [0, 2],
        "removed_layer": 1,
        "acceptance_length": 1.9,
        "retention": 0.95,
        "retention_interval": [0.9, 0.99],
        "by_set": {"gsm8k": {"retention": 0.96}},
        "packed_pass_ms": 7.0,
    }
    report = {
        "drafter": {"num_layers": 3},
        "data": {"calibration": {"gsm8k": 5}, "evaluation": {"gsm8k": 4}, "num_positions": {"evaluation": 40}},
        "settings": {"recovery": None},
        "full": {"acceptance_length": 2.0, "packed_pass_ms": 9.5, "trained": None},
        "steps": [step],
        "baselines": [],
    }
    (folder / "pruning_report.json").write_text(json.dumps(report))
    text = str(make_card(folder))
    assert "## Layers" in text and "| 2 | 1 | 1.90 | 0.950 (0.900 to 0.990) | 0.960 | 7.0 |" in text


def test_names_with_colons_and_spaces_make_valid_metadata(folder):
    renamed = folder.with_name("my: drafter #1")
    folder.rename(renamed)
    rewrite(renamed / "card.yaml", license="other", license_name="my: own, 'odd' licence", datasets=["own.er/da_ta"])
    report = json.loads((renamed / "bench.json").read_text())
    report["results"][0] |= {"dataset": "set: one #2", "method": "d3d: sync"}
    (renamed / "bench.json").write_text(json.dumps(report))
    data = ModelCard(str(make_card(renamed))).data
    assert data.license_name == "my: own, 'odd' licence" and data.datasets == ["own.er/da_ta"]
    assert data.model_name == "my: drafter #1" and data.eval_results[0].dataset_name == "set: one #2"


def test_a_target_that_is_a_folder_stays_out_of_the_metadata(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["target_name_or_path"], config["training_recipe"] = str(tmp_path / "secret" / "target"), None
    config["backbone_config"]["_name_or_path"] = str(tmp_path / "secret" / "base")
    (folder / "config.json").write_text(json.dumps(config))
    card = make_card(folder)
    assert card.data.base_model is None and card.data.get("base_model_relation") is None
    assert "secret" not in str(card) and "`target`" in str(card)


def test_relation_of_an_adapter(folder):
    config = D3DDrafterForCausalLM.config_class.from_pretrained(folder)
    config.adapter_base = "org/target"
    data = card_data("x", TEXTS, config)
    assert (data.base_model, data.base_model_relation) == ("org/target", "adapter")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"speed": "5x"}, "has the line 'speed', which no card knows"),
        ({"datasets": "openai/gsm8k"}, "'datasets' is 'openai/gsm8k', which must be a list"),
        ({"datasets": ["my data"]}, "data set 'my data' is no name on the Hub"),
        ({"limits": " "}, "says nothing about 'limits'"),
        ({"results": ["none.json"]}, "none.json cannot be read"),
        ({"results": ["config.json"]}, "lacks results, argv, machine, versions: a card shows no figures of unknown"),
    ],
)
def test_unusable_facts(fields, message, folder, capsys):
    rewrite(folder / "card.yaml", **fields)
    assert main(["card", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "README.md").exists()


def test_damaged_yaml_and_missing_files(folder, capsys):
    (folder / "card.yaml").write_text("a: [")
    assert main(["card", str(folder)]) == 2 and "is no YAML" in capsys.readouterr().err
    (folder / "card.yaml").unlink()
    assert main(["card", str(folder)]) == 2 and "card.yaml is missing" in capsys.readouterr().err
    assert main(["card", str(folder / "nothing")]) == 2 and "is no folder" in capsys.readouterr().err


# What push looks at before it sends anything


def push_fails(capsys, folder, repo="org/x"):
    assert main(["push", str(folder), repo, "--dry-run"]) == 2
    return capsys.readouterr().err


def test_push_refuses_before_it_sends(folder, capsys):
    for name in TEMPLATES:
        assert "is a card without a drafter" in push_fails(capsys, ROOT / "hub_cards" / name)
    assert "has no owner" in push_fails(capsys, folder, "x")
    assert "no name of a repository" in push_fails(capsys, folder, "a/b/c")
    assert "README.md is missing: write it with `d3d-hf card" in push_fails(capsys, folder)
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    assert "metadata of" in push_fails(capsys, folder)
    (folder / "README.md").write_text("---\ntags: [a]\n---\n")
    assert "names no license" in push_fails(capsys, folder)
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "has no model.safetensors" in push_fails(capsys, folder)


def test_push_refuses_an_adapter_on_a_folder_of_this_machine(folder, capsys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adapter_base": str(folder)}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "has no adapter/adapter_model.safetensors" in push_fails(capsys, folder)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").touch()
    assert "a folder of this machine: set adapter_base" in push_fails(capsys, folder)


def test_push_is_off_where_the_hub_is(folder, capsys, monkeypatch):
    assert main(["card", str(folder)]) == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["push", str(folder), "org/x"]) == 2
    assert "switched off by HF_HUB_OFFLINE" in capsys.readouterr().err
