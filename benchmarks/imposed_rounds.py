"""What the checks of the cost model share: evenly imposed acceptance, and the steady pace of a generation."""

import functools
import time
from collections.abc import Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.bench.synthetic import ImposedAcceptance
from d3d_hf.cost_model.acceptance import first_slots, survival
from d3d_hf.cost_model.shapes import random_model


_GOLDEN = (5**0.5 - 1) / 2


class EvenlyImposedAcceptance(ImposedAcceptance):
    """
    Imposes a profile on a few rounds as if they were many: the draws of successive rounds are spread evenly (multiples
    of the golden ratio), so that every verdict turns up as often as its chance says.
    """

    num_rounds = 0

    def draft(self, context_length: int, num_tokens: int) -> torch.LongTensor:
        draw = self.num_rounds * _GOLDEN % 1
        self.num_rounds += 1
        reached = torch.tensor(survival(first_slots(self._profile, num_tokens)))
        places = slice(context_length, context_length + num_tokens)
        return torch.where(reached > draw, self._text[places], self._wrong[places])


class Pace(BaseStreamer):
    """
    Notes when tokens come, forward by forward of the target. The first round, which has the prefill in it, and the
    last, cut short, do not count.
    """

    def __init__(self):
        self._times, self._counts = [], []
        self._is_new_round = True  # the prompt comes first

    def begin_round(self):
        """A forward of the target begins; what comes until the next one is of one round."""
        self._is_new_round = True

    def put(self, value):
        if self._is_new_round:
            self._times.append(0.0)
            self._counts.append(0)
            self._is_new_round = False
        self._times[-1] = time.perf_counter()
        self._counts[-1] += value.numel()

    def end(self):
        pass

    @property
    def num_rounds(self) -> int:
        return len(self._times) - 4

    @property
    def num_tokens(self) -> int:
        return sum(self._counts[3:-1])

    @property
    def seconds(self) -> float:
        return self._times[-2] - self._times[2]

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / self.num_tokens


def paced(target, prompt: torch.LongTensor, max_new_tokens: int, **kwargs) -> Pace:
    """The pace of one greedy generation."""
    pace, previous, forward = Pace(), target.__dict__.get("forward"), target.forward

    @functools.wraps(forward)  # generate reads the signature
    def noted(*args, **kwargs):
        pace.begin_round()
        return forward(*args, **kwargs)

    target.forward = noted
    try:
        target.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, streamer=pace, **kwargs)
    finally:
        del target.forward
        if previous is not None:
            target.forward = previous
    return pace


def prompt_of(length: int, vocab_size: int) -> torch.LongTensor:
    return torch.randint(2, vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def random_drafter(config, block_size: int, mode: str = "sync") -> D3DDrafterForCausalLM:
    """An untrained drafter that drafts chains, eagerly, and raises where drafting fails."""
    drafter = D3DDrafterForCausalLM.from_backbone(random_model(config, seed=1), block_size=block_size).eval()
    config = drafter.generation_config
    config.drafting_mode, config.num_bonus_guesses, config.draft_tree_size = mode, 0, 0
    config.compile_drafter, config.on_draft_error = False, "raise"
    return drafter


def impose(profile: Sequence[float], target, drafter) -> EvenlyImposedAcceptance:
    """Imposes one profile on both, in the place of one imposed before."""
    for model, method in ((target, "forward"), (drafter, "make_drafts")):
        model.__dict__.pop(method, None)
    imposed = EvenlyImposedAcceptance(profile, target.config.vocab_size)
    imposed.impose_on_target(target)
    imposed.impose_on_drafter(drafter)
    return imposed


__all__ = ["EvenlyImposedAcceptance", "Pace", "impose", "paced", "prompt_of", "random_drafter"]
