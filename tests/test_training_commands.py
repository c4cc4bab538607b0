"""`d3d-hf train` and `d3d-hf evaluate`, on tiny models saved to disk."""

import collections
import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments
from d3d_hf.cli import main
from d3d_hf.commands.train_options import TrainOptions
from d3d_hf.testing import tiny_model, tiny_tokenizer
from d3d_hf.training.acceptance import DraftOutcomes, play_rounds
from d3d_hf.training.answer_decoding import Decoding
from d3d_hf.training.chat_template import Template
from d3d_hf.training.evaluate import evaluate_drafter
from d3d_hf.training.options import DrafterTrainingOptions
from d3d_hf.training.prompts import Prompt
from d3d_hf.training.regenerate import regenerate
from d3d_hf.training.transformers_engine import TransformersEngine


BLOCK_SIZE = 4
MAX_NEW_TOKENS = 20


def target_model():
    target = tiny_model("llama", seed=5)
    target.generation_config.eos_token_id = 31
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, its responses, the same rows as a file, a drafter that fails here and there, and one of another."""
    folder = tmp_path_factory.mktemp("training")
    target, tokenizer = target_model(), tiny_tokenizer()
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [Prompt(i, ("abcdefghij"[i % 4 : 4 + i % 5], "k")[: 1 + i % 2]) for i in range(10)]
    engine = TransformersEngine(target, tokenizer, Decoding(MAX_NEW_TOKENS))
    regenerate(engine, Template(tokenizer), prompts, str(folder / "data"), "target", "prompts.jsonl")
    shard = next((folder / "data").glob("*.jsonl"))
    (folder / "rows.jsonl").write_text(shard.read_text())

    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=BLOCK_SIZE)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        drafter.lm_head.weight.add_(0.15 * torch.randn_like(drafter.lm_head.weight))
    drafter.config.target_name_or_path = "target"
    drafter.save_pretrained(folder / "drafter")
    drafter.config.target_name_or_path = "org/other"
    drafter.save_pretrained(folder / "of-another")
    D3DDrafterForCausalLM.from_backbone(tiny_model(vocab_size=50)).save_pretrained(folder / "small")
    other = tiny_tokenizer()
    other.add_tokens(["one more"])
    other.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Runs a command where the models are; gives its exit status, stdout and stderr."""
    monkeypatch.chdir(folder)

    def run(*argv):
        capsys.readouterr()
        status = main([str(argument) for argument in argv])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def train(run, tmp_path):
    """Trains a little, into `tmp_path`; what is given comes last and counts."""
    common = ["--output-dir", tmp_path, "--max-steps", 2, "--per-device-train-batch-size", 4, "--use-cpu"]
    common += ["--report-to", "none", "--learning-rate", "1e-2", "--logging-steps", 1, "--save-steps", 2]
    return lambda *argv: run("train", *common, *argv)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# Training


