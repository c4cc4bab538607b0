"""Plays prompts through all methods, interleaved, and keeps a row for each prompt and method as they come."""

import copy
import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from transformers import GenerationConfig

from ..pruning.resumable_run import ResumableRun
from ..training.prompts import Prompt
from .comparison import first_difference
from .datasets import PromptSet
from .methods import CannotRunError, Contestants, Method
from .recording import record


WARM_UP_TOKENS = 16


class RowStore(ResumableRun):
    """
    The rows of a run that may be ended and taken up again: a folder with the run's settings and a JSONL file for each
    process. All rows of a prompt are written together, so that its methods were always measured side by side.

    Args:
        folder (`str`): Made if it is not there.
        settings (`Mapping`): What the rows hang on; JSON can hold it.
        process_index (`int`, *optional*, defaults to 0): Names the file that this process writes.

    Raises:
        ValueError: The folder was begun with other settings.
    """

    def __init__(self, folder: str, settings: Mapping, process_index: int = 0):
        super().__init__(folder, settings)
        self._path = os.path.join(folder, f"rows-{process_index}.jsonl")

    def rows(self) -> list[dict]:
        """The rows that are there, those of other processes too; of a prompt that was measured again the last ones."""
        rows = {}
        for path in sorted(glob.glob(os.path.join(glob.escape(self.folder), "rows-*.jsonl"))):
            with open(path, encoding="utf-8") as file:
                lines = file.read().split("\n")
            for line in lines[:-1]:  # the last one is empty, or was cut off
                row = json.loads(line)
                rows[row["dataset"], row["prompt"], row["method"]] = row
        return list(rows.values())

    def add(self, rows: Sequence[Mapping]):
        """Appends the rows of one prompt."""
        with open(self._path, "ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    # A line that was cut off when a run was ended: what follows must not be glued to it.
                    file.seek(0)
                    whole = file.read().rpartition(b"\n")
                    file.truncate(len(whole[0]) + len(whole[1]))
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


class Runner:
    """
    Plays prompts through.

    Args:
        contestants ([`Contestants`]): The models.
        methods (`list[Method]`): What is compared; the first is plain generation.
        template: What encodes conversations: see `datasets.template_of`.
        config (`GenerationConfig`): Of all calls.
        seed (`int`, *optional*, defaults to 0): Of sampling, for each prompt plus its index.
    """

    def __init__(
        self,
        contestants: Contestants,
        methods: Sequence[Method],
        template,
        config: GenerationConfig,
        seed: int = 0,
    ):
        self._template, self._config, self._seed = template, config, seed
        self._methods, self._imposed = list(methods), contestants.imposed
        self._target = contestants.target
        self._calls, self.reasons = {}, {}
        for method in self._methods:
            try:
                self._calls[method] = method.call(contestants)
            except CannotRunError as error:
                self.reasons[method] = str(error)

    def warm_up(self, prompt: Prompt):
        """Every method answers the beginning of a prompt, which nobody counts."""
        config = copy.deepcopy(self._config)
        config.max_new_tokens = min(WARM_UP_TOKENS, config.max_new_tokens)
        for method in list(self._calls):
            self._answer(method, prompt, config)

    def run(
        self,
        prompt_sets: Sequence[PromptSet],
        store: RowStore,
        process_index: int = 0,
        num_processes: int = 1,
        on_prompt: Callable[[str], None] = lambda name: None,
    ):
        """
        Measures what the store does not hold yet.

        Args:
            prompt_sets (`list[PromptSet]`): The prompts.
            store ([`RowStore`]): Gets the rows.
            process_index, num_processes (`int`, *optional*): This process takes every `num_processes`th prompt.
            on_prompt (`Callable`, *optional*): Told the name of the data set after each prompt of this process.
        """
        names = {method.name for method in self._methods}
        done = {}
        for row in store.rows():
            done.setdefault((row["dataset"], row["prompt"]), set()).add(row["method"])
        is_warm = False
        for prompt_set in prompt_sets:
            for prompt in prompt_set.prompts[process_index::num_processes]:
                if done.get((prompt_set.name, prompt.index)) != names:
                    if not is_warm:
                        self.warm_up(prompt)
                        is_warm = True
                    store.add(self.rows_of(prompt_set.name, prompt))
                on_prompt(prompt_set.name)

    def rows_of(self, dataset: str, prompt: Prompt) -> list[dict]:
        """One row per method; the order in which they run turns from prompt to prompt."""
        answers = {}
        turn = prompt.index % len(self._methods)
        for method in self._methods[turn:] + self._methods[:turn]:
            answers[method] = self._answer(method, prompt, self._config)
        plain = answers[self._methods[0]]
        rows = []
        for method in self._methods:
            row = {"dataset": dataset, "prompt": prompt.index, "method": method.name, "drafter": method.drafter}
            row |= answers[method]
            if "turns" in row and "turns" in plain and not self._config.do_sample:
                row["difference"] = self._difference(plain["turns"], row["turns"])
            rows.append(row)
        return [_without_prompts(row) for row in rows]

    def _answer(self, method: Method, prompt: Prompt, config: GenerationConfig) -> dict:
        """What a method gives for a conversation, or the reason why it gives nothing."""
        if method in self.reasons:
            return {"reason": self.reasons[method]}
        try:
            return self._play(method, prompt, config)
        except Exception as error:  # a method of others may fail in any way, and the comparison goes on without it
            if method.base == "plain" and not method.compiles_target:
                raise
            self.reasons[method] = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
            return {"reason": self.reasons[method]}

    def _play(self, method: Method, prompt: Prompt, config: GenerationConfig) -> dict:
        call = self._calls[method]
        if self._imposed is not None:
            self._imposed.begin(self._seed + prompt.index)
        torch.manual_seed(self._seed + prompt.index)
        config, arguments = call.arguments(config)
        messages, turns, peaks = self._template.open(prompt), [], []
        for text in prompt.turns:
            messages.append({"role": "user", "content": text})
            prompt_ids = self._template.encode(messages)
            if method.is_drafted:
                call.assistant.last_generation_stats = None
            generation = record(call.target, prompt_ids, config, **arguments)
            messages.append({"role": "assistant", "content": self._template.decode(generation.ids)})
            turn = asdict(generation) | {"prompt_ids": prompt_ids, "num_prompt_tokens": len(prompt_ids)}
            peaks.append(turn.pop("peak_memory_bytes"))
            if method.is_drafted:
                stats = call.assistant.last_generation_stats
                if stats is None or stats.door == "plain":
                    raise RuntimeError(f"it generated without drafts: {stats and stats.door_reason}")
                turn |= _drafting(stats)
            turns.append(turn)
        peak = None if None in peaks else max(peaks)
        return {"turns": turns, "peak_memory_bytes": peak, "weights_bytes": call.weights_bytes}

    def _difference(self, plain: Sequence[Mapping], other: Sequence[Mapping]) -> dict | None:
        """Where two conversations first differ; with the logits of one forward of the target over the text before."""
        for number, (ours, theirs) in enumerate(zip(plain, other)):
            difference = first_difference(
                self._target,
                torch.tensor([ours["prompt_ids"]], device=self._target.device),
                torch.tensor(ours["ids"]),
                torch.tensor(theirs["ids"]),
            )
            if difference is not None:
                return {"turn": number, **asdict(difference)}
        return None


def _drafting(stats) -> dict:
    """A turn's drafting statistics: what [`GenerationStats`] says, as sums that add up over turns."""
    packed_ms = 1e3 * sum(end - start for lane, start, end in stats.spans if lane == "draft")
    return {
        "draft_ms": stats.draft_ms,
        "verify_ms": stats.verify_ms,
        "wait_ms": stats.wait_ms,
        "packed_ms": packed_ms,
        "hidden_ms": packed_ms * stats.overlap,
        "num_hits": stats.num_hits,
        "num_errors": stats.num_errors,
        "mode_choices": stats.mode_choices,
    }


def _without_prompts(row: dict) -> dict:
    if "turns" not in row:
        return row
    turns = [{name: value for name, value in turn.items() if name != "prompt_ids"} for turn in row["turns"]]
    return {**row, "turns": turns}


__all__ = ["WARM_UP_TOKENS", "RowStore", "Runner"]
