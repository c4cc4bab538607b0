"""
Whoever is called during a generation, grammars, watermarks, guidance, criteria, streamers and users' own, is called
with a drafter as without one: as often, in the same order, with the same arguments.
"""

import functools
import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from beside_plain import assert_as_plain, fewest_forwards, num_new_tokens, run
from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.testing import ARCHITECTURES, acceptance_profile_drafter, oracle_drafter, tiny_model, tiny_tokenizer
from lossless import PROMPT_LENGTH, drafters_of, prompt_of
from test_real_model import encode


SHIPPED_DRAFTER = Path(__file__).resolve().parent.parent / "hub_cards" / "d3d-smollm2-135m"
BLOCK_SIZE, NEW = 5, 26
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
    },
    "required": ["name", "age"],
}
WAYS = [("sync", 0), ("sync", 12), ("async", 0)]


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", seed=11, initializer_range=0.2)


@pytest.fixture(scope="module")
def prompt():
    return prompt_of()


def in_way(drafter, way):
    drafter.generation_config.drafting_mode, drafter.generation_config.draft_tree_size = way
    drafter.generation_config.on_draft_error = "raise"
    return drafter


# Grammars, on real text


@pytest.fixture(scope="module")
def real(embedded_target):
    """The embedded target in float32, its tokenizer, the shipped drafter, and what is asked."""
    _, tokenizer = embedded_target
    target = AutoModelForCausalLM.from_pretrained(embedded.target_folder(), dtype=torch.float32)
    drafter = D3DDrafterForCausalLM.from_target(target, adapter=SHIPPED_DRAFTER)
    return target, tokenizer, drafter, encode(tokenizer, "Describe a person as JSON with name and age.")


def outlines_processors(target, tokenizer):
    outlines = pytest.importorskip("outlines")
    backends = pytest.importorskip("outlines.backends")
    model = outlines.from_transformers(target, tokenizer)
    # One for each call: it moves through the grammar with the tokens that it is shown, and cannot go back.
    return lambda: backends.get_json_schema_logits_processor("outlines_core", model, json.dumps(SCHEMA))


def xgrammar_processors(target, tokenizer):
    xgrammar = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    return lambda: hf.LogitsProcessor(grammar)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("processors_of", [outlines_processors, xgrammar_processors], ids=["outlines", "xgrammar"])
def test_grammars_give_the_same_json_in_fewer_forwards(real, processors_of, do_sample):
    target, tokenizer, drafter, inputs = real
    make = processors_of(target, tokenizer)
    options = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 40, "do_sample": do_sample}
    if do_sample:
        options["temperature"] = 0.7
    plain = run(target, inputs["input_ids"], seed=1, logits_processor=[make()], **options)
    text = tokenizer.decode(plain.ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert set(json.loads(text)) == {"name", "age"}, "the grammar must matter in this test"
    in_way(drafter, ("sync", 12 if do_sample else 0))
    ours = run(target, inputs["input_ids"], drafter, seed=1, logits_processor=[make()], **options)
    assert_as_plain(ours, plain, drafter)
    assert ours.num_forwards < 0.6 * num_new_tokens(plain, inputs["input_ids"])


# Watermarks and guidance

WITH_STATE = {
    "synth_id": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    "green_list": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
    "green_list_selfhash": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "guidance": {"guidance_scale": 1.5},
    "guidance_with_negative_prompt": {"guidance_scale": 2.5, "negative_prompt_ids": prompt_of(4, seed=8)},
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", WITH_STATE)
def test_watermarks_and_guidance_see_plain_decoding(target, prompt, name, do_sample, way):
    kwargs = {"do_sample": do_sample, "max_new_tokens": NEW, **WITH_STATE[name]}
    if do_sample:
        kwargs["top_k"] = 0
    plain = run(target, prompt, seed=3, **kwargs)
    without = run(
        target, prompt, seed=3, **{key: value for key, value in kwargs.items() if key not in WITH_STATE[name]}
    )
    assert do_sample or name == "synth_id" or plain.ids.tolist() != without.ids.tolist(), "it must matter in this test"
    drafter = in_way(oracle_drafter(plain.ids, block_size=BLOCK_SIZE), way)
    ours = run(target, prompt, drafter, seed=3, **kwargs)
    num_guided = NEW if "guidance" in name else 0  # one forward without the prompt for each token
    assert_as_plain(ours, plain, drafter, num_guided)
    num_alone = 1 if way[0] == "async" else 0
    assert ours.num_forwards - num_guided == num_alone + fewest_forwards(NEW - num_alone, BLOCK_SIZE)


# Users' own


class Log:
    """What happened during a generation, in order: names and arguments."""

    def __init__(self):
        self.events = []

    def add(self, name, *values):
        self.events.append((name, *(None if value is None else torch.as_tensor(value).tolist() for value in values)))


class RecordingProcessor(LogitsProcessor):
    """Notes its calls; its state, the number of calls and the token it forbade last, decides what it forbids."""

    def __init__(self, log, draws=False, fails_at=None):
        self.log, self.draws, self.fails_at = log, draws, fails_at
        self.num_calls, self.last = 0, 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        self.log.add("processor", input_ids, (1e3 * scores).round())
        if self.num_calls == self.fails_at:
            raise KeyError("the user's own fault")
        if self.num_calls % 3 == 0:
            self.last = int(scores.argmax())
        scores[:, self.last] = float("-inf")  # in place, as some processors do
        if self.draws:
            scores = scores + 0.5 * torch.rand(scores.shape)
        return scores


class RecordingCriterion(StoppingCriteria):
    """Notes its calls, and ends the text at a length."""

    def __init__(self, log, length=None):
        self.log, self.length = log, length

    def __call__(self, input_ids, scores, **kwargs):
        self.log.add("criterion", input_ids, None if scores is None else len(scores))
        is_done = self.length is not None and input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), is_done)


