"""How answers are decoded: greedily, or by draws that depend on the seed and the answer alone."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor


@dataclass(frozen=True)
class Decoding:
    """
    How answers are decoded.

    Args:
        max_new_tokens (`int`, *optional*, defaults to 512): Longest answer.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
        top_p (`float`, *optional*, defaults to 1.0), top_k (`int`, *optional*, defaults to 0): Both are off.
        seed (`int`, *optional*, defaults to 0): Each answer's draws depend on it and on the answer's id alone.

    Raises:
        ValueError: A value is out of range, or does nothing as `temperature` is 0.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give at least 1.")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: give 0, which is greedy, or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0 and at most 1, which is off.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give 0, which is off, or the number of tokens to keep.")
        if self.temperature == 0 and (self.top_p != 1 or self.top_k != 0):
            raise ValueError(
                f"top_p is {self.top_p} and top_k {self.top_k}, but at temperature 0, which is greedy, they do "
                "nothing: give a temperature, or leave them out."
            )

    def seed_of(self, row_id: str) -> int:
        digest = hashlib.sha256(f"{self.seed}:{row_id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1  # servers take 31 bits


class SamplePerRow(LogitsProcessor):
    """
    Draws the next token of each row from the row's law by a generator of the row's own, and leaves it as the only one
    possible. So a row's draws are the same in any batch.

    Args:
        seeds (sequence of `int`): One per row.
    """

    def __init__(self, seeds: Sequence[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)  # (batch, vocab)
        uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        thresholds = uniform.to(scores.device)[:, None] * cumulated[:, -1:]
        # The first token whose cumulated probability exceeds the threshold; one of probability 0 never does.
        chosen = torch.searchsorted(cumulated, thresholds, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


__all__ = ["Decoding", "SamplePerRow"]
