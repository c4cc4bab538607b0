"""Where a generation ends: with a drafter, exactly where it ends without one."""

import pytest
import torch
from scipy.stats import chi2
from transformers import StoppingCriteria

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.testing import (
    ForwardCounter,
    anti_oracle_drafter,
    memoryless_model,
    oracle_drafter,
    tiny_model,
    tiny_tokenizer,
    transition_logits,
)
from lossless import PROMPT_LENGTH, assert_same_for_every_drafter, generate, prompt_of


NEW = 33


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", seed=11)


@pytest.fixture(scope="module")
def prompt():
    return prompt_of()


@pytest.fixture(scope="module")
def free(target, prompt):
    """What comes out if nothing stops it."""
    return generate(target, prompt)


def first_index(free, token):
    return free[0, PROMPT_LENGTH:].tolist().index(token)


@pytest.mark.parametrize("index", range(12))
def test_eos_at_every_slot(target, prompt, free, index):
    eos = int(free[0, PROMPT_LENGTH + index])
    output = assert_same_for_every_drafter(target, prompt, free, eos_token_id=eos, pad_token_id=0)
    assert output.shape[1] == PROMPT_LENGTH + first_index(free, eos) + 1


def test_several_eos_ids_and_none(target, prompt, free):
    ids = [int(free[0, PROMPT_LENGTH + index]) for index in (20, 9, 15)]
    output = assert_same_for_every_drafter(target, prompt, free, eos_token_id=ids, pad_token_id=0)
    assert output.shape[1] == PROMPT_LENGTH + min(first_index(free, token) for token in ids) + 1
    assert assert_same_for_every_drafter(target, prompt, eos_token_id=None).shape[1] == PROMPT_LENGTH + NEW


@pytest.mark.parametrize(
    "kwargs", [{"min_new_tokens": 20}, {"min_length": PROMPT_LENGTH + 13}, {"min_new_tokens": NEW}]
)
def test_minimum_lengths_against_an_early_eos(target, prompt, free, kwargs):
    eos = int(free[0, PROMPT_LENGTH + 3])
    assert_same_for_every_drafter(target, prompt, eos_token_id=eos, pad_token_id=0, **kwargs)


@pytest.mark.parametrize("max_length", [PROMPT_LENGTH + 1, PROMPT_LENGTH + 2, PROMPT_LENGTH + 7, PROMPT_LENGTH + 24])
def test_max_length(target, prompt, max_length):
    output = assert_same_for_every_drafter(target, prompt, max_new_tokens=None, max_length=max_length)
    assert output.shape[1] == max_length


@pytest.mark.parametrize("num_new_tokens", [1, 9])
def test_a_prompt_that_ends_in_eos(target, free, num_new_tokens):
    prompt = free[:, : PROMPT_LENGTH + 2]
    eos = int(prompt[0, -1])
    for kwargs in ({}, {"min_new_tokens": min(num_new_tokens, 4)}):
        assert_same_for_every_drafter(
            target, prompt, eos_token_id=eos, pad_token_id=0, max_new_tokens=num_new_tokens, **kwargs
        )


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("index", range(14))
def test_stop_strings_of_one_to_three_tokens(target, prompt, free, index, length):
    """Ending at every slot, beginning in the block before, or with the first token of all."""
    tokenizer = tiny_tokenizer()
    start = PROMPT_LENGTH + index
    stop = tokenizer.decode(free[0, start : start + length])
    output = assert_same_for_every_drafter(target, prompt, free, stop_strings=[stop], tokenizer=tokenizer)
    assert tokenizer.decode(output[0]).endswith(stop) and output.shape[1] <= start + length


def test_several_stop_strings_and_eos(target, prompt, free):
    tokenizer = tiny_tokenizer()
    stops = [tokenizer.decode(free[0, i : i + 2]) for i in (PROMPT_LENGTH + 14, PROMPT_LENGTH + 9)]
    eos = int(free[0, PROMPT_LENGTH + 12])
    assert_same_for_every_drafter(
        target, prompt, free, stop_strings=stops, tokenizer=tokenizer, eos_token_id=eos, pad_token_id=0
    )


VOCAB_SIZE = 8


def test_under_sampling_stop_strings_do_not_bias_the_text():
    """
    The token that completes the stop string ends a good part of the texts here, and must come out neither too rarely
    nor too often for that; the law of the first two tokens, with the ends among them, is the target's.
    """
    target = memoryless_model(VOCAB_SIZE, seed=3)
    tokenizer = tiny_tokenizer(VOCAB_SIZE)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=3)
    prompt, stop, num_samples = torch.tensor([[2, 3]]), 4, 1500
    stop_string = tokenizer.decode([stop])
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    with ForwardCounter(target) as forwards:
        for seed in range(num_samples):
            torch.manual_seed(seed)
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=3,
                do_sample=True,
                top_k=0,
                stop_strings=[stop_string],
                tokenizer=tokenizer,
                pad_token_id=0,
                assistant_model=drafter,
            )[0, 2:].tolist()
            assert (stop in output) == (len(output) < 3 or output[-1] == stop) and stop not in output[:-1]
            counts[output[0], output[1] if len(output) > 1 else 0] += 1
    assert forwards.count < 2.6 * num_samples, "drafts must be accepted at all"
    probs = transition_logits(target).softmax(-1)
    law = probs[3][:, None] * probs
    law[stop] = 0
    law[stop, 0] = probs[3, stop]
    expected = num_samples * law
    assert not counts[expected == 0].any()
    likely = expected >= 5
    chi_square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert chi2.sf(chi_square, int(likely.sum()) - 1) > 1e-4


class StopsAfter(StoppingCriteria):
    """Ends the text once it is `length` tokens long; `None` never does. Counts what it is shown."""

    def __init__(self, length=None):
        self.length, self.lengths_seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths_seen.append(input_ids.shape[1])
        done = self.length is not None and input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("extra", range(9))
def test_custom_criteria_see_every_token(target, prompt, free, extra, mode):
    """Once, in order; the text ends where it ends without a drafter, inside a block too."""
    wanted = PROMPT_LENGTH + 4 + extra
    plain = StopsAfter(wanted)
    reference = generate(target, prompt, stopping_criteria=[plain])
    assert reference.shape[1] == wanted
    for make in (oracle_drafter, anti_oracle_drafter):
        criterion, drafter = StopsAfter(wanted), make(free, block_size=5)
        drafter.generation_config.drafting_mode = mode
        with ForwardCounter(target) as forwards:
            assert torch.equal(generate(target, prompt, drafter, stopping_criteria=[criterion]), reference)
        assert criterion.lengths_seen == plain.lengths_seen == list(range(PROMPT_LENGTH + 1, wanted + 1))
        num_new = wanted - PROMPT_LENGTH
        num_rounds = -(-num_new // 6) if mode == "sync" else 1 + -(-(num_new - 1) // 6)
        assert forwards.count == (num_rounds if make is oracle_drafter else num_new)


def test_criteria_that_never_fire_change_nothing(target, prompt):
    assert_same_for_every_drafter(target, prompt, make_kwargs=lambda: {"stopping_criteria": [StopsAfter()]})


def test_max_time_that_is_over_ends_the_generation(target, prompt, free):
    output = generate(target, prompt, oracle_drafter(free), max_time=1e-9)
    assert torch.equal(output, generate(target, prompt, max_time=1e-9)), "after the first token"
    assert output.shape[1] == PROMPT_LENGTH + 1
    with ForwardCounter(target) as forwards:
        assert torch.equal(generate(target, prompt, oracle_drafter(free), max_time=1e9), free)
    assert forwards.count == 6
