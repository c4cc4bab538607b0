"""A drafting session: the drafter's KV cache and the chain drafts of one generation."""

import contextlib
import logging
import time
from collections.abc import Iterable

import torch

from .backbones import execution_device, max_draft_positions
from .extensions import extensions
from .packing import lay_out
from .storage import GrowingCache


logger = logging.getLogger(__name__)

# Context tokens of one pass: bounds the mask of a long prompt's prefill to this many rows.
MAX_CONTEXT_PER_PASS = 1024
# Tokens that a chained head chooses among at each slot.
CHAIN_CANDIDATES = 64


def draftable(logits: torch.Tensor, vocab_size: int, never_drafted: Iterable[int] = ()) -> torch.Tensor:
    """
    Logits of the tokens that may be drafted.

    Args:
        logits (`torch.Tensor` of shape `(..., embedding_rows)`): A drafter's.
        vocab_size (`int`): The target's; ids beyond are left out.
        never_drafted (iterable of `int`): Ids that get -inf, the mask token's above all.

    Returns:
        `torch.Tensor` of shape `(..., at most vocab_size)`.
    """
    logits = logits[..., :vocab_size]
    never = [token for token in never_drafted if token < logits.shape[-1]]
    return logits.index_fill(-1, torch.tensor(never, device=logits.device), float("-inf")) if never else logits


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
        self._drafter, self._vocab_size = drafter, vocab_size
        self._compile_drafter = compile_drafter
        self._cache, self._drafting_seconds = None, 0.0
        mask = drafter.config.mask_token_id
        self._never_drafted = () if mask is None else (mask,)
        self._num_steps = num_denoising_steps
        self._device = execution_device(drafter)
        self._num_embeddings = drafter.get_input_embeddings().weight.shape[0]
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

    @torch.no_grad()
    def draft(self, context: torch.LongTensor, num_tokens: int) -> torch.LongTensor:
        """
        Drafts the tokens that follow a text.

        Args:
            context (`torch.LongTensor` of shape `(length,)`): The whole text so far, any device; at least one token.
            num_tokens (`int`): Draft tokens wanted, at most `block_size`.

        Returns:
            `torch.LongTensor` of shape `(num_tokens,)` on the drafter's device, or an empty one where the text
            outgrows the drafter's positions.
        """
        if not self.has_room_for(context.shape[0] + self._drafter.config.block_size - 1):
            return torch.empty(0, dtype=torch.long, device=self._device)
        self._open()
        start = time.perf_counter()
        try:
            with self._current_device():
                return self._draft(context.cpu(), num_tokens)
        except BaseException:
            self.close()  # the pass may have stopped halfway through the layers
            raise
        finally:
            self._drafting_seconds += time.perf_counter() - start

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

    def _draft(self, context: torch.LongTensor, num_tokens: int) -> torch.LongTensor:
        block_size, num_context = self._drafter.config.block_size, context.shape[0]
        new_tokens = self._prefill_all_but(MAX_CONTEXT_PER_PASS, self._rewind_to(context).to(self._pass_device))

        # The anchor's own output gives the first draft token, the mask slots the others. A shorter draft runs all
        # slots all the same, as in training, and is cut.
        num_slots = block_size - 1
        first_row = new_tokens.shape[0] - 1
        fixed = [new_tokens]
        drafts = []
        num_drafted = 0
        for steps_left in range(self._num_steps, 0, -1):
            take = -(-(num_tokens - num_drafted) // steps_left)
            outputs = self._pass(fixed, num_context, num_slots, num_drafted, first_row, take)
            drafts.append(self.choose(outputs.hidden_states[0][0], outputs.logits[0], take))
            num_drafted += take
            if num_drafted == num_tokens:
                break
            # The next step shows what was drafted: left to right, so that each law is true given the tokens before.
            fixed = [torch.empty_like(new_tokens[:0]), *(draft.to(new_tokens.device) for draft in drafts)]
            first_row = num_drafted - 1
        return torch.cat(drafts)

    def _pass(self, fixed, num_context, num_slots, num_visible, first_row, num_rows):
        """One packed pass over `fixed` = [context, visible tokens, ...] and mask slots; outputs of `num_rows` rows."""
        context_length = fixed[0].shape[0]
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
            self._embeddable(torch.cat([*fixed, masks]))[None],
            layout,
            cache=self._cache,
            logits_to_keep=torch.arange(first_row, first_row + num_rows, device=device),
        )
        self._cache.crop(-num_slots)
        return outputs

    @torch.no_grad()
    def choose(
        self, hidden_states: torch.Tensor, logits: torch.Tensor, num_tokens: int, bonus: int | None = None
    ) -> torch.LongTensor:
        """
        Chooses draft tokens from the outputs of consecutive places. With a chained head each mask slot's law is
        corrected by the tokens before it, left to right.

        Args:
            hidden_states (`torch.Tensor` of shape `(rows, hidden)`): Last hidden states.
            logits (`torch.Tensor` of shape `(rows, embedding_rows)`): Of the same rows.
            num_tokens (`int`): Rows to use.
            bonus (`int`, *optional*):
                The token that stands at the first row, if that is a mask slot; by default the first row saw its token.
        """
        head = self._drafter.chained_head
        if head is None:
            return self._likeliest(logits[:num_tokens])
        tokens, state = [], None
        standing = self._likeliest(logits[:1]) if bonus is None else torch.tensor([bonus], device=logits.device)
        if bonus is None:
            tokens.append(standing)
        embed = self._drafter.get_input_embeddings()
        slots = slice(len(tokens), num_tokens)
        hidden_states, logits = hidden_states[slots], self._draftable(logits[slots])
        parts, shortlist = head.hidden_part(hidden_states), self._drafter.shortlist(logits, CHAIN_CANDIDATES)
        for slot in range(hidden_states.shape[0]):
            correction, state = head.step(parts[slot], embed(self._embeddable(standing))[0], state)
            if shortlist is None:
                standing = self._likeliest(self._drafter.project((hidden_states[slot] + correction)[None]))
            else:
                candidates, values, rows = (part[slot] for part in shortlist)
                standing = candidates[(values.float() + (rows @ correction).float()).argmax()][None]
            tokens.append(standing)
        return torch.cat(tokens)

    def _draftable(self, logits: torch.Tensor) -> torch.Tensor:
        return draftable(logits, self._vocab_size, self._never_drafted)

    def _likeliest(self, logits: torch.Tensor) -> torch.LongTensor:
        """The likeliest token of each row of shape `(rows, embedding_rows)`."""
        if logits.is_cuda and extensions.choose_tokens is not None:  # one reading instead of a copy
            return extensions.choose_tokens(logits, self._vocab_size, self._never_drafted).tokens
        return self._draftable(logits).argmax(dim=-1)

    def _prefill_all_but(self, most: int, tokens: torch.LongTensor) -> torch.LongTensor:
        """Feeds a long text piece by piece and returns what is left of it, at most `most` tokens."""
        while tokens.shape[0] > most:
            piece, tokens = tokens[:MAX_CONTEXT_PER_PASS], tokens[MAX_CONTEXT_PER_PASS:]
            layout = lay_out(piece.shape[0], num_cached=self._cache.get_seq_length(), device=piece.device)
            self._drafter.packed_forward(self._embeddable(piece)[None], layout, cache=self._cache, logits_to_keep=1)
        return tokens

    def _embeddable(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """`tokens` with those that the drafter has no embedding for replaced by its last one: a guess is as good."""
        return tokens.clamp(max=self._num_embeddings - 1)

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


__all__ = ["MAX_CONTEXT_PER_PASS", "DraftingSession", "draftable"]
