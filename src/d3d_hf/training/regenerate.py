"""Regeneration: the target's own answers to a prompt set, as token ids, for drafters to learn its words from.

A conversation is played through turn by turn, every assistant's turn being the target's own. An engine answers what is
ready: transformers' batched `generate` here, or any OpenAI-compatible server for scale.
"""

import copy
import hashlib
import itertools
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .chat_server import ChatServer, ServerError
from .prompts import Prompt, prompts_digest
from .provenance import versions
from .responses import FORMAT_VERSION, LENGTH, SKIPPED, STOP, ResponseFolder, text_digest, tokenizer_fingerprint


logger = logging.getLogger(__name__)

_WINDOW_BATCHES = 16
_FINISH_OF_SERVERS = {"stop": STOP, "eos_token": STOP, "stop_sequence": STOP, "length": LENGTH}
_TEMPLATE_KEYWORDS = ("conversation", "messages", "add_generation_prompt", "tokenize", "return_dict", "return_tensors")


@dataclass(frozen=True)
class Decoding:
    """
    How answers are decoded.

    Args:
        max_new_tokens (`int`, *optional*, defaults to 512): Longest answer.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
        top_p (`float`, *optional*, defaults to 1.0), top_k (`int`, *optional*, defaults to 0): Both are off.
        seed (`int`, *optional*, defaults to 0): Each answer's draws depend on it and on the answer's id alone.

    Raises:
        ValueError: A value is out of range, or does nothing as `temperature` is 0.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give at least 1.")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: give 0, which is greedy, or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0 and at most 1, which is off.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give 0, which is off, or the number of tokens to keep.")
        if self.temperature == 0 and (self.top_p != 1 or self.top_k != 0):
            raise ValueError(
                f"top_p is {self.top_p} and top_k {self.top_k}, but at temperature 0, which is greedy, they do "
                "nothing: give a temperature, or leave them out."
            )

    def seed_of(self, row_id: str) -> int:
        digest = hashlib.sha256(f"{self.seed}:{row_id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1  # servers take 31 bits


class Template:
    """
    A tokenizer's chat template with its settings.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        settings (`Mapping`, *optional*): Given to the template, e.g. `{"enable_thinking": False}`.
        system (`str`, *optional*): System message of conversations that have none.

    Raises:
        ValueError: There is no template, or it does not use one of the settings.
    """

    def __init__(self, tokenizer, settings: Mapping | None = None, system: str | None = None):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template: give an instruction-tuned target, or "
                "a tokenizer with one."
            )
        self.tokenizer, self.settings, self.system = tokenizer, dict(settings or {}), system
        self.text = tokenizer.get_chat_template()
        for name in self.settings:
            if name in _TEMPLATE_KEYWORDS or name not in self.text:
                raise ValueError(
                    f"The chat template of {tokenizer.name_or_path!r} takes no setting {name!r}: leave it out, or "
                    "give the name that the template uses."
                )

    def open(self, prompt: Prompt) -> list[dict[str, str]]:
        """The messages before the first user turn."""
        system = self.system if prompt.system is None else prompt.system
        return [] if system is None else [{"role": "system", "content": system}]

    def encode(self, messages: Sequence[Mapping]) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self.settings
        )
        return list(encoded["input_ids"])

    def decode(self, response_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(response_ids, skip_special_tokens=True)

    def end_of_turn(self) -> int | None:
        """The special token that ends an answer: what the template writes after one, else the tokenizer's EOS."""
        answer = "answer"
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.settings)
        tail = self.tokenizer(text[text.rfind(answer) + len(answer) :], add_special_tokens=False)["input_ids"]
        special = set(self.tokenizer.all_special_ids)
        return next((token for token in tail if token in special), self.tokenizer.eos_token_id)


@dataclass
class _Job:
    """One answer to be given."""

    prompt: Prompt
    turn: int
    messages: list[dict[str, str]]
    prompt_ids: list[int]

    @property
    def id(self) -> str:
        return f"{self.prompt.index}-{self.turn}"


