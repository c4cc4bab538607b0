"""Nodes out of the text itself: what followed the last tokens wherever they stood before."""

from dataclasses import dataclass

import torch

from .draft_tree import DraftTree


# Tokens that two places must have in common, at most and at least.
LONGEST_MATCH, SHORTEST_MATCH = 8, 2
# Continuations that are looked at, the latest first.
_MOST_MATCHES = 4

# What is thought of matches by their length before any was seen, and observations that it counts as much as.
_PRIOR_CHANCES = (0.0, 0.1, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8)
_PRIOR_WEIGHT = 4.0


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


class TextChances:
    """How likely the next token is the one that followed a match, by its length; learned from what came true."""

    def __init__(self):
        self._right = [_PRIOR_WEIGHT * _PRIOR_CHANCES[length] for length in range(LONGEST_MATCH + 1)]
        self._seen = [_PRIOR_WEIGHT] * (LONGEST_MATCH + 1)

    def chance(self, match_length: int) -> float:
        length = min(match_length, LONGEST_MATCH)
        return self._right[length] / self._seen[length]

    def record(self, continuation: Continuation, truth: list[int]):
        """What followed in truth: every place up to the first that differs is an observation."""
        for place, (token, true_token) in enumerate(zip(continuation.tokens, truth)):
            length = min(continuation.match_length + place, LONGEST_MATCH)
            self._seen[length] += 1
            self._right[length] += token == true_token
            if token != true_token:
                return


def merge(tree: DraftTree, continuations: list[Continuation], chances: TextChances, num_nodes: int) -> DraftTree:
    """
    A tree with continuations out of the text as further paths, merged by prefix; the likeliest nodes of it.

    Args:
        tree ([`DraftTree`]): With the chances of its nodes.
        continuations, chances: What the text offers, and how good that is.
        num_nodes (`int`): Of the new tree, at most.
    """
    paths = tree.read()
    tokens, parents = list(paths.tokens), list(paths.parents)
    own, sources = tree.chances.tolist(), ["model"] * len(tokens)
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens), start=1)}
    offered = {}  # chances out of the text
    for continuation in continuations:
        node, chance = 0, 1.0
        for place, token in enumerate(continuation.tokens):
            chance *= chances.chance(continuation.match_length + place)
            child = children.get((node, token))
            if child is None:
                tokens.append(token)
                parents.append(node)
                own.append(0.0)
                sources.append("text")
                child = children[(node, token)] = len(tokens)
            offered[child] = max(chance, offered.get(child, 0.0))
            node = child
    # A node that the text makes likelier makes those below it likelier; none is likelier than its parent.
    merged = [1.0]
    for node, (parent, chance) in enumerate(zip(parents, own), start=1):
        before = own[parent - 1] if parent else 1.0
        chance = chance / before * merged[parent] if before else 0.0
        merged.append(min(max(chance, offered.get(node, 0.0)), merged[parent]))
    order = sorted(range(1, len(merged)), key=lambda node: -merged[node])[:num_nodes]
    place = {0: 0} | {node: new for new, node in enumerate(order, start=1)}
    return DraftTree(
        torch.tensor([tokens[node - 1] for node in order]),
        torch.tensor([place[parents[node - 1]] for node in order]),
        torch.tensor([merged[node] for node in order]),
        [sources[node - 1] for node in order],
    )


__all__ = ["Continuation", "TextChances", "TextIndex", "merge"]
