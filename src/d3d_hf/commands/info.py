"""`d3d-hf info`: what a drafter is, from its config and the headers of its weight files."""

import argparse
import json
import math
import os

from .arguments import UsageError, one_line


# Of a generation config: bookkeeping, and what every drafter sets.
_NOT_SHOWN = (
    "_from_model_config",
    "assistant_confidence_threshold",
    "num_assistant_tokens_schedule",
    "transformers_version",
)
_MAX_HEADER_BYTES = 100_000_000


def add_command(commands):
    parser = commands.add_parser(
        "info",
        help="describe a drafter without loading its weights",
        description="Describes a D3D drafter from its config.json and the headers of its safetensors files.",
        allow_abbrev=False,
    )
    parser.add_argument("drafter", metavar="DRAFTER", help="folder or Hub name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    description = describe(args.drafter)
    print(json.dumps(description) if args.json else _as_text(description))
    return 0


def describe(name_or_path: str) -> dict:
    """
    Args:
        name_or_path (`str`): A drafter's folder or Hub name.

    Returns:
        `dict` of values that JSON can hold. `num_parameters` and `dtypes` are `None` without safetensors files.

    Raises:
        UsageError: It is no drafter, or cannot be found.
    """
    from .loading import read_drafter_config

    config = read_drafter_config(name_or_path, "DRAFTER")
    backbone = config.backbone_config
    folder = _folder_of(name_or_path)
    tensors = _read_headers(name_or_path, folder)
    return {
        "drafter": name_or_path,
        "architecture": backbone.model_type,
        "num_layers": backbone.num_hidden_layers,
        "kept_layers": config.kept_layers,
        "hidden_size": getattr(backbone, "hidden_size", None),
        "num_parameters": None if tensors is None else sum(math.prod(shape) for _, shape in tensors),
        "dtypes": None if tensors is None else sorted({dtype for dtype, _ in tensors}),
        "block_size": config.block_size,
        "mask": "own embedding" if config.mask_token_id is None else "token",
        "mask_token_id": config.mask_token_id,
        "block_attention": config.block_attention,
        "chained_head_size": config.chained_head_size,
        "vocab_size": config.vocab_size,
        "target": config.target_name_or_path,
        "generation_options": _generation_options(folder),
        "training_recipe": config.training_recipe,
    }


def _folder_of(name_or_path: str) -> str:
    """The folder itself, or that of the Hub's cache which the config came from."""
    if os.path.isdir(name_or_path):
        return name_or_path
    from transformers.utils import cached_file

    return os.path.dirname(cached_file(name_or_path, "config.json"))


def _read_headers(name_or_path: str, folder: str) -> list[tuple[str, list[int]]] | None:
    """Dtype and shape of each stored tensor; of files that are only on the Hub, the headers alone are fetched."""
    index = os.path.join(folder, "model.safetensors.index.json")
    names = ["model.safetensors"]
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    paths = [os.path.join(folder, name) for name in names]
    if all(map(os.path.isfile, paths)):
        return [tensor for path in paths for tensor in _read_header(path)]
    if os.path.isdir(name_or_path):
        return None
    import huggingface_hub

    try:
        files = huggingface_hub.get_safetensors_metadata(name_or_path).files_metadata.values()
    except Exception:  # offline, no such files, no permission: the rest of the description stands
        return None
    return [(tensor.dtype, tensor.shape) for file in files for tensor in file.tensors.values()]


def _read_header(path: str) -> list[tuple[str, list[int]]]:
    """A safetensors file begins with its header's length, 8 bytes little-endian, and the header, a JSON object."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else None
        return [(entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path!r} is no safetensors file: save the drafter again. {one_line(error)}") from error


def _generation_options(folder: str) -> dict:
    try:
        with open(os.path.join(folder, "generation_config.json"), encoding="utf-8") as file:
            options = json.load(file)
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in options.items() if value is not None and name not in _NOT_SHOWN}


def _as_text(description: dict) -> str:
    lines = dict(description)
    kept, mask_token_id = lines.pop("kept_layers"), lines.pop("mask_token_id")
    if kept is not None:
        lines["num_layers"] = f"{lines['num_layers']} (kept of the original: {', '.join(map(str, kept))})"
    if mask_token_id is not None:
        lines["mask"] = f"token {mask_token_id}"
    if lines["num_parameters"] is not None:
        lines["num_parameters"] = f"{lines['num_parameters']:,}"
        lines["dtypes"] = ", ".join(lines["dtypes"])
    for name in ("generation_options", "training_recipe"):
        lines[name] = ", ".join(f"{key}={value!r}" for key, value in (lines[name] or {}).items()) or None
    width = max(map(len, lines)) + 2
    return "\n".join(
        f"{name.replace('_', ' '):{width}}{'-' if value is None else value}" for name, value in lines.items()
    )


__all__ = ["add_command", "describe", "run"]
