"""What `d3d-hf train` leaves: the final drafter, and in its config the recipe."""

import os

from .train_options import TrainOptions


def recipe_of(options: TrainOptions, training, trainer, metadata: dict | None, num_rows: dict, metrics: dict) -> dict:
    """What the drafter's config keeps of its training; no paths of this machine."""
    from ..training.provenance import versions

    data = {"source": os.path.basename(os.path.normpath(options.data)), "num_rows": num_rows}
    if metadata is not None:
        names = ("target", "tokenizer_fingerprint", "chat_template", "generation", "prompts")
        data |= {name: metadata[name] for name in names}
    adapter = None
    if options.lora_rank is not None:
        adapter = {
            "kind": "lora",
            "rank": options.lora_rank,
            "alpha": options.lora_alpha or options.lora_rank,
            "dropout": options.lora_dropout or 0.0,
            "target_modules": options.lora_target_modules or "all-linear",
        }
    losses = (
        "blocks_per_sequence",
        "block_loss_decay",
        "ar_loss_weight",
        "visible_token_share",
        "denoising_mask_ratio",
        "distillation_weight",
        "distillation_temperature",
    )
    world = training.world_size
    return {
        "data": data,
        "backbone": None if options.backbone is None else _name_alone(options.backbone),
        "losses": {name: getattr(training, name) for name in losses},
        "num_steps": trainer.state.global_step,
        "num_epochs": trainer.state.epoch,
        "batch_size": training.per_device_train_batch_size * training.gradient_accumulation_steps * world,
        "learning_rate": training.learning_rate,
        "lr_scheduler": getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type),
        "optimizer": getattr(training.optim, "value", training.optim),
        "weight_decay": training.weight_decay,
        "warmup_steps": training.get_warmup_steps(trainer.state.max_steps),
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else options.dtype,
        "seed": training.seed,
        "adapter": adapter,
        "evaluation": {
            name.removeprefix("eval_"): value
            for name, value in metrics.items()
            if name.startswith(("eval_acceptance", "eval_tokens", "eval_ar", "eval_bonus"))
        }
        or None,
        "versions": versions(),
    }


def _name_alone(name: str) -> str:
    return os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name


def save_final(trainer, folder: str, dtype, adapter_base: str | None) -> str:
    """Saves the drafter with its tokenizer; an adapter is merged or, if its base is named, stored on that base."""
    import torch

    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        # Sharded weights can only be gathered as they are.
        trainer.save_model(folder)
        return folder
    if not trainer.is_world_process_zero():
        return folder
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    if adapter_base is not None:
        drafter = drafter.get_base_model()
        drafter.config.adapter_base = adapter_base
    elif hasattr(drafter, "merge_and_unload"):
        drafter = drafter.merge_and_unload()
        if hasattr(drafter, "peft_config"):
            del drafter.peft_config
    drafter.config.use_cache = True  # transformers' trainer has switched it off
    drafter.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype).save_pretrained(folder)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    return folder


__all__ = ["recipe_of", "save_final"]
