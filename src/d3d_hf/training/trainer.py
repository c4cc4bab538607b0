"""D3DTrainer: transformers' Trainer over packed passes."""

import functools
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from peft import PeftConfig, get_peft_model
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainerCallback, set_seed

from ..model.modeling_d3d import D3DDrafterForCausalLM
from ..model.packing import lay_out
from .acceptance import AcceptedByPosition, draft_outcomes, evenly_spread, mean_metrics
from .arguments import D3DTrainingArguments
from .examples import DraftingCollator, DraftingDataset, draw_blocks
from .losses import token_loss, weighted_mean


logger = logging.getLogger(__name__)


class _SetEpoch(TrainerCallback):
    """Tells the dataset which epoch's blocks to draw."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        dataset = getattr(train_dataloader, "dataset", None)
        if isinstance(dataset, DraftingDataset):
            dataset.set_epoch(int(state.epoch + 1e-6))


class D3DTrainer(Trainer):
    r"""
    Trains a drafter on responses of its target.

    One packed pass per sequence holds the text and all its blocks. The loss is the blocks' (decaying over the slots)
    plus `ar_loss_weight` times the next-token loss on the response. Both are normalised over the whole accumulation
    window and all processes, so that neither changes what a step does. Evaluation measures acceptance, teacher-forced:
    `eval_acceptance_length`, `eval_tokens_per_round`, `eval_ar_accuracy`, `eval_bonus_hit_rate` and those of packed
    drafts, any of which may be `metric_for_best_model`.

    Args:
        model ([`D3DDrafterForCausalLM`]): From `from_backbone` or a checkpoint.
        args ([`D3DTrainingArguments`]): Training arguments.
        train_dataset, eval_dataset (sequence of rows, *optional*): In one of the layouts of `training.examples`.
        processing_class (*optional*): The target's tokenizer; needed for rows of `messages`.
        peft_config (`PeftConfig`, *optional*): Trains an adapter; the mask embedding is trained beside it.
        teacher_model (`PreTrainedModel`, *optional*): The target, for `distillation_weight` above 0.
        compute_metrics (`Callable`, *optional*):
            Further metrics, from an `EvalPrediction` whose `predictions` are accepted draft tokens per position and
            `label_ids` what was possible there, both `(rows, positions)`, -100 for none.
        kwargs: Passed to `Trainer`.

    Raises:
        ValueError: Not a drafter, data in an unknown layout or of another vocabulary, a missing teacher.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: D3DDrafterForCausalLM,
        args: D3DTrainingArguments,
        train_dataset: Sequence[Mapping] | None = None,
        eval_dataset: Sequence[Mapping] | Mapping[str, Sequence] | None = None,
        processing_class=None,
        peft_config: PeftConfig | None = None,
        teacher_model: PreTrainedModel | None = None,
        compute_metrics=None,
        **kwargs,
    ):
        config = getattr(model, "config", None)
        if getattr(config, "model_type", None) != "d3d":
            raise ValueError(
                f"model is a {type(model).__name__}: give a drafter, from D3DDrafterForCausalLM.from_backbone(model)."
            )
        if args.distillation_weight > 0 and teacher_model is None:
            raise ValueError(f"distillation_weight is {args.distillation_weight}: pass teacher_model=, the target.")
        self.drafter_config = config
        self.teacher_model = None if teacher_model is None else teacher_model.eval().requires_grad_(False)
        self._user_metrics = compute_metrics
        if peft_config is not None:
            # Trainer does so too, but only once it has the model. An adapter begins with random weights.
            set_seed(args.seed)
            model = get_peft_model(model, _with_own_modules(model, peft_config))

        draw_train = functools.partial(
            _draw_for_training,
            block_size=config.block_size,
            num_blocks=args.blocks_per_sequence,
            visible_token_share=args.visible_token_share,
            denoising_mask_ratio=args.denoising_mask_ratio,
        )
        draw_eval = functools.partial(_draw_for_evaluation, num_positions=args.eval_blocks_per_sequence)

        def wrap(rows, draw):
            if rows is None or isinstance(rows, DraftingDataset):
                return rows
            if isinstance(rows, Mapping):
                return {name: wrap(part, draw) for name, part in rows.items()}
            return DraftingDataset(
                rows, draw, args.seed, processing_class, config.vocab_size, chain_dropout=args.chain_dropout
            )

        self._wrap_eval = functools.partial(wrap, draw=draw_eval)
        train_dataset = wrap(train_dataset, draw_train)
        if train_dataset is not None:
            _warn_of_short_responses(train_dataset, config.block_size)
        super().__init__(
            model=model,
            args=args,
            data_collator=DraftingCollator(config.block_size, args.block_loss_decay),
            train_dataset=train_dataset,
            eval_dataset=self._wrap_eval(eval_dataset),
            processing_class=processing_class,
            compute_metrics=self._acceptance_metrics,
            **kwargs,
        )
        self.add_callback(_SetEpoch())
        self._signature_columns = ["input_ids", "prompt_length", "anchors", "num_visible", "is_chained"]
        self._eval_collator = _EvaluationCollator()
        if self.teacher_model is not None:
            self.teacher_model.to(self.args.device)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of an accumulation window, each with the denominators of the whole window, all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        sums = sum(_loss_denominators(batch) for batch in batches).to(device)
        sums = self.accelerator.gather(sums[None]).sum(dim=0)
        for batch in batches:
            batch["loss_denominators"] = sums
        return batches, sums.sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The packed loss; its gradient averaged over processes is that of the whole window."""
        context_length = inputs["context_mask"].shape[1]
        supervised = inputs["labels"] != -100
        labels, weights = inputs["labels"][supervised], inputs["loss_weights"][supervised]
        is_context = torch.zeros_like(supervised)
        is_context[:, :context_length] = True
        is_context = is_context[supervised]

        outputs = model(
            input_ids=inputs["input_ids"],
            layout=self._layout(inputs),
            logits_to_keep=supervised,
            slot_tokens=inputs["slot_tokens"] if self.drafter_config.chained_head_size else None,
        )
        teacher_logits = self._teacher_logits(inputs, supervised)
        losses = token_loss(
            outputs.logits, labels, teacher_logits, self.args.distillation_weight, self.args.distillation_temperature
        )
        denominators = inputs.get("loss_denominators")
        num_processes = 1 if denominators is None else self.accelerator.num_processes
        if denominators is None:
            denominators = _loss_denominators(inputs)
        ar_loss = weighted_mean(losses, weights * is_context, denominators[0])
        block_loss = weighted_mean(losses, weights * ~is_context, denominators[1])
        loss = num_processes * (block_loss + self.args.ar_loss_weight * ar_loss)
        return (loss, outputs) if return_outputs else loss

    def _layout(self, inputs):
        return lay_out(
            inputs["context_mask"].shape[1],
            inputs["anchors"],
            (self.drafter_config.block_size,) * inputs["anchors"].shape[1],
            num_visible=inputs["num_visible"],
            context_mask=inputs["context_mask"],
            bidirectional=self.drafter_config.block_attention == "bidirectional",
        )

    @torch.no_grad()
    def _teacher_logits(self, inputs, supervised) -> torch.Tensor | None:
        """The teacher's logits for the token that each supervised row predicts, shape `(rows, vocab)`."""
        if self.teacher_model is None or self.args.distillation_weight == 0:
            return None
        context_length = inputs["context_mask"].shape[1]
        contexts = inputs["input_ids"][:, :context_length]
        logits = self.teacher_model(input_ids=contexts, attention_mask=inputs["context_mask"]).logits
        # The token that stands at p is predicted at p - 1 by the teacher, by whichever row of the drafter.
        positions = self._layout(inputs).position_ids
        rows, _ = supervised.nonzero(as_tuple=True)
        return logits[rows, positions[supervised]][:, : self.drafter_config.vocab_size]

    def get_eval_dataloader(self, eval_dataset=None):
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._wrap_eval(eval_dataset)
        train_collator, self.data_collator = self.data_collator, self._eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = train_collator

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Accepted draft tokens of every kind; no loss, which says little about drafts."""
        inputs = self._prepare_inputs(inputs)
        outcomes = draft_outcomes(
            model, self.drafter_config, inputs["input_ids"], inputs["context_mask"], inputs["anchors"]
        )
        accepted = AcceptedByPosition.of(outcomes)
        columns = np.stack([accepted.synchronous, accepted.masked, accepted.guessed, accepted.rank], axis=-1)
        possible = (outcomes.truth[..., :-1] >= 0).sum(axis=-1)
        is_position = outcomes.anchors >= 0
        columns = np.where(is_position[..., None], columns, -100)
        possible = np.where(is_position, possible, -100)
        device = self.args.device
        return None, torch.from_numpy(columns).to(device), torch.from_numpy(possible).to(device)

    def _acceptance_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        columns, possible = prediction.predictions, prediction.label_ids
        accepted = AcceptedByPosition(*(columns[..., i] for i in range(4)))
        metrics = mean_metrics(accepted, possible >= 0)
        if self._user_metrics is not None:
            metrics.update(self._user_metrics(EvalPrediction(predictions=columns[..., 0], label_ids=possible)))
        return metrics


class _EvaluationCollator:
    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row["input_ids"])] = row["input_ids"]
            mask[i, : len(row["input_ids"])] = 1
        anchors = np.stack([row["anchors"] for row in rows]).astype(np.int64)
        batch = {"input_ids": ids, "context_mask": mask, "anchors": anchors}
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def _draw_for_training(length, prompt_length, rng, **kwargs):
    return draw_blocks(length, prompt_length, rng=rng, **kwargs)


def _draw_for_evaluation(length, prompt_length, rng, num_positions):
    anchors = evenly_spread(prompt_length, length, num_positions)
    return anchors, np.zeros_like(anchors)


def _loss_denominators(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sums of the weights of the context's rows and of the slots', shape `(2,)`."""
    context_length = batch["context_mask"].shape[1]
    weights = batch["loss_weights"]
    return torch.stack([weights[:, :context_length].sum(), weights[:, context_length:].sum()])


