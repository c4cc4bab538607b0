"""`d3d-hf train`: trains a drafter on its target's own responses."""

import argparse
import difflib
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Literal

from .arguments import UsageError, one_line


_FINAL_FOLDER = "final"
_OF_BACKBONES = ("block_size", "kept_layers", "block_attention", "mask_token_id", "chained_head_size")
_CHAINED_HEAD_SIZE = 256
_OF_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")


def add_command(commands):
    parser = commands.add_parser("train", help="train a drafter on its target's own responses", add_help=False)
    # The options are those of transformers' TrainingArguments, which take seconds to import: `run` parses them.
    parser.parse_known_args = lambda argv, namespace=None: (argparse.Namespace(run=run, options=list(argv)), [])


def run(args: argparse.Namespace) -> int:
    options, training = _parse(args.options)
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
    recipe = _recipe(options, training, trainer, metadata, num_rows, metrics)
    recipe["continued_from"] = drafter.config.training_recipe
    drafter.config.training_recipe = {name: value for name, value in recipe.items() if value is not None}
    adapter_base = None
    if options.keep_adapter:
        adapter_base = options.backbone or drafter.config.target_name_or_path
    folder = os.path.join(training.output_dir, _FINAL_FOLDER)
    final = _save(trainer, folder, options.final_dtype or source_dtype, adapter_base)
    if trainer.is_world_process_zero():
        if metrics:
            shown = ("acceptance_length", "tokens_per_round", "ar_accuracy", "bonus_hit_rate")
            print(", ".join(f"{name} {metrics[f'eval_{name}']:.3f}" for name in shown))
        print(f"Saved to {final}", file=sys.stderr)
    return 0


