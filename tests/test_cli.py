"""The command line, on tiny models saved to disk."""

import builtins
import io
import json
import os
import subprocess
import sys
from functools import wraps

import pytest
import torch
from transformers import GenerationMixin

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.bench.comparison import first_difference
from d3d_hf.cli import main, make_parser
from d3d_hf.commands import generate as generate_command
from d3d_hf.testing import ForwardCounter, tiny_model, tiny_tokenizer


PROMPT = "ask me."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, a drafter of it, one of another vocabulary, a plain model and an empty folder."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_model("llama", seed=5)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target.config._name_or_path = "org/target"
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4, kept_layers=[1])
    drafter.config.training_recipe = {"num_steps": 3}
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(folder / "drafter")
    D3DDrafterForCausalLM.from_backbone(tiny_model(vocab_size=50)).save_pretrained(folder / "other")
    (folder / "empty").mkdir()
    untemplated = tiny_tokenizer()
    untemplated.chat_template = None
    target.save_pretrained(folder / "untemplated")
    untemplated.save_pretrained(folder / "untemplated")
    return folder


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Runs `d3d-hf` in the folder of the models; gives its exit status, stdout, and stderr by lines."""
    monkeypatch.chdir(folder)

    def run(*argv):
        capsys.readouterr()
        status = main([str(argument) for argument in argv])
        output = capsys.readouterr()
        return status, output.out, output.err.splitlines()

    return run


@pytest.fixture
def generate(run):
    """Runs `d3d-hf generate` with the tiny target on the CPU."""
    return lambda *argv: run("generate", "--target", "target", "--device", "cpu", *argv)


def reference(prompt=PROMPT, num_tokens=12, messages=None):
    """What plain `generate` answers: text and ids."""
    target, tokenizer = tiny_model("llama", seed=5), tiny_tokenizer()
    if messages is None:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids = inputs["input_ids"]
    output = target.generate(ids, attention_mask=inputs["attention_mask"], max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def user(content):
    return {"role": "user", "content": content}


class TestGenerate:
    def test_the_answer_is_the_targets_and_alone_on_stdout(self, generate):
        status, out, err = generate("--drafter", "drafter", "--prompt", PROMPT, "--max-new-tokens", 12)
        assert status == 0
        assert out == reference(messages=[user(PROMPT)]) + "\n"
        assert len(err) == 1 and "12 tokens, " in err[0] and "tokens per round; rounds by accepted tokens" in err[0]

    def test_without_a_drafter_the_targets_own_layers_draft_and_one_line_says_so(self, generate):
        status, out, err = generate("--prompt", PROMPT, "--max-new-tokens", 12)
        assert status == 0 and out == reference(messages=[user(PROMPT)]) + "\n"
        assert len(err) == 2 and "untrained" in err[0] and "2.00 tokens per round" in err[1]

    def test_raw_text_from_standard_input(self, generate, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
        status, out, _ = generate("--drafter", "drafter", "--no-chat-template", "--max-new-tokens", 12)
        assert status == 0 and out == reference() + "\n"

    def test_a_system_message_stands_before_the_prompt(self, generate):
        _, out, _ = generate("--system", "be kind", "--prompt", PROMPT, "--max-new-tokens", 12)
        assert out == reference(messages=[{"role": "system", "content": "be kind"}, user(PROMPT)]) + "\n"

    def test_tokens_are_shown_as_they_come(self, generate, monkeypatch):
        pieces = []
        show = generate_command.make_streamer

        def recording(tokenizer, is_shown):
            streamer = show(tokenizer, is_shown)
            put = streamer.put
            streamer.put = lambda value: (pieces.append(value.numel()), put(value))
            return streamer

        monkeypatch.setattr(generate_command, "make_streamer", recording)
        generate("--prompt", PROMPT, "--max-new-tokens", 12)
        assert len(pieces) > 3 and sum(pieces[1:]) == 12, "the prompt, then a piece per round"

    def test_json_is_all_there_is_on_stdout(self, generate):
        status, out, _ = generate("--drafter", "drafter", "--prompt", PROMPT, "--max-new-tokens", 12, "--json")
        report = json.loads(out)
        assert status == 0
        assert report["text"] == reference(messages=[user(PROMPT)]) and report["num_tokens"] == 12
        assert report["ids_equal"] is None and report["tokens_per_second"] > 0
        stats = report["stats"]
        assert stats["num_tokens"] == 12 and stats["tokens_per_round"] == 12 / stats["num_rounds"]
        assert sum(stats["num_accepted"].values()) == stats["num_rounds"]

    @pytest.mark.parametrize("num_assistant_tokens", [1, 3, 20])
    def test_drafting_options_reach_the_drafter(self, generate, num_assistant_tokens):
        _, out, _ = generate(
            "--drafter", "drafter", "--prompt", PROMPT, "--max-new-tokens", 12, "--json",
            "--num-assistant-tokens", num_assistant_tokens, "--num-denoising-steps", 2,
        )  # fmt: skip
        stats = json.loads(out)["stats"]
        # the rounds near the budget's end draft less
        at_most = min(num_assistant_tokens, 4) * stats["num_rounds"]
        assert at_most - 10 <= stats["num_drafted"] <= at_most
        assert json.loads(out)["text"] == reference(messages=[user(PROMPT)])

    def test_sampling_follows_the_seed_and_the_options(self, generate):
        def sample(*argv):
            return generate("--prompt", PROMPT, "--max-new-tokens", 20, *argv)[1]

        first = sample("--temperature", 1.5, "--seed", 3)
        assert sample("--temperature", 1.5, "--seed", 3) == first
        assert sample("--temperature", 1.5, "--seed", 4) != first
        greedy = reference(messages=[user(PROMPT)], num_tokens=20) + "\n"
        assert first != greedy
        for narrow in (["--top-k", 1], ["--top-p", 0], ["--min-p", 1]):
            assert sample("--temperature", 1.5, *narrow) == greedy

    @pytest.mark.parametrize("own", [None, 1])
    def test_where_not_given_the_targets_own_sampling_options_hold(self, generate, folder, tmp_path, own):
        target = tiny_model("llama", seed=5)
        target.generation_config.top_k, target.generation_config.do_sample = own, True
        target.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        argv = ["--target", tmp_path, "--prompt", PROMPT, "--max-new-tokens", 20, "--temperature", 1.5, "--seed", 1]
        greedy = reference(messages=[user(PROMPT)], num_tokens=20) + "\n"
        assert (generate(*argv)[1] == greedy) == (own == 1)
        assert generate(*argv, "--top-k", 0)[1] != greedy

    def test_greedy_is_greedy_whatever_the_targets_generation_config_says(self, generate, tmp_path, caplog):
        target = tiny_model("llama", seed=5)
        target.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
        target.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        _, out, err = generate("--target", tmp_path, "--prompt", PROMPT, "--max-new-tokens", 12)
        assert out == reference(messages=[user(PROMPT)]) + "\n"
        assert len(err) == 2 and not caplog.records, "nothing is warned of"

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    def test_dtype_and_attention_reach_both_models(self, generate, monkeypatch, dtype, attn_implementation):
        seen = []
        decode = GenerationMixin._assisted_decoding

        def spy(self, *args, **kwargs):
            seen.extend(
                (model.dtype, model.config._attn_implementation) for model in (self, kwargs["assistant_model"])
            )
            return decode(self, *args, **kwargs)

        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", wraps(decode)(spy))
        argv = ["--dtype", dtype, "--attn-implementation", attn_implementation]
        assert generate("--drafter", "drafter", "--prompt", PROMPT, "--max-new-tokens", 4, *argv)[0] == 0
        expected = torch.float32 if dtype == "auto" else torch.bfloat16
        assert seen == 2 * [(expected, attn_implementation)]


class TestCompare:
    def test_equal_answers(self, generate):
        argv = ["--drafter", "drafter", "--prompt", PROMPT, "--max-new-tokens", 12, "--compare"]
        status, out, _ = generate(*argv)
        assert status == 0
        assert "The ids are equal, all 12." in out and "speedup " in out
        report = json.loads(generate(*argv, "--json")[1])
        assert report["ids_equal"] is True and report["first_difference"] is None
        assert report["plain_text"] == report["text"] and report["plain_num_tokens"] == 12
        speeds = report["tokens_per_second"], report["plain_tokens_per_second"]
        assert report["speedup"] == pytest.approx(speeds[0] / speeds[1])

    def test_a_difference_is_shown_with_its_logits(self, generate, monkeypatch):
        """The plain answer is tampered with: its third token becomes another one."""
        answer = generate_command._Answerer._generate

        def tampered(self, inputs, config, drafter, streamer):
            ids = answer(self, inputs, config, drafter, streamer)
            if drafter is None:
                ids[2] = (ids[2] + 1) % 67
            return ids

        monkeypatch.setattr(generate_command._Answerer, "_generate", tampered)
        argv = ["--drafter", "drafter", "--prompt", PROMPT, "--max-new-tokens", 12, "--compare"]
        status, out, _ = generate(*argv)
        assert status == 0 and "The ids differ from new token 3 on: " in out
        assert "neighbouring float32 numbers" in out
        report = json.loads(generate(*argv, "--json")[1])
        difference = report["first_difference"]
        assert report["ids_equal"] is False and difference["index"] == 2
        assert difference["plain_id"] == (difference["drafted_id"] + 1) % 67
        assert difference["logit_gap"] < 0, "the target's own choice has the larger logit"

    def test_sampled_answers_are_not_compared(self, generate):
        argv = ["--prompt", PROMPT, "--max-new-tokens", 12, "--compare", "--temperature", 1, "--seed", 5]
        status, out, _ = generate(*argv)
        assert status == 0 and "sampled" in out and "equal, all" not in out
        assert json.loads(generate(*argv, "--json")[1])["ids_equal"] is None
        without = generate(*argv[:4], *argv[5:])[1]
        assert out.startswith(without), "the seed gives the same answer with and without the comparison"

    def test_an_answer_that_ends_early_is_a_difference(self):
        target, ids = tiny_model(), torch.tensor([3, 4, 5])
        assert first_difference(target, ids[None], ids, ids) is None
        difference = first_difference(target, ids[None], ids, ids[:2])
        assert (difference.index, difference.plain_id, difference.drafted_id) == (2, 5, None)
        assert difference.logit_gap is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_gap_and_rounding(self, dtype):
        target, prompt = tiny_model().to(dtype), torch.tensor([[3, 4, 5]])
        difference = first_difference(target, prompt, torch.tensor([7, 8]), torch.tensor([7, 9]))
        with torch.no_grad():
            logits = target(torch.tensor([[3, 4, 5, 7]])).logits[0, -1]
        assert difference.logit_gap == pytest.approx(float(logits[8].float() - logits[9].float()))
        larger = logits[[8, 9]].abs().max().float()
        rounding = difference.rounding
        # half a step rounds back or to the neighbour, a whole one is the neighbour
        assert float((larger + rounding).to(dtype)) == float(larger) + rounding
        assert float((larger + 0.4 * rounding).to(dtype)) == float(larger)


class TestChat:
    @pytest.fixture
    def chat(self, generate, monkeypatch):
        """A conversation with these inputs; an exception class is raised in place of an input."""

        def chat(*inputs, argv=()):
            inputs = iter(inputs)

            def read(prompt):
                text = next(inputs, EOFError)
                if isinstance(text, type):
                    raise text
                return text

            monkeypatch.setattr(builtins, "input", read)
            status, out, err = generate("--chat", "--max-new-tokens", 12, *argv)
            assert next(inputs, None) is None, "left too early"
            assert status == 0
            return out.splitlines(), err

        return chat

    def test_history_is_kept_until_cleared(self, chat):
        lines, err = chat("hi", " ", "and", "/clear", "and")
        first = reference(messages=[user("hi")])
        second = reference(messages=[user("hi"), {"role": "assistant", "content": first}, user("and")])
        assert lines[:2] == [first, second] and second != reference(messages=[user("and")])
        assert lines[2] == reference(messages=[user("and")])
        assert sum("tokens per round" in line for line in err) == 4, "one a turn, and the note on the drafter"

    def test_the_system_message_survives_clearing(self, chat):
        lines, _ = chat("/clear", "hi", argv=["--system", "be kind"])
        assert lines[0] == reference(messages=[{"role": "system", "content": "be kind"}, user("hi")])

    def test_exit_leaves(self, chat):
        lines, _ = chat("/exit")
        assert lines == []

    def test_ctrl_c_at_the_prompt_goes_on(self, chat):
        lines, _ = chat(KeyboardInterrupt, "hi")
        assert reference(messages=[user("hi")]) in lines

    def test_ctrl_c_stops_only_the_answer_and_what_was_shown_stays(self, chat, monkeypatch):
        calls = []
        forward = generate_command._Answerer._generate

        def interrupted(self, inputs, config, drafter, streamer):
            calls.append(None)
            if len(calls) == 1:
                streamer.put(inputs["input_ids"])
                for token in (3, 4, 5):
                    streamer.put(torch.tensor([token]))
                raise KeyboardInterrupt
            return forward(self, inputs, config, drafter, streamer)

        monkeypatch.setattr(generate_command._Answerer, "_generate", interrupted)
        lines, _ = chat("hi", "and")
        shown = tiny_tokenizer().decode([3, 4, 5])
        history = [user("hi"), {"role": "assistant", "content": shown}, user("and")]
        assert lines[:2] == [shown, reference(messages=history)]


class TestInfo:
    def test_text(self, run):
        status, out, err = run("info", "drafter")
        assert status == 0 and err == []
        for line in ("architecture llama", "num layers 1 (kept of the original: 1)", "mask own embedding",
                     "block size 4", "block attention bidirectional", "vocab size 67", "target org/target",
                     "dtypes F32", "generation options", "training recipe num_steps=3"):  # fmt: skip
            assert line in " ".join(out.split())
        assert "num_assistant_tokens=3" in out

    def test_json_counts_every_stored_parameter(self, run, folder):
        description = json.loads(run("info", "drafter", "--json")[1])
        drafter = D3DDrafterForCausalLM.from_pretrained(folder / "drafter")
        assert description["num_parameters"] == sum(parameter.numel() for parameter in drafter.parameters())
        assert description["kept_layers"] == [1] and description["training_recipe"] == {"num_steps": 3}
        assert description["generation_options"]["num_assistant_tokens"] == 3
        assert description["mask_token_id"] is None and description["dtypes"] == ["F32"]

    def test_shards_mask_tokens_and_other_dtypes(self, run, tmp_path):
        drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3"), mask_token_id=7, block_attention="causal")
        drafter.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="10KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        description = json.loads(run("info", tmp_path, "--json")[1])
        assert description["num_parameters"] == sum(parameter.numel() for parameter in drafter.parameters())
        assert (description["mask"], description["mask_token_id"]) == ("token", 7)
        assert (description["block_attention"], description["dtypes"]) == ("causal", ["BF16"])
        assert "mask token 7 " in " ".join(run("info", tmp_path)[1].split())

    def test_no_weights_are_loaded_and_none_are_needed(self, run, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(D3DDrafterForCausalLM, "__init__", lambda *args, **kwargs: 1 / 0)
        assert run("info", "drafter")[0] == 0
        (tmp_path / "config.json").write_text((folder / "drafter/config.json").read_text())
        status, out, _ = run("info", tmp_path, "--json")
        assert status == 0 and json.loads(out)["num_parameters"] is None
        assert run("info", tmp_path)[0] == 0


GENERATE = ("generate", "--target", "target", "--device", "cpu")
ERRORS = [
    ((), ["COMMAND", "d3d-hf --help"]),
    (("fly",), ["'fly'", "generate", "info"]),
    ((*GENERATE, "--prompt", PROMPT, "--max-new-tokens", -1), ["--max-new-tokens", "-1", "at least 1"]),
    ((*GENERATE, "--prompt", PROMPT, "--max-new-tokens", "many"), ["--max-new-tokens", "'many'", "at least 1"]),
    ((*GENERATE, "--prompt", PROMPT, "--temperature=-0.1"), ["--temperature", "'-0.1'", "at least 0"]),
    ((*GENERATE, "--prompt", PROMPT, "--temperature", "nan"), ["--temperature", "'nan'", "at least 0"]),
    ((*GENERATE, "--prompt", PROMPT, "--temperature", "inf"), ["--temperature", "'inf'", "at least 0"]),
    ((*GENERATE, "--prompt", PROMPT, "--top-p", 1.5), ["--top-p", "'1.5'", "from 0 to 1"]),
    ((*GENERATE, "--prompt", PROMPT, "--min-p=-1"), ["--min-p", "'-1'", "from 0 to 1"]),
    ((*GENERATE, "--prompt", PROMPT, "--top-k=-1"), ["--top-k", "'-1'", "at least 0"]),
    ((*GENERATE, "--prompt", PROMPT, "--top-k", 5), ["--top-k 5", "--temperature 0", "above 0"]),
    ((*GENERATE, "--prompt", PROMPT, "--num-assistant-tokens", 0), ["--num-assistant-tokens", "'0'", "at least 1"]),
    ((*GENERATE, "--prompt", PROMPT, "--dtype", "int3"), ["--dtype", "'int3'", "bfloat16"]),
    ((*GENERATE, "--prompt", PROMPT, "--device", "toaster"), ["--device", "'toaster'", "give cpu"]),
    ((*GENERATE, "--prompt", PROMPT, "--attn-implementation", "magic"), ["magic"]),
    ((*GENERATE, "--prompt", PROMPT, "--promp", "abbreviated"), ["--promp", "--help"]),
    ((*GENERATE, "--prompt", PROMPT, "--chat"), ["--chat", "--prompt"]),
    ((*GENERATE, "--chat", "--compare"), ["--chat and --compare", "--prompt"]),
    ((*GENERATE, "--chat", "--json"), ["--chat and --json", "--prompt"]),
    ((*GENERATE, "--chat", "--no-chat-template"), ["--chat and --no-chat-template", "--prompt"]),
    ((*GENERATE, "--prompt", PROMPT, "--system", "be kind", "--no-chat-template"), ["'be kind'", "leave"]),
    ((*GENERATE, "--prompt", ""), ["empty", "--prompt TEXT"]),
    (("generate", "--prompt", PROMPT, "--target", "./nowhere"), ["--target './nowhere'", "Hub name"]),
    (("generate", "--prompt", PROMPT, "--target", "no/where"), ["--target 'no/where'", "Hub name"]),
    (("generate", "--prompt", PROMPT, "--target", "target/config.json"), ["'target/config.json' is no folder"]),
    (("generate", "--prompt", PROMPT, "--target", "empty"), ["--target 'empty'", "config.json", "Hub name"]),
    ((*GENERATE[:2], "untemplated", "--prompt", PROMPT), ["'untemplated'", "--no-chat-template"]),
    ((*GENERATE, "--prompt", PROMPT, "--drafter", "./nowhere"), ["--drafter './nowhere'", "Hub name"]),
    ((*GENERATE, "--prompt", PROMPT, "--drafter", "empty"), ["--drafter 'empty'", "config.json", "save_pretrained"]),
    ((*GENERATE, "--prompt", PROMPT, "--drafter", "target"), ["--drafter 'target'", "'llama'", "'d3d'"]),
    ((*GENERATE, "--prompt", PROMPT, "--drafter", "other"), ["--drafter 'other'", "50", "67", "give a drafter of"]),
    (("info",), ["DRAFTER", "d3d-hf info --help"]),
    (("info", "./nowhere"), ["DRAFTER './nowhere'", "Hub name"]),
    (("info", "no/where"), ["DRAFTER 'no/where'", "Hub name"]),
    (("info", "empty"), ["DRAFTER 'empty'", "config.json"]),
    (("info", "target"), ["DRAFTER 'target'", "'llama'", "'d3d'"]),
]  # fmt: skip


@pytest.mark.parametrize("argv, named", ERRORS, ids=[" ".join(map(str, argv)) or "nothing" for argv, _ in ERRORS])
def test_errors_are_one_line_that_names_the_value_and_the_mend(run, argv, named):
    status, out, err = run(*argv)
    assert status == 2 and out == ""
    assert len(err) == 1 and err[0].startswith("d3d-hf: error: ") and len(err[0]) < 600
    for part in named:
        assert part in err[0]


def test_no_prompt_at_a_terminal_is_an_error(run, monkeypatch):
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    status, _, err = run(*GENERATE)
    assert status == 2 and len(err) == 1 and "--prompt TEXT" in err[0]


@pytest.mark.parametrize(
    "name, content, named",
    [
        (
            "config.json",
            '{"model_type": "d3d", "block_size": 0, "backbone_config": {"model_type": "llama"}}',
            "block_size is 0",
        ),
        ("config.json", '{"model_type": "d3d", "backbone_config": {"model_type": "nosuch"}}', "nosuch"),
        ("config.json", "{", "config.json"),
        ("model.safetensors", "junk", "again"),
    ],
)
def test_damaged_drafters(run, folder, tmp_path, name, content, named):
    (tmp_path / "config.json").write_text((folder / "drafter/config.json").read_text())
    (tmp_path / name).write_text(content)
    for argv in (("info", tmp_path), (*GENERATE, "--prompt", PROMPT, "--drafter", tmp_path)):
        status, _, err = run(*argv)
        assert status == 2 and len(err) == 1 and str(tmp_path) in err[0] and named in err[0]


def test_ctrl_c_ends_without_a_traceback(generate, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerationMixin, "generate", interrupted)
    status, _, err = generate("--drafter", "drafter", "--prompt", PROMPT)
    assert status == 130 and err == [""]


def test_models_are_used_as_counted(generate, monkeypatch):
    """Fewer forwards of the target than tokens: the drafter does draft."""
    counters = []
    answer = generate_command._Answerer._generate

    def counted(self, *args, **kwargs):
        with ForwardCounter(self.target) as counter:
            ids = answer(self, *args, **kwargs)
        counters.append(counter.count)
        return ids

    monkeypatch.setattr(generate_command._Answerer, "_generate", counted)
    generate("--prompt", PROMPT, "--max-new-tokens", 12, "--compare")
    assert counters[2:] == [6, 12]


def test_help_and_version_in_process(run):
    for argv in (["--help"], ["generate", "--help"], ["info", "--help"]):
        status, out, err = run(*argv)
        assert status == 0 and out.startswith("usage: d3d-hf") and err == []
    status, out, _ = run("--version")
    assert status == 0 and out.startswith("d3d-hf 0.")
    assert make_parser().prog == "d3d-hf"


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
HEAVY = {"torch", "transformers", "numpy", "peft", "accelerate", "huggingface_hub"}


def imported_by(*command):
    """Output of a process, and the packages that it has imported."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return result.stdout, {line.split("|")[-1].strip().split(".")[0] for line in lines}


