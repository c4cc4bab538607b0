"""Answers by any OpenAI-compatible server, many at once."""

import logging
import queue
import threading

from .answer_decoding import Decoding
from .chat_server import ChatServer, ServerError
from .chat_template import Template
from .conversations import Conversations, Job
from .responses import LENGTH, STOP


logger = logging.getLogger(__name__)

_FINISH_OF_SERVERS = {"stop": STOP, "eos_token": STOP, "stop_sequence": STOP, "length": LENGTH}


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

    def answer_all(self, conversations: Conversations):
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

    def _answer(self, job: Job) -> tuple[list[int], str]:
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


__all__ = ["ServerEngine"]