def test_a_drafter_of_a_backbone(train, tmp_path):
    status, out, err = train(
        *("--backbone", "target", "--block-size", 3, "--kept-layers", 1, "--data", "data", "--eval-rows", 4),
        *("--block-loss-decay", 0.7, "--weight-decay", 0.1, "--warmup-steps", 1, "--eval-strategy", "steps"),
    )
    assert status == 0, err
    assert "acceptance_length " in out and "Saved to" in err
    final = tmp_path / "final"
    drafter = D3DDrafterForCausalLM.from_pretrained(final)
    assert drafter.config.block_size == 3 and drafter.config.kept_layers == [0]
    assert drafter.config.target_name_or_path == "target" and drafter.dtype == torch.float32
    recipe = config_of(final)["training_recipe"]
    assert recipe["data"]["target"] == "target" and recipe["data"]["source"] == "data"
    assert recipe["data"]["num_rows"] == {"train": 11, "eval": 4}
    assert recipe["data"]["chat_template"]["settings"] == {}
    assert recipe["losses"]["block_loss_decay"] == 0.7 and recipe["losses"]["ar_loss_weight"] == 0.5
    assert recipe["num_steps"] == 2 and recipe["batch_size"] == 4 and recipe["learning_rate"] == 0.01
    assert recipe["weight_decay"] == 0.1 and recipe["warmup_steps"] == 1 and recipe["backbone"] == "target"
    assert recipe["evaluation"]["tokens_per_round"] >= 1 and "adapter" not in recipe
    assert str(tmp_path) not in json.dumps(recipe)
    assert (final / "tokenizer_config.json").exists(), "the backbone brought the target's"
    inputs = torch.randint(2, 67, (1, 6))
    target = target_model()
    plain = target.generate(inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(
        target.generate(inputs, max_new_tokens=12, do_sample=False, pad_token_id=0, assistant_model=drafter), plain
    )


def test_a_drafter_is_trained_on(train, tmp_path):
    status, _, err = train("--drafter", "drafter", "--data", "data", "--eval-data", "rows.jsonl")
    assert status == 0, err
    recipe = config_of(tmp_path / "final")["training_recipe"]
    assert recipe["data"]["num_rows"] == {"train": 15, "eval": 15}
    first, after = load_file("drafter/model.safetensors"), load_file(tmp_path / "final" / "model.safetensors")
    assert first.keys() == after.keys()
    assert all(not torch.equal(first[name], after[name]) for name in ("mask_embedding.weight", "lm_head.weight"))
    status, _, err = train("--drafter", tmp_path / "final", "--data", "data", "--output-dir", tmp_path)
    assert status == 2 and "holds 'checkpoint-2' already: give --resume" in err


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_config_file_is_overridden_by_what_follows_it(run, tmp_path, kind):
    config = {
        "drafter": "drafter",
        "data": "data",
        "eval_rows": 3,
        "output_dir": str(tmp_path / "out"),
        "max-steps": 5,
        "use_cpu": True,
        "report_to": ["none"],
        "optim_args": None,
        "lr_scheduler_kwargs": {},
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_rank": 2,
    }
    path = tmp_path / f"config.{kind}"
    if kind == "json":
        path.write_text(json.dumps({**config, "learning_rate": 1e-3}))
    else:
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in config.items()]
        path.write_text("".join(lines) + "learning_rate: 1e-3\n")  # which YAML takes for a text
    status, _, err = run("train", path, "--max-steps", 1)
    assert status == 0, err
    recipe = config_of(tmp_path / "out" / "final")["training_recipe"]
    assert recipe["num_steps"] == 1 and recipe["learning_rate"] == 1e-3
    assert recipe["adapter"]["target_modules"] == ["q_proj", "v_proj"] and recipe["adapter"]["rank"] == 2


def test_every_training_argument_is_an_option(run):
    status, out, _ = run("train", "--help-all")
    assert status == 0
    for argument in dataclasses.fields(D3DTrainingArguments):
        assert not argument.init or f"--{argument.name} " in out or f"--{argument.name}," in out, argument.name
    status, out, _ = run("train", "--help")
    assert status == 0 and "--help-all" in out
    for argument in (*dataclasses.fields(TrainOptions), *dataclasses.fields(DrafterTrainingOptions)):
        assert f"--{argument.name.replace('_', '-')} " in out, argument.name


def test_lora_is_kept_as_an_adapter_where_asked(train, tmp_path):
    status, _, err = train("--backbone", "target", "--data", "data", "--lora-rank", 2, "--keep-adapter")
    assert status == 0, err
    final = tmp_path / "final"
    assert (final / "adapter" / "adapter_model.safetensors").is_file() and not (final / "model.safetensors").exists()
    assert json.loads((final / "config.json").read_text())["adapter_base"] == "target"
    drafter = D3DDrafterForCausalLM.from_pretrained(final)
    assert drafter.config.training_recipe["adapter"]["rank"] == 2


