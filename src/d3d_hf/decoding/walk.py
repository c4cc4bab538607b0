"""The walk: from the root of a draft along the target's own choices, one emitted token at a time.

At each node everything happens that plain decoding does for a token, once, in order and on the true text: the logits
processors, the argmax or one draw of the global generator, the stopping criteria, the streamer. Then the child that
bears the token is followed; where there is none, the token is the bonus and the round ends. So what is emitted, and
what everybody else sees of it, is plain decoding's, whatever was drafted.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..model.candidate_generator import attended_tokens
from ..model.generation_hook import Call
from ..model.generation_stats import RoundTree
from ..model.packing import ancestor_table
from .draft_tree import DraftTree, Paths
from .noise import ForeseenNoise
from .target_pass import PassOutput


# Processors that look at each row of scores alone, never at the text: rows may be processed together, ahead of time.
_ROW_BY_ROW = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class Walk:
    """
    The text of one call, and how it goes on.

    Args:
        call ([`Call`]): The call.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(1, length)`): Prompt and output so far, on the caller's device.
        text (`torch.LongTensor` of shape `(length,)`): The same without padding, on the CPU.
        is_finished (`bool`): Whether the output has ended.
        path (`list[int]`):
            Nodes that the last walk accepted, from the root's child on; where it was interrupted, those so far.
        scores, logits, hidden_states, attentions (`list`, *optional*):
            Of each emitted token, as plain decoding returns them; `None` where they were not asked for.
    """

    def __init__(self, call: Call):
        config, arguments = call.generation_config, call.arguments
        self._call = call
        self._processors = arguments.get("logits_processor") or LogitsProcessorList()
        self._criteria = arguments.get("stopping_criteria") or []
        self._streamer = arguments.get("streamer")
        self._samples = bool(config.do_sample)
        self._block_size = call.drafter.config.block_size
        self.input_ids = call.input_ids
        mask = arguments.get("attention_mask")
        self._attended = attended_tokens(call.input_ids, mask).cpu()
        self._text = torch.empty(max(config.max_length, len(self._attended)) + 1, dtype=torch.long, device="cpu")
        self._text[: len(self._attended)] = self._attended
        self._num_text = len(self._attended)
        self.is_finished, self.path = False, []

        def wanted(is_asked) -> list | None:
            return [] if config.return_dict_in_generate and is_asked else None

        self.scores, self.logits = wanted(config.output_scores), wanted(config.output_logits)
        self.hidden_states, self.attentions = wanted(config.output_hidden_states), wanted(config.output_attentions)
        self._limits = self._plain_limits(call)
        nothing_recorded = all(x is None for x in (self.scores, self.logits, self.hidden_states, self.attentions))
        self._is_swift = (
            not self._samples
            and not len(self._processors)
            and self._limits is not None
            and self._streamer is None
            and nothing_recorded
        )
        # On a GPU reading a choice back waits for the device: all nodes are chosen for together, then read once.
        device, vocab_size = call.input_ids.device, call.target.config.get_text_config().vocab_size
        self._draws_together = self._samples and device.type == "cuda" and self._are_rows_alone()
        self._noise = call.noise = ForeseenNoise(vocab_size, device) if self._samples else None

    @property
    def text(self) -> torch.LongTensor:
        return self._text[: self._num_text]

    def _plain_limits(self, call: Call) -> tuple[int, frozenset[int]] | None:
        """The greatest length and the ids that end the text, if nothing else ends it."""
        max_length, ends = None, set()
        for criterion in self._criteria:
            if type(criterion) is MaxLengthCriteria:
                max_length = min(criterion.max_length, max_length or criterion.max_length)
                reach = criterion.max_position_embeddings  # beyond, transformers says a word of warning
                if reach is not None and max_length > reach:
                    return None
            elif type(criterion) is EosTokenCriteria:
                ends.update(criterion.eos_token_id.tolist())
            else:
                return None
        return None if max_length is None else (max_length, frozenset(ends))

    def _are_rows_alone(self) -> bool:
        return all(type(processor) in _ROW_BY_ROW for processor in self._processors)

    def __call__(self, tree: DraftTree, output: PassOutput) -> list[int]:
        """
        Walks one verified draft.

        Returns:
            `list[int]`: The accepted nodes, from the root's child on; one token more was emitted.
        """
        self._call.has_begun, self.path = True, []
        paths = self._swiftly(tree, output) if self._is_swift else self._step_by_step(tree, output)
        if len(tree):
            self._call.stats.record_tree(RoundTree(paths.tokens, paths.parents, self.path), tree.sources)
        return self.path

    def _step_by_step(self, tree: DraftTree, output: PassOutput) -> Paths:
        if self._draws_together:
            drawn, paths = self._draw_together(tree, output.logits)
        else:
            drawn, paths = None, tree.read()
        node = 0
        while True:
            token = self._choose(output.logits[node]) if drawn is None else drawn.choose(node, self)
            self._record(output, node)
            self._emit(token)
            node = paths.child(node, token)
            if self.is_finished or node is None:
                break
            self.path.append(node)
        if drawn is not None:
            self._noise.skip(len(self.path) + 1)
        return paths

    def _swiftly(self, tree: DraftTree, output: PassOutput) -> Paths:
        """Greedy with nobody looking on: one argmax over all nodes, read once, and the text grows by a whole path."""
        choices, paths = tree.read_with(output.logits.argmax(dim=-1))
        max_length, ends = self._limits
        room = max_length - self.input_ids.shape[1]
        node, tokens = 0, []
        while True:
            token = choices[node]
            tokens.append(token)
            self.is_finished = token in ends or len(tokens) >= room
            node = paths.child(node, token)
            if self.is_finished or node is None:
                break
            self.path.append(node)
        self._append(torch.tensor(tokens, device="cpu"))
        return paths

    def _draw_together(self, tree: DraftTree, logits: torch.Tensor) -> tuple["_Drawn", Paths]:
        """What every node would emit if it were reached: one reading of the device."""
        rows = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self._processors(self.input_ids, rows)
        if tree.is_chain:
            depths = torch.arange(len(tree) + 1, device=rows.device)
        else:
            depths = F.pad(ancestor_table(tree.parents).sum(dim=1), (1, 0)).to(rows.device)
        noise = torch.cat([self._noise.row(depth) for depth in range(self._most_depth(tree) + 1)])
        choices, paths = tree.read_with((scores.softmax(dim=-1) / noise[depths]).argmax(dim=-1))
        return _Drawn(choices, scores, rows), paths

    def _most_depth(self, tree: DraftTree) -> int:
        """Levels of a tree, known without reading it."""
        return min(len(tree), self._block_size)

    def _choose(self, logits: torch.Tensor) -> int:
        """What plain decoding makes of one row of logits."""
        # A copy: processors may write to it.
        row = logits[None].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self._processors(self.input_ids, row)
        self.record_scores(scores, row)
        if not self._samples:
            return int(scores.argmax(dim=-1))
        return int(self._noise.draw(scores.softmax(dim=-1)))

    def record_scores(self, scores: torch.Tensor, logits: torch.Tensor):
        """Of one emitted token, both of shape `(1, vocab)`."""
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)

    def _record(self, output: PassOutput, node: int):
        """Hidden states and attentions of one emitted token: of all the prompt for the first, as in plain decoding."""
        end = output.num_context + node
        start = 0 if node == 0 else end - 1
        if self.hidden_states is not None:
            self.hidden_states.append(tuple(layer[:, start:end] for layer in output.outputs.hidden_states))
        if self.attentions is not None:
            keys = output.num_cached + end
            self.attentions.append(tuple(layer[:, :, start:end, :keys] for layer in output.outputs.attentions))

    def _emit(self, token: int):
        ids = torch.tensor([token], device=self.input_ids.device)
        self._append(ids)
        scores = None if self.scores is None else tuple(self.scores)
        if self._limits is not None:
            max_length, ends = self._limits
            self.is_finished = token in ends or self.input_ids.shape[1] >= max_length
        else:
            self.is_finished = bool(self._criteria(self.input_ids, scores).all())
        if self._streamer is not None:
            self._streamer.put(ids.cpu())

    def _append(self, tokens: torch.LongTensor):
        self.input_ids = torch.cat([self.input_ids, tokens.to(self.input_ids.device)[None]], dim=1)
        self._text[self._num_text : self._num_text + len(tokens)] = tokens
        self._num_text += len(tokens)


@dataclass
class _Drawn:
    """What each node of a draft would emit, and the processed and raw logits, of shape `(1 + nodes, vocab)`."""

    choices: list[int]
    scores: torch.Tensor
    logits: torch.Tensor

    def choose(self, node: int, walk: Walk) -> int:
        walk.record_scores(self.scores[node][None], self.logits[node][None])
        return self.choices[node]


__all__ = ["Walk"]
