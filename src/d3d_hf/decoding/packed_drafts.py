"""Drafts for every possible verdict at once.

While the target verifies `d_1..d_g` after the last committed token, the drafter runs one pass over these tokens as
context, with branches that hang on each place where the verification may end. A *masked* branch is all mask slots;
the first stands where the bonus will be, so it serves any bonus. A *guess* branch shows a guessed bonus and is as good
as a synchronous draft if the guess is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..model.block import Block
from ..model.drafting_session import MAX_CONTEXT_PER_PASS, DraftingSession
from ..model.packing import lay_out, lay_out_tree
from .draft_tree import Paths
from .planner import Branch, BranchValues, plan_branches


@dataclass
class PackedDrafts:
    """
    What a packed pass drafted.

    Attributes:
        round_id (`int`): Of the round whose verification it was made for.
        branches (`list[Branch]`): In the order of the rows.
        hidden_states (`torch.Tensor` of shape `(branches, block_size, hidden)`):
            Last hidden states of the slots; the vocabulary projection is left to the branch that is chosen.
    """

    round_id: int
    branches: list[Branch]
    hidden_states: torch.Tensor

    def choose(self, node: int, bonus: int) -> int | None:
        """Index of the branch for a verdict: the guess that is right, else the masked one, else `None`."""
        for branch in (Branch(node, bonus), Branch(node)):
            if branch in self.branches:
                return self.branches.index(branch)
        return None


def guesses_without(candidates: torch.LongTensor, rejected: Sequence[int], num_guesses: int) -> list[list[int]]:
    """
    The best candidates for each place, less the token that would have been rejected there.

    Args:
        candidates (`torch.LongTensor` of shape `(places, at least num_guesses + 1)`): Tokens, best first.
        rejected (sequence of `int`): The draft token at each place; shorter by one where nothing would be rejected.
        num_guesses (`int`): Guesses per place.
    """
    guesses = []
    for place, tokens in enumerate(candidates.tolist()):
        never = rejected[place] if place < len(rejected) else None
        guesses.append([token for token in tokens if token != never][:num_guesses])
    return guesses


class PackedSession(DraftingSession):
    """A drafting session that drafts for every verdict. Runs wherever the worker runs it; one job at a time."""

    _hanging = None  # the tree whose keys and values stand behind those of the text

    def close(self):
        super().close()
        self._hanging = None

    def pack(
        self,
        text: torch.LongTensor,
        num_committed: int,
        round_id: int,
        num_guesses: int = 0,
        given_guesses: list[list[int]] | None = None,
        parents: list[int] | None = None,
        max_branches: int | None = None,
        verdict_chances: Sequence[float] | None = None,
        values: BranchValues | None = None,
    ) -> PackedDrafts:
        """
        Drafts the block after each possible verdict on the tokens after `text[:num_committed]`.

        Args:
            text (`torch.LongTensor` of shape `(length,)`): Committed tokens and those under verification, on the CPU.
            num_committed (`int`): Committed tokens, at least one.
            round_id (`int`): Returned with the drafts.
            num_guesses (`int`, *optional*, defaults to 0): Guesses of the bonus for each verdict.
            given_guesses (`list[list[int]]`, *optional*):
                Guesses for each verdict; by default they come from a first small forward over the context. A tree
                needs them given.
            parents (`list[int]`, *optional*):
                Of each token under verification, as in [`DraftTree`]. Default: they are a chain.
            max_branches, verdict_chances, values: As in [`plan_branches`].
        """
        plan = (max_branches, verdict_chances, values)
        return self._run(self._pack, text, num_committed, round_id, num_guesses, given_guesses, parents, plan)

    def _pack(self, text, num_committed, round_id, num_guesses, given_guesses, parents, plan):
        drafter, size = self._drafter, self._drafter.config.block_size
        draft, device = text[num_committed:], self._pass_device
        context = self._rewind_to(text if parents is None else text[:num_committed], most=num_committed - 1)
        if parents is not None:
            context = torch.cat([context, draft])
        context = self._prefill_all_but(MAX_CONTEXT_PER_PASS + len(draft), context.to(device))

        guesses = [[] for _ in range(len(draft) + 1)]
        if num_guesses and given_guesses is not None:
            guesses = given_guesses
        elif num_guesses and parents is None:
            logits = self._run_context(context, num_rows=len(draft) + 1)
            candidates = logits.topk(min(num_guesses + 1, logits.shape[-1])).indices
            guesses = guesses_without(candidates, draft.tolist(), num_guesses)
            context = context[:0]
        branches = plan_branches(guesses, *plan)

        nodes = torch.tensor([branch.node for branch in branches], device=device)
        shown = torch.tensor([int(branch.guess is not None) for branch in branches], device=device)
        slots = torch.zeros(len(branches), size, dtype=torch.long)
        slots[:, 0] = torch.tensor([branch.guess or 0 for branch in branches])
        is_bidirectional = drafter.config.block_attention == "bidirectional"
        num_cached = text.shape[0] - context.shape[0]
        if parents is None:
            layout = lay_out(
                context.shape[0],
                (num_committed - 1 + nodes)[None],
                (size,) * len(branches),
                num_visible=shown[None],
                num_cached=num_cached,
                bidirectional=is_bidirectional,
            )
        else:
            layout = lay_out_tree(
                context.shape[0] - len(draft),
                torch.tensor(parents, device=device),
                num_cached,
                anchors=nodes,
                num_slots=size,
                num_visible=shown,
                bidirectional=is_bidirectional,
            )
        ids = self.reader.embeddable(torch.cat([context, slots.flatten().to(device)]))[None]
        outputs = drafter.packed_forward(ids, layout, cache=self._cache, logits_to_keep=None)
        self._cache.crop(-slots.numel())
        if parents is not None:
            self._hanging = Paths(draft.tolist(), parents)
        hidden_states = outputs.hidden_states[-1][0, context.shape[0] :]
        return PackedDrafts(round_id, branches, hidden_states.unflatten(0, (len(branches), size)))

    def _rewind_to(self, context: torch.LongTensor, most: int | None = None) -> torch.LongTensor:
        if self._hanging is not None:
            paths, start, self._hanging = self._hanging, self.num_cached, None
            node, accepted, tokens = 0, [], context[start:].tolist()
            for token in tokens if torch.equal(context[:start], self._cached) else []:
                node = paths.child(node, token)
                if node is None:
                    break
                accepted.append(node)
            self._cache.keep(start, [start + node - 1 for node in accepted])
            self._cached = context[: start + len(accepted)] if accepted else self._cached
        return super()._rewind_to(context, most)

    def _run_context(self, context: torch.LongTensor, num_rows: int) -> torch.Tensor:
        """A forward over the context alone; the logits of its last rows, shape `(num_rows, vocab_size)`."""
        layout = lay_out(context.shape[0], num_cached=self._cache.get_seq_length(), device=context.device)
        logits = self._drafter.packed_forward(
            self.reader.embeddable(context)[None], layout, cache=self._cache, logits_to_keep=num_rows
        ).logits[0]
        return self.reader.draftable(logits)

    @torch.no_grad()
    def block_of(self, drafts: PackedDrafts, branch: int, bonus: int) -> Block:
        """The block of one branch, for the bonus that turned up; on the caller's thread."""
        hidden_states = drafts.hidden_states[branch]
        logits = self._drafter.project(hidden_states, getattr(self._cache, "backbone", None))
        return Block(hidden_states, logits, bonus if drafts.branches[branch].guess is None else None)


__all__ = ["PackedDrafts", "PackedSession", "guesses_without"]
