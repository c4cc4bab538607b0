"""What each layer of a drafter is worth: the acceptance length without it, on fixed texts and fixed positions.

All candidates of a step draft after the same positions, so that their differences are paired. The hidden states that
enter a layer do not depend on that layer: one full pass keeps them all, and the pass without layer `i` begins at
layer `i + 1` with what entered layer `i`. Over all candidates that is half the work of full passes. The vocabulary
projection goes slot by slot, over the drafts of all candidates that are still right, since a draft ends at its first
wrong token.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..model.block import draftable
from ..model.packing import PackedLayout, lay_out
from ..training.acceptance import bootstrap_interval, evenly_spread
from ..training.examples import to_example
from .removal import layers_replaced, prunable_layers, skip_layers


_ROWS_PER_PROJECTION = 256  # bounds the memory of logits


@dataclass
class CalibrationBatch:
    """
    One packed pass of synchronous drafts.

    Attributes:
        texts (`list[int]`): Which texts, by number.
        input_ids (`torch.LongTensor` of shape `(batch, tokens)`): Contexts, padded on the right, and mask slots.
        layout ([`PackedLayout`]): Of the pass.
        slot_tokens (`torch.LongTensor` of shape `(batch, tokens)`): What stands at the mask slots, -1 elsewhere.
        rows (`torch.LongTensor` of shape `(batch, positions, block_size)`): Outputs that the draft tokens come from.
        truth (`torch.LongTensor` of shape `(batch, positions, block_size)`): The text there; -1 for none.
    """

    texts: list[int]
    input_ids: torch.LongTensor
    layout: PackedLayout
    slot_tokens: torch.LongTensor
    rows: torch.LongTensor
    truth: torch.LongTensor


@dataclass
class Accepted:
    """
    Sums over the positions of each text, all of shape `(texts,)`.

    Attributes:
        tokens: Accepted draft tokens.
        first: Positions whose first draft token, the context's own prediction, was accepted.
        positions: Positions drafted after.
    """

    tokens: np.ndarray
    first: np.ndarray
    positions: np.ndarray

    @property
    def length(self) -> float:
        """The acceptance length."""
        return float(self.tokens.sum() / self.positions.sum())

    @property
    def ar_accuracy(self) -> float:
        return float(self.first.sum() / self.positions.sum())

    def interval(self) -> list[float]:
        """95% interval of the acceptance length over the texts."""
        return list(bootstrap_interval(self.tokens, self.positions))

    def retention(self, full: "Accepted") -> float:
        """Share of another drafter's acceptance length on the same positions."""
        return float(self.tokens.sum() / full.tokens.sum())

    def retention_interval(self, full: "Accepted") -> list[float]:
        """95% interval of the retention, paired over the texts; those where there is nothing to keep are left out."""
        has_any = full.tokens > 0
        return list(bootstrap_interval(self.tokens[has_any], full.tokens[has_any]))

    def of(self, texts: slice) -> "Accepted":
        """Of some of the texts."""
        return Accepted(self.tokens[texts], self.first[texts], self.positions[texts])

    def to_lists(self) -> dict[str, list[int]]:
        return {name: values.tolist() for name, values in vars(self).items()}

    @classmethod
    def from_lists(cls, lists: Mapping[str, Sequence[int]]) -> "Accepted":
        return cls(**{name: np.asarray(values, dtype=np.int64) for name, values in lists.items()})


