"""The seam to generate: the hook, its two doors, and how it fails soft where a release has changed."""

import functools
import gc
import importlib
import inspect
import logging
import os
import subprocess
import sys
import weakref

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationMixin
from transformers.generation import BaseStreamer
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.decoding import loop
from d3d_hf.decoding.walk import Walk
from d3d_hf.model import generation_hook
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.candidate_generator import D3DCandidateGenerator
from d3d_hf.model.drafting_options import DraftingOptions
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.model.generation_stats import GenerationStats
from d3d_hf.testing import (
    ForwardCounter,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
    tiny_tokenizer,
)


PLAIN = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def target():
    return tiny_model("llama", seed=11)


@pytest.fixture
def prompt():
    return torch.randint(2, 67, (1, 6))


@pytest.fixture
def second_door(monkeypatch):
    """The loop is not there, as where the code came with a repository."""
    monkeypatch.setattr(generation_hook, "_doors", [door for door in generation_hook._doors if door.name != "loop"])


@pytest.fixture
def sessions(monkeypatch):
    """Every drafting session that is made."""
    made, make = [], DraftingSession.__init__
    monkeypatch.setattr(DraftingSession, "__init__", lambda self, *a, **k: made.append(self) or make(self, *a, **k))
    return made


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
    wrapped = GenerationMixin._assisted_decoding
    name = "d3d_hf.model.second_copy"
    spec = importlib.util.spec_from_file_location(name, generation_hook.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    try:
        spec.loader.exec_module(copy)
        assert copy.install_generation_hook()
        assert GenerationMixin._assisted_decoding is wrapped
        copy.uninstall_generation_hook()
        assert not d3d_hf.is_generation_hook_installed()
    finally:
        del sys.modules[name]
        d3d_hf.install_generation_hook()


def test_dispatch_goes_by_the_method_that_the_drafter_carries(target, prompt):
    """A drafter of a class that the hook has never seen, as a copy of the code from a repository is."""
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    drafter.__class__ = type("Elsewhere", (D3DDrafterForCausalLM,), {})
    reference = target.generate(prompt, **PLAIN)
    with ForwardCounter(target) as forwards:
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
    assert drafter.last_generation_stats.num_rounds == forwards.count < 20


def test_other_assistants_and_prompt_lookup_go_through_untouched(target, prompt, monkeypatch):
    reference = target.generate(prompt, **PLAIN)
    assistant = tiny_model("llama", seed=12)
    drafter = oracle_drafter(reference)
    monkeypatch.setattr(D3DCandidateGenerator, "get_candidates", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr(loop, "decode", lambda call: 1 / 0)
    assert torch.equal(target.generate(prompt, assistant_model=assistant, **PLAIN), reference)
    assert torch.equal(target.generate(prompt, prompt_lookup_num_tokens=3, **PLAIN), reference)
    both = target.generate(prompt, prompt_lookup_num_tokens=3, assistant_model=drafter, **PLAIN)
    assert torch.equal(both, reference), "prompt lookup outranks an assistant in transformers"
    assert drafter.last_generation_stats is None


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_however_generation_ends_the_cache_is_freed(target, prompt, interruption, mode, sessions):
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    drafter.generation_config.drafting_mode = mode
    forward, calls = target.forward, []

    @functools.wraps(forward)
    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise interruption("in the target's forward")
        return forward(*args, **kwargs)

    reference = target.generate(prompt, **PLAIN)
    target.forward = failing
    with pytest.raises(interruption) as kept_traceback:
        target.generate(prompt, assistant_model=drafter, **PLAIN)
    del target.forward
    assert len(sessions) == 1 and sessions[-1]._cache is None and sessions[-1].num_cached == 0
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
    assert len(sessions) == 2 and sessions[-1]._cache is None and sessions[-1].num_cached == 0
    del kept_traceback


def test_nothing_of_a_generation_outlives_it(target, prompt, monkeypatch):
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    alive = []
    for cls in (Walk, loop.Drafts, loop.TargetPasses, DraftingSession):
        make = cls.__init__
        monkeypatch.setattr(
            cls,
            "__init__",
            lambda self, *args, make=make, **kwargs: alive.append(weakref.ref(self)) or make(self, *args, **kwargs),
        )
    for _ in range(3):
        target.generate(prompt, assistant_model=drafter, **PLAIN)
    gc.collect()
    assert len(alive) == 12 and not any(ref() for ref in alive)


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

    with ForwardCounter(target) as forwards:
        outer = target.generate(prompt, assistant_model=drafter, logits_processor=[processor], **PLAIN)
    assert torch.equal(outer, reference) and torch.equal(inner[1], reference)
    assert forwards.count < 40, "both draft"


# The second door


class TestSecondDoor:
    """transformers' own assisted loop drives the candidate generator."""

    @pytest.mark.parametrize(
        "make, num_forwards",
        [(oracle_drafter, 4), (anti_oracle_drafter, 24), (lambda ref: noisy_oracle_drafter(ref, [2]), 8)],
    )
    def test_greedy(self, second_door, target, prompt, make, num_forwards):
        reference = target.generate(prompt, **PLAIN)
        drafter = make(reference)
        with ForwardCounter(target) as forwards:
            output = target.generate(prompt, assistant_model=drafter, **PLAIN)
        assert torch.equal(output, reference) and forwards.count == num_forwards
        stats = drafter.last_generation_stats
        assert stats.door == "candidate generator" and stats.num_rounds == num_forwards and stats.num_tokens == 24

    @pytest.mark.parametrize("padding", [0, 3])
    def test_padding_and_eos(self, second_door, target, prompt, padding):
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
        mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
        free = target.generate(ids, attention_mask=mask, **PLAIN)
        for eos in (None, int(free[0, -3])):
            kwargs = {**PLAIN, "attention_mask": mask, "eos_token_id": eos, "pad_token_id": 0}
            reference = target.generate(ids, **kwargs)
            drafter = acceptance_profile_drafter(free[:, padding:], [0.9, 0.7])
            assert torch.equal(target.generate(ids, assistant_model=drafter, **kwargs), reference)
            assert drafter.last_generation_stats.tokens_per_round > 1.5

    def test_each_round_may_choose_by_a_sampled_law(self, second_door, target, prompt):
        drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
        output = target.generate(prompt, assistant_model=drafter, max_new_tokens=24, do_sample=True)
        assert output.shape[1] == 30 and drafter.last_generation_stats.door == "candidate generator"

    @pytest.mark.parametrize("kind", ["processor", "criterion", "stop strings"])
    def test_whoever_must_see_every_token_once_sees_plain_decoding(self, second_door, target, prompt, kind, caplog):
        tokenizer = tiny_tokenizer()
        reference = target.generate(prompt, **PLAIN)
        kwargs = {
            "processor": {"logits_processor": [lambda input_ids, scores: scores]},
            "criterion": {"stopping_criteria": [lambda input_ids, scores, **kwargs: input_ids.shape[1] >= 17]},
            "stop strings": {"stop_strings": [tokenizer.decode(reference[0, 14:16])], "tokenizer": tokenizer},
        }[kind]
        plain = target.generate(prompt, **PLAIN, **kwargs)
        drafter = oracle_drafter(reference)
        with ForwardCounter(target) as forwards:
            output = target.generate(prompt, assistant_model=drafter, **PLAIN, **kwargs)
        assert torch.equal(output, plain) and forwards.count == plain.shape[1] - 6
        assert caplog.text.count("which no assistant can promise here") == 1
        assert drafter.last_generation_stats.door == "plain"

    def test_asynchronous_drafting_is_said_to_be_synchronous(self, second_door, target, prompt, caplog):
        reference = target.generate(prompt, **PLAIN)
        drafter = oracle_drafter(reference)
        drafter.generation_config.drafting_mode = "async"
        for _ in range(2):
            assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
        assert drafter.last_generation_stats.num_rounds == 4
        assert caplog.text.count("drafting_mode='async' is drafted synchronously here") == 1

    def test_the_generator_has_every_attribute_of_the_base_class(self, target):
        """transformers reads some of them; an abstract default of the base would break a call, or raise."""
        drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
        options = DraftingOptions.resolve(target.generation_config, drafter.generation_config, 4)
        ours = D3DCandidateGenerator(drafter, options, GenerationStats(), max_length=30, vocab_size=67)

        def declared(cls):
            return {name for name in dir(cls) if not name.startswith("_")} | set(inspect.get_annotations(cls))

        # What all of transformers' own generators have, their loop may read as well.
        everywhere = declared(AssistedCandidateGenerator) & declared(PromptLookupCandidateGenerator)
        names = declared(CandidateGenerator) | everywhere
        assert {"requires_model_outputs", "get_candidates", "update_candidate_strategy"} <= names
        for name in names:
            theirs = inspect.getattr_static(CandidateGenerator, name, None)
            value = getattr(ours, name)
            if callable(theirs):
                assert name in vars(D3DCandidateGenerator), f"{name} of the base class does nothing"
                expected = set(inspect.signature(theirs).parameters)
                assert expected <= set(inspect.signature(getattr(D3DCandidateGenerator, name)).parameters), name
            elif name != "requires_model_outputs":
                assert value, name
        assert ours.requires_model_outputs is False
        assert ours.num_drafting_tokens == options.num_assistant_tokens == 4


# Contracts that a release may change


class Changed:
    """Puts something else in the place of a method of `GenerationMixin`, below the hook."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        d3d_hf.uninstall_generation_hook()

    def method(self, name: str, wrap):
        self._monkeypatch.setattr(GenerationMixin, name, wrap(getattr(GenerationMixin, name)))

    def removed(self, name: str):
        self._monkeypatch.delattr(GenerationMixin, name)


@pytest.fixture
def changed():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Changed(monkeypatch)
        d3d_hf.uninstall_generation_hook()
    assert d3d_hf.install_generation_hook()


def assert_soft(target, prompt, caplog, num_warnings=1, says="", **kwargs):
    """Twice the ids of plain generation, and one warning that names the release."""
    caplog.clear()
    make = kwargs.pop("make_kwargs", dict)
    reference = target.generate(prompt, **PLAIN, **kwargs, **make())
    drafter = oracle_drafter(reference)
    for _ in range(2):
        made = make()
        with ForwardCounter(target) as forwards:
            output = target.generate(prompt, assistant_model=drafter, **PLAIN, **kwargs, **made)
        assert torch.equal(output, reference)
        assert drafter.last_generation_stats.door == "plain" and says in drafter.last_generation_stats.door_reason
    assert 24 <= forwards.count <= 25, "a door may have made one pass before it failed"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == num_warnings, warnings
    assert all(f"transformers {transformers.__version__}" in warning for warning in warnings), warnings
    return drafter


def renaming(**names):
    """Wraps a method so that it is given, and takes, some arguments by new names."""

    def wrap(method):
        def renamed(self, input_ids, **kwargs):
            back = {new: kwargs.pop(new) for new in names.values() if new in kwargs}
            return method(self, input_ids, **{old: back[new] for old, new in names.items() if new in back}, **kwargs)

        parameters = inspect.signature(method).parameters
        renamed.__signature__ = inspect.Signature(
            [parameter.replace(name=names.get(name, name)) for name, parameter in parameters.items()]
        )
        return renamed

    return wrap


def calling_by(**names):
    """A model class whose `generate` calls decoding methods by these names."""

    class CallsByNewNames(type(tiny_model("llama"))):
        def _sample(self, input_ids, **kwargs):
            return super()._sample(input_ids, **{names.get(name, name): value for name, value in kwargs.items()})

        def _assisted_decoding(self, input_ids, **kwargs):
            renamed = {names.get(name, name): value for name, value in kwargs.items()}
            return super()._assisted_decoding(input_ids, **renamed)

    return CallsByNewNames


class Quiet(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append(None)


@pytest.mark.parametrize(
    "name", ["generation_config", "logits_processor", "stopping_criteria", "streamer", "assistant_model"]
)
def test_a_renamed_parameter_of_assisted_decoding(changed, target, prompt, caplog, name):
    names = {name: f"{name}_of_tomorrow"}
    changed.method("_assisted_decoding", renaming(**names))
    if name != "assistant_model":
        changed.method("_sample", renaming(**names))
    assert d3d_hf.install_generation_hook()
    target.__class__ = calling_by(**names)
    streamers = []
    assert_soft(
        target,
        prompt,
        caplog,
        says=name,
        repetition_penalty=1.3,
        make_kwargs=lambda: streamers.append(Quiet()) or {"streamer": streamers[-1]},
    )
    assert len(streamers) == 3 and streamers[0].tokens == streamers[1].tokens == streamers[2].tokens


def test_a_new_argument_of_assisted_decoding(changed, target, prompt, caplog):
    def wrap(method):
        def asking_more(self, input_ids, logits_processor, stopping_criteria, generation_config, verifier, **kwargs):
            return method(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

        return asking_more

    changed.method("_assisted_decoding", wrap)
    assert d3d_hf.install_generation_hook()

    class GivesMore(type(target)):
        def _assisted_decoding(self, input_ids, **kwargs):
            return super()._assisted_decoding(input_ids, verifier="of tomorrow", **kwargs)

    target.__class__ = GivesMore
    assert_soft(target, prompt, caplog, says="verifier")


def test_a_new_argument_that_a_method_of_the_model_must_be_given(target, prompt, caplog):
    """The loop calls it as it is called now; transformers' own decoding, which has moved on, as it wants to be."""

    class AsksMore(type(target)):
        is_sampling = False

        def prepare_inputs_for_generation(self, *args, **kwargs):
            if not self.is_sampling:
                raise TypeError("prepare_inputs_for_generation() missing 1 required argument: 'round'")
            return super().prepare_inputs_for_generation(*args, **kwargs)

        def _sample(self, *args, **kwargs):
            self.is_sampling = True
            try:
                return super()._sample(*args, **kwargs)
            finally:
                self.is_sampling = False

    target.__class__ = AsksMore
    assert_soft(target, prompt, caplog, says="the loop failed")


@pytest.mark.parametrize("attribute", ["attribute_of_tomorrow", "method_of_tomorrow"])
def test_the_assisted_loop_reads_something_new_from_the_generator(
    changed, second_door, target, prompt, caplog, attribute
):
    def wrap(method):
        def reading(self, input_ids, **kwargs):
            others = {"generation_config", "inputs_tensor", "assistant_model", "logits_processor"}
            generator = self._get_candidate_generator(
                input_ids=input_ids,
                target_tokenizer=None,
                assistant_tokenizer=None,
                model_kwargs={},
                **{name: kwargs.get(name) for name in others},
            )
            value = getattr(generator, attribute)
            return value and method(self, input_ids, **kwargs)

        reading.__signature__ = inspect.signature(method)
        return reading

    changed.method("_assisted_decoding", wrap)
    assert d3d_hf.install_generation_hook()
    assert_soft(target, prompt, caplog, says=attribute)


def test_the_generator_that_is_asked_for_by_another_name(changed, second_door, target, prompt, caplog):
    """The dispatch has a renamed parameter: the drafter is known all the same."""

    def wrap(method):
        def renamed(self, generation_config, input_ids, helper=None, **kwargs):
            return method(self, generation_config, input_ids, assistant_model=helper, **kwargs)

        return renamed

    def wrap_caller(method):
        def calling(self, *args, **kwargs):
            dispatch = self._get_candidate_generator

            def by_new_name(**given):
                return dispatch(helper=given.pop("assistant_model"), **given)

            self._get_candidate_generator = by_new_name
            try:
                return method(self, *args, **kwargs)
            finally:
                del self._get_candidate_generator

        calling.__signature__ = inspect.signature(method)
        return calling

    changed.method("_get_candidate_generator", wrap)
    changed.method("_assisted_decoding", wrap_caller)
    assert d3d_hf.install_generation_hook()
    reference = target.generate(prompt, **PLAIN)
    drafter = oracle_drafter(reference)
    with ForwardCounter(target) as forwards:
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **PLAIN), reference)
    assert forwards.count == 4 and not caplog.text.count("WARNING")


