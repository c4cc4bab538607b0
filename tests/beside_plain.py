"""Helpers of the tests that hold a call with a drafter against the same call without one."""

from dataclasses import dataclass
from typing import Any

import torch

from d3d_hf.testing import ForwardCounter
from lossless import generate


@dataclass
class Run:
    """One call of generate: what it returned, the target's forwards, and where it left the global generator."""

    output: Any
    num_forwards: int
    generator_state: torch.Tensor

    @property
    def ids(self) -> torch.LongTensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


def run(target, prompt, drafter=None, seed=0, **kwargs) -> Run:
    torch.manual_seed(seed)
    with ForwardCounter(target) as forwards:
        output = generate(target, prompt, drafter, **kwargs)
    return Run(output, forwards.count, torch.get_rng_state())


def assert_as_plain(ours: Run, plain: Run, drafter=None, num_other_forwards: int = 0):
    """
    Same ids, same state of the generator; the drafter's statistics, if it is given, agree with what came out.
    `num_other_forwards` are the target's that a processor made.
    """
    assert ours.ids.tolist() == plain.ids.tolist()
    assert torch.equal(ours.generator_state, plain.generator_state)
    if drafter is not None:
        stats = drafter.last_generation_stats
        assert stats.door == "loop", stats.door_reason
        assert stats.num_rounds == ours.num_forwards - num_other_forwards == sum(stats.num_accepted.values())
        assert stats.num_tokens == sum((accepted + 1) * rounds for accepted, rounds in stats.num_accepted.items())
        assert not stats.num_errors


def num_new_tokens(run: Run, prompt) -> int:
    return run.ids.shape[1] - prompt.shape[1]


def fewest_forwards(num_tokens: int, block_size: int) -> int:
    """Forwards that so many tokens need if every draft is right."""
    return -(-num_tokens // (block_size + 1))
