"""A drafting session: the drafter's KV cache and the chain drafts of one generation."""

import contextlib
import logging
import time

import torch

from .backbones import execution_device, max_draft_positions
from .block import Block, BlockReader
from .extensions import extensions
from .packing import lay_out
from .storage import GrowingCache


logger = logging.getLogger(__name__)

# Context tokens of one pass: bounds the mask of a long prompt's prefill to this many rows.
MAX_CONTEXT_PER_PASS = 1024


class DraftingSession:
    """
    Owns the drafter's KV cache for one generation. Each call to `draft` is given the whole text; the session works out
    what its cache holds of it, rolls back what it does not, and feeds the rest. The cache holds context only: a pass's
    slots are cropped away as soon as it returns.

    Runs on the caller's thread and on the drafter's device.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model; not modified.
        vocab_size (`int`): The target's vocabulary size; no token beyond it is drafted.
        num_denoising_steps (`int`, *optional*, defaults to 1): Forwards that a draft is spread over.
        compile_drafter (`bool` or `"auto"`, *optional*, defaults to `False`): Whether passes run compiled.
    """

    def __init__(self, drafter, vocab_size: int, num_denoising_steps: int = 1, compile_drafter: bool | str = False):
        self._drafter = drafter
        self.reader = BlockReader(drafter, vocab_size)
        self._compile_drafter = compile_drafter
        self._cache, self._drafting_seconds = None, 0.0
        self._num_steps = num_denoising_steps
        self._device = execution_device(drafter)
        self._max_positions = max_draft_positions(drafter.config.backbone_config)
        self._is_past_the_end = False
        self.close()

    def close(self):
        """Frees the cache. Idempotent; a session that is used again starts with an empty one."""
        if self._compile_drafter == "auto" and type(self._cache) is GrowingCache and self._drafting_seconds:
            extensions.count_eager(self._drafter, self._drafting_seconds)
        self._drafting_seconds = 0.0
        if hasattr(self._cache, "release"):
            self._cache.release()
        self._cache = None
        self._cached = torch.empty(0, dtype=torch.long, device="cpu")

    def _open(self):
        """Makes the cache, if there is none: storage for compiled passes where they are wanted."""
        if self._cache is None and self._compile_drafter and self._device.type in ("cpu", "cuda"):
            self._cache = extensions.storage_for(self._drafter, self._compile_drafter)
        if self._cache is None:
            self._cache = GrowingCache(self._drafter.config.num_hidden_layers)

    def prepare(self, num_packed: int | None = None):
        """
        Compiles what the next passes need and lack, which takes seconds, if the options ask for it. On the caller's
        thread, while no pass runs.

        Args:
            num_packed (`int`, *optional*): Tokens of a packed pass at most; `None` for synchronous drafts alone.
        """
        if hasattr(self._cache, "prepare"):
            with self._current_device():
                self._cache.prepare(self._drafter, num_packed)

    def would_pack_compiled(self, num_packed: int) -> bool:
        """Whether a packed pass runs in the way that synchronous drafts run here: compiled, if they are."""
        return not hasattr(self._cache, "is_ready_for") or self._cache.is_ready_for(num_packed)

    def _current_device(self):
        """The drafter's GPU made the current one, which may be the target's: Triton launches on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    @property
    def _pass_device(self) -> torch.device:
        """Where ids and layouts of a pass are made: on the CPU where graphs take them from there in one copy."""
        return torch.device("cpu") if hasattr(self._cache, "run_static") else self._device

    @property
    def num_cached(self) -> int:
        """Context tokens in the cache."""
        return self._cached.shape[0]

    def draft(self, context: torch.LongTensor, num_tokens: int) -> torch.LongTensor:
        """
        The chain that follows a text.

        Args:
            context (`torch.LongTensor` of shape `(length,)`): The whole text so far, any device; at least one token.
            num_tokens (`int`): Draft tokens wanted, at most `block_size`.

        Returns:
            `torch.LongTensor` of shape `(num_tokens,)` on the drafter's device, or an empty one where the text
            outgrows the drafter's positions.
        """
        if not self._has_room_for_block(context):
            return torch.empty(0, dtype=torch.long, device=self._device)
        return self._run(self._chain, context.cpu(), num_tokens)

    def block(self, context: torch.LongTensor, num_rows: int) -> Block | None:
        """
        The outputs of the block that follows a text, in one pass: of the anchor, which saw its token, and the slots.

        Args:
            context (`torch.LongTensor` of shape `(length,)`): The whole text so far, any device; at least one token.
            num_rows (`int`): Rows wanted, at most `block_size`.

        Returns:
            [`Block`], or `None` where the text outgrows the drafter's positions.
        """
        return self._run(self._block, context.cpu(), num_rows) if self._has_room_for_block(context) else None

    @torch.no_grad()
    def _run(self, work, *args):
        """Runs passes over the cache, which is dropped if they stop halfway through the layers."""
        self._open()
        start = time.perf_counter()
        try:
            with self._current_device():
                return work(*args)
        except BaseException:
            self.close()
            raise
        finally:
            self._drafting_seconds += time.perf_counter() - start

    def _has_room_for_block(self, context: torch.LongTensor) -> bool:
        return self.has_room_for(context.shape[0] + self._drafter.config.block_size - 1)

    def has_room_for(self, num_positions: int) -> bool:
        """Whether the drafter's positions reach so far; the first time that they do not, one warning says so."""
        if self._max_positions is None or num_positions <= self._max_positions:
            return True
        if not self._is_past_the_end:
            self._is_past_the_end = True
            logger.warning(
                f"The text outgrows the drafter's positions, which end at {self._max_positions}: the rest of this "
                f"generation runs without drafts."
            )
        return False

    def _block(self, context: torch.LongTensor, num_rows: int) -> Block:
        return self._first_pass(context, num_rows)[0]

    def _first_pass(self, context: torch.LongTensor, num_rows: int) -> tuple[Block, torch.LongTensor]:
        """A pass over what the cache lacks of a text, and a block of mask slots; and the tokens that were fed."""
        new_tokens = self._prefill_all_but(MAX_CONTEXT_PER_PASS, self._rewind_to(context).to(self._pass_device))
        # The anchor's own output gives the first draft token, the mask slots the others. A shorter draft runs all
        # slots all the same, as in training, and is cut.
        return self._pass([new_tokens], context.shape[0], 0, new_tokens.shape[0] - 1, num_rows), new_tokens

    def _chain(self, context: torch.LongTensor, num_tokens: int) -> torch.LongTensor:
        """A chain in one pass, or in several denoising steps."""
        take = -(-num_tokens // self._num_steps)
        block, new_tokens = self._first_pass(context, take)
        drafts = [self.reader.chain(block, take)]
        num_drafted = take
        for steps_left in range(self._num_steps - 1, 0, -1):
            if num_drafted == num_tokens:
                break
            # The next step shows what was drafted: left to right, so that each law is true given the tokens before.
            fixed = [torch.empty_like(new_tokens[:0]), *(draft.to(new_tokens.device) for draft in drafts)]
            take = -(-(num_tokens - num_drafted) // steps_left)
            block = self._pass(fixed, context.shape[0], num_drafted, num_drafted - 1, take)
            drafts.append(self.reader.chain(block, take))
            num_drafted += take
        return torch.cat(drafts)

    def _pass(self, fixed, num_context: int, num_visible: int, first_row: int, num_rows: int) -> Block:
        """One packed pass over `fixed` = [context, visible tokens, ...] and mask slots; outputs of `num_rows` rows."""
        context_length, num_slots = fixed[0].shape[0], self._drafter.config.block_size - 1
        device = fixed[0].device
        layout = lay_out(
            context_length,
            torch.tensor([[num_context - 1]], device=device) if num_slots else None,
            (num_slots,) if num_slots else (),
            num_visible=torch.tensor([[num_visible]], device=device),
            num_cached=num_context - context_length,
            bidirectional=self._drafter.config.block_attention == "bidirectional",
            device=device,
        )
        masks = fixed[0].new_zeros(num_slots - num_visible)
        outputs = self._drafter.packed_forward(
            self.reader.embeddable(torch.cat([*fixed, masks]))[None],
            layout,
            cache=self._cache,
            logits_to_keep=torch.arange(first_row, first_row + num_rows, device=device),
        )
        self._cache.crop(-num_slots)
        return Block(outputs.hidden_states[0][0], outputs.logits[0])

    def _prefill_all_but(self, most: int, tokens: torch.LongTensor) -> torch.LongTensor:
        """Feeds a long text piece by piece and returns what is left of it, at most `most` tokens."""
        while tokens.shape[0] > most:
            piece, tokens = tokens[:MAX_CONTEXT_PER_PASS], tokens[MAX_CONTEXT_PER_PASS:]
            layout = lay_out(piece.shape[0], num_cached=self._cache.get_seq_length(), device=piece.device)
            self._drafter.packed_forward(
                self.reader.embeddable(piece)[None], layout, cache=self._cache, logits_to_keep=1
            )
        return tokens

    def _rewind_to(self, context: torch.LongTensor, most: int | None = None) -> torch.LongTensor:
        """
        Crops the cache to what it shares with `context`, `most` tokens at most (by default all but the last), and
        returns the tokens to feed.
        """
        num_known = min(self.num_cached, context.shape[0] - 1 if most is None else most)
        differs = (self._cached[:num_known] != context[:num_known]).nonzero()
        num_shared = int(differs[0]) if differs.numel() else num_known
        self._cache.crop(num_shared - self.num_cached)
        self._cached = context
        return context[num_shared:]


__all__ = ["MAX_CONTEXT_PER_PASS", "DraftingSession"]