def test_the_dispatch_is_gone(changed, second_door, target, prompt, caplog):
    changed.removed("_get_candidate_generator")
    assert d3d_hf.install_generation_hook()
    assert_soft(target, prompt, caplog, says="has no GenerationMixin._get_candidate_generator")


def test_assisted_decoding_is_gone(changed, caplog):
    changed.removed("_assisted_decoding")
    assert d3d_hf.install_generation_hook() is False
    assert not d3d_hf.is_generation_hook_installed()
    assert caplog.text.count("is not installed") == 1
    assert f"transformers {transformers.__version__} has no GenerationMixin._assisted_decoding" in caplog.text


def test_a_cache_that_cannot_say_its_length(target, prompt, caplog):
    """What a release takes away its own code no longer calls."""

    class Unmeasured(DynamicCache):
        def get_seq_length(self, *args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("d3d_hf"):
                raise AttributeError("'Unmeasured' object has no attribute 'get_seq_length'")
            return super().get_seq_length(*args, **kwargs)

    make = {"make_kwargs": lambda: {cache_argument(target): Unmeasured()}}
    assert_soft(target, prompt, caplog, says="get_seq_length", **make)


def test_a_cache_that_cannot_be_cropped_any_more(second_door, target, prompt, caplog):
    """The assisted loop finds out after its first pass, whose keys are in the cache by then."""

    class Uncropped(DynamicCache):
        @property
        def crop(self):
            raise AttributeError("'Uncropped' object has no attribute 'crop'")

    make = {"make_kwargs": lambda: {cache_argument(target): Uncropped()}}
    assert_soft(target, prompt, caplog, says="crop", **make)


def test_a_pass_that_fails_halfway_leaves_the_callers_cache_as_it_was(target, prompt, caplog):
    """A later layer of the first pass fails, when earlier ones have written their keys; then plain goes on."""
    first = target.generate(prompt, max_new_tokens=6, do_sample=False)
    text = torch.cat([first, prompt], dim=1)

    class Once(type(target)):
        is_sampling = False

        def _sample(self, *args, **kwargs):
            self.is_sampling = True
            try:
                return super()._sample(*args, **kwargs)
            finally:
                self.is_sampling = False

    target.__class__ = Once
    layer = target.model.layers[1]
    forward = layer.forward

    def failing(*args, **kwargs):
        if not target.is_sampling:
            raise RuntimeError("a layer failed")
        return forward(*args, **kwargs)

    def cache_of_first_turn():
        cache = DynamicCache()
        target.generate(prompt, max_new_tokens=6, do_sample=False, **{cache_argument(target): cache})
        return {cache_argument(target): cache}

    layer.forward = failing
    assert_soft(target, text, caplog, says="a layer failed", make_kwargs=cache_of_first_turn)


# What is the caller's


@pytest.mark.parametrize("is_second_door", [False, True])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_assistant_tokens": 0}, "num_assistant_tokens is 0"),
        ({"drafting_mode": "never"}, "drafting_mode is 'never'"),
        ({"on_draft_error": "ignore"}, "on_draft_error is 'ignore'"),
    ],
)
def test_bad_options_are_errors_before_any_work(request, target, prompt, caplog, is_second_door, options, message):
    if is_second_door:
        request.getfixturevalue("second_door")
    drafter = oracle_drafter(target.generate(prompt, **PLAIN))
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    caplog.clear()
    with ForwardCounter(target) as forwards, pytest.raises(ValueError, match=message):
        target.generate(prompt, assistant_model=drafter, **PLAIN)
    assert forwards.count == 0 and not caplog.records


