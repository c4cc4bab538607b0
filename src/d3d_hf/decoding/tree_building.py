"""From a block to a draft tree: the paths that the target's own text most likely takes, best first.

Each node carries the chained head's state, so that the law of its children knows its path; the shortlist of each slot
serves every node at that depth. A node is no likelier than its parent, so the `n` likeliest nodes are a tree, and
level by level with the `n` likeliest of each level finds the same nodes as expanding one at a time, best first, does.
Nothing is read off the device on the way.
"""

import heapq
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..model.block import SHORTLIST, Block, BlockReader
from .draft_tree import DraftTree


# How far the drafter's law is from the target's, in the scale of the noise: ranks under shared noise are as sure as a
# softmax of this width (docs/lab-notes.md).
NOISE_WIDTH = 1.5


@dataclass
class Draws:
    """
    How the target will draw: what is known of it when children are ranked.

    Attributes:
        noise (`torch.Tensor` of shape `(levels, vocab)`): Of the draws to come, level by level; see noise.py.
        temperature (`float`): Of the call.
        top_k, top_p, min_p (*optional*): Of the call; `None` where it cuts nothing off.
    """

    noise: torch.Tensor
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Puts what the call's warpers would leave out at -inf. `(rows, candidates)`, in descending order."""
        places = torch.arange(logits.shape[1], device=logits.device)
        left_out = torch.zeros_like(logits, dtype=torch.bool)
        if self.top_k:
            left_out |= places >= self.top_k
        if self.top_p is not None:
            laws = logits.softmax(dim=-1)
            left_out |= laws.cumsum(dim=-1) - laws >= self.top_p
        if self.min_p is not None:
            left_out |= logits < logits[:, :1] + torch.tensor(self.min_p).log().to(logits.device)
        return logits.masked_fill(left_out & (places > 0), float("-inf"))

    @property
    def cuts(self) -> bool:
        """Whether only few tokens of each law are left."""
        return bool(self.top_k) or self.top_p is not None or self.min_p is not None


class TreeBuilder(BlockReader):
    """
    Builds the trees of one drafter for one target.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter.
        vocab_size (`int`): The target's.
    """

    @torch.no_grad()
    def tree(self, block: Block, num_nodes: int, depth: int, draws: Draws | None = None) -> DraftTree:
        """
        The likeliest nodes, in descending order of their chances.

        Args:
            block ([`Block`]): What the drafter says.
            num_nodes (`int`): Of the tree, at most.
            depth (`int`): Levels, at most as many as the block has rows.
            draws ([`Draws`], *optional*): How the target will draw. Default: it takes the likeliest.
        """
        laws = _Laws(self, block, depth, draws)
        reads_are_free = block.logits.device.type == "cpu"
        scores = torch.zeros(1, device=block.logits.device)  # logarithms of the chances of this level's nodes
        state, first, levels = laws.root_state(), 0, []
        for level in range(depth):
            children = scores[:, None] + laws.children(level, state)  # (nodes, candidates)
            scores, places = children.flatten().topk(min(num_nodes, children.numel()))
            if reads_are_free and levels:  # those that others have crowded out are not expanded
                best = torch.cat([*(known for known, _, _ in levels), scores])
                if best.shape[0] > num_nodes:
                    scores = scores[: int((scores >= best.topk(num_nodes).values[-1]).sum())]
                    places = places[: scores.shape[0]]
            if scores.shape[0] == 0:
                break
            above = places // children.shape[1]
            tokens = laws.candidates[level, places % children.shape[1]]
            levels.append((scores, tokens, above + first))
            if level + 1 < depth:
                state = laws.next_state(level + 1, tokens, None if state is None else state[above])
            first += 1 if level == 0 else levels[-2][0].shape[0]
        scores, tokens, parents = (torch.cat(parts) for parts in zip(*levels))
        # Stable: of two that are as likely the one above stands first.
        ranked, order = scores.sort(descending=True, stable=True)
        order = order[:num_nodes]
        if reads_are_free:  # what a cut left out is no node
            order = order[ranked[:num_nodes] > float("-inf")]
        place = torch.zeros(len(scores) + 1, dtype=torch.long, device=scores.device)
        place[order + 1] = torch.arange(1, len(order) + 1, device=scores.device)
        return DraftTree(tokens[order], place[parents[order]], scores[order].exp())

    @torch.no_grad()
    def tree_one_by_one(self, block: Block, num_nodes: int, depth: int, draws: Draws | None = None) -> DraftTree:
        """The twin of `tree`, which expands one node at a time."""
        laws = _Laws(self, block, depth, draws)
        tokens, parents, scores = [], [], []
        waiting = []

        def expand(node: int, score: torch.Tensor, level: int, state):
            children = score + laws.children(level, state)[0]
            for child, token in zip(children, laws.candidates[level].tolist()):
                if child == float("-inf"):
                    continue
                heapq.heappush(waiting, (-child.item(), len(waiting), child, node, token, level, state))

        expand(0, torch.zeros(()), 0, laws.root_state())
        while waiting and len(tokens) < num_nodes:
            _, _, score, parent, token, level, state = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            scores.append(score)
            if level + 1 < depth:
                state = laws.next_state(level + 1, torch.tensor([token], device=block.logits.device), state)
                expand(len(tokens), score, level + 1, state)
        return DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.stack(scores).exp())