class _Conversations:
    """Hands out the answers that are due, stores those that were given, and goes on with the next turns."""

    def __init__(self, prompts: Sequence[Prompt], template: Template, folder: ResponseFolder, stored: Mapping):
        self._template, self._folder, self._stored = template, folder, stored
        self._unopened, self._ready = iter(prompts), deque()
        self.num_rows = self.num_skipped = self.num_tokens = 0
        self.on_row = lambda: None

    def take(self, count: int) -> list[_Job]:
        """Up to `count` answers that can be given at once; none if all the rest wait for others, or all are given."""
        while len(self._ready) < count:
            prompt = next(self._unopened, None)
            if prompt is None:
                break
            self._advance(prompt, 0, self._template.open(prompt))
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def finish(self, job: _Job, response_ids: Sequence[int], finish: str):
        self._store(job.id, job.prompt_ids, response_ids, finish)
        self._go_on(job.prompt, job.turn, job.messages, response_ids)

    def skip(self, job: _Job, reason: str):
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
            self._ready.append(_Job(prompt, turn, messages, prompt_ids))
        elif row["finish"] != SKIPPED:
            self._go_on(prompt, turn, messages, row["response_ids"])

    def _go_on(self, prompt, turn, messages, response_ids):
        answer = {"role": "assistant", "content": self._template.decode(response_ids)}
        self._advance(prompt, turn + 1, [*messages, answer])