class RecordingStreamer(BaseStreamer):
    def __init__(self, log):
        self.log = log

    def put(self, value):
        assert value.device.type == "cpu"
        self.log.add("streamer", value)

    def end(self):
        self.log.add("end")


def everybody(log, length=None, **kwargs):
    def allowed(batch_id, ids):
        log.add("allowed", batch_id, ids)
        return list(range(int(ids[-1]) % 2, 67, 2))

    return {
        "logits_processor": [RecordingProcessor(log, **kwargs)],
        "stopping_criteria": [RecordingCriterion(log, length)],
        "streamer": RecordingStreamer(log),
        "prefix_allowed_tokens_fn": allowed,
    }


def rounded_apart(ours: list, plain: list) -> bool:
    """Whether two logs differ by more than rounding, in the only figures that are rounded: a processor's scores."""
    if [event[:2] for event in ours] != [event[:2] for event in plain]:
        return True
    for one, other in zip(ours, plain):
        if one[0] == "processor":
            if not torch.allclose(torch.tensor(one[2]), torch.tensor(other[2]), atol=1.5):
                return True
        elif one != other:
            return True
    return False


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"do_sample": True}, {"return_dict_in_generate": True, "output_scores": True}, {"eos_token_id": [7, 8, 9]}],
    ids=["greedy", "sampled", "scores", "ends"],
)
def test_everybody_is_called_as_in_plain_decoding(target, prompt, kwargs, way):
    kwargs = {"max_new_tokens": NEW, "pad_token_id": 0, **kwargs}
    expected = Log()
    plain = run(target, prompt, seed=3, **kwargs, **everybody(expected))
    num_tokens = num_new_tokens(plain, prompt)
    assert len(expected.events) == 4 * num_tokens + 2, "four for a token, the prompt for the streamer, and the end"
    for name, drafter in drafters_of(plain.ids, block_size=BLOCK_SIZE).items():
        log = Log()
        ours = run(target, prompt, in_way(drafter, way), seed=3, **kwargs, **everybody(log))
        assert not rounded_apart(log.events, expected.events), name
        assert_as_plain(ours, plain, drafter)
        if name == "oracle":
            num_alone = 1 if way[0] == "async" else 0
            assert ours.num_forwards == num_alone + fewest_forwards(num_tokens - num_alone, BLOCK_SIZE)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_processor_that_draws_shares_the_generator_with_the_tokens(target, prompt, way):
    """Its draws and those of the tokens take turns, so that nobody could foresee the tokens' noise."""
    kwargs = {"max_new_tokens": NEW, "do_sample": True}
    plain = run(target, prompt, seed=4, logits_processor=[RecordingProcessor(Log(), draws=True)], **kwargs)
    drafter = in_way(acceptance_profile_drafter(plain.ids, [0.9, 0.8], block_size=BLOCK_SIZE), way)
    ours = run(target, prompt, drafter, seed=4, logits_processor=[RecordingProcessor(Log(), draws=True)], **kwargs)
    assert_as_plain(ours, plain, drafter)
    assert ours.num_forwards < NEW