def test_lora_is_merged(train, tmp_path):
    status, _, err = train("--drafter", "drafter", "--data", "data", "--lora-rank", 2, "--lora-alpha", 8)
    assert status == 0, err
    assert (tmp_path / "checkpoint-2" / "adapter_config.json").exists()
    first, final = load_file("drafter/model.safetensors"), load_file(tmp_path / "final" / "model.safetensors")
    assert first.keys() == final.keys()
    changed = {name for name in first if not torch.equal(first[name], final[name])}
    assert "mask_embedding.weight" in changed and "model.layers.0.self_attn.q_proj.weight" in changed
    assert not changed & {"lm_head.weight", "model.embed_tokens.weight"}
    adapter = config_of(tmp_path / "final")["training_recipe"]["adapter"]
    assert adapter == {"kind": "lora", "rank": 2, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
    with torch.no_grad():
        D3DDrafterForCausalLM.from_pretrained(tmp_path / "final")(torch.tensor([[5, 6]]))


def test_resume(run, tmp_path):
    def train(name, *argv):
        common = ["--drafter", "drafter", "--data", "data", "--lora-rank", 2, "--use-cpu", "--report-to", "none"]
        common += ["--per-device-train-batch-size", 4, "--learning-rate", "1e-2", "--save-steps", 2]
        return run("train", *common, "--lr-scheduler-type", "constant", "--output-dir", tmp_path / name, *argv)

    assert train("whole", "--max-steps", 4)[0] == 0
    assert train("cut", "--max-steps", 2)[0] == 0
    status, _, err = train("cut", "--max-steps", 4)
    assert status == 2 and "--resume" in err
    assert train("cut", "--max-steps", 4, "--resume")[0] == 0
    whole, cut = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "cut"))
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], atol=1e-6, rtol=0, msg=name)
    assert config_of(tmp_path / "cut" / "final")["training_recipe"]["num_steps"] == 4
    status, _, err = train("new", "--max-steps", 4, "--resume")
    assert status == 2 and "no checkpoint" in err


def test_the_target_teaches(train, tmp_path):
    status, _, err = train("--drafter", "drafter", "--data", "rows.jsonl", "--distillation-weight", 0.5)
    assert status == 0, err
    assert config_of(tmp_path / "final")["training_recipe"]["losses"]["distillation_weight"] == 0.5


def test_the_saved_dtype_is_that_of_the_source(train, tmp_path):
    drafter = D3DDrafterForCausalLM.from_pretrained("drafter", dtype=torch.bfloat16)
    drafter.save_pretrained(tmp_path / "half")
    status, _, err = train("--drafter", tmp_path / "half", "--data", "data")
    assert status == 0, err
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert config_of(tmp_path / "final")["training_recipe"]["precision"] == "float32"


TRAIN = ("--drafter", "drafter", "--data", "data")


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), ["--drafter is None", "--backbone None"]),
        ((*TRAIN, "--backbone", "target"), ["--drafter is 'drafter'", "--backbone 'target'"]),
        ((*TRAIN, "--block-size", 4), ["--block-size 4", "--backbone"]),
        (("--drafter", "drafter"), ["--data", "regenerate"]),
        (("--drafter", "drafter", "--data", "nowhere"), ["There is no 'nowhere'"]),
        (("--drafter", "target", "--data", "data"), ["--drafter 'target'", "model_type is 'llama'"]),
        (("--backbone", "nowhere", "--data", "data"), ["--backbone 'nowhere'"]),
        ((*TRAIN, "--eval-rows", 15), ["--eval-rows 15", "15 rows"]),
        ((*TRAIN, "--eval-rows", 2, "--eval-data", "data"), ["--eval-rows 2", "--eval-data 'data'"]),
        ((*TRAIN, "--eval-strategy", "steps"), ["--eval-strategy is 'steps'", "--eval-rows"]),
        ((*TRAIN, "--lora-alpha", 2), ["--lora-alpha 2", "--lora-rank"]),
        ((*TRAIN, "--lora-rank", 0), ["--lora-rank is 0"]),
        (
            (*TRAIN, "--lora-rank", 2, "--lora-target-modules", "nothing"),
            ["--lora-target-modules 'nothing'", "q_proj"],
        ),
        ((*TRAIN, "--block-loss-decay", 2), ["block_loss_decay is 2"]),
        ((*TRAIN, "--learning-rat", 2), ["'--learning-rat'", "did you mean '--learning-rate'"]),
        ((*TRAIN, "--max-steps", "many"), ["--max_steps", "'many'"]),
        ((*TRAIN, "--resume"), ["no checkpoint"]),
        ((*TRAIN, "--resume-from-checkpoint", "nowhere"), ["'nowhere'", "no folder"]),
        ((*TRAIN, "--tokenizer", "tokenizer"), ["fingerprint", "was given here"]),
        (("--drafter", "of-another", "--data", "data"), ["'target'", "'org/other'", "--allow-other-target"]),
        (("--drafter", "small", "--data", "data", "--target", "target"), ["67 tokens", "one of 50"]),
        (("config.txt",), ["'config.txt'", ".yaml"]),
        (("missing.yaml",), ["'missing.yaml' cannot be read"]),
        (("wrong.yaml",), ["'learning_rat'", "'learning_rate'"]),
        (("broken.yaml",), ["cannot be understood"]),
        (("list.json",), ["no names and values"]),
    ],
)
def test_mistakes_are_one_line_before_any_training(run, folder, tmp_path, argv, words):
    (folder / "wrong.yaml").write_text("learning_rat: 3\n")
    (folder / "broken.yaml").write_text("a: [\n")
    (folder / "list.json").write_text("[1]")
    status, out, err = run("train", *argv, *(() if argv[:1] and "." in argv[0] else ("--output-dir", tmp_path)))
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("d3d-hf: error: ") and "Traceback" not in err
    assert all(word in last for word in words), last
    assert not (tmp_path / "final").exists()


