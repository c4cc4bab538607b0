"""Folders of regenerated responses: how they are stored, resumed, read, and held against a drafter.

A folder holds `metadata.json` (how the responses were made), `chat_template.jinja` and one JSONL shard per process,
`responses-00000-of-00001.jsonl`, to which lines are only ever appended. A process that is killed leaves a torn last
line at worst, which reading passes over and resuming cuts off.
"""

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping

from .prompts import read_jsonl


logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
METADATA_NAME = "metadata.json"
TEMPLATE_NAME = "chat_template.jinja"
STOP, LENGTH, SKIPPED = "stop", "length", "skipped"

# What may change from one run into a folder to the next. Prompts have a rule of their own: they may become more.
_FREE = ("versions", "prompts", "engine.base_url")


def tokenizer_fingerprint(tokenizer) -> str:
    """A hash of which token has which id, special and added tokens included."""
    vocab = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class ResponseFolder:
    """
    The folder that one process of a regeneration appends to, one shard each.

    Args:
        path (`str`): The folder; made if it is not there.
        process_index, num_processes (`int`, *optional*): Which shard.

    Raises:
        ValueError: `path` is a file.
    """

    def __init__(self, path: str, process_index: int = 0, num_processes: int = 1):
        if os.path.exists(path) and not os.path.isdir(path):
            raise ValueError(f"The output {path!r} is a file: give a folder.")
        self.path, self.process_index = path, process_index
        self._shard = os.path.join(path, f"responses-{process_index:05d}-of-{num_processes:05d}.jsonl")
        self._file = None

    def check(self, metadata: Mapping, digest_of_first):
        """
        Args:
            metadata (`Mapping`): Of the run that is about to begin.
            digest_of_first (`Callable(int) -> str`): Hash of its first so many prompts.

        Raises:
            ValueError: The folder holds responses that were made in another way; the message says in which.
        """
        stored = read_metadata(self.path)
        if stored is None:
            if any(map(os.path.getsize, _shard_paths(self.path))):
                raise ValueError(
                    f"The folder {self.path!r} holds responses without {METADATA_NAME}, so that nothing says how they "
                    "were made: give another folder."
                )
            return
        differences = _differences(stored, metadata)
        num_stored, num_given = (record["prompts"]["num_prompts"] for record in (stored, metadata))
        if num_given < num_stored:
            differences.append(f"number of prompts ({num_stored} there, {num_given} here)")
        elif digest_of_first(num_stored) != stored["prompts"]["sha256"]:
            sources = (record["prompts"]["source"] for record in (stored, metadata))
            differences.append("prompts ({!r} there, {!r} here)".format(*sources))
        if differences:
            raise ValueError(
                f"The folder {self.path!r} was begun with other settings: {'; '.join(differences)}. Give the same "
                "ones to go on with it, or another folder."
            )

    def open(self, metadata: Mapping, template: str | None, wait_for_everyone) -> list[dict]:
        """
        Prepares the folder, and reads what all shards hold already.

        Args:
            metadata (`Mapping`): Written by the first process.
            template (`str`, *optional*): The chat template.
            wait_for_everyone (`Callable()`): Returns when all processes have called it.

        Returns:
            `list[dict]`: The rows.
        """
        os.makedirs(self.path, exist_ok=True)
        wait_for_everyone()  # to have checked the folder as it was
        self._file = open(self._shard, "ab", buffering=0)
        _lock(self._file, self.path)
        if self.process_index == 0:
            for path in _shard_paths(self.path):
                _cut_torn_line(path)
            if template is not None:
                _write_at_once(os.path.join(self.path, TEMPLATE_NAME), template)
            _write_at_once(os.path.join(self.path, METADATA_NAME), json.dumps(metadata, indent=2) + "\n")
        wait_for_everyone()
        rows = [row for path in _shard_paths(self.path) for row in _read_shard(path)]
        wait_for_everyone()  # nobody writes while somebody reads
        return rows

    def append(self, row: Mapping):
        self._file.write(json.dumps(row).encode() + b"\n")

    def close(self):
        if self._file is not None:
            self._file.close()


def read_metadata(path: str) -> dict | None:
    """
    `metadata.json` of a folder of responses; `None` if there is none.

    Raises:
        ValueError: It cannot be read, or a later release of this package wrote it.
    """
    name = os.path.join(path, METADATA_NAME)
    if not os.path.isfile(name):
        return None
    try:
        with open(name, encoding="utf-8") as file:
            metadata = json.load(file)
        version = metadata["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name!r} is not what regenerate writes ({error}): give another folder.") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{name!r} has format_version {version}, this release reads {FORMAT_VERSION}: upgrade d3d_hf."
        )
    return metadata


