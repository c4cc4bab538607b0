"""Training examples: a prompt and the target's own response as token ids, out of the layouts that data come in."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset


logger = logging.getLogger(__name__)

LAYOUTS = (
    "`input_ids` and `prompt_length`",
    "`prompt_ids` and `response_ids` (or `p` and `r`)",
    "`input_ids` and `labels` (-100 on the prompt)",
    "`messages` (needs a tokenizer with a chat template)",
)


def to_example(row: Mapping, processing_class=None, vocab_size: int | None = None) -> tuple[list[int], int]:
    """
    Reads one row, whatever its layout; columns beside those of its layout are ignored.

    Args:
        row (`Mapping`): One row of a dataset, in one of `LAYOUTS`.
        processing_class (*optional*): Tokenizer, for conversations.
        vocab_size (`int`, *optional*): Ids at or beyond it are refused.

    Returns:
        `tuple[list[int], int]`: The ids of prompt and response, and the prompt's length. Supervision begins after it.

    Raises:
        ValueError: An unknown layout, a prompt longer than the text, ids of another vocabulary.
    """
    if "input_ids" in row and "prompt_length" in row:
        ids, prompt_length = list(row["input_ids"]), int(row["prompt_length"])
    elif "prompt_ids" in row and "response_ids" in row:
        ids, prompt_length = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"])
    elif "p" in row and "r" in row:
        ids, prompt_length = [*row["p"], *row["r"]], len(row["p"])
    elif "input_ids" in row and "labels" in row:
        ids = list(row["input_ids"])
        prompt_length = next((i for i, label in enumerate(row["labels"]) if label != -100), len(ids))
    elif "messages" in row:
        ids, prompt_length = _encode_conversation(row["messages"], processing_class)
    else:
        raise ValueError(f"The data have the columns {sorted(row)}: give {'; or '.join(LAYOUTS)}.")
    if not 0 <= prompt_length <= len(ids):
        raise ValueError(f"prompt_length is {prompt_length} in a text of {len(ids)} tokens: give 0 to {len(ids)}.")
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise ValueError(
            f"The data hold token id {max(ids)}, but the drafter's vocabulary has {vocab_size} tokens: train on text "
            f"of the drafter's own target, tokenized by its tokenizer."
        )
    return ids, prompt_length


def _encode_conversation(messages: Sequence[Mapping], processing_class) -> tuple[list[int], int]:
    """The last assistant turn is the response. Found by length, so that templates need no generation tags."""
    if processing_class is None or getattr(processing_class, "chat_template", None) is None:
        raise ValueError("The data hold `messages`: pass processing_class=, a tokenizer with a chat template.")
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("A conversation must end in an assistant turn, which is the response to train on.")
    encode = processing_class.apply_chat_template
    prompt = encode(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    ids = encode(messages, tokenize=True, return_dict=True)["input_ids"]
    if ids[: len(prompt)] != prompt:
        raise ValueError(
            "The chat template writes the prompt of a finished conversation in another way than that of an open one, "
            "so the response cannot be told from it: regenerate the responses as token ids instead."
        )
    return ids, len(prompt)


def draw_blocks(
    length: int,
    prompt_length: int,
    block_size: int,
    num_blocks: int,
    visible_token_share: float,
    denoising_mask_ratio: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Draws the positions that blocks hang on, without replacement, and how many of their first slots are shown.

    A block on position `c` supervises the tokens from `c + 2` on (the one at `c + 1` is the context's own to predict),
    so `c` runs from the last token of the prompt to the third last of the text.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Anchors and visible counts, both of shape `(num_blocks,)`; -1 pads anchors.
    """
    candidates = np.arange(max(prompt_length - 1, 0), length - 2)
    anchors = np.full(num_blocks, -1)
    chosen = rng.permutation(candidates)[:num_blocks]
    anchors[: len(chosen)] = np.sort(chosen)
    num_visible = (rng.random(num_blocks) < visible_token_share).astype(int)
    most_shown = int((1 - denoising_mask_ratio) * block_size)
    if most_shown:
        num_visible = np.maximum(num_visible, rng.integers(0, most_shown + 1, num_blocks))
    room = np.maximum(length - 3 - anchors, 0)  # at least one mask slot must have a token to predict
    return anchors, np.minimum(num_visible, np.minimum(room, block_size - 1))