def test_drafters_of_another_tokenizer_are_refused(target, prompt, caplog):
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama", vocab_size=90))
    tokenizers = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": tiny_tokenizer()}
    with ForwardCounter(target) as forwards, pytest.raises(ValueError, match="90 tokens.*assistant_tokenizer"):
        target.generate(prompt, assistant_model=drafter, **tokenizers, **PLAIN)
    assert forwards.count == 0 and "could not begin" not in caplog.text


class Raising:
    """A processor, a criterion or a streamer of the caller's that raises at its `after`-th call, once."""

    def __init__(self, after):
        self.calls, self.after = 0, after

    def count(self):
        self.calls += 1
        if self.calls == self.after:
            raise KeyError("of the caller's")

    def processor(self, input_ids, scores):
        self.count()
        return scores

    def criterion(self, input_ids, scores, **kwargs):
        self.count()
        return torch.zeros(1, dtype=torch.bool)

    def put(self, value):
        self.count()

    def end(self):
        pass


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria", "streamer"])
def test_the_callers_own_errors_stay_errors_and_the_next_call_works(target, prompt, caplog, kind, after, mode):
    reference = target.generate(prompt, **PLAIN)
    drafter = oracle_drafter(reference)
    drafter.generation_config.drafting_mode = mode
    after += kind == "streamer"  # the first chunk is the prompt, which generate itself puts
    raising = Raising(after)
    given = {
        "logits_processor": [raising.processor],
        "stopping_criteria": [raising.criterion],
        "streamer": raising,
    }[kind]
    caplog.clear()
    with ForwardCounter(target) as forwards, pytest.raises(KeyError, match="of the caller's"):
        target.generate(prompt, assistant_model=drafter, **{kind: given}, **PLAIN)
    assert raising.calls == after and forwards.count < 4 and not caplog.records
    with ForwardCounter(target) as forwards:
        output = target.generate(prompt, assistant_model=drafter, **{kind: given}, **PLAIN)
    assert torch.equal(output, reference) and forwards.count == {"sync": 4, "async": 5}[mode]