def load_responses(path: str) -> tuple[list[dict], dict | None]:
    """
    Reads responses to train on or to evaluate with.

    Args:
        path (`str`): A folder that regenerate wrote, or a JSONL file with rows in one of `training.examples.LAYOUTS`.

    Returns:
        `tuple[list[dict], dict or None]`: Rows, those of a folder in the order of its prompts and without the skipped
        ones, and the folder's metadata.

    Raises:
        ValueError: Neither of the two, or no rows.
    """
    if os.path.isdir(path):
        metadata = read_metadata(path)
        if metadata is None:
            raise ValueError(
                f"The folder {path!r} holds no {METADATA_NAME}: give a folder that `d3d-hf regenerate` wrote, or a "
                "JSONL file."
            )
        rows = [row for shard in _shard_paths(path) for row in _read_shard(shard)]
        num_expected = metadata["prompts"]["num_rows"]
        if len(rows) < num_expected:
            logger.warning(
                f"The folder {path!r} holds {len(rows)} of {num_expected} responses: the same `d3d-hf regenerate` "
                "again goes on with it."
            )
        rows = sorted((row for row in rows if row["finish"] != SKIPPED), key=_place_of)
    elif os.path.isfile(path):
        rows, metadata = list(read_jsonl(path)), None
    else:
        raise ValueError(f"There is no {path!r}: give a folder that `d3d-hf regenerate` wrote, or a JSONL file.")
    if not rows:
        raise ValueError(f"{path!r} holds no responses: give data with at least one row.")
    return rows, metadata


def check_responses(metadata: Mapping | None, drafter_config, tokenizer=None, allow_other_target: bool = False):
    """
    Refuses responses that are not those of the drafter's target, or in other tokens than the drafter's.

    Args:
        metadata (`Mapping`, *optional*): Of the responses; nothing is known, and nothing refused, without.
        drafter_config ([`D3DConfig`]): The drafter's.
        tokenizer (*optional*):
            The drafter's; without one the fingerprint in the drafter's training recipe stands in for it.
        allow_other_target (`bool`, *optional*, defaults to `False`): Takes another target's words. Tokens must fit.

    Raises:
        ValueError: They do not fit.
    """
    if metadata is None:
        return
    made_by, drafts_for = metadata["target"], drafter_config.target_name_or_path
    vocab_size = metadata.get("vocab_size")
    if vocab_size is not None and vocab_size != drafter_config.vocab_size:
        raise ValueError(
            f"The responses were written in a vocabulary of {vocab_size} tokens (target {made_by!r}) and the drafter "
            f"drafts in one of {drafter_config.vocab_size} (target {drafts_for!r}): regenerate them with the "
            f"drafter's own target, or make a drafter for {made_by!r}."
        )
    recipe = drafter_config.training_recipe or {}
    if tokenizer is None:
        fingerprint, whose = recipe.get("data", {}).get("tokenizer_fingerprint"), "the drafter was trained with"
    else:
        fingerprint = tokenizer_fingerprint(tokenizer)
        whose = f"was given here ({tokenizer.name_or_path!r})"
    made_with = metadata["tokenizer_fingerprint"]
    if fingerprint is not None and fingerprint != made_with:
        raise ValueError(
            f"The responses were tokenized by the tokenizer of {made_by!r} (fingerprint {made_with[:12]}), which "
            f"differs from the one that {whose} (fingerprint {fingerprint[:12]}): regenerate them with the drafter's "
            "own target, or give its tokenizer."
        )
    if allow_other_target or drafts_for is None or _is_same_model(made_by, drafts_for):
        return
    raise ValueError(
        f"The responses are those of {made_by!r} and the drafter drafts for {drafts_for!r}: regenerate them with "
        f"{drafts_for!r}, say --target {made_by!r} if the drafter is to draft for that one, or give "
        "--allow-other-target to take another model's words."
    )


def _is_same_model(left: str, right: str) -> bool:
    if left == right:
        return True
    return os.path.isdir(left) and os.path.isdir(right) and os.path.samefile(left, right)


def _place_of(row: Mapping) -> list[int]:
    return [int(part) for part in row["id"].split("-")]


def _differences(stored: Mapping, given: Mapping) -> list[str]:
    stored, given = dict(_flatten(stored)), dict(_flatten(given))
    names = [name for name in {**stored, **given} if not name.startswith(_FREE)]
    return [
        f"{name} ({stored.get(name)!r} there, {given.get(name)!r} here)"
        for name in names
        if stored.get(name) != given.get(name)
    ]


def _flatten(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shard_paths(path: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(path), "responses-*-of-*.jsonl")))


def _read_shard(path: str) -> Iterator[dict]:
    """The rows of a shard but for a torn last line. A torn line can be nowhere else."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                row["id"], row["prompt_ids"], row["response_ids"], row["finish"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {path!r} is no response: delete it, and regenerate again."
                ) from error
            yield row


def _cut_torn_line(path: str):
    with open(path, "rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)


def _write_at_once(path: str, text: str):
    """Readers see the old file or the new one, never a part."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _lock(file, path: str):
    """Two runs into one folder would make every response twice."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"Another process is writing to {path!r}: wait for it, or end it.") from None
    except OSError:  # the file system has no locks
        pass


__all__ = [
    "LENGTH",
    "SKIPPED",
    "STOP",
    "ResponseFolder",
    "check_responses",
    "load_responses",
    "read_metadata",
    "text_digest",
    "tokenizer_fingerprint",
]
