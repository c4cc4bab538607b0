"""The hook into generate, and the stock assistant protocol where it is not installed."""

import gc
import importlib
import inspect
import re
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model import generation_hook, modeling_d3d
from d3d_hf.model.candidate_generator import D3DCandidateGenerator, generate_as_assistant
from d3d_hf.testing import (
    ForwardCounter,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
)


PLAIN = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def target():
    return tiny_model("llama", seed=11)


@pytest.fixture
def prompt():
    return torch.randint(2, 67, (1, 6))


@pytest.fixture
def without_hook():
    d3d_hf.uninstall_generation_hook()
    yield
    assert d3d_hf.install_generation_hook()


def test_importing_installs_it_once_and_it_can_be_removed():
    assert d3d_hf.is_generation_hook_installed()
    wrapped = GenerationMixin._assisted_decoding
    assert d3d_hf.install_generation_hook() and GenerationMixin._assisted_decoding is wrapped
    assert "inputs_tensor" in inspect.signature(wrapped).parameters, "generate reads the signature"
    d3d_hf.uninstall_generation_hook()
    try:
        assert not d3d_hf.is_generation_hook_installed()
        assert not hasattr(GenerationMixin._get_candidate_generator, "_d3d_original")
        d3d_hf.uninstall_generation_hook()
    finally:
        assert d3d_hf.install_generation_hook()


