"""Prompt sets: conversations whose user turns are known and whose answers are not."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


COLUMNS = ("turns", "messages", "prompt", "question")


@dataclass(frozen=True)
class Prompt:
    """
    A conversation to be played through.

    Attributes:
        index (`int`): Its place in the prompt set.
        turns (`tuple[str, ...]`): The user's turns.
        system (`str`, *optional*): The system message before them.
    """

    index: int
    turns: tuple[str, ...]
    system: str | None = None


def load_prompts(
    source: str,
    column: str | None = None,
    max_samples: int | None = None,
    split: str = "train",
    subset: str | None = None,
) -> list[Prompt]:
    """
    Reads a prompt set. A row holds `turns` (a list of user turns), `messages` (with roles; what an assistant says in
    them is left out, and answered anew), `prompt` or `question` (text).

    Args:
        source (`str`): A .jsonl file, a .json file that holds a list, or a dataset's name for `datasets`.
        column (`str`, *optional*): The column to read; by default the first of those above that the row has.
        max_samples (`int`, *optional*): Read so many rows.
        split, subset (`str`, *optional*): Of a dataset of `datasets`.

    Raises:
        ValueError: No such file, a row in an unknown layout, no rows.
        ImportError: `source` is no file and `datasets` is not installed.
    """
    prompts = []
    for index, row in enumerate(_read_rows(source, split, subset)):
        if index == max_samples:
            break
        prompts.append(_to_prompt(index, row, column, source))
    if not prompts:
        raise ValueError(f"{source!r} holds no prompts: give a file or a dataset with at least one row.")
    return prompts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' content and order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.system, *prompt.turns]).encode() + b"\n")
    return digest.hexdigest()


def _read_rows(source: str, split: str, subset: str | None) -> Iterator[Mapping]:
    if os.path.isfile(source):
        if source.endswith(".jsonl"):
            return read_jsonl(source)
        if source.endswith(".json"):
            return _read_json(source)
        raise ValueError(f"{source!r} is neither a .jsonl nor a .json file: give one, or the name of a dataset.")
    if source.endswith((".jsonl", ".json")) or source.startswith((".", "~", os.sep)):
        raise ValueError(f"There is no file {source!r}: give a .jsonl or .json file, or the name of a dataset.")
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no file, and the datasets package, which could look for a dataset of this name, is not "
            "installed: give a .jsonl file, or pip install d3d_hf[train]"
        ) from error
    try:
        return iter(datasets.load_dataset(source, subset, split=split))
    except Exception as error:  # of many classes, a network's among them
        raise ValueError(f"The dataset {source!r} (split {split!r}) cannot be loaded: {error}") from error


def read_jsonl(path: str) -> Iterator[Mapping]:
    """
    The rows of a file with one JSON object per line; blank lines are skipped.

    Raises:
        ValueError: A line that is none.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"Line {number} of {path!r} is no JSON ({error}): mend or delete it.") from error
            if not isinstance(row, dict):
                raise ValueError(f"Line {number} of {path!r} is no JSON object: give one object per line.")
            yield row


def _read_json(path: str) -> Iterator[Mapping]:
    with open(path, encoding="utf-8") as file:
        try:
            rows = json.load(file)
        except ValueError as error:
            raise ValueError(
                f"{path!r} is no JSON ({error}): mend it, or name it .jsonl if it holds one object per line."
            ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path!r} is no list of objects: give a list with one object per prompt.")
    return iter(rows)


def _to_prompt(index: int, row: Mapping, column: str | None, source: str) -> Prompt:
    place = f"row {index} of {source!r}"
    name = next((name for name in COLUMNS if name in row), None) if column is None else column
    if name is None or name not in row:
        asked = "" if column is None else f"no column {column!r}, but "
        raise ValueError(
            f"In {place} there is {asked}the columns {sorted(row)}: name the column with the prompts "
            f"(--prompt-column); it is found by itself if it is one of {', '.join(COLUMNS)}."
        )
    value, system = row[name], None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
        system, value = _user_turns(value, place)
    if not isinstance(value, Sequence) or not value or not all(isinstance(turn, str) and turn for turn in value):
        raise ValueError(
            f"In {place} the column {name!r} holds {value!r:.80}: give a text, a list of user turns, or messages with "
            "`role` and `content`."
        )
    return Prompt(index, tuple(value), system)


def _user_turns(messages: Sequence[Mapping], place: str) -> tuple[str | None, list[str]]:
    turns, system = [], None
    for position, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str) or role not in ("system", "user", "assistant"):
            raise ValueError(
                f"In {place} message {position} has the role {role!r} and content of type {type(content).__name__}: "
                "give texts of system, user and assistant."
            )
        if role == "system":
            if position:
                raise ValueError(f"In {place} the system message is not the first: put it there.")
            system = content
        elif role == "user":
            turns.append(content)
    return system, turns


__all__ = ["COLUMNS", "Prompt", "load_prompts", "prompts_digest", "read_jsonl"]
