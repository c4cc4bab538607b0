"""`d3d-hf train`: trains a drafter on its target's own responses."""

import argparse
import os
import sys

from .arguments import UsageError, one_line
from .train_options import CHAINED_HEAD_SIZE, OF_BACKBONES, TrainOptions, parse_options, short_help
from .train_output import recipe_of, save_final


_FINAL_FOLDER = "final"


def add_command(commands):
    parser = commands.add_parser("train", help="train a drafter on its target's own responses", add_help=False)

    def parse(argv, namespace=None):
        # The options are transformers' TrainingArguments too, which take seconds to import: `run` parses them.
        if {"-h", "--help"}.intersection(argv):
            print(short_help(), end="")
            raise SystemExit(0)
        return argparse.Namespace(run=run, options=list(argv)), []

    parser.parse_known_args = parse


def run(args: argparse.Namespace) -> int:
    options, training = parse_options(args.options)
    from transformers.utils import logging as transformers_logging

    from ..training.responses import check_responses

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
        training.disable_tqdm = True
    checkpoint = _checkpoint(options, training)
    train_rows, eval_rows, metadata = _load_data(options)
    drafter, tokenizer, source_dtype = _load_drafter(options, training, metadata)
    try:
        check_responses(metadata, drafter.config, tokenizer, options.allow_other_target)
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error
    teacher = _load_teacher(options, training, drafter.config.target_name_or_path)
    from ..training import D3DTrainer

    num_rows = {"train": len(train_rows), "eval": 0 if eval_rows is None else len(eval_rows)}
    try:
        trainer = D3DTrainer(
            drafter,
            training,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=_lora_config(options, drafter),
            teacher_model=teacher,
        )
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = {} if eval_rows is None else trainer.evaluate()
    recipe = recipe_of(options, training, trainer, metadata, num_rows, metrics)
    recipe["continued_from"] = drafter.config.training_recipe
    drafter.config.training_recipe = {name: value for name, value in recipe.items() if value is not None}
    adapter_base = None
    if options.keep_adapter:
        adapter_base = options.backbone or drafter.config.target_name_or_path
    folder = os.path.join(training.output_dir, _FINAL_FOLDER)
    final = save_final(trainer, folder, options.final_dtype or source_dtype, adapter_base)
    if trainer.is_world_process_zero():
        if metrics:
            shown = ("acceptance_length", "tokens_per_round", "ar_accuracy", "bonus_hit_rate")
            print(", ".join(f"{name} {metrics[f'eval_{name}']:.3f}" for name in shown))
        print(f"Saved to {final}", file=sys.stderr)
    return 0


def _checkpoint(options: TrainOptions, training) -> str | None:
    """The checkpoint to go on from; refuses to train over one."""
    from transformers.trainer_utils import get_last_checkpoint

    given, folder = training.resume_from_checkpoint, training.output_dir
    if given is not None:
        if not os.path.isdir(given):
            raise UsageError(
                f"--resume-from-checkpoint {given!r} is no folder: give a checkpoint, or --resume for the last one in "
                "--output-dir"
            )
        return given
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if options.resume and last is None:
        raise UsageError(f"--resume: there is no checkpoint in --output-dir {folder!r}: leave it out to begin anew")
    if last is not None and not options.resume:
        raise UsageError(
            f"--output-dir {folder!r} holds {os.path.basename(last)!r} already: give --resume to go on from it, or "
            "another folder"
        )
    return last


def _load_data(options: TrainOptions):
    """Rows to train on, rows to evaluate on (or `None`), and the metadata of the former."""
    from ..training.responses import load_responses

    try:
        rows, metadata = load_responses(options.data)
        eval_rows = None if options.eval_data is None else load_responses(options.eval_data)[0]
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    if options.eval_rows is not None:
        if options.eval_rows >= len(rows):
            raise UsageError(
                f"--eval-rows {options.eval_rows} leaves none of the {len(rows)} rows of --data {options.data!r} to "
                "train on: give a smaller number"
            )
        rows, eval_rows = rows[: -options.eval_rows], rows[-options.eval_rows :]
    return rows[: options.max_samples], eval_rows, metadata


def _load_drafter(options: TrainOptions, training, metadata: dict | None):
    """The drafter, the target's tokenizer (or `None`) and the dtype that the weights were stored in."""
    import torch
    from transformers import AutoConfig

    from .. import embedded
    from ..model.modeling_d3d import D3DDrafterForCausalLM
    from .loading import load_drafter, load_tokenizer, own_tokenizer, read_drafter_config

    cpu = torch.device("cpu")  # the trainer moves it
    if options.drafter is not None:
        config = read_drafter_config(options.drafter, "--drafter")
        drafter = load_drafter(options.drafter, options.dtype, cpu, options.attn_implementation)
        target = options.target or drafter.config.target_name_or_path or (metadata and metadata["target"])
    else:
        target = options.target or (metadata["target"] if metadata else options.backbone)
        given = {name: getattr(options, name) for name in OF_BACKBONES if getattr(options, name) is not None}
        given["chained_head_size"] = given.get("chained_head_size", CHAINED_HEAD_SIZE) or None
        if len(given.get("kept_layers", ())) == 1:
            given["kept_layers"] = given["kept_layers"][0]
        if metadata is not None and metadata["vocab_size"] is not None:
            given["vocab_size"] = metadata["vocab_size"]
        if options.attn_implementation is not None:
            given["attn_implementation"] = options.attn_implementation
        try:
            source = embedded.resolve(options.backbone)
            config = AutoConfig.from_pretrained(source)
            drafter = D3DDrafterForCausalLM.from_backbone(source, dtype=options.dtype, **given)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            raise UsageError(
                f"--backbone {options.backbone!r} cannot be made a drafter of: {one_line(error)}"
            ) from error
    drafter.config.target_name_or_path = target
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer, "--tokenizer")
    else:
        tokenizer = own_tokenizer(options.drafter, options.backbone)
    return drafter, tokenizer, config.dtype or drafter.dtype


def _load_teacher(options: TrainOptions, training, target: str | None):
    if training.distillation_weight == 0:
        return None
    import torch

    from .loading import load_target

    if target is None:
        raise UsageError(
            f"--distillation-weight is {training.distillation_weight} and nothing names the target, which is the "
            "teacher: give --target NAME"
        )
    return load_target(target, "auto", torch.device("cpu"))[0]


def _lora_config(options: TrainOptions, drafter):
    if options.lora_rank is None:
        return None
    from peft import LoraConfig

    modules = options.lora_target_modules
    names = [name for name, _ in drafter.named_modules()]
    for module in modules or ():
        if module != "all-linear" and not any(f".{name}".endswith(f".{module}") for name in names):
            known = sorted({name.rsplit(".", 1)[-1] for name in names if name.endswith("_proj")})
            raise UsageError(
                f"--lora-target-modules {module!r} is no module of the drafter: give names like "
                f"{', '.join(known) or 'those of its linear layers'}, or all-linear"
            )
    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha or options.lora_rank,
        lora_dropout=options.lora_dropout or 0.0,
        target_modules="all-linear" if modules in (None, ["all-linear"]) else modules,
    )


__all__ = ["add_command", "run"]