@dataclass
class _Options:
    """What the command takes beside the arguments of training."""

    drafter: str | None = field(default=None, metadata={"help": "Drafter to train on: folder or Hub name."})
    backbone: str | None = field(default=None, metadata={"help": "Model to make a drafter of: folder or Hub name."})
    block_size: int | None = field(default=None, metadata={"help": "With --backbone: draft tokens per block (8)."})
    kept_layers: list[int] | None = field(
        default=None, metadata={"help": "With --backbone: how many layers to keep, or which."}
    )
    block_attention: Literal["bidirectional", "causal"] | None = field(
        default=None, metadata={"help": "With --backbone: what mask slots see of each other (bidirectional)."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "With --backbone: an existing token for mask slots (an embedding of its own)."}
    )
    chained_head_size: int | None = field(
        default=None,
        metadata={"help": f"With --backbone: size of the chained head, 0 for none ({_CHAINED_HEAD_SIZE})."},
    )
    target: str | None = field(
        default=None, metadata={"help": "Target that the drafter drafts for (what the data or the drafter say)."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "The target's tokenizer (that of the drafter or backbone, if it has one)."}
    )
    data: str | None = field(default=None, metadata={"help": "Folder that regenerate wrote, or JSONL file."})
    eval_data: str | None = field(default=None, metadata={"help": "The same, for evaluation."})
    eval_rows: int | None = field(default=None, metadata={"help": "Hold so many rows out, from the data's end."})
    max_samples: int | None = field(default=None, metadata={"help": "Train on the first so many rows alone."})
    allow_other_target: bool = field(
        default=False, metadata={"help": "Take the responses of another model than the drafter's target."}
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "Of the weights in training; computing in bf16 is --bf16."}
    )
    final_dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Of the saved weights (that of the model that was trained on)."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, ... (the model's)."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train a LoRA adapter of this rank (all weights)."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of the adapter (its rank)."})
    lora_dropout: float | None = field(default=None, metadata={"help": "Dropout of the adapter (0)."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules that get an adapter (all linear ones but the head)."}
    )
    keep_adapter: bool = field(
        default=False, metadata={"help": "Save the final drafter as an adapter on its base instead of merged."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in --output-dir."})


def _parse(argv: list[str]):
    """The options and the `D3DTrainingArguments` of a command line, which a config file may come first in."""
    from transformers import HfArgumentParser

    from ..training import D3DTrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise UsageError(f"{message} (see d3d-hf train --help)")

    parser = Parser(
        (_Options, D3DTrainingArguments),
        prog="d3d-hf train",
        usage="d3d-hf train [CONFIG.yaml | CONFIG.json] [--OPTION VALUE ...]",
        description="Trains a drafter on its target's own responses. A config file holds the same options, by name; "
        "those on the command line count more.",
        allow_abbrev=False,
    )
    if argv and not argv[0].startswith("-"):
        known = {action.dest for action in parser._actions} - {"help"}
        argv = [*_config_as_arguments(argv[0], known), *argv[1:]]
    try:
        options, training, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, ImportError) as error:
        raise UsageError(one_line(error)) from error
    if unknown:
        name = unknown[0].split("=")[0]
        raise UsageError(f"{name!r} is no option: {_did_you_mean(name, list(parser._option_string_actions))}")
    _refuse_conflicts(options, training)
    if training.output_dir is None:
        training.output_dir = "trainer_output"
    return options, training


def _did_you_mean(name: str, known) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "see d3d-hf train --help"


def _config_as_arguments(path: str, known: set[str]) -> list[str]:
    if not path.endswith((".yaml", ".yml", ".json")):
        raise UsageError(f"{path!r} is no config file: give a .yaml or .json file, or options that begin with --")
    try:
        with open(path, encoding="utf-8") as file:
            if path.endswith(".json"):
                config = json.load(file)
            else:
                import yaml

                config = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"the config file {path!r} cannot be read: {one_line(error)}") from error
    except Exception as error:  # json's and yaml's own classes
        raise UsageError(f"the config file {path!r} cannot be understood: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise UsageError(f"the config file {path!r} holds no names and values: give lines like learning_rate: 1e-4")
    arguments = []
    for name, value in config.items():
        name = str(name).replace("-", "_")
        if name not in known:
            raise UsageError(
                f"the config file {path!r} sets {name!r}, which is no option: {_did_you_mean(name, known)}"
            )
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            arguments.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def _refuse_conflicts(options: _Options, training):
    if (options.drafter is None) == (options.backbone is None):
        raise UsageError(
            f"--drafter is {options.drafter!r} and --backbone {options.backbone!r}: give one of them, a drafter to "
            "train on or a model to make one of"
        )
    if options.drafter is not None:
        for name in _OF_BACKBONES:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"{_option(name)} {getattr(options, name)!r} is for --backbone, and --drafter "
                    f"{options.drafter!r} has its own: leave it out"
                )
    if options.data is None:
        raise UsageError("there is no --data: give a folder that `d3d-hf regenerate` wrote, or a JSONL file")
    if options.eval_data is not None and options.eval_rows is not None:
        raise UsageError(
            f"--eval-data {options.eval_data!r} and --eval-rows {options.eval_rows} exclude each other: give one"
        )
    for name in ("eval_rows", "max_samples", "lora_rank", "lora_alpha", "block_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{_option(name)} is {value}: give a whole number of at least 1")
    if options.lora_rank is None:
        for name in _OF_LORA:
            if getattr(options, name) is not None:
                raise UsageError(f"{_option(name)} {getattr(options, name)!r} needs --lora-rank: give it as well")
        if options.keep_adapter:
            raise UsageError("--keep-adapter needs --lora-rank: give it as well")
    has_eval_data = options.eval_data is not None or options.eval_rows is not None
    if training.eval_strategy != "no" and not has_eval_data:
        raise UsageError(
            f"--eval-strategy is {training.eval_strategy.value!r} and there is nothing to evaluate on: give "
            "--eval-data PATH or --eval-rows N"
        )
    if training.distillation_weight > 0 and options.target is None and options.drafter is None:
        raise UsageError(
            f"--distillation-weight is {training.distillation_weight} and needs the target as the teacher: give "
            "--target NAME"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _checkpoint(options: _Options, training) -> str | None:
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


def _load_data(options: _Options):
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


def _load_drafter(options: _Options, training, metadata: dict | None):
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
        given = {name: getattr(options, name) for name in _OF_BACKBONES if getattr(options, name) is not None}
        given["chained_head_size"] = given.get("chained_head_size", _CHAINED_HEAD_SIZE) or None
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


def _load_teacher(options: _Options, training, target: str | None):
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


def _lora_config(options: _Options, drafter):
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


def _recipe(options: _Options, training, trainer, metadata: dict | None, num_rows: dict, metrics: dict) -> dict:
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


def _save(trainer, folder: str, dtype, adapter_base: str | None) -> str:
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


__all__ = ["add_command", "run"]