def _with_own_modules(model: D3DDrafterForCausalLM, peft_config: PeftConfig) -> PeftConfig:
    """What a drafter has beside its backbone is trained in full."""
    if hasattr(peft_config, "modules_to_save"):
        saved = list(peft_config.modules_to_save or [])
        own = [name for name in ("mask_embedding", "chained_head") if getattr(model, name) is not None]
        peft_config.modules_to_save = [*saved, *(name for name in own if name not in saved)] or None
    return peft_config


def _warn_of_short_responses(dataset: DraftingDataset, block_size: int):
    if len(dataset) == 0:
        raise ValueError("The training data hold no rows.")
    rows = [dataset[i] for i in range(min(len(dataset), 256))]
    if not any((row["anchors"] >= 0).any() for row in rows):
        raise ValueError(
            f"None of the first {len(rows)} rows has a response long enough to draft a block of {block_size} from: "
            f"check prompt_length (it must end where the response begins), or give longer responses."
        )
    num_short = sum(len(row["input_ids"]) - row["prompt_length"] <= block_size for row in rows)
    if num_short:
        logger.warning(
            f"{num_short} of the first {len(rows)} rows have responses no longer than a block of {block_size} tokens: "
            f"they train fewer slots, or none."
        )


__all__ = ["D3DTrainer"]
