"""Helpers of the generation tests: the same call with and without a drafter."""

import copy

import torch

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.drafting_options import DraftingOptions
from d3d_hf.model.generation_hook import Call
from d3d_hf.testing import (
    ForwardCounter,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
)


BLOCK_SIZE = 5
PROMPT_LENGTH = 6


def prompt_of(length=PROMPT_LENGTH, seed=0):
    return torch.randint(2, 67, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(target, prompt, drafter=None, **kwargs):
    kwargs = {"max_new_tokens": 33, "do_sample": False, "attention_mask": torch.ones_like(prompt), **kwargs}
    return target.generate(prompt, assistant_model=drafter, **kwargs)


def call_of(target, prompt, drafter, max_length=60) -> Call:
    """A greedy call as `generate` would hand it to a door, for tests that draft without it."""
    config = copy.deepcopy(target.generation_config)
    config.max_length = max_length
    options = DraftingOptions.resolve(config, drafter.generation_config, drafter.config.block_size)
    return Call(target, drafter, prompt, config, {}, options)


def drafters_of(reference, **kwargs):
    """Every kind of drafter for one reference output: name to drafter."""
    kwargs = {"block_size": BLOCK_SIZE, **kwargs}
    own = tiny_model("qwen3", seed=99, vocab_size=kwargs.get("vocab_size", 67))
    return {
        "oracle": oracle_drafter(reference, **kwargs),
        "noisy": noisy_oracle_drafter(reference, wrong_slots=[2], **kwargs),
        "mixed": acceptance_profile_drafter(reference, [0.9, 0.7, 0.5], **kwargs),
        "anti": anti_oracle_drafter(reference, **kwargs),
        "random": D3DDrafterForCausalLM.from_backbone(own, block_size=kwargs["block_size"]),
    }


def assert_same(target, prompt, drafter, num_forwards=None, reference=None, **kwargs):
    """
    Generates with and without the drafter: same ids, statistics that agree with what came out, and `num_forwards`
    target forwards. `kwargs` may be a function that makes them anew, for arguments with a state.
    """
    make = kwargs.pop("make_kwargs", dict)
    if reference is None:
        reference = generate(target, prompt, **kwargs, **make())
    with ForwardCounter(target) as forwards:
        output = generate(target, prompt, drafter, **kwargs, **make())
    assert output.tolist() == reference.tolist()
    if num_forwards is not None:
        assert forwards.count == num_forwards
    stats = drafter.last_generation_stats
    assert stats.num_tokens == output.shape[1] - prompt.shape[1]
    assert stats.num_rounds == forwards.count == sum(stats.num_accepted.values())
    assert sum((accepted + 1) * rounds for accepted, rounds in stats.num_accepted.items()) == stats.num_tokens
    return output


def assert_same_for_every_drafter(target, prompt, free=None, padding=0, **kwargs):
    """
    `assert_same` for every kind of drafter; the oracle must need the fewest forwards that the output allows, the
    anti-oracle one per token.

    Args:
        free: The output that the scripted drafters propose, if it is not the call's own (for calls that stop early).
        padding: Tokens on the left that the drafter does not count.
    """
    make = kwargs.get("make_kwargs", dict)
    plain = {name: value for name, value in kwargs.items() if name != "make_kwargs"}
    reference = generate(target, prompt, **plain, **make())
    num_tokens = reference.shape[1] - prompt.shape[1]
    proposed = (reference if free is None else free)[:, padding:]
    for name, drafter in drafters_of(proposed).items():
        num_forwards = {"oracle": -(-num_tokens // (BLOCK_SIZE + 1)), "anti": num_tokens}.get(name)
        assert_same(target, prompt, drafter, num_forwards, reference, **kwargs)
    return reference