class TransformersEngine:
    """
    Answers with transformers' batched `generate`, padded on the left.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer: Its tokenizer.
        decoding ([`Decoding`]): How to decode.
        batch_size (`int`, *optional*, defaults to 8): Answers at once. They are sorted by length, so that little is
            padded.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, tokenizer, decoding: Decoding, batch_size: int = 8):
        self.model, self.decoding, self.batch_size = model, decoding, batch_size
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = config.vocab_size
        self._max_length = getattr(config, "max_position_embeddings", None)
        eos = model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self._eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self._pad = next((token for token in (tokenizer.pad_token_id, *self._eos) if token is not None), 0)

    def describe(self) -> dict:
        return {
            "name": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "repetition_penalty": self.model.generation_config.repetition_penalty or 1.0,
        }

    def answer_all(self, conversations: _Conversations):
        while window := conversations.take(_WINDOW_BATCHES * self.batch_size):
            jobs = []
            for job in window:
                if self._room(job) > 0:
                    jobs.append(job)
                else:
                    conversations.skip(job, f"its {len(job.prompt_ids)} tokens fill the {self._max_length} positions")
            # The longest first: if memory does not suffice, that shows at once.
            jobs.sort(key=lambda job: (self._room(job), -len(job.prompt_ids)))
            for _, group in itertools.groupby(jobs, key=self._room):
                group = list(group)
                for start in range(0, len(group), self.batch_size):
                    self._answer(group[start : start + self.batch_size], conversations)

    def _room(self, job: _Job) -> int:
        if self._max_length is None:
            return self.decoding.max_new_tokens
        return min(self.decoding.max_new_tokens, self._max_length - len(job.prompt_ids))

    @torch.inference_mode()
    def _answer(self, jobs: Sequence[_Job], conversations: _Conversations):
        width = max(len(job.prompt_ids) for job in jobs)
        ids = torch.full((len(jobs), width), self._pad)
        mask = torch.zeros_like(ids)
        for i, job in enumerate(jobs):
            ids[i, width - len(job.prompt_ids) :] = torch.tensor(job.prompt_ids)
            mask[i, width - len(job.prompt_ids) :] = 1
        config = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens, config.max_length = self._room(jobs[0]), None
        config.eos_token_id, config.pad_token_id = self._eos or None, self._pad
        # Sampling is the processors' (below). These values count as not given.
        config.do_sample, config.temperature, config.top_k, config.top_p = False, 1.0, 50, 1.0
        output = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=config,
            logits_processor=self._processors(jobs),
        )
        for job, response in zip(jobs, output[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(response) if token in self._eos), None)
            if end is None:
                conversations.finish(job, response, LENGTH)
            else:
                conversations.finish(job, response[: end + 1], STOP)

    def _processors(self, jobs: Sequence[_Job]) -> LogitsProcessorList:
        decoding, processors = self.decoding, LogitsProcessorList()
        if decoding.temperature > 0:
            processors.append(TemperatureLogitsWarper(decoding.temperature))
            if decoding.top_k:
                processors.append(TopKLogitsWarper(decoding.top_k))
            if decoding.top_p < 1:
                processors.append(TopPLogitsWarper(decoding.top_p))
            processors.append(SamplePerRow([decoding.seed_of(job.id) for job in jobs]))
        return processors


class SamplePerRow(LogitsProcessor):
    """
    Draws the next token of each row from the row's law by a generator of the row's own, and leaves it as the only one
    possible. So a row's draws are the same in any batch.

    Args:
        seeds (sequence of `int`): One per row.
    """

    def __init__(self, seeds: Sequence[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)  # (batch, vocab)
        uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        thresholds = uniform.to(scores.device)[:, None] * cumulated[:, -1:]
        # The first token whose cumulated probability exceeds the threshold; one of probability 0 never does.
        chosen = torch.searchsorted(cumulated, thresholds, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


class ServerEngine:
    """
    Has an OpenAI-compatible server answer, so many conversations at once.

    Args:
        server ([`ChatServer`]): The server.
        template ([`Template`]): What the answers are tokenized with; its settings go to the server as well.
        decoding ([`Decoding`]): Sent with each request.
        concurrency (`int`, *optional*, defaults to 16): Requests under way at once.
        vocab_size (`int`, *optional*): The target's, where it is known.
    """

    name = "openai"

    def __init__(
        self,
        server: ChatServer,
        template: Template,
        decoding: Decoding,
        concurrency: int = 16,
        vocab_size: int | None = None,
    ):
        self.server, self.decoding, self.concurrency, self.vocab_size = server, decoding, concurrency, vocab_size
        self._template, self._end = template, template.end_of_turn()
        # What not every server knows is sent only where it says something.
        options = {"max_tokens": decoding.max_new_tokens, "temperature": decoding.temperature}
        if decoding.top_p < 1:
            options["top_p"] = decoding.top_p
        if decoding.top_k:
            options["top_k"] = decoding.top_k
        if template.settings:
            options["chat_template_kwargs"] = template.settings
        self._options = options

    def describe(self) -> dict:
        return {"name": self.name, "base_url": self.server.base_url, "model": self.server.model}

    def answer_all(self, conversations: _Conversations):
        """
        Raises:
            ServerError: Answers failed for good. All others are stored, but where every request was bound to fail.
        """
        requests, results, failures, num_sent = queue.Queue(), queue.Queue(), [], 0
        # Daemons: an interrupted run does not wait for answers that may take minutes.
        for _ in range(self.concurrency):
            threading.Thread(target=self._work, args=(requests, results), name="d3d-requests", daemon=True).start()
        try:
            while True:
                while num_sent < self.concurrency and (jobs := conversations.take(1)):
                    requests.put(jobs[0])
                    num_sent += 1
                if not num_sent:
                    break
                job, outcome = results.get()
                num_sent -= 1
                if isinstance(outcome, ServerError):
                    outcome = ServerError(f"Row {job.id} failed with {outcome}", outcome.status, outcome.is_general)
                    if outcome.is_general:
                        raise outcome
                    logger.warning(str(outcome))
                    failures.append(outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    conversations.finish(job, *outcome)
        finally:
            for _ in range(self.concurrency):
                requests.put(None)
        if failures:
            raise ServerError(
                f"{failures[0]}" + (f" (and {len(failures) - 1} more rows failed)" if len(failures) > 1 else ""),
                failures[0].status,
                is_general=False,
            )

    def _work(self, requests: queue.Queue, results: queue.Queue):
        while (job := requests.get()) is not None:
            try:
                results.put((job, self._answer(job)))
            except BaseException as error:  # raised again by the thread that waits for it
                results.put((job, error))

    def _answer(self, job: _Job) -> tuple[list[int], str]:
        options = dict(self._options)
        if self.decoding.temperature > 0:
            options["seed"] = self.decoding.seed_of(job.id)
        text, reason = self.server.answer(job.messages, **options)
        finish = _FINISH_OF_SERVERS.get(reason)
        if finish is None:
            raise ServerError(f"finish_reason {reason!r}, neither 'stop' nor 'length'", 200, is_general=False)
        ids = self._template.tokenizer(text, add_special_tokens=False)["input_ids"]
        if finish == STOP and self._end is not None:
            ids = [*ids, self._end]
        return ids, finish


@dataclass
class Summary:
    """
    What a run did, on this process.

    Attributes:
        num_rows, num_skipped, num_tokens (`int`): Written; of those, left out as too long; response tokens.
        num_present (`int`): Rows that were there already.
        seconds (`float`): Time in the engine.
    """

    num_rows: int
    num_skipped: int
    num_tokens: int
    num_present: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def regenerate(
    engine: TransformersEngine | ServerEngine,
    template: Template,
    prompts: Sequence[Prompt],
    output: str,
    target: str,
    prompt_source: str,
    process_index: int = 0,
    num_processes: int = 1,
    wait_for_everyone=lambda: None,
    shows_progress: bool = False,
) -> Summary:
    """
    Writes the target's answers to `output`, or goes on with what an interrupted run has left there.

    Args:
        engine ([`TransformersEngine`] or [`ServerEngine`]): What answers.
        template ([`Template`]): The target's.
        prompts (sequence of [`Prompt`]): All of them, on every process.
        output (`str`): A folder, see responses.py.
        target (`str`): The target's name, which drafters will be checked against.
        prompt_source (`str`): What the prompts are called in the metadata.
        process_index, num_processes (`int`, *optional*): This process answers every `num_processes`th prompt.
        wait_for_everyone (`Callable()`, *optional*): A barrier over the processes.
        shows_progress (`bool`, *optional*, defaults to `False`): A progress bar on stderr.

    Raises:
        ValueError: `output` was begun with other settings, or a conversation cannot be written by the template.
        ServerError: Answers of a server failed for good.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "target": target,
        "vocab_size": engine.vocab_size,
        "tokenizer_fingerprint": tokenizer_fingerprint(template.tokenizer),
        "chat_template": {
            "sha256": text_digest(template.text),
            "settings": template.settings,
            "system": template.system,
        },
        "generation": asdict(engine.decoding),
        "engine": engine.describe(),
        "prompts": {
            "source": prompt_source,
            "num_prompts": len(prompts),
            "num_rows": sum(len(prompt.turns) for prompt in prompts),
            "sha256": prompts_digest(prompts),
        },
        "versions": versions(),
    }
    folder = ResponseFolder(output, process_index, num_processes)
    folder.check(metadata, lambda count: prompts_digest(prompts[:count]))
    mine = prompts[process_index::num_processes]
    try:
        stored = {row["id"]: row for row in folder.open(metadata, template.text, wait_for_everyone)}
        num_present = sum(f"{prompt.index}-{turn}" in stored for prompt, turn in _turns(mine))
        conversations = _Conversations(mine, template, folder, stored)
        start = time.perf_counter()
        with _progress(conversations, sum(1 for _ in _turns(mine)), num_present, shows_progress):
            engine.answer_all(conversations)
    finally:
        folder.close()
    return Summary(
        conversations.num_rows,
        conversations.num_skipped,
        conversations.num_tokens,
        num_present,
        time.perf_counter() - start,
    )


def _turns(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, int]]:
    return ((prompt, turn) for prompt in prompts for turn in range(len(prompt.turns)))


def _progress(conversations: _Conversations, total: int, num_present: int, is_shown: bool):
    from tqdm import tqdm

    bar = tqdm(total=total, initial=num_present, unit="row", disable=not is_shown, file=sys.stderr, smoothing=0)
    start = time.perf_counter()

    def on_row():
        speed = conversations.num_tokens / max(time.perf_counter() - start, 1e-9)
        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        bar.update()

    conversations.on_row = on_row
    return bar


__all__ = [
    "Decoding",
    "SamplePerRow",
    "ServerEngine",
    "Summary",
    "Template",
    "TransformersEngine",
    "regenerate",
]
