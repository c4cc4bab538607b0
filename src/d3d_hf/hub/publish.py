"""Uploads a drafter with its card, and with the code that loads it where the package is not installed."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from transformers.dynamic_module_utils import custom_object_save

from ..model.adapters import ADAPTER_FOLDER
from ..model.checkpoints import check_weight_files
from ..model.configuration_d3d import D3DConfig
from ..model.modeling_d3d import D3DDrafterForCausalLM
from .cards import CARD_NAME, FACTS_NAME


# What training leaves beside a drafter, and pickle files, which nobody should have to trust.
_LEFT_OUT_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".log", ".py", ".pyc")
_LEFT_OUT_NAMES = (FACTS_NAME, "config.json", "optimizer.safetensors")
_LEFT_OUT_FOLDERS = ("__pycache__", "checkpoint-", "runs", ".")


@dataclass
class Upload:
    """
    What goes to the Hub.

    Attributes:
        files (`dict[str, Path | bytes]`): Path in the repository: a file, or the content itself.
        left_out (`list[str]`): Files of the folder that stay.
    """

    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def plan_upload(folder: str | os.PathLike, repo_id: str) -> Upload:
    r"""
    Looks at a drafter's folder and makes what is to be uploaded; changes nothing.

    The code is this package's own, and config.json points to it (`auto_map`), so that `trust_remote_code=True` loads
    the repository without the package. Code that lies in the folder is not uploaded.

    Args:
        folder (`str` or `os.PathLike`): As `save_pretrained` wrote it, with a card.
        repo_id (`str`): Where it is to go: the card's lines of use then name it instead of the folder.

    Returns:
        [`Upload`]

    Raises:
        ValueError: There is no drafter, no card, or a card whose metadata cannot be read.
        OSError: The weights are missing or stored as pickle files.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json: it is a card without a drafter, and there is nothing to upload."
        )
    config = D3DConfig.from_pretrained(folder)
    if config.adapter_base is None:
        check_weight_files(folder, config=config)
    elif not (folder / ADAPTER_FOLDER / "adapter_model.safetensors").is_file():
        raise OSError(f"{folder} has no {ADAPTER_FOLDER}/adapter_model.safetensors: save the adapter again.")
    elif Path(config.adapter_base).is_absolute() or os.path.isdir(config.adapter_base):
        raise ValueError(
            f"The adapter's base is {config.adapter_base!r}, a folder of this machine: set adapter_base in "
            f"config.json to its name on the Hub."
        )
    check_card(folder / CARD_NAME)
    upload = Upload()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            continue
        if _stays(name):
            if name != "config.json":
                upload.left_out.append(name)
        else:
            upload.files[name] = path
    upload.files |= _code_and_config(config)
    card = (folder / CARD_NAME).read_text(encoding="utf-8")
    upload.files[CARD_NAME] = card.replace(f'"hub_cards/{folder.resolve().name}"', f'"{repo_id}"').encode()
    return upload


def check_card(path: Path):
    """
    Raises:
        ValueError: There is no card, or its metadata cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: write it with `d3d-hf card {path.parent}`.")
    try:
        data = ModelCard.load(path).data
    except Exception as error:  # huggingface_hub's and yaml's own classes
        raise ValueError(f"The metadata of {path} cannot be read: {' '.join(str(error).split())}") from error
    if not data.get("license"):
        raise ValueError(f"{path} names no license: write the card with `d3d-hf card {path.parent}`.")


def _stays(name: str) -> bool:
    *folders, file_name = name.split("/")
    return (
        file_name.endswith(_LEFT_OUT_SUFFIXES)
        or file_name.startswith(".")
        or name in _LEFT_OUT_NAMES
        or any(part.startswith(_LEFT_OUT_FOLDERS) for part in folders)
    )


def _code_and_config(config: D3DConfig) -> dict[str, bytes]:
    with torch.device("meta"):
        drafter = D3DDrafterForCausalLM._from_config(config)
    with tempfile.TemporaryDirectory() as scratch:
        custom_object_save(drafter, scratch, config=config)
        config.save_pretrained(scratch)
        return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir())}


def push(
    upload: Upload,
    repo_id: str,
    is_private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Upload a D3D drafter",
    api: HfApi | None = None,
) -> CommitInfo:
    r"""
    Uploads in one commit. After an interruption the same call goes on: weights that have arrived are not sent again.

    Args:
        upload ([`Upload`]): Of `plan_upload`.
        repo_id (`str`): The repository, which is made if it does not exist.
        is_private (`bool`, *optional*, defaults to `False`): Whether a repository that is made is private.
        revision (`str`, *optional*): Branch to commit to, made if it does not exist. Default: main.
        create_pr (`bool`, *optional*, defaults to `False`): Open a pull request instead of committing.
        message (`str`, *optional*): Of the commit.
        api (`HfApi`, *optional*): Endpoint and token. Default: those of the environment.

    Returns:
        `CommitInfo`, with `commit_url` and `pr_url`.

    Raises:
        HfHubHTTPError: The Hub refuses.
    """
    api = api or HfApi()
    api.create_repo(repo_id, private=is_private, exist_ok=True)
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content))
        for name, content in upload.files.items()
    ]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision, create_pr=create_pr)


__all__ = ["Upload", "check_card", "plan_upload", "push"]
