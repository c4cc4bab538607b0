"""Benchmarks: the statistics, imposed acceptance, what is recorded of a generation, and whole runs on tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_graphs import FakeGraphs

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.bench import ImposedAcceptance, RowStore, Runner, parse_methods, summarise
from d3d_hf.bench import datasets as bench_datasets
from d3d_hf.bench.datasets import RandomTokens, RawText, load_prompt_set, longest_context, random_prompts, template_of
from d3d_hf.bench.methods import CannotRunError, Contestants, autoregressive_assistant, decoding_config
from d3d_hf.bench.models import load_dflash, parse_shape
from d3d_hf.bench.page import read_reports, results_page
from d3d_hf.bench.recording import record
from d3d_hf.bench.report import averages, print_table, rounded
from d3d_hf.bench.statistics import (
    accepted_histogram,
    expected_tokens_per_round,
    geometric_mean,
    paired_speedup,
    slot_acceptance,
    spread,
)
from d3d_hf.cli import main
from d3d_hf.testing import ForwardCounter, oracle_drafter, tiny_model, tiny_tokenizer
from d3d_hf.training.provenance import provenance


ROOT = Path(__file__).resolve().parent.parent
NUM_TOKENS = 14


# Statistics


def test_spread_interpolates():
    assert spread([1, 2, 3, 4, 5]) == pytest.approx({"median": 3, "p10": 1.4, "p90": 4.6})
    assert spread([2.0]) == {"median": 2, "p10": 2, "p90": 2}


def test_speedups_are_paired():
    # Prompts differ a hundredfold in speed, the method is always twice as fast: pairing sees nothing else.
    plain = [0.01, 0.1, 1.0]
    assert paired_speedup([seconds / 2 for seconds in plain], plain) == {"median": 2, "low": 2, "high": 2}


def test_the_interval_covers_the_median_and_narrows_with_prompts():
    generator = torch.Generator().manual_seed(0)

    def width(count):
        noise = torch.rand(count, generator=generator).add(0.5).tolist()
        interval = paired_speedup(noise, [1.0] * count)
        assert interval["low"] <= interval["median"] <= interval["high"]
        return interval["high"] - interval["low"]

    assert 0 < width(400) < width(16)


def test_the_geometric_mean_of_a_doubling_and_a_halving_is_one():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)


def test_slots_are_counted_as_long_as_the_ones_before_are_accepted():
    # Of the first text: all 3 accepted; the second slot rejected; the last round ends the text, which decides nothing.
    generations = [[(3, 4), (3, 2), (3, 1)], [(0, 1), (2, 1), (2, 3)]]
    probabilities, decided = slot_acceptance(generations)
    assert decided == [4, 3, 1]
    assert probabilities == pytest.approx([3 / 4, 2 / 3, 1])
    assert accepted_histogram(generations) == {0: 3, 1: 1, 2: 1, 3: 1}
    assert slot_acceptance([[(0, 1), (0, 1)]]) == ([], [])


def test_expected_tokens_per_round_is_the_sum_over_slots_of_reaching_them():
    assert expected_tokens_per_round([0.5, 0.5]) == 1.75
    assert expected_tokens_per_round([0.5, 0.5], num_drafted=1) == 1.5
    assert expected_tokens_per_round([1.0] * 7) == 8


def test_slot_acceptance_finds_the_profile_that_rounds_were_drawn_from():
    profile, generator = [0.9, 0.6, 0.3], torch.Generator().manual_seed(1)
    rounds = []
    for _ in range(4000):
        right = torch.rand(3, generator=generator) < torch.tensor(profile)
        rounds.append((3, 1 + int(right.int().cumprod(0).sum())))
    probabilities, _ = slot_acceptance([rounds])
    assert probabilities == pytest.approx(profile, abs=0.04)
    tokens = sum(new for _, new in rounds) / len(rounds)
    assert tokens == pytest.approx(expected_tokens_per_round(profile), rel=0.02)


# What is recorded of a generation


def config_of(target, num_tokens=NUM_TOKENS, **kwargs):
    return decoding_config(target, num_tokens, **kwargs)


def test_rounds_are_those_of_the_target():
    target = tiny_model("llama", seed=5)
    prompt = [5, 6, 7, 8]
    expected = target.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    drafter = oracle_drafter(expected, block_size=4)
    with ForwardCounter(target) as forwards:
        drafted = record(target, prompt, config_of(target, 12), assistant_model=drafter)
    assert drafted.ids == expected[0, 4:].tolist()
    assert drafted.rounds == [(4, 5), (4, 5), (1, 2)] and forwards.count == 3
    assert 0 < drafted.first_token_seconds < drafted.seconds
    plain = record(target, prompt, config_of(target, 12))
    assert plain.ids == drafted.ids and plain.rounds == [(0, 1)] * 12
    assert "forward" not in target.__dict__
    if sys.platform == "linux":
        assert plain.peak_memory_bytes > sum(p.nbytes for p in target.parameters())


def test_sampling_takes_the_target_s_own_filters_unless_others_are_given():
    target = tiny_model("llama", seed=5)
    target.generation_config.top_k = 7
    greedy = config_of(target)
    assert not greedy.do_sample and greedy.max_new_tokens == NUM_TOKENS
    config = config_of(target, temperature=0.7, top_p=0.5)
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.7, 7, 0.5)
    assert config_of(target, temperature=0.7, top_k=0).top_k == 0


# Methods


def test_methods_stand_once_for_each_drafter_that_they_take():
    names = [method.name for method in parse_methods(["prompt-lookup", "d3d-sync+cd+ct"], ["a", "b"])]
    assert names == ["plain", "prompt-lookup", "d3d-sync[a]+cd+ct", "d3d-sync[b]+cd+ct"]
    assert [method.name for method in parse_methods(["d3d-async", "plain+ct", "plain"], ["a"])] == [
        "d3d-async",
        "plain+ct",
        "plain",
    ]
    assert [method.name for method in parse_methods(["plain", "assisted"], [])] == ["plain", "assisted"]


@pytest.mark.parametrize("name", ["", "d3d", "plain+cd", "d3d-sync+ct+ct", "d3d-sync+x"])
def test_unknown_methods_are_named(name):
    with pytest.raises(ValueError, match="The method is '.*give one of plain, prompt-lookup"):
        parse_methods(["plain", name], [])


def test_the_assistant_is_the_drafter_s_backbone_and_shares_its_weights():
    target = tiny_model("llama", seed=5)
    target.generation_config.eos_token_id = 9
    drafter = D3DDrafterForCausalLM.from_backbone(target, kept_layers=[1])
    assistant = autoregressive_assistant(drafter, target)
    assert not assistant.training and assistant.generation_config.eos_token_id == 9
    assert assistant.lm_head.weight is drafter.lm_head.weight
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(assistant(ids).logits, drafter(ids).logits)


def test_what_cannot_run_says_why():
    target = tiny_model("llama", seed=5)
    imposed = ImposedAcceptance([0.5], 67)
    for name, contestants, reason in (
        ("d3d-sync", Contestants(target), "no drafter was given"),
        ("assisted", Contestants(target), "no drafter was given"),
        ("dflash", Contestants(target), "no DFlash drafter was given"),
        ("prompt-lookup", Contestants(tiny_model("llama", seed=5), imposed=imposed), "acceptance is imposed"),
        ("plain+ct", Contestants(tiny_model("llama").to("meta")), "LlamaForCausalLM on meta cannot be compiled"),
    ):
        method = parse_methods([name], [])[-1]
        with pytest.raises(CannotRunError, match=reason):
            method.call(contestants)


def test_on_a_gpu_compiled_methods_replay_graphs(monkeypatch):
    graphs = {"target": FakeGraphs(), "drafter": FakeGraphs()}
    monkeypatch.setattr("d3d_hf.compiled.target.graphs_for", lambda device: graphs["target"])
    monkeypatch.setattr("d3d_hf.compiled.drafter.graphs_for", lambda device: graphs["drafter"])
    target = tiny_model("llama", seed=5)
    contestants = Contestants(target, {"d": D3DDrafterForCausalLM.from_backbone(target, block_size=3)}, max_context=64)
    answers = []
    for method in parse_methods(["plain", "plain+ct", "d3d-sync+cd+ct"], ["d"]):
        call = method.call(contestants)
        config, arguments = call.arguments(config_of(target, 30))
        replays = {name: fake.num_replays for name, fake in graphs.items()}
        answers.append(record(call.target, [5, 6, 7], config, **arguments).ids)
        ran = {name for name, fake in graphs.items() if fake.num_replays > replays[name]}
        assert ran == {"plain": set(), "plain+ct": {"target"}}.get(method.name, {"target", "drafter"}), method.name
    assert answers[0] == answers[1] == answers[2]


# Imposed acceptance


@pytest.mark.parametrize("mode", ["d3d-sync", "d3d-async", "d3d-auto"])
def test_imposed_acceptance_is_what_comes_out(mode):
    target = tiny_model("llama", seed=5, max_position_embeddings=2048)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=3, kept_layers=[1])
    profile = [0.9, 0.5, 0.7]
    contestants = Contestants(target, {"d": drafter}, imposed=ImposedAcceptance(profile, 67, never=[0, 1]))
    plain, method = parse_methods([mode], ["d"])
    answers = {}
    for one in (plain, method):
        call = one.call(contestants)
        contestants.imposed.begin(3)
        config, arguments = call.arguments(config_of(target, 500))
        answers[one] = record(call.target, [5, 6, 7], config, **arguments)
    assert answers[method].ids == answers[plain].ids
    assert not {0, 1} & set(answers[plain].ids) and len(set(answers[plain].ids)) > 30
    probabilities, decided = slot_acceptance([answers[method].rounds])
    if mode == "d3d-auto":  # a drafter that costs more than it gives is switched off
        assert len(answers[method].rounds) < 500
        return
    for slot, chance in enumerate(profile):
        deviation = (chance * (1 - chance) / decided[slot]) ** 0.5
        assert abs(probabilities[slot] - chance) < 4 * deviation
    again = ImposedAcceptance(profile, 67, never=[0, 1])
    again.begin(3)
    assert torch.equal(again.draft(40, 3), contestants.imposed.draft(40, 3))
    assert again.text(3, 503, torch.device("cpu")).tolist() == answers[plain].ids


def test_imposed_acceptance_leaves_the_work_to_be_done():
    target = tiny_model("llama", seed=5)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=3)
    contestants = Contestants(target, {"d": drafter}, imposed=ImposedAcceptance([1.0], 67))
    call = parse_methods(["d3d-sync"], ["d"])[-1].call(contestants)
    config, arguments = call.arguments(config_of(target, 12))
    with ForwardCounter(drafter, "packed_forward") as passes:
        answer = record(call.target, [5, 6, 7], config, **arguments)
    assert answer.rounds == [(3, 4)] * 3 and passes.count == 3
    assert drafter.last_generation_stats.num_drafted == 9


@pytest.mark.slow
def test_imposed_acceptance_holds_over_compiled_models():
    target = tiny_model("llama", seed=5)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=3, kept_layers=[1])
    contestants = Contestants(target, {"d": drafter}, imposed=ImposedAcceptance([1.0], 67), max_context=64)
    for method in parse_methods(["plain", "plain+ct", "d3d-sync+cd+ct"], ["d"]):
        call = method.call(contestants)
        config, arguments = call.arguments(config_of(target, 12))
        answer = record(call.target, [5, 6, 7], config, **arguments)
        assert answer.ids == contestants.imposed.text(3, 15, torch.device("cpu")).tolist()
        if method.compiles_target:
            assert call.target is not target and call.target._compiled_target.num_static_passes > 0
    assert answer.rounds == [(3, 4)] * 3


@pytest.mark.parametrize("profile", [[], [1.5], [-0.1]])
def test_profiles_that_are_none_are_refused(profile):
    with pytest.raises(ValueError, match="The acceptance profile is .*: give at least one number, each from 0 to 1"):
        ImposedAcceptance(profile, 67)


# Data sets


def test_hub_sets_become_turns(monkeypatch):
    asked, rows = (
        [],
        {
            "openai/gsm8k": [{"question": "How many?", "answer": "1"}] * 3,
            "openai/openai_humaneval": [{"prompt": "def f():\n"}],
            "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["first", "second"]}],
            "json": [{"question_content": "Sort {it}."}],
        },
    )
    module = ModuleType("datasets")
    module.load_dataset = lambda name, *args, **kwargs: asked.append((name, args, kwargs)) or rows[name]
    monkeypatch.setitem(sys.modules, "datasets", module)
    gsm8k = load_prompt_set("gsm8k", max_samples=2)
    assert [prompt.index for prompt in gsm8k.prompts] == [0, 1] and gsm8k.name == "gsm8k"
    assert gsm8k.prompts[0].turns[0].startswith("How many?\n") and "\\boxed{}" in gsm8k.prompts[0].turns[0]
    assert "```python\ndef f():\n\n```" in load_prompt_set("humaneval").prompts[0].turns[0]
    assert load_prompt_set("mt-bench").prompts[0].turns == ("first", "second")
    assert load_prompt_set("livecodebench").prompts[0].turns == ("Sort {it}.",)
    assert asked[0] == ("openai/gsm8k", ("main",), {"split": "test"})
    assert asked[-1][2]["data_files"].startswith("hf://datasets/livecodebench/")


def test_files_go_by_their_stem_and_other_names_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n{"turns": ["c"]}\n')
    prompts = load_prompt_set(str(path), max_samples=1)
    assert (prompts.name, len(prompts.prompts)) == ("mine", 1)
    assert prompts.digest != load_prompt_set(str(path)).digest
    assert [prompt.index for prompt in load_prompt_set(str(path), first=1).prompts] == [1]
    with pytest.raises(ValueError, match="has 2 prompts: begin with a smaller number than 2"):
        load_prompt_set(str(path), first=2)
    with pytest.raises(ValueError, match="'gsm9k' is neither a file nor one of gsm8k, math500, aime25"):
        load_prompt_set("gsm9k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install"):
        load_prompt_set("gsm8k")
    assert len(bench_datasets.DATASET_NAMES) == 7


def test_templates_of_tokenizers_with_and_without_one():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert tokenizer.decode(template_of(tokenizer).encode(messages)) == "uab.ac.a"
    tokenizer.chat_template = None
    assert isinstance(template_of(tokenizer), RawText)
    assert tokenizer.decode(template_of(tokenizer).encode(messages)) == "ab\nc\n"
    with pytest.raises(ValueError, match="no chat template"):
        template_of(tokenizer, {"loud": True})


def test_random_prompts_are_as_long_as_asked_and_the_same_again():
    template, prompt_set = RandomTokens(67, 30), random_prompts(3, 30)
    encoded = [template.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompt_set.prompts]
    assert {len(ids) for ids in encoded} == {30} and encoded[0] != encoded[1]
    assert encoded[0] == RandomTokens(67, 30).encode([{"role": "user", "content": prompt_set.prompts[0].turns[0]}])
    assert longest_context(template, prompt_set.prompts, 12) == 42


# Runs


@pytest.fixture
def prompt_sets(tmp_path):
    (tmp_path / "maths.jsonl").write_text("".join(f'{{"turns": ["{"abc"[: i + 1]}"]}}\n' for i in range(3)))
    (tmp_path / "chat.jsonl").write_text('{"turns": ["ab", "cd"]}\n{"turns": ["dc"]}\n')
    return [load_prompt_set(str(tmp_path / f"{name}.jsonl")) for name in ("maths", "chat")]


def runner_of(names, target=None, drafter=None, **kwargs):
    target = target or tiny_model("llama", seed=5)
    drafter = drafter or D3DDrafterForCausalLM.from_backbone(target, block_size=3, kept_layers=[1])
    contestants = Contestants(target, {"d": drafter})
    methods = parse_methods(names, ["d"])
    return Runner(contestants, methods, template_of(tiny_tokenizer()), config_of(target, **kwargs))


def test_a_run_plays_every_turn_through_and_compares_with_plain(prompt_sets, tmp_path):
    runner = runner_of(["plain", "prompt-lookup", "assisted", "d3d-sync", "d3d-async"])
    store = RowStore(str(tmp_path / "rows"), {})
    seen = []
    runner.run(prompt_sets, store, on_prompt=seen.append)
    assert seen == ["maths"] * 3 + ["chat"] * 2
    rows = store.rows()
    assert len(rows) == 5 * 5 and all(row["difference"] is None for row in rows)
    target, tokenizer = tiny_model("llama", seed=5), tiny_tokenizer()
    (row,) = (r for r in rows if (r["dataset"], r["prompt"], r["method"]) == ("chat", 0, "d3d-sync"))
    messages = []
    for text, turn in zip(("ab", "cd"), row["turns"], strict=True):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        answer = target.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0, ids.shape[1] :]
        assert turn["ids"] == answer.tolist() and turn["num_prompt_tokens"] == ids.shape[1]
        assert "prompt_ids" not in turn
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    results = summarise(rows, is_greedy=True)
    assert [(r["dataset"], r["num_prompts"], r["ids_equal"]) for r in results] == [
        *[("maths", 3, 3)] * 5,
        *[("chat", 2, 2)] * 5,
    ]
    plain, sync = results[0], next(r for r in results if r["method"] == "d3d-sync")
    assert plain["speedup"] == 1 and plain["tokens_per_round"] == 1 and plain["round_cost"] == pytest.approx(1)
    own = [turn for r in rows if (r["dataset"], r["method"]) == ("maths", "d3d-sync") for turn in r["turns"]]
    num_rounds = sum(len(turn["rounds"]) for turn in own)
    assert sync["tokens_per_round"] == 3 * NUM_TOKENS / num_rounds
    assert sum(sync["accepted_histogram"].values()) == num_rounds
    assert sync["tokens_per_second"] == pytest.approx(sorted(NUM_TOKENS / turn["seconds"] for turn in own)[1])
    assert sync["draft_ms"] > 0 and sync["overlap"] is None
    hits = next(r for r in results if r["method"] == "d3d-async")["num_hits"]
    assert sum(hits.values()) > 0
    assert {average["method"] for average in averages(results)} == {r["method"] for r in results}


def test_the_order_of_methods_turns_from_prompt_to_prompt(prompt_sets, monkeypatch):
    runner, order = runner_of(["plain", "prompt-lookup", "d3d-sync"]), []
    answer = runner._answer
    monkeypatch.setattr(runner, "_answer", lambda method, *args: order.append(method.base) or answer(method, *args))
    for prompt in prompt_sets[0].prompts:
        runner.rows_of("maths", prompt)
    assert order == [
        *("plain", "prompt-lookup", "d3d-sync"),
        *("prompt-lookup", "d3d-sync", "plain"),
        *("d3d-sync", "plain", "prompt-lookup"),
    ]


def test_a_difference_is_found_with_its_logits(prompt_sets):
    target = tiny_model("llama", seed=5)
    runner = runner_of(["plain", "d3d-sync"], target)
    prompt = [5, 6, 7]
    logits = target(torch.tensor([[*prompt, 20]])).logits[0, -1].detach()
    plain = [{"prompt_ids": prompt, "ids": [20, 3]}, {"prompt_ids": prompt, "ids": [1]}]
    other = [{"prompt_ids": prompt, "ids": [20, 4]}, {"prompt_ids": prompt, "ids": [1]}]
    difference = runner._difference(plain, other)
    assert (difference["turn"], difference["index"], difference["plain_id"], difference["drafted_id"]) == (0, 1, 3, 4)
    assert difference["logit_gap"] == pytest.approx(float(logits[3] - logits[4]))
    assert runner._difference(plain, plain) is None


def test_a_run_goes_on_where_it_was_ended(prompt_sets, tmp_path):
    class Ended(Exception):
        pass

    def end_after(number):
        told = []

        def on_prompt(name):
            told.append(name)
            if len(told) == number:
                raise Ended

        return on_prompt

    folder, names = str(tmp_path / "rows"), ["plain", "d3d-sync"]
    with pytest.raises(Ended):
        runner_of(names).run(prompt_sets, RowStore(folder, {"a": 1}), on_prompt=end_after(2))
    (path,) = Path(folder).glob("rows-*.jsonl")
    first = path.read_text()
    path.write_text(first + first.splitlines()[0][:50])  # a line that was cut off
    store = RowStore(folder, {"a": 1})
    assert len(store.rows()) == 4
    target = tiny_model("llama", seed=5)
    with ForwardCounter(target, "generate") as calls:
        runner_of(names, target).run(prompt_sets, store)
    # A warm-up of both turns, then the prompt left of the first set, and three turns of the second.
    assert calls.count == 2 * (1 + 1 + 3)
    assert path.read_text().startswith(first)
    keys = [(row["dataset"], row["prompt"], row["method"]) for row in store.rows()]
    assert len(keys) == len(set(keys)) == 2 * 5
    with pytest.raises(ValueError, match=r"begun with other settings: a \(1 there, 2 here\)"):
        RowStore(folder, {"a": 2})


def test_rows_of_half_a_prompt_are_measured_again(prompt_sets, tmp_path):
    store = RowStore(str(tmp_path / "rows"), {})
    runner = runner_of(["plain", "d3d-sync"])
    store.add(runner.rows_of("maths", prompt_sets[0].prompts[0])[:1])
    runner.run(prompt_sets[:1], store)
    keys = [(row["prompt"], row["method"]) for row in store.rows()]
    assert sorted(keys) == sorted((index, name) for index in range(3) for name in ("plain", "d3d-sync"))


def test_a_method_that_fails_has_its_reason_and_the_others_go_on(prompt_sets, tmp_path, monkeypatch):
    runner = runner_of(["plain", "d3d-sync", "dflash"])
    (drafter,) = (call.assistant for call in runner._calls.values() if call.assistant is not None)

    def fail(*args, **kwargs):
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr(drafter, "packed_forward", fail)
    drafter.generation_config.on_draft_error = "raise"
    store = RowStore(str(tmp_path / "rows"), {})
    runner.run(prompt_sets[:1], store)
    results = {result["method"]: result for result in summarise(store.rows(), is_greedy=True)}
    assert results["plain"]["num_prompts"] == 3
    reason = "failed: DraftingError: Drafting failed (RuntimeError: broken in two lines)."
    assert results["d3d-sync"]["reason"] == reason
    assert "--dflash" in results["dflash"]["reason"]
    for name in ("d3d-sync", "dflash"):
        assert results[name]["num_prompts"] == results[name]["speedup"] == results[name]["tokens_per_round"] == 0


def test_a_drafter_that_is_not_asked_has_its_reason(prompt_sets):
    target = tiny_model("llama", seed=5)
    runner = runner_of(["plain", "d3d-sync"], target, D3DDrafterForCausalLM.from_backbone(target).train())
    _, row = runner.rows_of("maths", prompt_sets[0].prompts[0])
    assert "without drafts: the drafter is in train mode" in row["reason"]


def test_sampled_runs_are_seeded_and_not_compared(prompt_sets):
    rows = [
        runner_of(["plain", "d3d-sync"], temperature=0.8).rows_of("maths", prompt_sets[0].prompts[1]) for _ in range(2)
    ]
    ids = [[[turn["ids"] for turn in row["turns"]] for row in run] for run in rows]
    assert ids[0] == ids[1]
    results = summarise(rows[0], is_greedy=False)
    assert all(result["ids_equal"] is None for result in results) and "difference" not in rows[0][1]


# DFlash


@pytest.fixture(scope="module")
def dflash(tmp_path_factory):
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = assistant.MuseGlimmerAssistantConfig(
        **sizes,
        num_hidden_layers=1,
        head_dim=8,
        block_size=4,
        mask_token_id=66,
        target_layer_ids=[0, 1],
        eos_token_id=None,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("dflash")
    assistant.MuseGlimmerAssistantModel(config).save_pretrained(folder)
    return folder


def test_dflash_runs_in_transformers_own_loop(dflash):
    target = tiny_model("llama", seed=5)
    contestants = Contestants(target, dflash=load_dflash(str(dflash), target))
    call = parse_methods(["dflash"], [])[-1].call(contestants)
    config, arguments = call.arguments(config_of(target))
    answer = record(call.target, [5, 6, 7], config, **arguments)
    assert answer.ids == record(target, [5, 6, 7], config_of(target)).ids
    first, second, *_ = answer.rounds
    assert first == (0, 1) and second[0] == 3  # it reads the target's hidden states, so the first round has no draft


def test_other_models_are_no_dflash_drafters(dflash, tmp_path):
    tiny_model("llama", seed=5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no block_size, mask_token_id, target_layer_ids"):
        load_dflash(str(tmp_path), tiny_model("llama", seed=5))
    with pytest.raises(ValueError, match="drafts for another target"):
        load_dflash(str(dflash), tiny_model("llama", num_layers=1))


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_model("llama", seed=5)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    D3DDrafterForCausalLM.from_backbone(target, block_size=3).save_pretrained(folder / "drafter")
    D3DDrafterForCausalLM.from_backbone(target, block_size=3, kept_layers=[1]).save_pretrained(folder / "shallow")
    D3DDrafterForCausalLM.from_backbone(tiny_model(vocab_size=50)).save_pretrained(folder / "other")
    (folder / "maths.jsonl").write_text('{"turns": ["ab"]}\n{"turns": ["cde"]}\n')
    (folder / "chat.jsonl").write_text('{"turns": ["ab", "cd"]}\n')
    return folder


@pytest.fixture
def bench(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)

    def bench(*argv):
        capsys.readouterr()
        status = main(["bench", "--device", "cpu", *map(str, argv)])
        output = capsys.readouterr()
        return status, output.out, output.err.splitlines()

    return bench


TINY = ("--target", "target", "--drafter", "drafter", "--datasets", "maths.jsonl,chat.jsonl", "--max-new-tokens", 6)


def test_the_command_writes_a_table_and_json(bench, folder, tmp_path):
    path = tmp_path / "results.json"
    status, out, err = bench(*TINY, "--methods", "plain,dflash,d3d-sync", "--threads", 1, "--output", path)
    assert status == 0, err
    assert "maths" in out and "chat" in out and "d3d-sync" in out
    assert out.count("dflash did not run: no DFlash drafter was given") == 2
    report = json.loads(path.read_text())
    for result in report["results"]:
        assert {"dataset", "method", "tokens_per_second", "speedup", "tokens_per_round", "ids_equal"} <= result.keys()
    assert {(r["dataset"], r["method"]) for r in report["results"]} == {
        (dataset, method) for dataset in ("maths", "chat") for method in ("plain", "dflash", "d3d-sync")
    }
    assert {"argv", "git_commit", "versions", "machine", "warm_up"} <= report.keys()
    assert report["machine"]["num_threads"] == 1 and str(tmp_path) not in path.read_text()
    assert report["argv"][:2] == ["d3d-hf", "bench"] and report["argv"][-1] == "results.json"
    assert report["settings"]["drafters"] == {"drafter": {"num_layers": 2, "block_size": 3}}
    assert not Path(f"{path}.rows").exists()
    status, out, err = bench(*TINY, "--output", path)
    assert status == 2 and out == "" and "is there already" in err[0]


def test_without_rich_the_table_is_plain_lines(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table([result_of("chat", "plain", 1.0, 1.0), result_of("chat", "d3d-sync", 1.5, 2.0)])
    heading, _, line = capsys.readouterr().out.splitlines()
    assert heading.startswith("Data set  Method") and line.startswith("chat  d3d-sync  2  20.0 (10.0 to 30.0)  1.50")


def test_a_command_that_was_ended_goes_on(bench, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    command = (*TINY, "--methods", "plain,d3d-sync", "--output", path)
    rows_of = Runner.rows_of

    def ended(self, dataset, prompt):
        if dataset == "chat":
            raise KeyboardInterrupt
        return rows_of(self, dataset, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "rows_of", ended)
        assert bench(*command)[0] == 130
    assert not path.exists()
    status, _, err = bench(*command, "--seed", 1)
    assert status == 2 and "seed (0 there, 1 here)" in err[0]
    measured = []
    monkeypatch.setattr(
        Runner, "rows_of", lambda self, dataset, prompt: measured.append(dataset) or rows_of(self, dataset, prompt)
    )
    assert bench(*command)[0] == 0 and measured == ["chat"]
    assert [r["num_prompts"] for r in json.loads(path.read_text())["results"]] == [2, 2, 1, 1]


def test_imposed_acceptance_on_named_shapes(bench, tmp_path):
    path = tmp_path / "results.json"
    status, _, err = bench(
        *("--target", "shape:qwen3-8b:tiny", "--drafter", "shape:qwen3-1.7b:1:tiny", "--block-size", 4),
        *("--acceptance", "0.9,0.8", "--prompt-tokens", 20, "--max-samples", 2, "--max-new-tokens", 40),
        *("--methods", "plain,prompt-lookup,d3d-sync", "--dtype", "float32", "--output", path),
    )
    assert status == 0, err
    results = {result["method"]: result for result in json.loads(path.read_text())["results"]}
    assert results["d3d-sync"]["dataset"] == "random-20" and results["d3d-sync"]["ids_equal"] == 2
    assert 1.5 < results["d3d-sync"]["tokens_per_round"] < expected_tokens_per_round([0.9, 0.8, 0.8, 0.8]) + 1
    assert "imposed" in results["prompt-lookup"]["reason"]


def test_shapes_by_name():
    assert parse_shape("shape:qwen3-8b").num_hidden_layers == 36
    assert parse_shape("shape:qwen3-8b:31").num_hidden_layers == 31
    assert parse_shape("shape:qwen3-8b:tiny").hidden_size < 200
    for name in ("shape:qwen9", "shape:qwen3-8b:x"):
        with pytest.raises(ValueError, match="choose one of|give a number of layers"):
            parse_shape(name)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--methods", "plane"), "give one of plain, prompt-lookup"),
        (("--datasets", "none.jsonl"), "is neither a file nor one of"),
        (("--datasets", "maths.jsonl,maths.jsonl"), "two sets of the same name"),
        (("--drafter", "drafter"), "would have the same name"),
        (("--drafter", "other"), "vocabulary of 50 tokens and the target has 67"),
        (("--drafter", "target"), "is no D3D drafter"),
        (("--acceptance", "0.9,x"), "--acceptance '0.9,x' is no list of chances"),
        (("--acceptance", "1.2"), "numbers from 0 to 1"),
        (("--prompt-tokens", 8), "--prompt-tokens 8 is for models like shape:qwen3-8b"),
        (("--drafter", "shape:qwen3-8b"), "random weights, which accept nothing"),
        (("--target", "shape:qwen3-8b", "--acceptance", "0.9"), "needs a tokenizer"),
        (("--top-k", 5), "--top-k 5 does nothing at --temperature 0"),
        (("--output", "nowhere/x.json"), "is no file that can be written"),
        (("--dflash", "target"), "--dflash 'target' cannot be used"),
        (("--template-arg", "loud"), "is no KEY=VALUE"),
        (("--drafter-device", "cuda:9"), "--drafter-device 'cuda:9' is not usable here"),
        (("--page", "x.md"), "--page and --from belong together"),
    ],
)
def test_mistakes_are_named_in_one_line(bench, argv, message):
    status, out, err = bench(*TINY, *argv)
    assert status == 2 and out == "" and message in err[-1]


def test_two_processes_share_the_prompts(folder, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(31500 + os.getpid() % 1000)]
    command += ["-m", "d3d_hf.cli", "bench", *map(str, TINY), "--methods", "plain,d3d-sync"]
    command += ["--output", str(tmp_path / "results.json")]
    source = os.path.dirname(os.path.dirname(__import__("d3d_hf").__file__))
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["num_processes"] == 2
    assert [(r["dataset"], r["num_prompts"], r["ids_equal"]) for r in report["results"]] == [
        *[("maths", 2, 2)] * 2,
        *[("chat", 1, 1)] * 2,
    ]


def test_commands_in_reports_have_no_folders():
    argv = [
        "d3d-hf",
        "bench",
        "--datasets",
        "/data/gsm8k.jsonl,mt-bench",
        "--drafter",
        "hub_cards/d",
        "--output",
        "a/r.json",
    ]
    assert provenance(argv)["argv"] == [
        *("d3d-hf", "bench", "--datasets", "gsm8k.jsonl,mt-bench", "--drafter", "hub_cards/d", "--output", "r.json")
    ]
    assert rounded({"a": [1.23456789, 2], "b": (True, None)}) == {"a": [1.2346, 2], "b": [True, None]}


# The page


def test_the_page_of_results_is_what_its_json_says():
    reports = read_reports(sorted((ROOT / "docs" / "results").glob("bench-*.json")))
    expected = results_page(reports)
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == expected, (
        "run: d3d-hf bench --page docs/results.md --from 'docs/results/bench-*.json'"
    )


def result_of(dataset, method, speedup, tokens_per_round, **others):
    return {
        "dataset": dataset,
        "method": method,
        "drafter": None,
        "num_prompts": 2,
        "tokens_per_second": 20.04,
        "tokens_per_second_p10": 10.0,
        "tokens_per_second_p90": 30.0,
        "speedup": speedup,
        "ids_equal": 2,
        "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "tokens_per_round": tokens_per_round,
        "round_cost": tokens_per_round / speedup,
        "first_token_ms": 50.0,
        "peak_memory_bytes": None,
        **others,
    }


def test_a_page_says_where_d3d_loses_and_why(bench, tmp_path):
    results = [
        result_of("chat", "plain", 1.0, 1.0),
        result_of("chat", "prompt-lookup", 1.5, 2.0, ids_equal=1, largest_gap_in_roundings=0.5),
        result_of("chat", "d3d-sync", 0.8, 2.0, slot_acceptance=[0.75, 0.5]),
        result_of("chat", "d3d-async", 0.5, 2.0),
        {"dataset": "chat", "method": "dflash", "num_prompts": 0, "reason": "none | given"},
    ]
    report = {
        "results": results,
        "averages": averages(results),
        "title": "Talk",
        "argv": ["d3d-hf", "bench"],
        "date": "2026-01-01",
        "git_commit": None,
        "warm_up": "8 tokens",
        "versions": {"torch": "2", "transformers": "5"},
        "machine": {"accelerators": [], "num_threads": 1, "processor": "x", "num_cores": 2},
        "settings": {
            "target": "T",
            "dtype": "float32",
            "drafters": {"D": {}},
            "temperature": 0,
            "max_new_tokens": 9,
        },
    }
    (tmp_path / "bench-a.json").write_text(json.dumps(report))
    status, _, err = bench("--page", tmp_path / "page.md", "--from", tmp_path / "bench-*.json")
    assert status == 0, err
    page = (tmp_path / "page.md").read_text()
    assert "## Talk" in page and "greedy, 9 new tokens at most" in page
    assert "1.50 (1.40 to 1.60)" in page and "1 of 2 (gap 0.5 ulp)" in page and "none \\| given" in page
    assert "d3d-sync, 0.53 times prompt-lookup: it loses. Its rounds take 2.50 plain tokens' time for 2.00" in page
    assert "d3d-async is slower than plain generation" in page and "d3d-sync is slower" not in page
    assert "| chat | d3d-sync | 0.75 | 0.50 |" in page and "On average" not in page
    compiled = [result_of("chat", "plain+ct", 2.0, 1.0), result_of("chat", "d3d-sync+cd+ct", 2.4, 2.0)]
    code = [{**result, "dataset": "code"} for result in (*results[:3], *compiled)]
    others = {"a": {**report, "results": [*results, *compiled]}, "b": {**report, "results": code}}
    warm = {**report, "settings": {**report["settings"], "temperature": 1}}
    page = results_page({**others, "c": warm})
    assert "chat, eager target: the fastest D3D method is d3d-sync, 0.53 times" in page
    assert "chat, compiled target: the fastest D3D method is d3d-sync+cd+ct, 1.20 times plain+ct." in page
    assert "chat: the fastest of all D3D methods, d3d-sync+cd+ct, is 1.60 times prompt-lookup" in page
    average = page[page.index("## On average") :]
    assert "geometric means over chat, code" in average and "async" not in average, "it ran on one of them alone"
    assert average.index("d3d-sync+cd+ct | 2.40") < average.index("plain+ct | 2.00")
    assert "measured yet" not in page and "measured yet" in results_page({})
    (tmp_path / "other.json").write_text("[]")
    status, _, err = bench("--page", tmp_path / "page.md", "--from", tmp_path / "other.json")
    assert status == 2 and "holds no results" in err[0]
