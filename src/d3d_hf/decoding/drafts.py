"""Where the next draft comes from, synchronously: it is made after the verdict on the one before."""

import time

import torch

from ..model.block import Block
from ..model.candidate_generator import report_failure
from ..model.drafting_session import DraftingSession
from ..model.generation_hook import Call
from .call_draws import CallDraws
from .draft_tree import DraftTree
from .ngrams import TextChances, TextIndex, merge
from .tree_building import TreeBuilder
from .tree_size import TREE_SIZES, SizeRule, costs_of


class Drafts:
    """
    The drafts of one call, made on the caller's thread. Nothing is computed before the first.

    Args:
        call ([`Call`]): The call.
        takes_trees (`bool`, *optional*, defaults to `True`): Whether the target's passes do.
    """

    mode = "sync"

    def __init__(self, call: Call, takes_trees: bool = True):
        self.options, self.stats = call.options, call.stats
        self.stats.mode = self.mode
        self._block_size = call.drafter.config.block_size
        self._session = self._make_session(call.drafter, call.target.config.get_text_config().vocab_size)
        self._builder = TreeBuilder(call.drafter, call.target.config.get_text_config().vocab_size)
        self._takes_trees = takes_trees and self.options.draft_tree_size != 0
        self._size_rule = SizeRule(costs_of(call.target), getattr(call.target, "draft_tree_sizes", TREE_SIZES))
        self._draws = CallDraws(call) if call.noise is not None else None
        self._index, self._text_chances = TextIndex(), TextChances()
        self._continuations, self._num_known, self._num_drafts = [], 0, 0
        self._has_failed = False
        self._verify_start = None

    def _make_session(self, drafter, vocab_size: int) -> DraftingSession:
        options = self.options
        return DraftingSession(drafter, vocab_size, options.num_denoising_steps, options.compile_drafter)

    def next(self, text: torch.LongTensor, room: int) -> DraftTree:
        """
        The draft after a text.

        Args:
            text (`torch.LongTensor` of shape `(length,)`): The whole text without padding, on the CPU.
            room (`int`): Tokens that a draft may be deep.

        Returns:
            [`DraftTree`], an empty one where there is no room or drafting has failed.
        """
        start = time.perf_counter()
        tree = DraftTree.empty()
        if room >= 1 and len(text) and not self._has_failed:
            try:
                depth = min(self.options.num_assistant_tokens, room)
                tree = self._draft(text, depth) or tree
                self._prepare_next(text, tree, room)
            except Exception as error:
                self._fail(error)
                tree = DraftTree.empty()
        self._verify_start = time.perf_counter()
        self.stats.record_draft(len(tree), 1e3 * (self._verify_start - start))
        return tree

    def _draft(self, text: torch.LongTensor, depth: int) -> DraftTree | None:
        """A draft of at most so many levels, or none."""
        self._session.prepare()
        if self.options.num_denoising_steps > 1:
            return DraftTree(self._session.draft(text, depth))
        start = time.perf_counter()
        tree = self._shaped(self._session.block(text, depth), text, depth)
        if self._num_drafts:  # the first one reads the prompt
            self._size_rule.record_draft(time.perf_counter() - start)
        self._num_drafts += 1
        return tree

    def _shaped(self, block: Block | None, text: torch.LongTensor, depth: int) -> DraftTree | None:
        """A block's tree, or its chain."""
        if block is None:
            return None
        if not self._takes_trees:
            return DraftTree(self._builder.chain(block, depth))
        size = self.options.draft_tree_size
        most = self._size_rule.most if size == "auto" else size
        draws = None if self._draws is None else self._draws.next(depth)
        tree = self._builder.tree(block, most, depth, draws)
        if self.options.draft_from_text:
            tree = self._with_text(tree, text, depth, most)
        return tree.first(self._size_rule.choose(tree.chances.tolist())) if size == "auto" else tree

    def _with_text(self, tree: DraftTree, text: torch.LongTensor, depth: int, num_nodes: int) -> DraftTree:
        """A tree with what followed in the text where it stood as it stands now."""
        if self._continuations:
            truth = text[self._num_known :].tolist()
            for continuation in self._continuations:
                self._text_chances.record(continuation, truth)
        self._continuations, self._num_known = self._index.continuations(text, depth), len(text)
        return merge(tree, self._continuations, self._text_chances, num_nodes) if self._continuations else tree

    def observe(self, tree: DraftTree, path: list[int], rows: int, seconds: float):
        """
        The verdict on a draft.

        Args:
            tree ([`DraftTree`]): The draft.
            path (`list[int]`): The accepted nodes.
            rows (`int`): Tokens of the target's pass.
            seconds (`float`): What it took.
        """
        self._size_rule.costs.record(rows, seconds)
        if tree.chances is not None:
            accepted = set(path)
            chances = tree.chances.tolist()
            self._size_rule.calibration.record(chances, [node in accepted for node in range(1, len(chances) + 1)])

    def _prepare_next(self, text: torch.LongTensor, tree: DraftTree, room: int):
        """What can be done for the round after this one, before the verification."""

    def _fail(self, error: Exception):
        """Ends drafting, with one warning, or the generation; the output is right in any case."""
        self._has_failed = True
        report_failure(error, self.options, self.stats)

    def close(self):
        """Frees the drafter's cache; called however the generation ends. Idempotent."""
        self._session.close()


__all__ = ["Drafts"]
