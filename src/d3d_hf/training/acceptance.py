"""Acceptance measured on text that the target wrote, without generating: what each kind of draft would have got right.

Where the text is the target's own greedy response, a draft after position `n` is accepted up to its first token that
differs from the text. One packed pass drafts after many positions at once, in three ways:

- *synchronous*: the context's own prediction, then mask slots;
- *masked*: mask slots alone, of a branch that hangs one position earlier and does not see the bonus;
- *guessed*: a branch that shows the bonus, as a guess that turns out right does.

Positions may be sampled, for a mean over the text, or be all of them: then the rounds of a whole generation can be
played through, and come out as `generate` would have them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..model.block import draftable
from ..model.packing import lay_out


MAX_GUESSES = 3


@dataclass
class DraftOutcomes:
    """
    What was drafted after positions of a batch, and the text there. Arrays of `int64`; -1 where there is nothing.

    Attributes:
        anchors: Positions, shape `(batch, positions)`.
        truth: The text after each, shape `(batch, positions, block_size + 1)`.
        synchronous, masked, guessed: Drafts, shape `(batch, positions, block_size)`. The first begins right after the
            position, the others one token later.
        likeliest: Best tokens for the place right after the position, shape `(batch, positions, MAX_GUESSES + 1)`.
    """

    anchors: np.ndarray
    truth: np.ndarray
    synchronous: np.ndarray
    masked: np.ndarray
    guessed: np.ndarray
    likeliest: np.ndarray


@torch.no_grad()
def draft_outcomes(
    model: torch.nn.Module,
    config,
    contexts: torch.LongTensor,
    context_mask: torch.Tensor,
    anchors: torch.LongTensor,
) -> DraftOutcomes:
    """
    Drafts after many positions of known texts in one packed pass.

    Args:
        model (`torch.nn.Module`): The drafter, wrapped for training or not.
        config ([`D3DConfig`]): The drafter's.
        contexts (`torch.LongTensor` of shape `(batch, length)`): The texts, padded on the right.
        context_mask (`torch.Tensor` of shape `(batch, length)`): 0 on padding.
        anchors (`torch.LongTensor` of shape `(batch, positions)`): Positions to draft after; -1 for none.
    """
    batch, length = contexts.shape
    num_positions, size = anchors.shape[1], config.block_size
    lengths = context_mask.sum(dim=1, keepdim=True)  # (batch, 1)
    offsets = torch.arange(1, size + 2, device=contexts.device)
    places = anchors[..., None] + offsets  # (batch, positions, size + 1)
    is_text = (anchors[..., None] >= 0) & (places < lengths[..., None])
    truth = contexts.gather(1, places.clamp(max=length - 1).flatten(1)).view_as(places)
    truth = torch.where(is_text, truth, -1)

    # Three branches per position: size - 1 masks; size masks; the true next token and size - 1 masks.
    branch_slots = (size - 1, size, size)
    shown = torch.tensor([0, 0, 1], device=contexts.device).repeat(num_positions).expand(batch, -1)
    slots = torch.zeros(batch, num_positions, sum(branch_slots), dtype=torch.long, device=contexts.device)
    slots[..., -size] = truth[..., 0].clamp(min=0)
    layout = lay_out(
        length,
        anchors.repeat_interleave(3, dim=1),
        branch_slots * num_positions,
        num_visible=shown,
        context_mask=context_mask,
        bidirectional=config.block_attention == "bidirectional",
    )
    ids = torch.cat([contexts, slots.flatten(1)], dim=1)
    # Positions are storage indices: the padding is on the right.
    is_anchor = torch.zeros(batch, length + 1, dtype=torch.bool, device=contexts.device)
    is_anchor.scatter_(1, torch.where(anchors < 0, length, anchors), True)
    keep = torch.cat([is_anchor[:, :length], torch.ones_like(slots.flatten(1), dtype=torch.bool)], dim=1)
    # A chained head sees the true tokens: up to the first that differs, that is what it sees when it drafts.
    slot_tokens = None
    if config.chained_head_size:
        standing = torch.cat([truth[..., :width] for width in branch_slots], dim=2)
        slot_tokens = torch.cat([torch.full_like(contexts, -1), standing.flatten(1)], dim=1)
    outputs = model(input_ids=ids, layout=layout, logits_to_keep=keep, slot_tokens=slot_tokens)
    logits = outputs.logits  # (kept, embedding_rows)
    never = () if config.mask_token_id is None else (config.mask_token_id,)
    best = draftable(logits, config.vocab_size, never).topk(min(MAX_GUESSES + 1, config.vocab_size)).indices
    table = torch.full((batch, ids.shape[1], best.shape[1]), -1, device=ids.device)
    table[keep] = best

    at_anchor = table.gather(1, anchors.clamp(min=0)[..., None].expand(-1, -1, table.shape[2]))
    at_slots = table[:, length:, 0].view(batch, num_positions, -1)
    drafts = torch.cat([at_anchor[..., :1], at_slots], dim=2).split(size, dim=2)
    arrays = [tensor.cpu().numpy() for tensor in (anchors, truth, *drafts, at_anchor)]
    return DraftOutcomes(*arrays)


def accepted_lengths(drafts: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Length of the common prefix along the last axis; the text's end (-1) is never matched."""
    return ((drafts == truth) & (truth >= 0)).cumprod(axis=-1).sum(axis=-1)


