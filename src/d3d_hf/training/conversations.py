"""Conversations played through turn by turn: which answers are due, and what follows when one was given."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .chat_template import Template
from .prompts import Prompt
from .responses import SKIPPED, ResponseFolder


logger = logging.getLogger(__name__)


@dataclass
class Job:
    """One answer to be given."""

    prompt: Prompt
    turn: int
    messages: list[dict[str, str]]
    prompt_ids: list[int]

    @property
    def id(self) -> str:
        return f"{self.prompt.index}-{self.turn}"


class Conversations:
    """Hands out the answers that are due, stores those that were given, and goes on with the next turns."""

    def __init__(self, prompts: Sequence[Prompt], template: Template, folder: ResponseFolder, stored: Mapping):
        self._template, self._folder, self._stored = template, folder, stored
        self._unopened, self._ready = iter(prompts), deque()
        self.num_rows = self.num_skipped = self.num_tokens = 0
        self.on_row = lambda: None

    def take(self, count: int) -> list[Job]:
        """Up to `count` answers that can be given at once; none if all the rest wait for others, or all are given."""
        while len(self._ready) < count:
            prompt = next(self._unopened, None)
            if prompt is None:
                break
            self._advance(prompt, 0, self._template.open(prompt))
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def finish(self, job: Job, response_ids: Sequence[int], finish: str):
        self._store(job.id, job.prompt_ids, response_ids, finish)
        self._go_on(job.prompt, job.turn, job.messages, response_ids)

    def skip(self, job: Job, reason: str):
        """Gives up a conversation that has become too long."""
        logger.warning(f"Prompt {job.prompt.index} is left out from turn {job.turn} on: {reason}.")
        for turn in range(job.turn, len(job.prompt.turns)):
            self.num_skipped += 1
            self._store(f"{job.prompt.index}-{turn}", [], [], SKIPPED)

    def _store(self, row_id, prompt_ids, response_ids, finish):
        row = {"id": row_id, "prompt_ids": prompt_ids, "response_ids": list(response_ids), "finish": finish}
        self._folder.append(row)
        self.num_rows += 1
        self.num_tokens += len(response_ids)
        self.on_row()

    def _advance(self, prompt: Prompt, turn: int, messages: list[dict[str, str]]):
        """Makes the turn ready, or walks on over an answer that an earlier run has stored."""
        if turn == len(prompt.turns):
            return
        messages = [*messages, {"role": "user", "content": prompt.turns[turn]}]
        row = self._stored.get(f"{prompt.index}-{turn}")
        if row is None:
            try:
                prompt_ids = self._template.encode(messages)
            except Exception as error:  # templates raise what they like
                raise ValueError(
                    f"The chat template cannot write prompt {prompt.index}, turn {turn}: {error}. Leave out what it "
                    "does not take (a system message, for one)."
                ) from error
            self._ready.append(Job(prompt, turn, messages, prompt_ids))
        elif row["finish"] != SKIPPED:
            self._go_on(prompt, turn, messages, row["response_ids"])

    def _go_on(self, prompt, turn, messages, response_ids):
        answer = {"role": "assistant", "content": self._template.decode(response_ids)}
        self._advance(prompt, turn + 1, [*messages, answer])


__all__ = ["Conversations", "Job"]