@pytest.mark.parametrize("after", [1, 2])
def test_a_streamers_error_in_the_second_door_is_the_callers_too(second_door, target, prompt, caplog, after):
    """What it has seen is not streamed once more by a plain run."""
    reference = target.generate(prompt, **PLAIN)
    drafter, streamer = oracle_drafter(reference), Raising(after + 1)
    caplog.clear()
    with pytest.raises(KeyError, match="of the caller's"):
        target.generate(prompt, assistant_model=drafter, streamer=streamer, **PLAIN)
    assert streamer.calls == after + 1 and not caplog.records
    with ForwardCounter(target) as forwards:
        output = target.generate(prompt, assistant_model=drafter, streamer=streamer, **PLAIN)
    assert torch.equal(output, reference) and forwards.count == 4


def test_an_error_on_request_is_raised(target, prompt):
    drafter = oracle_drafter(target.generate(prompt, **PLAIN))
    drafter.generation_config.on_draft_error = "raise"
    drafter.packed_forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(generation_hook.DraftingError, match="ZeroDivisionError"):
        target.generate(prompt, assistant_model=drafter, **PLAIN)


def test_importing_the_package_needs_no_network_and_starts_no_threads():
    code = "import threading; n = threading.active_count(); import d3d_hf; assert threading.active_count() == n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