@pytest.mark.parametrize("fails_at", [1, 2, 9])
def test_what_a_processor_raises_reaches_the_caller_at_the_same_call(target, prompt, fails_at, caplog):
    kwargs = {"max_new_tokens": NEW}
    plain = run(target, prompt, **kwargs, **everybody(Log()))
    logs = Log(), Log()
    for log, drafter in zip(logs, (None, oracle_drafter(plain.ids, block_size=BLOCK_SIZE))):
        with pytest.raises(KeyError, match="the user's own fault"):
            run(target, prompt, drafter, **kwargs, **everybody(log, fails_at=fails_at))
    assert not rounded_apart(logs[1].events, logs[0].events)
    assert not caplog.text


# Where the text ends


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_criterion_ends_the_text_inside_a_block(target, prompt, num_tokens, do_sample):
    """Exactly where it fires, after a block of which the rest was right as well."""
    kwargs = {"do_sample": do_sample, "max_new_tokens": NEW}
    free = run(target, prompt, seed=2, **kwargs)
    drafter = oracle_drafter(free.ids, block_size=BLOCK_SIZE)

    def stopping():
        return [RecordingCriterion(Log(), PROMPT_LENGTH + num_tokens)]

    plain = run(target, prompt, seed=2, stopping_criteria=stopping(), **kwargs)
    ours = run(target, prompt, drafter, seed=2, stopping_criteria=stopping(), **kwargs)
    assert_as_plain(ours, plain, drafter)
    assert torch.equal(ours.ids, free.ids[:, : PROMPT_LENGTH + num_tokens])
    assert ours.num_forwards == fewest_forwards(num_tokens, BLOCK_SIZE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("start, length", [(0, 1), (0, 3), (3, 2), (4, 3), (5, 1), (6, 2), (11, 3)])
def test_stop_strings(architecture, start, length):
    """Within a block, across two, and ending with the bonus."""
    target, prompt, tokenizer = tiny_model(architecture, seed=11), prompt_of(), tiny_tokenizer()
    free = run(target, prompt, do_sample=True, max_new_tokens=NEW)
    first = PROMPT_LENGTH + start
    kwargs = {"do_sample": True, "max_new_tokens": NEW, "tokenizer": tokenizer}
    kwargs["stop_strings"] = [tokenizer.decode(free.ids[0, first : first + length]), "@@"]
    plain = run(target, prompt, **kwargs)
    assert plain.ids.shape[1] <= first + length
    for name, drafter in drafters_of(free.ids, block_size=BLOCK_SIZE).items():
        ours = run(target, prompt, drafter, **kwargs)
        assert_as_plain(ours, plain, drafter)
        if name == "oracle":
            assert ours.num_forwards == fewest_forwards(num_new_tokens(plain, prompt), BLOCK_SIZE)


# Streamers


def streamed(target, prompt, drafter, **kwargs) -> list[str]:
    """The pieces of text that an iterator streamer hands out while a thread generates."""
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=kwargs.pop("skip_prompt"), timeout=60)
    thread = threading.Thread(target=functools.partial(run, target, prompt, drafter, streamer=streamer, **kwargs))
    thread.start()
    pieces = list(streamer)
    thread.join(60)
    assert not thread.is_alive()
    return pieces


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("skip_prompt", [True, False])
def test_an_iterator_streamer_hands_out_the_same_pieces(target, prompt, skip_prompt, way):
    kwargs = {"max_new_tokens": NEW, "skip_prompt": skip_prompt, "do_sample": True}
    plain = run(target, prompt, max_new_tokens=NEW, do_sample=True)
    expected = streamed(target, prompt, None, **kwargs)
    drafter = in_way(oracle_drafter(plain.ids, block_size=BLOCK_SIZE), way)
    assert streamed(target, prompt, drafter, **kwargs) == expected
    assert len(expected) > 3 and drafter.last_generation_stats.num_rounds < NEW / 3


def test_a_streamer_that_gives_up_ends_the_call_in_the_middle_of_a_block(target, prompt):
    class GivesUp(RecordingStreamer):
        def put(self, value):
            super().put(value)
            if len(self.log.events) == 10:
                raise BrokenPipeError("nobody listens")

    plain = run(target, prompt, max_new_tokens=NEW)
    logs = Log(), Log()
    drafter = oracle_drafter(plain.ids, block_size=BLOCK_SIZE)
    for log, assistant in zip(logs, (None, drafter)):
        with pytest.raises(BrokenPipeError):
            run(target, prompt, assistant, max_new_tokens=NEW, streamer=GivesUp(log))
    assert logs[0].events == logs[1].events
    assert_as_plain(run(target, prompt, drafter, max_new_tokens=NEW), plain, drafter)
