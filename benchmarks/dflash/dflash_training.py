"""Training of a DFlash drafter with transformers' Trainer, all blocks of a text in one packed pass."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from dflash_drafter import read_hidden_states
from transformers import PreTrainedModel, Trainer, TrainerCallback

from d3d_hf.training import D3DTrainingArguments
from d3d_hf.training.examples import DraftingDataset
from d3d_hf.training.losses import token_loss, weighted_mean


def draw_anchors(length: int, prompt_length: int, rng: np.random.Generator, num_blocks: int):
    """Response tokens to hang blocks on, without replacement, shape `(num_blocks,)`, -1 for none; no visible slots."""
    anchors = np.full(num_blocks, -1)
    chosen = rng.permutation(np.arange(prompt_length, length - 1))[:num_blocks]
    anchors[: len(chosen)] = np.sort(chosen)
    return anchors, np.zeros_like(anchors)


def collate(rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
    """`input_ids` and `context_mask` of shape `(batch, length)`, padded on the right; `anchors` `(batch, blocks)`."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    return {
        "input_ids": ids,
        "context_mask": mask,
        "anchors": torch.from_numpy(np.stack([r["anchors"] for r in rows])),
    }


def packed_block_states(
    drafter: PreTrainedModel, target: PreTrainedModel, ids: torch.Tensor, context_mask: torch.Tensor, anchors
) -> torch.Tensor:
    """
    The drafter's output for a block on each anchor, in one pass. A block sees the target's states of the text before
    its anchor and its own slots, as when it is the only one.

    Returns:
        `torch.Tensor` of shape `(batch, blocks, block_size, hidden)`; row `j` of a block stands at `anchor + j`.
    """
    (batch, length), size = ids.shape, drafter.config.block_size
    num_blocks = anchors.shape[1]
    states = read_hidden_states(target, ids, context_mask, drafter.config.target_layer_ids)
    slots = torch.full((batch, num_blocks, size), drafter.config.mask_token_id, device=ids.device)
    slots[..., 0] = ids.gather(1, anchors.clamp(min=0))
    with torch.no_grad():
        embedded = target.get_input_embeddings()(slots.flatten(1))

    positions = (anchors[..., None] + torch.arange(size, device=ids.device)).clamp(min=0)
    context_positions = torch.arange(length, device=ids.device)
    block_of = torch.arange(num_blocks, device=ids.device).repeat_interleave(size)
    sees_context = context_positions < anchors.repeat_interleave(size, dim=1)[..., None]  # (batch, slots, length)
    sees_slots = (block_of[:, None] == block_of).expand(batch, -1, -1)  # (batch, slots, slots)
    outputs = drafter(
        noise_embeds=embedded.to(drafter.dtype),
        context_hidden_states=states.to(drafter.dtype),
        position_ids=torch.cat([context_positions.expand(batch, -1), positions.flatten(1)], dim=1),
        attention_mask={"full_attention": torch.cat([sees_context, sees_slots], dim=-1)[:, None]},
    )
    return outputs.last_hidden_state.unflatten(1, (num_blocks, size))


def tokens_after(ids: torch.Tensor, context_mask: torch.Tensor, anchors: torch.Tensor, count: int) -> torch.Tensor:
    """The text's next `count` tokens after each anchor, shape `(batch, blocks, count)`; -1 beyond its end."""
    places = anchors[..., None] + torch.arange(1, count + 1, device=ids.device)
    tokens = ids.gather(1, places.clamp(0, ids.shape[1] - 1).flatten(1)).view_as(places)
    is_text = (anchors[..., None] >= 0) & (places < context_mask.sum(dim=1)[:, None, None])
    return torch.where(is_text, tokens, -1)


@torch.no_grad()
def drafts_after(drafter, target, ids, context_mask, anchors) -> torch.Tensor:
    """Greedy drafts after each anchor, shape `(batch, blocks, block_size - 1)`."""
    states = packed_block_states(drafter, target, ids, context_mask, anchors)[:, :, 1:]
    head = target.get_output_embeddings()
    return head(states.to(head.weight.dtype)).argmax(dim=-1)


class DFlashTrainer(Trainer):
    r"""
    Trains a DFlash drafter on responses of its target: cross-entropy of each mask slot on the token at its place, the
    weight decaying over the slots. The target, its embedding and its head stay as they are.

    Args:
        model (`MuseGlimmerAssistantModel`): From `make_dflash_drafter`, or a checkpoint.
        args ([`D3DTrainingArguments`]): `blocks_per_sequence` and `block_loss_decay` count; the rest is Trainer's.
        target (`PreTrainedModel`): Whose responses the data hold.
        train_dataset (sequence of rows): In one of the layouts of `d3d_hf.training.examples`.
        kwargs: Passed to `Trainer`.
    """

    def __init__(self, model, args: D3DTrainingArguments, target: PreTrainedModel, train_dataset, **kwargs):
        def draw(length, prompt_length, rng):
            return draw_anchors(length, prompt_length, rng, args.blocks_per_sequence)

        self.target = target.eval().requires_grad_(False)
        dataset = DraftingDataset(train_dataset, draw, args.seed, vocab_size=target.config.vocab_size)
        super().__init__(model=model, args=args, train_dataset=dataset, data_collator=collate, **kwargs)
        self.add_callback(_NewBlocksEachEpoch())
        self._signature_columns = ["input_ids", "prompt_length", "anchors"]
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch
        self.target.to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, context_mask, anchors = inputs["input_ids"], inputs["context_mask"], inputs["anchors"]
        states = packed_block_states(model, self.target, ids, context_mask, anchors)[:, :, 1:]
        labels = tokens_after(ids, context_mask, anchors, states.shape[2])
        supervised = labels >= 0
        head = self.target.get_output_embeddings()
        logits = head(states[supervised].to(head.weight.dtype))
        decay = self.args.block_loss_decay ** torch.arange(labels.shape[2], device=ids.device)
        weights = decay.expand(labels.shape)[supervised]
        loss = weighted_mean(token_loss(logits, labels[supervised]), weights, weights.sum())
        return (loss, states) if return_outputs else loss


class _NewBlocksEachEpoch(TrainerCallback):
    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.dataset.set_epoch(int(state.epoch + 1e-6))


class StepTimer(TrainerCallback):
    """
    Prints each logged loss with the seconds per step since the one before, on the clock and of this process's CPU time
    (which another job on the same core does not lengthen much), and keeps them in the log history.
    """

    def __init__(self, name: str):
        self._name, self._seconds = name, []

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        wall, cpu = self._start
        self._seconds.append((time.perf_counter() - wall, time.process_time() - cpu))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self._seconds or "loss" not in logs:
            return
        wall, cpu = (sum(column) / len(self._seconds) for column in zip(*self._seconds))
        self._seconds.clear()
        state.log_history[-1] |= {"seconds_per_step": round(wall, 3), "cpu_seconds_per_step": round(cpu, 3)}
        print(
            f"{self._name}: step {state.global_step} of {state.max_steps}, loss {float(logs['loss']):.3f}, "
            f"{wall:.2f} s per step ({cpu:.2f} s of CPU time)",
            flush=True,
        )
