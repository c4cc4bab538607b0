"""What must hold of stored weights: safetensors only, no files from elsewhere, no tensor missing or too many."""

import json
import os
import re

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHOWN_NAMES = 4


def load_checked(load, name, *args, stored_config=None, **kwargs):
    """
    Calls transformers' `from_pretrained` and refuses what it would load with a warning.

    Args:
        load (`Callable`): `from_pretrained` of a superclass.
        name (`str` or `os.PathLike`, *optional*): Folder or Hub name; `None` for a `state_dict` that is passed in.
        stored_config (`PreTrainedConfig`, *optional*): The config that is stored there, or is passed in.
        args, kwargs:
            As in `from_pretrained`. `use_safetensors` defaults to `True`. With `output_loading_info=True` the caller
            looks at missing and unexpected tensors, and nothing is refused for them.

    Raises:
        OSError: There are no safetensors weights, or they are damaged.
        ValueError: Tensors are missing, of another shape or too many, or an index names a file outside its folder.
    """
    if name is None:
        return load(name, *args, **kwargs)
    if kwargs.get("use_safetensors") is None:
        kwargs["use_safetensors"] = True
    check_weight_files(name, **{**kwargs, "config": stored_config})
    wants_info = kwargs.pop("output_loading_info", False)
    try:
        model, info = load(name, *args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise OSError(f"The weights of {str(name)!r} are damaged: fetch or save them again. {error}") from error
    if wants_info:
        return model, info
    refuse_other_tensors(name, info["missing_keys"], info["unexpected_keys"])
    return model


def check_weight_files(
    name, use_safetensors: bool = True, variant: str | None = None, config=None, subfolder: str = "", **kwargs
):
    """
    Looks at a folder or repository before any weights are read.

    Args:
        name (`str` or `os.PathLike`): Folder or Hub name.
        use_safetensors (`bool`, *optional*, defaults to `True`): `False` asks for pickle files.
        variant, config, subfolder, kwargs: As in `from_pretrained`.

    Raises:
        OSError: It has no weights of the format asked for.
        ValueError: An index names files outside its folder, or cannot be read.
    """
    names = _SAFETENSORS if use_safetensors else _PICKLES
    if variant is not None:
        names = [re.sub(r"\.(safetensors|bin)", rf".{variant}.\1", names[0]), names[1][:-4] + f"{variant}.json"]
    if getattr(config, "transformers_weights", None) is not None:
        names = [config.transformers_weights]
    for file_name in names:
        _refuse_other_files(name, "config.json", file_name, use_safetensors)
        path = find_file(name, file_name, subfolder, **kwargs)
        if path is not None:
            break
    else:
        mend = (
            "Pickle files, which can run code when they are read, are loaded with use_safetensors=False alone."
            if use_safetensors
            else "Leave out use_safetensors=False."
        )
        raise OSError(f"{str(name)!r} has no {names[0]}, nor an index of its parts. {mend}")
    if ".index." in file_name:
        for part in _parts_of(path):
            _refuse_other_files(name, file_name, part, use_safetensors)


def find_file(name, file_name: str, subfolder: str = "", **kwargs) -> str | None:
    """The path of one file of a folder or repository, fetched to the Hub's cache if need be; `None` if it has none."""
    where = hub_arguments(kwargs)
    return cached_file(name, file_name, subfolder=subfolder, _raise_exceptions_for_missing_entries=False, **where)


def hub_arguments(kwargs: dict) -> dict:
    """Those of `from_pretrained`'s keyword arguments that say where and how to look on the Hub."""
    return {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}


def _refuse_other_files(name, index_name: str, file_name: str, use_safetensors: bool):
    """What an index or a config names must be a file beside it, and of the format that is read."""
    mend = None
    if os.path.isabs(file_name) or ".." in re.split(r"[/\\]", file_name) or ":" in file_name or not file_name:
        mend = "which is not a file beside it: do not trust this checkpoint"
    elif use_safetensors and not re.search(r"\.safetensors($|\.index\.)", file_name):
        mend = "a pickle file, which can run code when it is read: it is loaded with use_safetensors=False alone"
    if mend is not None:
        raise ValueError(f"{index_name} of {str(name)!r} names {file_name!r}, {mend}.")


def _parts_of(index_path: str) -> list[str]:
    try:
        with open(index_path, encoding="utf-8") as file:
            return sorted({str(part) for part in json.load(file)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The index {index_path!r} is damaged ({type(error).__name__}: {error}): fetch or save the weights again."
        ) from error


def tensor_names(path: str) -> set[str]:
    """
    The names in a safetensors file, from its header.

    Raises:
        OSError: The file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise OSError(f"The weights in {path!r} are damaged: fetch or save them again. {error}") from error


def refuse_other_tensors(name, missing: set[str], unexpected: set[str]):
    """
    Raises:
        ValueError: There are any.
    """
    if missing or unexpected:
        raise ValueError(
            f"The weights of {str(name)!r} are not those of its config: missing {_shortened(missing)}, unexpected "
            f"{_shortened(unexpected)}. Fetch or save the drafter again."
        )


def _shortened(names: set[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return (", ".join(sorted(names)[:_SHOWN_NAMES]) or "none") + more


__all__ = [
    "check_weight_files",
    "find_file",
    "hub_arguments",
    "load_checked",
    "refuse_other_tensors",
    "tensor_names",
]
