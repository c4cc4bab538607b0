"""What a call of generate gives back: field by field and token by token what plain generation does."""

import copy
import threading

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation import BaseStreamer

from d3d_hf.model import generation_hook
from d3d_hf.model.backbones import cache_argument
from d3d_hf.testing import (
    ARCHITECTURES,
    ForwardCounter,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
    tiny_tokenizer,
)
from lossless import PROMPT_LENGTH, generate, prompt_of


NEW = 17
EVERYTHING = {
    "max_new_tokens": NEW,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def flat(output, name):
    """A nested tuple of per-step outputs as one list of tensors."""
    values = getattr(output, name)
    return [tensor for step in values for tensor in (step if isinstance(step, tuple) else (step,))]


def assert_same_fields(ours, plain):
    """Type, fields, and every tensor in them, shapes included."""
    assert type(ours) is type(plain) and ours.keys() == plain.keys()
    assert torch.equal(ours.sequences, plain.sequences)
    for name in set(plain.keys()) & {"scores", "logits", "hidden_states", "attentions"}:
        assert len(getattr(ours, name)) == len(getattr(plain, name))
        for left, right in zip(flat(ours, name), flat(plain, name), strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    (name,) = set(plain.keys()) & {"cache", "past_key_values"}
    ours, plain = ours[name], plain[name]
    assert type(ours) is type(plain) and ours.get_seq_length() == plain.get_seq_length()
    for left, right in zip(ours.layers, plain.layers, strict=True):
        assert type(left) is type(right)
        torch.testing.assert_close(left.keys, right.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(left.values, right.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["oracle", "noisy", "anti"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_returned_dictionaries_are_those_of_a_plain_run(architecture, kind):
    """Field by field: each token's scores, logits, hidden states and attentions, and the cache."""
    target, prompt = tiny_model(architecture, seed=11, attn_implementation="eager"), prompt_of()
    asked = dict(EVERYTHING)
    has_windows = architecture == "gemma3"
    if has_windows:
        asked.pop("output_attentions")
    plain = generate(target, prompt, **asked)
    drafter = {
        "oracle": oracle_drafter,
        "noisy": lambda reference, **kwargs: noisy_oracle_drafter(reference, [2], **kwargs),
        "anti": anti_oracle_drafter,
    }[kind](plain.sequences, block_size=4)
    with ForwardCounter(target) as forwards:
        ours = generate(target, prompt, drafter, **asked)
    assert_same_fields(ours, plain)
    assert forwards.count == {"oracle": 4, "noisy": 6, "anti": NEW}[kind]
    for name in set(asked) - {"max_new_tokens", "return_dict_in_generate"}:
        only = {"max_new_tokens": NEW, "return_dict_in_generate": True, name: True}
        assert_same_fields(generate(target, prompt, drafter, **only), generate(target, prompt, **only))


def test_attentions_of_sliding_layers_are_those_of_a_plain_run(caplog):
    """A pass over several tokens cannot give them in rows as wide as plain decoding's, so it runs plain."""
    target, prompt = tiny_model("gemma3", seed=11, attn_implementation="eager"), prompt_of()
    plain = generate(target, prompt, **EVERYTHING)
    drafter = oracle_drafter(plain.sequences, block_size=4)
    for _ in range(2):
        assert_same_fields(generate(target, prompt, drafter, **EVERYTHING), plain)
    assert caplog.text.count("hidden states or attentions were asked for") == 1
    assert drafter.last_generation_stats.door == "plain"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dictionaries_of_the_second_door_are_plain_too(architecture, monkeypatch):
    """Where hidden states or attentions are asked for it runs plain."""
    monkeypatch.setattr(generation_hook, "_doors", [door for door in generation_hook._doors if door.name != "loop"])
    target, prompt = tiny_model(architecture, seed=11, attn_implementation="eager"), prompt_of()
    inner = ("output_hidden_states", "output_attentions")
    for left_out in ((), inner[:1], inner[1:], inner):
        asked = {**EVERYTHING, **dict.fromkeys(left_out, False)}
        plain = generate(target, prompt, **asked)
        drafter = oracle_drafter(plain.sequences, block_size=4)
        with ForwardCounter(target) as forwards:
            assert_same_fields(generate(target, prompt, drafter, **asked), plain)
        assert forwards.count == (4 if left_out == inner else NEW)


def test_dictionaries_of_a_sampled_run_and_of_processed_logits():
    target, prompt = tiny_model("qwen3", seed=11, attn_implementation="eager"), prompt_of()
    kwargs = {**EVERYTHING, "repetition_penalty": 1.2, "do_sample": True, "top_k": 5}

    def run(drafter=None):
        torch.manual_seed(4)
        return generate(target, prompt, drafter, **kwargs)

    plain = run()
    drafter = acceptance_profile_drafter(plain.sequences, [0.9, 0.6])
    with ForwardCounter(target) as forwards:
        assert_same_fields(run(drafter), plain)
    assert forwards.count < NEW


def test_a_dictionary_continues_a_conversation():
    """The cache that comes back serves the next turn, with a drafter and without."""
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = oracle_drafter(generate(target, prompt), block_size=4)
    asked = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    outputs = {}
    for name, assistant in (("plain", None), ("drafted", drafter)):
        first = generate(target, prompt, assistant, **asked)
        text = torch.cat([first.sequences, prompt_of(3, seed=1)], dim=1)
        (key,) = set(first.keys()) & {"cache", "past_key_values"}
        outputs[name] = [
            generate(target, text, second, **{cache_argument(target): copy.deepcopy(first[key])}).tolist()
            for second in (None, drafter)
        ]
    assert outputs["plain"][0] == outputs["plain"][1] == outputs["drafted"][0] == outputs["drafted"][1]
    assert outputs["plain"][0] == generate(target, text).tolist()


class Recording(TextStreamer):
    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.text, self.ends = "", 0

    def on_finalized_text(self, text, stream_end=False):
        self.text += text
        self.ends += stream_end


@pytest.mark.parametrize("make", [oracle_drafter, anti_oracle_drafter])
@pytest.mark.parametrize("eos_index", [None, 0, 3, 5, 8])
def test_a_text_streamer_sees_each_token_once_and_nothing_past_the_end(make, eos_index):
    target, prompt, tokenizer = tiny_model("llama", seed=11), prompt_of(), tiny_tokenizer()
    free = generate(target, prompt)
    kwargs = {}
    if eos_index is not None:
        kwargs = {"eos_token_id": int(free[0, PROMPT_LENGTH + eos_index]), "pad_token_id": 0}
    reference, streamer = generate(target, prompt, **kwargs), Recording(tokenizer)
    output = generate(target, prompt, make(free), streamer=streamer, **kwargs)
    assert torch.equal(output, reference)
    assert streamer.text == tokenizer.decode(reference[0, PROMPT_LENGTH:])
    assert streamer.ends == 1


class Chunks(BaseStreamer):
    """What a streamer is given, chunk by chunk."""

    def __init__(self):
        self.chunks = []

    def put(self, value):
        self.chunks.append((value.shape, value.device.type, value.tolist()))

    def end(self):
        self.chunks.append("end")


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_streamer_gets_the_chunks_of_plain_generation(mode, do_sample):
    """One token at a time, however many a round accepts."""
    target, prompt = tiny_model("llama", seed=11), prompt_of()

    def run(drafter=None):
        torch.manual_seed(4)
        streamer = Chunks()
        return generate(target, prompt, drafter, streamer=streamer, do_sample=do_sample), streamer.chunks

    reference, plain = run()
    drafter = oracle_drafter(reference)
    drafter.generation_config.drafting_mode = mode
    assert run(drafter)[1] == plain and len(plain) == 1 + 33 + 1
    assert drafter.last_generation_stats.num_rounds == {"sync": 6, "async": 7}[mode]


def test_an_iterator_streamer_in_a_thread():
    target, prompt, tokenizer = tiny_model("llama", seed=11), prompt_of(), tiny_tokenizer()
    reference = generate(target, prompt)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=generate, args=(target, prompt, oracle_drafter(reference)), kwargs={"streamer": streamer}
    )
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert not thread.is_alive() and text == tokenizer.decode(reference[0, PROMPT_LENGTH:])