def command_names():
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    return list(commands.choices)


@pytest.mark.parametrize("command", [(), *((name,) for name in command_names())])
def test_help_imports_nothing_heavy(command):
    output, imported = imported_by("-m", "d3d_hf.cli", *command, "--help")
    assert output.startswith(" ".join(["usage: d3d-hf", *command]))
    assert "d3d_hf" in imported and not imported & HEAVY


@pytest.fixture
def script(tmp_path):
    """The console script, as pip writes it."""
    path = tmp_path / "d3d-hf"
    path.write_text("import sys\nfrom d3d_hf.cli import main\nsys.exit(main())\n")
    return path


def test_the_script_imports_what_a_command_needs_when_it_runs(script):
    output, imported = imported_by(script, "--help")
    assert output.startswith("usage: d3d-hf") and not imported & HEAVY
    output, imported = imported_by(script, "predict", "--help")
    assert not imported & HEAVY
    sizes = ("--target", "qwen3-32b", "--drafter", "qwen3-1.7b", "--hardware", "h200", "--acceptance", "0.9,0.8")
    output, imported = imported_by(script, "predict", *sizes)
    assert output and {"torch", "transformers"} <= imported


def test_a_public_name_ends_the_wait_of_the_script(tmp_path):
    path = tmp_path / "d3d-hf"
    path.write_text(
        "import sys, d3d_hf\n"
        "assert 'torch' not in sys.modules\n"
        "d3d_hf.D3DConfig\n"
        "assert d3d_hf.is_generation_hook_installed()\n"
        "from transformers import AutoConfig\n"
        "assert AutoConfig.for_model('d3d', backbone_config={'model_type': 'llama'}).__class__ is d3d_hf.D3DConfig\n"
        "assert d3d_hf.compile_target and d3d_hf.D3DTrainingArguments\n"
    )
    imported_by(path)


def test_every_other_process_hooks_and_registers_at_import(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import d3d_hf\n"
        "from transformers import AutoConfig, GenerationMixin\n"
        "assert hasattr(GenerationMixin._assisted_decoding, '_d3d_original')\n"
        "assert AutoConfig.for_model('d3d', backbone_config={'model_type': 'llama'})\n"
    )
    imported_by(path)
    imported_by("-c", path.read_text())


def test_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "d3d_hf.cli", "info", "./nowhere"],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT,
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.startswith("d3d-hf: error: DRAFTER './nowhere'")
    assert "Traceback" not in result.stderr
