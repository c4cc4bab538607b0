"""Where the next draft comes from, asynchronously: it is ready when the verdict arrives."""

import functools
import time
import weakref

import torch

from ..model.backbones import execution_device
from ..model.generation_hook import Call
from .draft_tree import DraftTree, Paths
from .drafts import Drafts
from .packed_drafts import PackedSession
from .planner import BranchValues, verdict_chances
from .worker import CpuThreadShare, ThreadWorker


# A packed pass counts as hung after so many seconds, plus so many times the verification beside it.
_WAIT_S = 3.0
_WAIT_VERIFICATIONS = 10.0


class AsyncDrafts(Drafts):
    """
    Drafts that are made while the target is verifying.

    Each round, on the caller's thread: the verdict on the draft before is read off the text; the packed pass that was
    made for it is taken, and waited for if it is not there; the branch that the verdict selects becomes the draft; the
    next packed pass is submitted to the worker. The vocabulary projection and the choices of the selected branch are
    made on the caller's thread. The first round has no draft: the drafter's prefill runs beside the target's.

    Args:
        call, takes_trees: As in [`Drafts`].
    """

    mode = "async"

    def __init__(self, call: Call, takes_trees: bool = True):
        super().__init__(call, takes_trees)
        self._cpu_share, self._shares_cpu = CpuThreadShare(), False
        self._worker = self._make_worker(call.drafter)  # starts no thread before its first job
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._session, self._cpu_share)
        self._round_id = 0
        self._pending = None  # the packed pass for the verdict to come
        self._text_length = 0  # committed tokens when it was submitted
        self._last = Paths([], [])  # the draft under verification
        self._branch_logits = None
        self._kind, self._values, self._guesses = None, BranchValues(), []

    def _make_session(self, drafter, vocab_size: int) -> PackedSession:
        options = self.options
        return PackedSession(drafter, vocab_size, options.num_denoising_steps, options.compile_drafter)

    def _make_worker(self, drafter):
        device = execution_device(drafter)
        self._shares_cpu = device.type == "cpu"
        return ThreadWorker(device, self._cpu_share.worker_share() if self._shares_cpu else None)

    def _draft(self, text: torch.LongTensor, depth: int) -> DraftTree | None:
        """The draft of the branch that the verdict selects; `None` without one."""
        pending, self._pending = self._pending, None
        self._branch_logits = None
        if pending is None:
            return None
        *accepted, bonus = text[self._text_length :].tolist() or [None]
        drafts, node = self._take(pending), 0
        for token in accepted:
            node = None if node is None else self._last.child(node, token)
        # The caller may have done something else than verify: then the next pass starts from the text as it is.
        branch = None
        if bonus is not None and node is not None and drafts.round_id == self._round_id:
            if node < len(self._guesses):
                self._values.record_guesses(self._guesses[node], bonus)
            branch = drafts.choose(node, bonus)
        if branch is None:
            self._count_hit("none")
            return None
        self._kind = "masked" if drafts.branches[branch].guess is None else "guessed"
        self._count_hit(self._kind)
        block = self._session.block_of(drafts, branch, bonus)
        self._branch_logits = block.logits
        if torch.isnan(block.logits).any():
            raise FloatingPointError("the drafter's logits are NaN")
        return self._shaped(block, text, depth)

    def observe(self, tree: DraftTree, path: list[int], rows: int, seconds: float):
        super().observe(tree, path, rows, seconds)
        if self._kind is not None:
            self._values.record_round(self._kind, len(path) + 1)

    def _prepare_next(self, text: torch.LongTensor, tree: DraftTree, room: int):
        if room > 1:  # else the text ends with this round or the next, which has no room for a draft
            self._submit(text, tree)

    def _take(self, pending):
        last_verification_s = 0.0
        if self.stats.spans and self._verify_start is not None:
            last_verification_s = time.perf_counter() - self._verify_start
        start = time.perf_counter()
        try:
            result = self._worker.take(pending, timeout_s=_WAIT_S + _WAIT_VERIFICATIONS * last_verification_s)
        except TimeoutError as error:
            if pending.done():  # the pass itself raised it
                raise
            raise TimeoutError(f"the packed pass did not end within {time.perf_counter() - start:.1f} s") from error
        self.stats.wait_ms += 1e3 * (time.perf_counter() - start)
        self.stats.spans.append(("draft", result.start_s, result.end_s))
        return result.value

    def _submit(self, text: torch.LongTensor, tree: DraftTree):
        """Sends the packed pass for the verdict on a draft to the worker."""
        self._round_id += 1
        self._text_length, self._last = text.shape[0], tree.read()
        drafted = torch.cat([text, tree.tokens.cpu()])  # a copy: the text grows while the worker reads
        if not self._session.has_room_for(drafted.shape[0] + self._block_size):
            self._cpu_share.restore()
            return
        options = self.options
        self._session.prepare(options.num_packed_tokens(self._block_size))
        if self._shares_cpu:
            self._cpu_share.divide()
        chances = max_branches = None
        if options.draft_slot_budget is not None or not tree.is_chain:
            max_branches = options.max_branches(self._block_size)
            chances = self._verdict_chances(tree)
        is_given = options.bonus_guess_source == "slots" or not tree.is_chain
        self._guesses = self._slot_guesses() if is_given else []
        # The job knows the session, not these drafts, so that drafts that are dropped can end the worker.
        job = functools.partial(
            self._session.pack,
            drafted,
            num_committed=text.shape[0],
            round_id=self._round_id,
            num_guesses=options.num_bonus_guesses,
            given_guesses=self._guesses if is_given else None,
            parents=None if tree.is_chain else self._last.parents,
            max_branches=max_branches,
            verdict_chances=chances,
            values=self._values,
        )
        self._pending = self._worker.submit(job)

    def _verdict_chances(self, tree: DraftTree) -> list[float]:
        """Of each verdict on a tree; of a chain by the drafter's own probabilities, even odds where it has none."""
        if tree.chances is not None:
            chances = tree.chances.tolist()
        elif self._branch_logits is None:
            chances = [0.5 ** (place + 1) for place in range(len(tree))]
        else:
            laws = self._branch_logits[: len(tree)].float().softmax(-1)
            chances = laws.gather(-1, tree.tokens[:, None].to(laws.device))[:, 0].cumprod(0).tolist()
        calibrated = [self._size_rule.calibration.chance(chance) for chance in chances]
        return verdict_chances(calibrated, self._last.parents)

    def _slot_guesses(self) -> list[list[int]]:
        """Guesses of the bonus from the laws of the draft under verification; none where it has no law."""
        count, depths = self.options.num_bonus_guesses, self._last.depths
        if self._branch_logits is None or count == 0:
            return [[] for _ in depths]
        num_levels, vocab_size = self._branch_logits.shape
        most = min(count + len(self._last.tokens), vocab_size)
        likeliest = self._branch_logits.topk(most).indices.tolist()
        guesses = []
        for node, depth in enumerate(depths):
            tokens = likeliest[depth] if depth < num_levels else []
            guesses.append([token for token in tokens if self._last.child(node, token) is None][:count])
        return guesses

    def _count_hit(self, kind: str):
        self.stats.num_hits[kind] = self.stats.num_hits.get(kind, 0) + 1

    def _fail(self, error: Exception):
        self._pending = None
        if isinstance(error, TimeoutError):
            self._worker.stop(timeout_s=0)  # it hangs: nothing is gained by waiting for it once more
        self._cpu_share.restore()
        super()._fail(error)

    def close(self):
        """Ends the worker, frees the drafter's cache, gives the caller's thread its CPU threads back. Idempotent."""
        self._pending = None
        self._finalizer()


def _shut_down(worker, session: PackedSession, cpu_share: CpuThreadShare):
    cpu_share.restore()
    worker.stop()
    session.close()


__all__ = ["AsyncDrafts"]