class _Laws:
    """The laws of one block, given the path to a node."""

    def __init__(self, reader: TreeBuilder, block: Block, depth: int, draws: Draws | None):
        self._reader, self._block, self._head = reader, block, reader._drafter.chained_head
        self._draws = draws
        logits = reader.draftable(block.logits[:depth])
        self.candidates, self._values = self._shortlist(logits)
        self._rows = None
        if self._head is not None and reader._drafter.has_plain_head():
            self._rows = reader._drafter.get_output_embeddings().weight[self.candidates]
        if draws is not None:
            noise = draws.noise[: len(logits), : logits.shape[1]].to(logits.device)
            self._luck = -noise.gather(1, self.candidates).log()
        self._hidden = block.hidden_states[:depth]
        self._parts = None if self._head is None else self._head.hidden_part(self._hidden)

    def _shortlist(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """Candidates of each row, and their logits in float32 before any correction."""
        draws, size = self._draws, min(SHORTLIST, logits.shape[1])
        if draws is None or draws.cuts:
            values, candidates = logits.topk(size)
            return candidates, values.float()
        # Without a cut any token may be drawn: those are looked at that luck and law together favour.
        luck = -draws.noise[: len(logits), : logits.shape[1]].to(logits.device).log()
        candidates = (logits / draws.temperature + luck).topk(size).indices
        return candidates, logits.gather(1, candidates).float()

    def root_state(self) -> torch.Tensor | None:
        """The head's state behind the root, of shape `(1, size)`; `None` where nothing was chosen behind a mask."""
        if self._head is None or self._block.bonus is None:
            return None
        return self.next_state(0, torch.tensor([self._block.bonus], device=self._hidden.device), None)

    def next_state(self, row: int, tokens: torch.LongTensor, state: torch.Tensor | None) -> torch.Tensor | None:
        """The states behind tokens that stand at a row's slot, after the states behind their parents."""
        if self._head is None:
            return None
        entering = self._parts[row] + self._head.token_part(self._reader.embed(tokens))
        return F.silu(entering if state is None else entering + self._head.recurrent(state))

    def children(self, row: int, state: torch.Tensor | None) -> torch.Tensor:
        """Logarithms of the laws at a row, given states: shape `(states, candidates)`, or `(1, candidates)`."""
        values = self._values[row][None]
        if state is not None:
            correction = self._head.out(state)  # (states, hidden)
            if self._rows is not None:
                values = values + (correction @ self._rows[row].T).float()
            else:
                logits = self._reader._drafter.project(self._hidden[row] + correction)
                values = logits[:, self.candidates[row]].float()
        if self._draws is not None:
            values = values / self._draws.temperature
            if self._draws.cuts:
                values = self._draws.cut(values)
            values = (values + self._luck[row]) / NOISE_WIDTH
        return values.log_softmax(dim=-1)


__all__ = ["Draws", "TreeBuilder"]
