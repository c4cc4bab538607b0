"""The options of `d3d-hf train`, on the command line or in a config file, and what cannot be asked for together."""

import argparse
import difflib
import json
from dataclasses import dataclass, field, fields
from typing import Literal

from ..training.options import DrafterTrainingOptions
from .arguments import UsageError, one_line, option


OF_BACKBONES = ("block_size", "kept_layers", "block_attention", "mask_token_id", "chained_head_size")
CHAINED_HEAD_SIZE = 256
_OF_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")


@dataclass
class TrainOptions:
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
        metadata={"help": f"With --backbone: size of the chained head, 0 for none ({CHAINED_HEAD_SIZE})."},
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


_USAGE = {
    "prog": "d3d-hf train",
    "usage": "d3d-hf train [CONFIG.yaml | CONFIG.json] [--OPTION VALUE ...]",
    "description": "Trains a drafter on its target's own responses. A config file holds the same options, by name; "
    "those on the command line count more.",
    "allow_abbrev": False,
}


def short_help() -> str:
    """The help on the options that are not those of every training, which needs no import of transformers."""
    parser = argparse.ArgumentParser(
        **_USAGE,
        epilog="Every training argument of transformers is an option too, such as --output-dir, --num-train-epochs, "
        "--learning-rate, --per-device-train-batch-size and --bf16: `d3d-hf train --help-all` lists all of them.",
    )
    parser.add_argument("--help-all", action="store_true", help="list the training arguments of transformers as well")
    for group, options in (("what is trained", TrainOptions), ("how a drafter is trained", DrafterTrainingOptions)):
        section = parser.add_argument_group(group)
        for found in fields(options):
            text = found.metadata["help"]
            if options is DrafterTrainingOptions:
                text = f"{text.rstrip('.')} ({found.default})."
            flag = {"action": "store_true"} if found.default is False else {"metavar": "VALUE"}
            section.add_argument(f"--{found.name.replace('_', '-')}", help=text, **flag)
    return parser.format_help()


def parse_options(argv: list[str]):
    """The options and the `D3DTrainingArguments` of a command line, which a config file may come first in."""
    from transformers import HfArgumentParser

    from ..training import D3DTrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise UsageError(f"{message} (see d3d-hf train --help)")

    parser = Parser(
        (TrainOptions, D3DTrainingArguments),
        **_USAGE,
    )
    if "--help-all" in argv:
        parser.print_help()
        raise SystemExit(0)
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


def _refuse_conflicts(options: TrainOptions, training):
    if (options.drafter is None) == (options.backbone is None):
        raise UsageError(
            f"--drafter is {options.drafter!r} and --backbone {options.backbone!r}: give one of them, a drafter to "
            "train on or a model to make one of"
        )
    if options.drafter is not None:
        for name in OF_BACKBONES:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"{option(name)} {getattr(options, name)!r} is for --backbone, and --drafter "
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
            raise UsageError(f"{option(name)} is {value}: give a whole number of at least 1")
    if options.lora_rank is None:
        for name in _OF_LORA:
            if getattr(options, name) is not None:
                raise UsageError(f"{option(name)} {getattr(options, name)!r} needs --lora-rank: give it as well")
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


__all__ = ["CHAINED_HEAD_SIZE", "OF_BACKBONES", "TrainOptions", "parse_options", "short_help"]
