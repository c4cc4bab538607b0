"""What a call of generate gives back: as transformers' own assisted generation does."""

import threading

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer

from d3d_hf.testing import (
    ARCHITECTURES,
    acceptance_profile_drafter,
    anti_oracle_drafter,
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_returned_dictionaries_are_those_of_an_assisted_run(architecture):
    """The same drafts from a stock assistant (the target itself) and from an oracle: the same rounds and outputs."""
    target, prompt = tiny_model(architecture, seed=11, attn_implementation="eager"), prompt_of()
    reference = generate(target, prompt, max_new_tokens=NEW)
    stock = tiny_model(architecture, seed=11, attn_implementation="eager")
    stock.generation_config.num_assistant_tokens = 4
    stock.generation_config.num_assistant_tokens_schedule = "constant"
    stock.generation_config.assistant_confidence_threshold = 0.0
    expected = generate(target, prompt, stock, **EVERYTHING)
    got = generate(target, prompt, oracle_drafter(reference, block_size=4), **EVERYTHING)
    assert type(got) is type(expected) and got.keys() == expected.keys()
    assert torch.equal(got.sequences, expected.sequences) and torch.equal(got.sequences, reference)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert len(getattr(got, name)) == len(getattr(expected, name)) == NEW
        for ours, theirs in zip(flat(got, name), flat(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_scores_are_those_of_plain_generation():
    target, prompt = tiny_model("qwen3", seed=11), prompt_of()
    plain = generate(target, prompt, **{**EVERYTHING, "output_attentions": False}, repetition_penalty=1.2)
    drafter = acceptance_profile_drafter(plain.sequences, [0.9, 0.6])
    ours = generate(target, prompt, drafter, **{**EVERYTHING, "output_attentions": False}, repetition_penalty=1.2)
    for name in ("scores", "logits"):
        for left, right in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


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
