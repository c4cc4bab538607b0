"""A client of OpenAI-compatible servers (vLLM, SGLang, TGI and others) that outlives their bad moments."""

import email.utils
import http.client
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


_RETRIED = (408, 409, 425, 429)
# With these no row would fare better than the first.
_HOPELESS = (401, 403, 404, 405)
_MAX_WAIT_S = 600.0


class ServerError(RuntimeError):
    """
    A request failed for good.

    Attributes:
        status (`int`, *optional*): The HTTP status; `None` where no answer came.
        is_general (`bool`): Whether every other request is bound to fail too.
    """

    def __init__(self, message: str, status: int | None, is_general: bool):
        super().__init__(message)
        self.status, self.is_general = status, is_general


@dataclass
class ChatServer:
    """
    Sends conversations to `base_url`/chat/completions.

    Args:
        base_url (`str`): As OpenAI's clients take it, e.g. http://localhost:8000/v1; `/v1` may be left out.
        model (`str`): The name that the server knows the model by.
        api_key (`str`, *optional*): Sent as a bearer token.
        options (`Mapping`, *optional*): Further fields of each request.
        max_retries (`int`, *optional*, defaults to 8): After 429, 5xx, timeouts and broken connections.
        backoff_s (`float`, *optional*, defaults to 1.0):
            Seconds before the first retry, twice as long before each next one, up to a minute. A Retry-After header
            says more.
        timeout_s (`float`, *optional*, defaults to 600.0): For one answer.

    Raises:
        ValueError: `base_url` is no http(s) URL.
    """

    base_url: str
    model: str
    api_key: str | None = None
    options: Mapping | None = None
    max_retries: int = 8
    backoff_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self):
        parts = urllib.parse.urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"The base URL is {self.base_url!r}: give one like http://localhost:8000/v1.")
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        self._url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, path + "/chat/completions", parts.query, ""))

    def answer(self, messages: Sequence[Mapping], **options) -> tuple[str, str]:
        """
        Args:
            messages (sequence of `Mapping`): The conversation, ending in a user's turn.
            options: Fields of this request alone.

        Returns:
            `tuple[str, str]`: The answer's text and the server's `finish_reason`.

        Raises:
            ServerError: The server refuses, or went on failing through all retries.
        """
        body = {"model": self.model, "messages": list(messages), **(self.options or {}), **options}
        for attempt in range(self.max_retries + 1):
            try:
                return _read_answer(self._post(body))
            except urllib.error.HTTPError as error:
                status, reason = error.code, f"status {error.code}: {_excerpt(error)}"
                if status not in _RETRIED and status < 500:
                    raise ServerError(reason, status, status in _HOPELESS) from error
                wait_s = _retry_after_s(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:  # timeouts and refused connections are OSErrors
                status, reason, wait_s = None, f"no answer: {error!r}", None
            if attempt < self.max_retries:
                backoff_s = min(self.backoff_s * 2**attempt, 60.0)
                # Spread, or all that were turned away at once would come back at once.
                time.sleep(backoff_s * random.uniform(0.5, 1.0) if wait_s is None else wait_s)
        raise ServerError(f"{reason}, {self.max_retries + 1} times", status, is_general=status is None)

    def _post(self, body: Mapping) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            return response.read()


def _read_answer(content: bytes) -> tuple[str, str]:
    try:
        choice = json.loads(content)["choices"][0]
        message = choice["message"]
        text, finish = message.get("content") or "", choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        excerpt = content[:200].decode(errors="replace")
        raise ServerError(f"an answer that is no chat completion: {excerpt}", 200, False) from error
    if message.get("reasoning_content") or message.get("reasoning"):
        raise ServerError(
            "the server has split the reasoning off the answer, so that the model's own words are not whole: start it "
            "without a reasoning parser, or switch thinking off with --template-arg",
            200,
            is_general=True,
        )
    return text, finish


def _excerpt(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    return " ".join(text.split())[:200] or error.reason


def _retry_after_s(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date."""
    if header is None:
        return None
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(0.0, wait_s), _MAX_WAIT_S)


__all__ = ["ChatServer", "ServerError"]