def test_another_targets_words_can_be_asked_for(train, tmp_path):
    assert train("--drafter", "of-another", "--data", "data", "--allow-other-target")[0] == 0
    assert config_of(tmp_path / "final")["target_name_or_path"] == "org/other"


def test_the_target_can_be_named_anew(train, tmp_path):
    assert train("--drafter", "of-another", "--data", "data", "--target", "target")[0] == 0
    assert config_of(tmp_path / "final")["target_name_or_path"] == "target"


# Evaluation


def test_rounds_are_those_of_generate(run, tmp_path):
    status, out, err = run("evaluate", "--drafter", "drafter", "--data", "data", "--output", tmp_path / "e.json")
    assert status == 0, err
    report = json.loads((tmp_path / "e.json").read_text())
    target, drafter = target_model(), D3DDrafterForCausalLM.from_pretrained("drafter")
    drafter.generation_config.drafting_mode = "sync"
    histogram, num_tokens, num_rounds = collections.Counter(), 0, 0
    with open("rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        if len(row["response_ids"]) < 2:
            continue
        ids = torch.tensor([row["prompt_ids"]])
        output = target.generate(
            ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=0, assistant_model=drafter
        )
        assert output[0, ids.shape[1] :].tolist() == row["response_ids"]
        stats = drafter.last_generation_stats
        # The last round may draft beyond the text's end, which stops it.
        histogram.update(stats.num_accepted)
        num_tokens, num_rounds = num_tokens + stats.num_tokens, num_rounds + stats.num_rounds
    played = report["results"]["drafts"]["synchronous"]["played_through"]
    assert played["num_tokens"] == num_tokens and played["num_rounds"] == num_rounds
    assert played["tokens_per_round"]["mean"] == pytest.approx(num_tokens / num_rounds)
    assert {int(key): value for key, value in played["histogram"].items()} == dict(histogram)
    assert 1.2 < num_tokens / num_rounds
    assert report["argv"][:2] == ["d3d-hf", "evaluate"] and report["dtype"] == "float32"
    assert {"torch", "transformers", "d3d_hf"} <= set(report["versions"])
    assert report["machine"]["num_threads"] == 1 and report["data"]["metadata"]["target"] == "target"
    assert "git_commit" in report and report["drafter"]["block_size"] == BLOCK_SIZE
    lines = out.splitlines()
    assert lines[0].startswith(f"{report['results']['num_texts']} texts, ")
    kinds = ["synchronous", "masked", "guess_1", "guess_2", "guess_3"]
    assert [line.split()[0] for line in lines[-5:]] == kinds == list(report["results"]["drafts"])


def test_estimates_fit_together(run, tmp_path):
    drafter = D3DDrafterForCausalLM.from_pretrained("drafter")
    with open("rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    rows.append({"prompt_ids": [4, 5], "response_ids": [6]})
    results = evaluate_drafter(drafter, rows)
    assert evaluate_drafter(drafter, rows, positions_per_pass=3) == results
    assert results["num_texts_skipped"] >= 1 and results["num_texts"] + results["num_texts_skipped"] == 16
    for kind, draft in results["drafts"].items():
        by_slot = [slot["mean"] for slot in draft["acceptance_by_slot"]]
        assert by_slot == sorted(by_slot, reverse=True) and len(by_slot) == BLOCK_SIZE
        assert sum(draft["histogram"].values()) == results["num_positions"]
        mean = sum(int(key) * count for key, count in draft["histogram"].items()) / results["num_positions"]
        assert draft["acceptance_length"]["mean"] == pytest.approx(mean)
        assert draft["tokens_per_round"]["mean"] == pytest.approx(mean + 1)
        assert draft["acceptance_length"]["low"] <= mean <= draft["acceptance_length"]["high"]
        played = draft["played_through"]
        assert played["num_tokens"] == sum(len(row["response_ids"]) for row in rows if len(row["response_ids"]) > 1)
        assert (played["bonus_hit_rate"] is None) == (kind in ("synchronous", "masked"))
    assert results["drafts"]["masked"]["acceptance_length"]["mean"] == pytest.approx(
        results["metrics"]["acceptance_length_masked"]
    )


def test_metrics_are_the_trainers(run, tmp_path):
    drafter = D3DDrafterForCausalLM.from_pretrained("drafter")
    with open("rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    args = D3DTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], eval_blocks_per_sequence=64, disable_tqdm=True
    )
    expected = D3DTrainer(drafter, args, eval_dataset=rows).evaluate()
    for name, value in evaluate_drafter(drafter, rows)["metrics"].items():
        assert value == pytest.approx(expected[f"eval_{name}"]), name


def test_the_rejected_token_is_never_a_guess():
    """Blocks of 2; the text is 1 2 3 4 5 6 after the prompt's 0."""
    text = np.array([0, 1, 2, 3, 4, 5, 6])
    truth = np.full((1, 6, 3), -1)
    for at in range(6):
        rest = text[at + 1 : at + 4]
        truth[0, at, : len(rest)] = rest
    drafts = np.full((1, 6, 2), 9)  # always wrong
    drafts[0, 0] = [2, 9]  # after the first bonus: one right, then 9 is rejected
    likeliest = np.tile(np.array([9, 8, 7, 6]), (1, 6, 1))
    likeliest[0, 2] = [9, 3, 7, 6]  # after 2, where 9 was rejected: the bonus 3 comes first
    outcomes = DraftOutcomes(np.arange(6)[None], truth, drafts, drafts, drafts, likeliest)
    rounds = play_rounds(outcomes, 0, prompt_length=1, length=7, num_guesses=1)
    assert [played.num_tokens for played in rounds] == [1, 2, 1, 1, 1]
    assert [played.is_hit for played in rounds] == [None, False, True, False, False]
    masked = play_rounds(outcomes, 0, prompt_length=1, length=7, num_guesses=0)
    assert all(played.is_hit is None for played in masked)


@pytest.mark.parametrize(
    "argv, words",
    [
        (("--drafter", "of-another", "--data", "data"), ["'target'", "'org/other'", "--allow-other-target"]),
        (("--drafter", "drafter", "--data", "nowhere"), ["There is no 'nowhere'"]),
        (("--drafter", "nowhere/", "--data", "data"), ["--drafter 'nowhere/'"]),
        (("--drafter", "drafter", "--data", "data", "--output", "missing/e.json"), ["--output 'missing/e.json'"]),
        (("--drafter", "drafter", "--data", "data", "--positions-per-pass", 0), ["'0'", "at least 1"]),
        (("--drafter", "drafter", "--data", "data", "--tokenizer", "tokenizer"), ["was given here"]),
        (("--drafter", "drafter", "--data", "short.jsonl"), ["None of the 2 rows"]),
        (("--drafter", "drafter", "--data", "text.jsonl"), ["columns ['text']"]),
    ],
)
def test_mistakes_of_evaluation_are_one_line(run, folder, argv, words):
    (folder / "short.jsonl").write_text('{"p": [4], "r": [5]}\n' * 2)
    (folder / "text.jsonl").write_text('{"text": "x"}\n')
    status, out, err = run("evaluate", *argv)
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("d3d-hf: error: ") and not out
    assert all(word in last for word in words), last


def test_evaluation_of_the_first_rows(run):
    status, out, _ = run("evaluate", "--drafter", "of-another", "--data", "data", "--allow-other-target")
    assert status == 0
    status, few, _ = run("evaluate", "--drafter", "drafter", "--data", "data", "--max-samples", 3)
    assert status == 0 and int(few.split()[0]) <= 3 < int(out.split()[0])
    assert not os.path.exists("e.json")
