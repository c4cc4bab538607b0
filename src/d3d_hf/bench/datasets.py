"""Benchmark prompts: seven sets of the Hub by short names, JSONL files, and random tokens for models without text."""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..training.chat_template import Template
from ..training.prompts import Prompt, load_prompts, prompts_digest


_MATHS = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_COMPLETION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True)
class _HubSet:
    """Where a benchmark lies on the Hub, and how a row becomes the first user turn."""

    repository: str
    column: str
    split: str = "test"
    subset: str | None = None
    wording: str = "{}"
    data_files: str | None = None


_HUB_SETS = {
    "gsm8k": _HubSet("openai/gsm8k", "question", subset="main", wording=_MATHS),
    "math500": _HubSet("HuggingFaceH4/MATH-500", "problem", wording=_MATHS),
    "aime25": _HubSet("math-ai/aime25", "problem", wording=_MATHS),
    "humaneval": _HubSet("openai/openai_humaneval", "prompt", wording=_COMPLETION),
    "mbpp": _HubSet("google-research-datasets/mbpp", "prompt", subset="sanitized"),
    # Its loading script is refused by current releases of datasets; the files beside it are plain JSONL.
    "livecodebench": _HubSet(
        "livecodebench/code_generation_lite", "question_content", split="train", data_files="test.jsonl"
    ),
    "mt-bench": _HubSet("HuggingFaceH4/mt_bench_prompts", "prompt", split="train"),
}
DATASET_NAMES = tuple(_HUB_SETS)


@dataclass(frozen=True)
class PromptSet:
    """
    Attributes:
        name (`str`): Short: the benchmark's, or the file's stem.
        prompts (`list[Prompt]`): In the order of the source.
    """

    name: str
    prompts: list[Prompt]

    @property
    def digest(self) -> str:
        return prompts_digest(self.prompts)


def load_prompt_set(source: str, max_samples: int | None = None, first: int = 0) -> PromptSet:
    """
    Args:
        source (`str`): One of `DATASET_NAMES`, or a JSONL file of `turns`.
        max_samples (`int`, *optional*): So many prompts at most.
        first (`int`, *optional*, defaults to 0): The prompt to begin with.

    Raises:
        ValueError: Neither of the two, it cannot be read, or it has no prompt `first`.
        ImportError: A benchmark's name, and `datasets` is not installed.
    """
    last = None if max_samples is None else first + max_samples
    if os.path.isfile(source):
        name, prompts = os.path.splitext(os.path.basename(source))[0], load_prompts(source, max_samples=last)
    elif source in _HUB_SETS:
        name, prompts = source, _from_hub(_HUB_SETS[source], last)
    else:
        raise ValueError(
            f"The dataset {source!r} is neither a file nor one of {', '.join(DATASET_NAMES)}: give one of these, or a "
            "JSONL file of turns."
        )
    if first >= len(prompts):
        raise ValueError(f"{source!r} has {len(prompts)} prompts: begin with a smaller number than {first}.")
    return PromptSet(name, prompts[first:])


def _from_hub(hub_set: _HubSet, max_samples: int | None) -> list[Prompt]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{hub_set.repository} is read with the datasets package, which is not installed: pip install "
            "d3d_hf[bench], or give a JSONL file of turns"
        ) from error
    try:
        if hub_set.data_files is None:
            rows = datasets.load_dataset(hub_set.repository, hub_set.subset, split=hub_set.split)
        else:
            file = f"hf://datasets/{hub_set.repository}/{hub_set.data_files}"
            rows = datasets.load_dataset("json", data_files=file, split=hub_set.split)
    except Exception as error:  # of many classes, a network's among them
        raise ValueError(f"The dataset {hub_set.repository!r} cannot be loaded: {error}") from error
    prompts = []
    for index, row in enumerate(rows):
        if index == max_samples:
            break
        turns = row[hub_set.column]
        first, *others = [turns] if isinstance(turns, str) else turns
        prompts.append(Prompt(index, (hub_set.wording.format(first), *others)))
    return prompts


class RawText:
    """Stands in for a chat template where a tokenizer has none: turns and answers, one per line."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def open(self, prompt: Prompt) -> list[dict[str, str]]:
        return []

    def encode(self, messages: Sequence[Mapping]) -> list[int]:
        text = "".join(f"{message['content']}\n" for message in messages)
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, response_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(response_ids, skip_special_tokens=True)


class RandomTokens:
    """
    A template for models without a tokenizer: a prompt of random tokens for each conversation.

    Args:
        vocab_size (`int`): Ids go from 0 to this.
        num_tokens (`int`): Tokens of a prompt.
    """

    def __init__(self, vocab_size: int, num_tokens: int):
        self._vocab_size, self._num_tokens = vocab_size, num_tokens

    def open(self, prompt: Prompt) -> list[dict[str, str]]:
        return []

    def encode(self, messages: Sequence[Mapping]) -> list[int]:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(messages).encode()))
        return torch.randint(self._vocab_size, (self._num_tokens,), generator=generator).tolist()

    def decode(self, response_ids: Sequence[int]) -> str:
        return " ".join(map(str, response_ids))


def random_prompts(num_prompts: int, num_tokens: int) -> PromptSet:
    """Prompts for [`RandomTokens`]."""
    return PromptSet(f"random-{num_tokens}", [Prompt(index, (f"prompt {index}",)) for index in range(num_prompts)])


def template_of(tokenizer, settings: Mapping | None = None):
    """The tokenizer's chat template, or raw text if it has none and no settings ask for one."""
    if getattr(tokenizer, "chat_template", None) is None and not settings:
        return RawText(tokenizer)
    return Template(tokenizer, settings)


def longest_context(template, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens that the longest of some conversations may come to, prompt and answers."""
    longest = 0
    for prompt in prompts:
        messages = template.open(prompt) + [{"role": "user", "content": turn} for turn in prompt.turns]
        longest = max(longest, len(template.encode(messages)) + len(prompt.turns) * max_new_tokens)
    return longest


__all__ = [
    "DATASET_NAMES",
    "PromptSet",
    "RandomTokens",
    "RawText",
    "load_prompt_set",
    "longest_context",
    "random_prompts",
    "template_of",
]