def test_a_second_copy_of_the_module_does_not_wrap_again():
    wrapped = GenerationMixin._get_candidate_generator
    spec = importlib.util.spec_from_file_location("second_copy", generation_hook.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.install_generation_hook()
    assert GenerationMixin._get_candidate_generator is wrapped
    copy.uninstall_generation_hook()
    try:
        assert not d3d_hf.is_generation_hook_installed()
    finally:
        d3d_hf.install_generation_hook()


def test_dispatch_goes_by_the_method_that_the_drafter_carries(target, prompt):
    """A drafter of a class that the hook has never seen, as a copy of the code from a repository is."""
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    drafter.__class__ = type("Elsewhere", (D3DDrafterForCausalLM,), {})
    reference = target.generate(prompt, **PLAIN)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
    assert drafter.last_generation_stats.num_rounds > 0


def test_other_assistants_and_prompt_lookup_go_through_untouched(target, prompt, monkeypatch):
    reference = target.generate(prompt, **PLAIN)
    assistant = tiny_model("llama", seed=12)
    monkeypatch.setattr(D3DCandidateGenerator, "get_candidates", lambda *args, **kwargs: 1 / 0)
    assert torch.equal(target.generate(prompt, assistant_model=assistant, **PLAIN), reference)
    assert torch.equal(target.generate(prompt, prompt_lookup_num_tokens=3, **PLAIN), reference)
    drafter = oracle_drafter(reference)
    both = target.generate(prompt, prompt_lookup_num_tokens=3, assistant_model=drafter, **PLAIN)
    assert torch.equal(both, reference), "prompt lookup outranks an assistant in transformers"


@pytest.mark.parametrize(
    "method, replacement, named",
    [
        ("_get_candidate_generator", None, "GenerationMixin._get_candidate_generator"),
        ("_assisted_decoding", lambda self, input_ids, **kwargs: None, r"_assisted_decoding\(assistant_model=\)"),
    ],
)
def test_a_changed_transformers_is_not_patched(without_hook, monkeypatch, caplog, method, replacement, named):
    with monkeypatch.context() as patch:
        if replacement is None:
            patch.delattr(GenerationMixin, method)
        else:
            patch.setattr(GenerationMixin, method, replacement)
        assert d3d_hf.install_generation_hook() is False
        assert not d3d_hf.is_generation_hook_installed()
    assert caplog.text.count("is not installed") == 1
    assert re.search(named, caplog.text)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_however_generation_ends_the_cache_is_freed(target, prompt, interruption, monkeypatch):
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    generators = []
    make = D3DDrafterForCausalLM.make_candidate_generator
    monkeypatch.setattr(
        D3DDrafterForCausalLM,
        "make_candidate_generator",
        lambda *args, **kwargs: generators.append(make(*args, **kwargs)) or generators[-1],
    )
    forward, calls = target.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise interruption("in the target's forward")
        return forward(*args, **kwargs)

    reference = target.generate(prompt, **PLAIN)
    failing.__signature__ = inspect.signature(forward)
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", failing)
        with pytest.raises(interruption) as kept_traceback:
            target.generate(prompt, assistant_model=drafter, **PLAIN)
    assert generators[-1]._session.num_cached == 0
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
    assert generators[-1]._session.num_cached == 0
    del kept_traceback


def test_nothing_of_a_generation_outlives_it(target, prompt, monkeypatch):
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    alive = []
    make = D3DDrafterForCausalLM.make_candidate_generator

    def tracked(*args, **kwargs):
        generator = make(*args, **kwargs)
        alive.append(weakref.ref(generator))
        return generator

    monkeypatch.setattr(D3DDrafterForCausalLM, "make_candidate_generator", tracked)
    for _ in range(3):
        target.generate(prompt, assistant_model=drafter, **PLAIN)
    gc.collect()
    assert len(alive) == 3 and not any(ref() for ref in alive)


def test_nested_generation_inside_a_processor_keeps_its_own_session(target, prompt):
    """A processor that itself generates with the same drafter: two sessions, one inside the other."""
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    reference = target.generate(prompt, **PLAIN)
    inner = []

    def processor(input_ids, scores):
        if not inner:
            inner.append(None)
            inner.append(target.generate(prompt, assistant_model=drafter, **PLAIN))
        return scores

    outer = target.generate(prompt, assistant_model=drafter, logits_processor=[processor], **PLAIN)
    assert torch.equal(outer, reference) and torch.equal(inner[1], reference)


class TestStockProtocol:
    """Without the hook, transformers' own AssistedCandidateGenerator drives the drafter."""

    @pytest.mark.parametrize(
        "make, num_forwards",
        [(oracle_drafter, 4), (anti_oracle_drafter, 24), (lambda ref: noisy_oracle_drafter(ref, [2]), 8)],
    )
    def test_greedy(self, without_hook, target, prompt, make, num_forwards):
        reference = target.generate(prompt, **PLAIN)
        drafter = make(reference)
        with ForwardCounter(target) as forwards:
            output = target.generate(prompt, assistant_model=drafter, **PLAIN)
        assert torch.equal(output, reference) and forwards.count == num_forwards
        num_rounds = drafter.last_generation_stats.num_rounds
        assert num_forwards - 2 <= num_rounds < num_forwards, "what follows the last draft is not reported"

    @pytest.mark.parametrize("padding", [0, 3])
    def test_padding_and_eos(self, without_hook, target, prompt, padding):
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
        mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
        free = target.generate(ids, attention_mask=mask, **PLAIN)
        for eos in (None, int(free[0, -3])):
            kwargs = {**PLAIN, "attention_mask": mask, "eos_token_id": eos, "pad_token_id": 0}
            reference = target.generate(ids, **kwargs)
            drafter = acceptance_profile_drafter(free[:, padding:], [0.9, 0.7])
            assert torch.equal(target.generate(ids, assistant_model=drafter, **kwargs), reference)

    def test_sampling_runs_and_one_hot_laws_are_handed_over(self, without_hook, target, prompt):
        drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
        output = target.generate(prompt, assistant_model=drafter, max_new_tokens=24, do_sample=True)
        assert output.shape[1] == 30

    def test_stop_strings_are_refused_with_the_mend(self, target):
        drafter = D3DDrafterForCausalLM.from_backbone(target)
        config = GenerationConfig(stop_strings=["end"])
        with pytest.raises(ValueError, match=r"stop_strings=\['end'\].*install_generation_hook"):
            generate_as_assistant(drafter, torch.ones(1, 3, dtype=torch.long), config, max_new_tokens=4)

    def test_being_bypassed_with_the_hook_in_place_is_reported_once(self, target, prompt, caplog, monkeypatch):
        monkeypatch.setattr(modeling_d3d, "_warned_of_bypassed_hook", False)
        monkeypatch.setattr(
            type(target),
            "_get_candidate_generator",
            GenerationMixin._get_candidate_generator._d3d_original,
            raising=False,
        )
        reference = target.generate(prompt, **PLAIN)
        for _ in range(2):
            drafter = oracle_drafter(reference)
            assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
        assert caplog.text.count("went past the D3D generation hook") == 1


def test_drafters_of_another_tokenizer_are_refused(target):
    drafter = D3DDrafterForCausalLM.from_backbone(target)
    with pytest.raises(ValueError, match="67 tokens.*assistant_tokenizer"):
        drafter.make_candidate_generator(target, None, {}, target_tokenizer=object(), assistant_tokenizer=object())


def test_importing_the_package_needs_no_network_and_starts_no_threads():
    code = "import threading; n = threading.active_count(); import d3d_hf; assert threading.active_count() == n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
