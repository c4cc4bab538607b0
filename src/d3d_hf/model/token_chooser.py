"""From drafter logits to draft tokens, by the law of the call."""

from collections.abc import Callable, Sequence

import torch
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .verification import draw, drawable, fit_vocabulary, warp


def warpers_of(generation_config: GenerationConfig) -> list[Callable]:
    """
    The call's own temperature, top-k, top-p and min-p, in transformers' order. They shape what is drafted, not what
    is emitted: the closer the draft's law to the target's, the more is accepted.
    """
    config = generation_config
    warpers = []
    if config.temperature is not None and config.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(config.temperature)))
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        warpers.append(MinPLogitsWarper(config.min_p))
    return warpers


class TokenChooser:
    """
    Chooses draft tokens for one generation.

    Greedy mode, or `warpers=None`, takes the argmax and hands over no law, which is always exact: the verifier then
    compares the draft with its own choice. Otherwise tokens are drawn, and the law that they were drawn from is
    handed over.

    The generator of the draws is seeded from PyTorch's global CPU generator at the first draw, so that a fixed seed
    gives the same drafts whatever else consumes random numbers in between, and greedy generation consumes none.

    Args:
        vocab_size (`int`): The target's vocabulary size.
        never_drafted (sequence of `int`): Ids that are never drafted.
        warpers (list of `Callable`, *optional*): Applied to the logits before drawing; `None` for argmax drafts.
    """

    def __init__(self, vocab_size: int, never_drafted: Sequence[int] = (), warpers: list[Callable] | None = None):
        self._vocab_size = vocab_size
        self._never_drafted = never_drafted
        self._warpers = warpers
        self._generator = None

    def choose(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            logits (`torch.Tensor` of shape `(rows, embedding_rows)`): The drafter's, any float dtype.

        Returns:
            Tokens of shape `(rows,)`, and the float32 logits `(rows, vocab_size)` they were drawn from or `None`.
        """
        if self._warpers is None and logits.is_cuda:
            try:  # one reading of the logits instead of a float32 copy; comes with the package alone
                from d3d_hf.kernels import choose_tokens

                return choose_tokens(logits, self._vocab_size, self._never_drafted).tokens, None
            except ImportError:
                pass
        logits = fit_vocabulary(logits, self._vocab_size, self._never_drafted)
        return self._choose(logits)

    def choose_among(
        self, candidates: torch.LongTensor, logits: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        One token of a few, the others being left out of its law.

        Args:
            candidates (`torch.LongTensor` of shape `(candidates,)`): Ids of the vocabulary, without repetition.
            logits (`torch.Tensor` of shape `(candidates,)`): The drafter's for them.

        Returns:
            As [`TokenChooser.choose`] for one row.
        """
        logits = logits.float()
        for token in self._never_drafted:
            logits = logits.masked_fill(candidates == token, float("-inf"))
        if self._warpers is None:
            return candidates[logits.argmax()][None], None
        # Warped as a row of these alone: what is left out would be -inf before and after.
        place, law = self._choose(logits[None])
        row = law.new_full((1, self._vocab_size), float("-inf"))
        return candidates[place], row.scatter(1, candidates[None], law)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor | None]:
        if self._warpers is None:
            return logits.argmax(dim=-1), None
        law = drawable(warp(logits, self._warpers))
        if self._generator is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            self._generator = torch.Generator(device=law.device).manual_seed(seed)
        return draw(law, self._generator), law


__all__ = ["TokenChooser", "warpers_of"]
