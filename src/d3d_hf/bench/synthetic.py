"""Imposed acceptance: real models of any size do all their work, and a script decides what is accepted.

The target's logits are computed and then made to choose a fixed random text; a D3D draft is computed and its tokens
are then replaced, each being right with the probability of its slot. So the time of every round is the real one while
the acceptance is what was asked for, with random weights and in any dtype.
"""

import functools
from collections.abc import Iterable, Sequence

import torch

from ..cost_model.acceptance import check_probabilities, first_slots
from ..decoding import make_drafts
from ..decoding.draft_tree import DraftTree
from ..model.backbones import cache_argument


# Above every logit of any model here, and a number in float16.
_CERTAIN = 3e4


class ImposedAcceptance:
    """
    Args:
        profile (sequence of `float`):
            The chance that a slot is right given the slots before it; slots beyond its end take its last value.
        vocab_size (`int`): The target's.
        never (iterable of `int`, *optional*): Ids that no text holds, EOS above all.
        max_length (`int`, *optional*, defaults to 4096): Tokens of a text at most.

    Raises:
        ValueError: A chance that is none, or nothing to choose from.
    """

    def __init__(self, profile: Sequence[float], vocab_size: int, never: Iterable[int] = (), max_length: int = 4096):
        never = set(never)
        self._profile = check_probabilities("The acceptance profile", profile)
        self._allowed = torch.tensor([token for token in range(vocab_size) if token not in never])
        if len(self._allowed) < 2:
            raise ValueError(f"A vocabulary of {vocab_size} ids without {sorted(never)} leaves nothing to be wrong.")
        self._max_length = max_length
        self._on_device = {}
        self.begin(0)

    def begin(self, seed: int):
        """Another text and other draws; the same seed gives the same ones."""
        generator = torch.Generator().manual_seed(seed)
        choices = torch.randint(len(self._allowed), (self._max_length,), generator=generator)
        self._text = self._allowed[choices]
        self._wrong = self._allowed[(choices + 1) % len(self._allowed)]
        self._draws = seed
        self._on_device.clear()

    def text(self, start: int, end: int, device: torch.device) -> torch.LongTensor:
        """What the target chooses at the positions from `start` to before `end`."""
        if end > self._max_length:
            raise ValueError(f"The text outgrows max_length={self._max_length} of the imposed acceptance.")
        if device not in self._on_device:
            self._on_device[device] = self._text.to(device)
        return self._on_device[device][start:end]

    def draft(self, context_length: int, num_tokens: int) -> torch.LongTensor:
        """Draft tokens after so many tokens of text, on the CPU; the same for the same place, whoever drafts."""
        generator = torch.Generator().manual_seed(self._draws * self._max_length + context_length)
        chances = first_slots(self._profile, num_tokens)
        is_right = torch.rand(num_tokens, generator=generator) < torch.tensor(chances)
        places = slice(context_length, context_length + num_tokens)
        return torch.where(is_right, self._text[places], self._wrong[places])

    def impose_on_target(self, target):
        """Makes a target choose the text. Its forwards do all they did before."""
        forward, cache_name = target.forward, cache_argument(target)

        @functools.wraps(forward)
        def imposed(*args, **kwargs):
            cache = kwargs.get(cache_name)
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            end = ids.shape[1] + (0 if cache is None else cache.get_seq_length())
            outputs = forward(*args, **kwargs)
            logits = outputs.logits  # (1, rows, vocab_size): of the last positions
            chosen = self.text(end - logits.shape[1] + 1, end + 1, logits.device)
            logits[0].scatter_(1, chosen[:, None], _CERTAIN)
            return outputs

        target.forward = imposed

    def impose_on_drafter(self, drafter):
        """Makes a drafter hand over these draft tokens in the place of its own."""

        def make_imposed(call):
            # Found on the class: the drafter itself would lead back here.
            del drafter.make_drafts
            try:
                drafts = make_drafts(call)
            finally:
                drafter.make_drafts = make_imposed
            drafts.__class__ = _imposed_class(type(drafts))
            drafts.imposed = self
            return drafts

        drafter.make_drafts = make_imposed


class _ImposedDrafts:
    """Goes before the class of a call's drafts."""

    def _draft(self, text: torch.LongTensor, depth: int) -> DraftTree | None:
        tree = super()._draft(text, depth)
        return None if tree is None else DraftTree(self.imposed.draft(text.shape[0], min(len(tree), depth)))


@functools.cache
def _imposed_class(drafts_class: type) -> type:
    return type(f"Imposed{drafts_class.__name__}", (_ImposedDrafts, drafts_class), {})


__all__ = ["ImposedAcceptance"]
