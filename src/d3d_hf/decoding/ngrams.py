"""Nodes out of the text itself: what followed the last tokens wherever they stood before."""

from dataclasses import dataclass

import torch


# Tokens that two places must have in common, at most and at least.
LONGEST_MATCH, SHORTEST_MATCH = 8, 2
# Continuations that are looked at, the latest first.
_MOST_MATCHES = 4


@dataclass
class Continuation:
    """
    Attributes:
        tokens (`list[int]`): What followed there.
        match_length (`int`): Tokens before it that are those at the text's end.
    """

    tokens: list[int]
    match_length: int


class TextIndex:
    """
    Where each short run of tokens stands in a text that grows.

    The text is read once: each call of `continuations` looks at the tokens that came since the last.
    """

    def __init__(self):
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # of the shortest matches: where they end

    def continuations(self, text: torch.LongTensor, depth: int) -> list[Continuation]:
        """
        What followed earlier places that end as the text ends, the longest match first and then the latest.

        Args:
            text (`torch.LongTensor` of shape `(length,)`): The whole text, on the CPU.
            depth (`int`): Tokens of a continuation at most.
        """
        self._read(text)
        tokens, end = self._tokens, len(self._tokens)
        places = self._places.get(tuple(tokens[-SHORTEST_MATCH:]), []) if end > SHORTEST_MATCH else []
        found = []
        for place in reversed(places):
            if place == end:
                continue
            length = SHORTEST_MATCH
            while length < LONGEST_MATCH and length < place and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            # A text that repeats itself goes on into what it is about to say.
            following = [tokens[place + i % (end - place)] for i in range(depth)]
            found.append(Continuation(following, length))
            if len(found) == 8 * _MOST_MATCHES:
                break
        found.sort(key=lambda continuation: -continuation.match_length)
        return found[:_MOST_MATCHES]

    def _read(self, text: torch.LongTensor):
        start = len(self._tokens)
        self._tokens += text[start:].tolist()
        for place in range(max(start, SHORTEST_MATCH - 1), len(self._tokens)):
            end = place + 1
            self._places.setdefault(tuple(self._tokens[end - SHORTEST_MATCH : end]), []).append(end)


__all__ = ["Continuation", "TextIndex"]