class CalibrationSet:
    """
    Texts that the target wrote, with the positions to draft after, the same for every candidate.

    Args:
        rows (sequence of `Mapping`): In one of the layouts of `training.examples`.
        config ([`D3DConfig`]): The drafter's.
        positions_per_text (`int`, *optional*, defaults to 32): Evenly spread over the response.
        texts_per_pass (`int`, *optional*, defaults to 4): Bounds the memory.
        processing_class (*optional*): Tokenizer, for rows of `messages`.

    Raises:
        ValueError: No rows, rows of another vocabulary, or one without a response of at least two tokens.
    """

    def __init__(
        self,
        rows: Sequence[Mapping],
        config,
        positions_per_text: int = 32,
        texts_per_pass: int = 4,
        processing_class=None,
    ):
        if not len(rows):
            raise ValueError("The calibration data hold no rows: give responses that the target wrote.")
        for name, value in (("positions_per_text", positions_per_text), ("texts_per_pass", texts_per_pass)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give at least 1.")
        self._config = config
        self.texts = []
        for number, row in enumerate(rows):
            ids, prompt_length = to_example(row, processing_class, config.vocab_size)
            anchors = evenly_spread(prompt_length, len(ids), positions_per_text)
            if anchors[0] < 0:
                raise ValueError(
                    f"Row {number} of the calibration data has no response of at least two tokens: leave it out, or "
                    f"check where its prompt ends."
                )
            # What comes later than the last draft is of no use.
            self.texts.append((ids[: anchors.max() + config.block_size + 1], anchors))
        # Texts of like length go into one pass, which saves padding.
        order = sorted(range(len(self.texts)), key=lambda number: -len(self.texts[number][0]))
        self._groups = [order[i : i + texts_per_pass] for i in range(0, len(order), texts_per_pass)]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_batches(self) -> int:
        return len(self._groups)

    def batch(self, number: int, device: torch.device | str = "cpu") -> CalibrationBatch:
        """One of `num_batches` passes."""
        group, size = self._groups[number], self._config.block_size
        texts = [self.texts[i] for i in group]
        width = max(len(ids) for ids, _ in texts)
        contexts = torch.zeros(len(group), width, dtype=torch.long)
        lengths = torch.tensor([len(ids) for ids, _ in texts])
        for row, (ids, _) in enumerate(texts):
            contexts[row, : len(ids)] = torch.tensor(ids)
        anchors = torch.from_numpy(np.stack([anchors for _, anchors in texts]))  # (batch, positions)
        num_positions = anchors.shape[1]

        places = anchors[..., None] + torch.arange(1, size + 1)  # (batch, positions, size)
        is_text = (anchors[..., None] >= 0) & (places < lengths[:, None, None])
        truth = contexts.gather(1, places.clamp(max=width - 1).flatten(1)).view_as(places)
        truth = torch.where(is_text, truth, -1)
        # Draft token 0 comes from the anchor's own output, token j from mask slot j - 1, where token j - 1 stands.
        slot_rows = width + torch.arange(num_positions * (size - 1)).view(num_positions, size - 1)
        rows = torch.cat([anchors.clamp(min=0)[..., None], slot_rows.expand(len(group), -1, -1)], dim=2)
        standing = truth[..., :-1].flatten(1)
        layout = lay_out(
            width,
            anchors.to(device),
            (size - 1,) * num_positions if size > 1 else (),
            context_mask=(torch.arange(width) < lengths[:, None]).to(device),
            bidirectional=self._config.block_attention == "bidirectional",
        )
        return CalibrationBatch(
            texts=group,
            input_ids=torch.cat([contexts, torch.zeros_like(standing)], dim=1).to(device),
            layout=layout,
            slot_tokens=torch.cat([torch.full_like(contexts, -1), standing], dim=1).to(device),
            rows=rows.to(device),
            truth=truth.to(device),
        )


@torch.no_grad()
def accepted_in_batch(drafter, batch: CalibrationBatch) -> Accepted:
    """Accepted draft tokens of the texts of one batch."""
    return accepted_of(drafter, drafting_states(drafter, batch)[None], batch)[0]


def drafting_states(drafter, batch: CalibrationBatch) -> torch.Tensor:
    """Last hidden states that the draft tokens come from, shape `(batch, positions, block_size, hidden)`."""
    outputs = drafter.packed_forward(batch.input_ids, batch.layout, logits_to_keep=None, slot_tokens=batch.slot_tokens)
    (hidden_states,) = outputs.hidden_states
    return hidden_states[torch.arange(len(batch.texts), device=hidden_states.device)[:, None, None], batch.rows]


def accepted_of(drafter, states: torch.Tensor, batch: CalibrationBatch) -> list[Accepted]:
    """
    Projects the hidden states of several candidates together, slot by slot, those of drafts that are still right.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): Whose vocabulary projection it is.
        states (`torch.Tensor` of shape `(candidates, batch, positions, block_size, hidden)`): Of [`drafting_states`].
        batch ([`CalibrationBatch`]): What they were computed from.
    """
    never = () if drafter.config.mask_token_id is None else (drafter.config.mask_token_id,)
    truth = batch.truth.expand(states.shape[0], -1, -1, -1)
    alive = torch.ones_like(truth[..., 0], dtype=torch.bool)  # (candidates, batch, positions)
    accepted = torch.zeros_like(truth[..., 0])
    for slot in range(truth.shape[3]):
        alive = alive & (truth[..., slot] >= 0)
        rows = states[..., slot, :][alive]
        tokens = [
            draftable(drafter.project(part), drafter.config.vocab_size, never).argmax(dim=-1)
            for part in rows.split(_ROWS_PER_PROJECTION)
            if len(part)
        ]
        if not tokens:
            break
        alive[alive.clone()] = torch.cat(tokens) == truth[..., slot][alive]
        accepted += alive
    num_positions = (batch.truth[..., 0] >= 0).sum(dim=1).cpu().numpy()
    totals, first = (values.sum(dim=2).cpu().numpy() for values in (accepted, accepted > 0))
    return [Accepted(tokens, hits, num_positions) for tokens, hits in zip(totals, first)]


def accepted_drafts(drafter, calibration: CalibrationSet) -> Accepted:
    """Accepted draft tokens of all texts, in their order."""
    parts = {
        number: accepted_in_batch(drafter, calibration.batch(number, drafter.device))
        for number in range(calibration.num_batches)
    }
    return in_order_of_texts(parts, calibration)


def in_order_of_texts(parts: Mapping[int, Accepted], calibration: CalibrationSet) -> Accepted:
    """Puts the batches' results together."""
    order = np.argsort([text for number in sorted(parts) for text in calibration._groups[number]])
    names = ("tokens", "first", "positions")
    return Accepted(*(np.concatenate([getattr(parts[i], name) for i in sorted(parts)])[order] for name in names))


@torch.no_grad()
def accepted_without_each(
    drafter, batch: CalibrationBatch, on_layer: Callable[[int], None] = lambda layer: None
) -> list[Accepted]:
    """
    Accepted draft tokens of one batch without each layer in turn, from shared hidden states, of which it holds those
    that enter every layer: `num_layers x batch x tokens x hidden`.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): In eval mode.
        batch ([`CalibrationBatch`]): On its device.
        on_layer (`Callable(int)`, *optional*): Called after each candidate, with its index.
    """
    layers = prunable_layers(drafter)
    entering = entering_hidden_states(drafter, batch)
    states = []
    for index in range(len(layers)):
        outputs = dict.fromkeys(range(index), lambda hidden_states: hidden_states)
        outputs[index] = functools.partial(_give, entering[index])
        with layers_replaced(layers, outputs):
            states.append(drafting_states(drafter, batch))
        on_layer(index)
    return accepted_of(drafter, torch.stack(states), batch)


def _give(given: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    return given


@torch.no_grad()
def entering_hidden_states(drafter, batch: CalibrationBatch) -> list[torch.Tensor]:
    """What enters each layer, and what leaves the last: tensors of shape `(batch, tokens, hidden)`."""
    states = []

    def keep_input(layer, args, kwargs):
        states.append(args[0] if args else kwargs["hidden_states"])

    def keep_output(layer, args, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    layers = prunable_layers(drafter)
    handles = [layer.register_forward_pre_hook(keep_input, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(keep_output))
    try:
        drafter.packed_forward(batch.input_ids, batch.layout, logits_to_keep=None)
    finally:
        for handle in handles:
            handle.remove()
    return states


def accepted_without_each_naively(drafter, batch: CalibrationBatch) -> list[Accepted]:
    """The readable twin of [`accepted_without_each`]: a full pass without each layer."""
    results = []
    for index in range(len(prunable_layers(drafter))):
        with skip_layers(drafter, [index]):
            results.append(accepted_in_batch(drafter, batch))
    return results


@dataclass
class LayerScore:
    """
    What a drafter does without one of its layers.

    Attributes:
        layer (`int`): Index in the drafter as it is.
        acceptance_length (`float`): Without the layer, with its 95% `interval` over the texts.
        impact (`float`): What its removal costs of the acceptance length, with its 95% `impact_interval` (paired).
        ar_accuracy (`float`): Share of positions whose next token the context predicts right.
        is_tied (`bool`): Within one standard error (paired) of the best.
    """

    layer: int
    acceptance_length: float
    interval: list[float]
    impact: float
    impact_interval: list[float]
    ar_accuracy: float
    is_tied: bool


def score_layers(without: Sequence[Accepted], full: Accepted) -> list[LayerScore]:
    """
    Args:
        without (sequence of [`Accepted`]): Without each layer in turn.
        full ([`Accepted`]): With all of them.
    """
    best = max(without, key=lambda accepted: accepted.length)
    return [
        LayerScore(
            layer=layer,
            acceptance_length=accepted.length,
            interval=accepted.interval(),
            impact=full.length - accepted.length,
            impact_interval=list(bootstrap_interval(full.tokens - accepted.tokens, full.positions)),
            ar_accuracy=accepted.ar_accuracy,
            is_tied=best.length - accepted.length <= _standard_error(best.tokens - accepted.tokens, best.positions),
        )
        for layer, accepted in enumerate(without)
    ]


def _standard_error(totals: np.ndarray, counts: np.ndarray) -> float:
    """Of `sum(totals) / sum(counts)`, texts being independent."""
    if len(totals) < 2:
        return 0.0
    residuals = totals - counts * (totals.sum() / counts.sum())
    return float(np.sqrt(len(totals) / (len(totals) - 1) * (residuals**2).sum()) / counts.sum())


def cheapest(scores: Sequence[LayerScore]) -> LayerScore:
    """
    The layer to remove: the one whose removal leaves the longest accepted drafts or, where others are within noise of
    it, the one of them all that also keeps the autoregressive accuracy best.
    """
    tied = [score for score in scores if score.is_tied]
    return max(tied, key=lambda score: (score.ar_accuracy, score.acceptance_length, -score.layer))


__all__ = [
    "Accepted",
    "CalibrationBatch",
    "CalibrationSet",
    "LayerScore",
    "accepted_drafts",
    "accepted_in_batch",
    "accepted_of",
    "accepted_without_each",
    "accepted_without_each_naively",
    "cheapest",
    "drafting_states",
    "entering_hidden_states",
    "in_order_of_texts",
    "score_layers",
]