class DraftingDataset(Dataset):
    """
    Rows with the blocks to draft from them. Blocks are drawn anew for each epoch, from the seed, the epoch and the
    row's index alone: batch shape, resumption, workers and the number of processes do not change them.

    Args:
        rows (sequence of `Mapping`): A dataset of one of `LAYOUTS`.
        draw (`Callable(length, prompt_length, rng)`): Returns anchors and visible counts.
        seed (`int`): Of the draws.
        processing_class, vocab_size: As in `to_example`.
        chain_dropout (`float`, *optional*, defaults to 0.0): Share of blocks that are not corrected by a chained head.
    """

    def __init__(
        self,
        rows: Sequence[Mapping],
        draw,
        seed: int,
        processing_class=None,
        vocab_size: int | None = None,
        chain_dropout: float = 0.0,
    ):
        self._rows, self._draw, self._seed, self._chain_dropout = rows, draw, seed, chain_dropout
        self._processing_class, self._vocab_size = processing_class, vocab_size
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()  # seen by loader workers that live on
        if len(rows):
            self[0]  # an unknown layout shows before training begins

    def set_epoch(self, epoch: int):
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict:
        ids, prompt_length = to_example(self._rows[index], self._processing_class, self._vocab_size)
        rng = np.random.default_rng([self._seed, int(self._epoch), index])
        anchors, num_visible = self._draw(len(ids), prompt_length, rng)
        is_chained = rng.random(len(anchors)) >= self._chain_dropout
        return {
            "input_ids": ids,
            "prompt_length": prompt_length,
            "anchors": anchors,
            "num_visible": num_visible,
            "is_chained": is_chained,
        }


class DraftingCollator:
    """
    Packs rows into one batch: `[context, padded][slots of block 1][slots of block 2]...`.

    Args:
        block_size (`int`): Slots of each block.
        block_loss_decay (`float`): Weight of a mask slot relative to the one before.

    Returns:
        `dict` with `input_ids`, `labels` (-100: not supervised) and `loss_weights`, of shape
        `(batch, length + blocks * block_size)`, as are `slot_tokens`, the tokens that stand at the mask slots of
        blocks with a chained head (-1 elsewhere); `context_mask` of shape `(batch, length)`; `anchors` and
        `num_visible` of shape `(batch, blocks)`. A label is what the output at its own place must predict.
    """

    def __init__(self, block_size: int, block_loss_decay: float):
        self.block_size, self.block_loss_decay = block_size, block_loss_decay

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        contexts = np.zeros((len(rows), width), dtype=np.int64)
        context_mask = np.zeros((len(rows), width), dtype=np.int64)
        context_labels = np.full((len(rows), width), -100, dtype=np.int64)
        slots, slot_labels, slot_weights, standing = [], [], [], []
        for i, row in enumerate(rows):
            ids, prompt_length = np.asarray(row["input_ids"], dtype=np.int64), row["prompt_length"]
            length = len(ids)
            contexts[i, :length] = ids
            context_mask[i, :length] = 1
            first = max(prompt_length, 1)
            context_labels[i, first - 1 : length - 1] = ids[first:]

            # Slot j (from 0) of a block on c stands at c + 1 + j: it may show that token, or predicts the one after.
            anchors, num_visible = row["anchors"][:, None], row["num_visible"][:, None]  # (blocks, 1)
            positions = anchors + 1 + np.arange(self.block_size)
            tokens = np.append(ids, [0, 0])
            depth = np.arange(self.block_size) - num_visible
            predicts = (anchors >= 0) & (depth >= 0) & (positions + 1 < length)
            shown = (anchors >= 0) & (depth < 0)
            there = tokens[np.clip(positions, 0, length)]
            slots.append(np.where(shown, there, 0).reshape(-1))
            is_corrected = predicts & row["is_chained"][:, None]
            standing.append(np.where(is_corrected, there, -1).reshape(-1))
            slot_labels.append(np.where(predicts, tokens[np.clip(positions + 1, 0, length)], -100).reshape(-1))
            slot_weights.append(np.where(predicts, self.block_loss_decay ** np.maximum(depth, 0), 0.0).reshape(-1))
        labels = np.concatenate([context_labels, np.stack(slot_labels)], axis=1)
        weights = np.concatenate([(context_labels != -100).astype(float), np.stack(slot_weights)], axis=1)
        batch = {
            "input_ids": np.concatenate([contexts, np.stack(slots)], axis=1),
            "labels": labels,
            "loss_weights": weights.astype(np.float32),
            "slot_tokens": np.concatenate([np.full_like(contexts, -1), np.stack(standing)], axis=1),
            "context_mask": context_mask,
            "anchors": np.stack([row["anchors"] for row in rows]).astype(np.int64),
            "num_visible": np.stack([row["num_visible"] for row in rows]).astype(np.int64),
        }
        return {name: torch.from_numpy(array) for name, array in batch.items()}


__all__ = ["LAYOUTS", "DraftingCollator", "DraftingDataset", "draw_blocks", "to_example"]