@dataclass
class AcceptedByPosition:
    """Accepted draft tokens after each position, and whether the position's next token is among the likeliest."""

    synchronous: np.ndarray  # (...,)
    masked: np.ndarray  # (...,)
    guessed: np.ndarray  # (...,)
    rank: np.ndarray  # (...,) 0 for the likeliest token, MAX_GUESSES + 1 for none of them

    @classmethod
    def of(cls, outcomes: DraftOutcomes) -> "AcceptedByPosition":
        later = outcomes.truth[..., 1:]
        hits = outcomes.likeliest == outcomes.truth[..., :1]
        rank = np.where(hits.any(axis=-1), hits.argmax(axis=-1), MAX_GUESSES + 1)
        return cls(
            accepted_lengths(outcomes.synchronous, outcomes.truth[..., :-1]),
            accepted_lengths(outcomes.masked, later),
            accepted_lengths(outcomes.guessed, later),
            rank,
        )

    def with_guesses(self, num_guesses: int) -> np.ndarray:
        """Accepted with so many guesses of the bonus beside the masked branch."""
        return np.where(self.rank < num_guesses, self.guessed, self.masked)


def mean_metrics(accepted: AcceptedByPosition, is_position: np.ndarray) -> dict[str, float]:
    """
    Means over sampled positions.

    Returns:
        `dict` with `acceptance_length` and `tokens_per_round` (synchronous), `ar_accuracy`, `bonus_hit_rate` (with
        `MAX_GUESSES` guesses), and `acceptance_length_masked`, `..._guess_1` to `..._guess_3` of packed drafts.
    """
    if not is_position.any():
        raise ValueError("No position to draft after: the texts have no response of at least two tokens.")

    def mean(values):
        return float(values[is_position].mean())

    metrics = {
        "acceptance_length": mean(accepted.synchronous),
        "tokens_per_round": mean(accepted.synchronous) + 1,
        "ar_accuracy": mean(accepted.rank == 0),
        "bonus_hit_rate": mean(accepted.rank < MAX_GUESSES),
        "acceptance_length_masked": mean(accepted.masked),
    }
    for num_guesses in range(1, MAX_GUESSES + 1):
        metrics[f"acceptance_length_guess_{num_guesses}"] = mean(accepted.with_guesses(num_guesses))
    return metrics


@dataclass
class Round:
    """
    A round of a generation that was played through.

    Attributes:
        num_tokens (`int`): Tokens emitted.
        is_hit (`bool`, *optional*): Whether a guess held the bonus; `None` where there was nothing to guess.
    """

    num_tokens: int
    is_hit: bool | None = None


def play_rounds(
    outcomes: DraftOutcomes, row: int, prompt_length: int, length: int, num_guesses: int | None = None
) -> list[Round]:
    """
    The rounds that `generate` would take over one text, from drafts after all of its positions.

    Args:
        outcomes ([`DraftOutcomes`]): With anchors `prompt_length - 1 .. length - 2` in that order.
        row (`int`): Which text of the batch.
        prompt_length, length (`int`): Of the prompt, and of prompt and response.
        num_guesses (`int`, *optional*):
            `None` for synchronous drafts; else packed drafts: masked branches and so many guesses of the bonus, of
            which none is the token that was just rejected. The first packed round has no draft.
    """
    accepted = AcceptedByPosition.of(outcomes)
    first = prompt_length - 1
    rounds, position, rejected = [], first, None
    while position < length - 1:
        is_hit = None
        if num_guesses is None:
            at = position - first
            draft, num_accepted = outcomes.synchronous[row, at], accepted.synchronous[row, at]
        elif position == first:
            draft, num_accepted = np.empty(0, dtype=int), 0
        else:
            at = position - 1 - first
            guesses = [token for token in outcomes.likeliest[row, at] if token != rejected][:num_guesses]
            is_hit = bool(outcomes.truth[row, at, 0] in guesses) if num_guesses else None
            kind = "guessed" if is_hit else "masked"
            draft, num_accepted = getattr(outcomes, kind)[row, at], getattr(accepted, kind)[row, at]
        rejected = draft[num_accepted] if num_accepted < len(draft) else None
        num_tokens = int(min(num_accepted + 1, length - 1 - position))
        rounds.append(Round(num_tokens, is_hit))
        position += num_tokens
    return rounds


def play_through(
    outcomes: DraftOutcomes, row: int, prompt_length: int, length: int, num_guesses: int | None = None
) -> list[int]:
    """Tokens emitted in each of [`play_rounds`]."""
    return [played.num_tokens for played in play_rounds(outcomes, row, prompt_length, length, num_guesses)]


def evenly_spread(prompt_length: int, length: int, num_positions: int) -> np.ndarray:
    """Positions of a response to draft after, shape `(num_positions,)`; -1 pads a response with fewer."""
    candidates = np.arange(max(prompt_length - 1, 0), length - 2)
    anchors = np.full(num_positions, -1)
    if len(candidates):
        picks = np.unique(np.linspace(0, len(candidates) - 1, num_positions).round().astype(int))
        anchors[: len(picks)] = candidates[picks]
    return anchors


def bootstrap_interval(
    totals: Sequence[float], counts: Sequence[float], num_samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """95% interval of `sum(totals) / sum(counts)`, texts drawn with replacement (they are independent, rounds not)."""
    totals, counts = np.asarray(totals, dtype=float), np.asarray(counts, dtype=float)
    picks = np.random.default_rng(seed).integers(0, len(totals), (num_samples, len(totals)))
    ratios = totals[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


__all__ = [
    "MAX_GUESSES",
    "AcceptedByPosition",
    "DraftOutcomes",
    "Round",
    "accepted_lengths",
    "bootstrap_interval",
    "draft_outcomes",
    "evenly_spread",
    "mean_metrics",
    "play_rounds",
    "play_through",
]
