"""The drafter's passes, compiled: a synchronous draft or a packed pass as one static pass over static KV storage.

A pass is padded to a bucket of tokens and runs through the backbone's own code, with one compiled graph in the place
of each decoder layer, as the target's does. Prefill, and passes longer than every bucket, run eagerly over the same
storage. What is compiled belongs to the drafter and serves all its sessions; the storage belongs to a session.
"""

import dataclasses
import threading
import weakref

import torch
from transformers import GenerationConfig

from ..drafting_options import DraftingOptions
from ..packing import PackedLayout, attention_masks, lay_out
from .layer_graph import NotServedError
from .static_cache import MIN_CAPACITY, GrowingStaticCache, capacity_for
from .target import CompiledTarget


# Graphs that are compiled without being asked for cost about this long, and save about this share of an eager pass.
_COMPILE_S, _SAVED_SHARE = 10.0, 0.3

_known = weakref.WeakKeyDictionary()
_eager_seconds = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compiled_drafter(drafter) -> "CompiledDrafter":
    """What is compiled for a drafter in this process; it does not hang on the model, which stays as it is."""
    with _lock:
        if drafter not in _known:
            _known[drafter] = CompiledDrafter(drafter)
        return _known[drafter]


def storage_for(drafter, compile_drafter: str | bool) -> "DraftingCache | None":
    """
    Storage for a session whose passes are to run compiled, or `None` if they are to run eagerly.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter.
        compile_drafter (`bool` or `"auto"`):
            `"auto"` compiles once drafting eagerly has lost more time in this process than compiling takes.
    """
    if compile_drafter == "auto":
        is_warm = drafter in _known and _known[drafter].num_static_passes > 0
        compile_drafter = is_warm or _eager_seconds.get(drafter, 0.0) * _SAVED_SHARE > _COMPILE_S
    if not compile_drafter:
        return None
    compiled = compiled_drafter(drafter)
    compiled.refresh(drafter._backbone)
    return None if compiled.reason is not None else DraftingCache(compiled)


def count_eager(drafter, seconds: float):
    """Counts time that a generation spent on drafting eagerly."""
    with _lock:
        _eager_seconds[drafter] = _eager_seconds.get(drafter, 0.0) + seconds


def pass_buckets(block_size: int) -> tuple[int, ...]:
    """
    Tokens of static passes: a synchronous draft after a verification that accepted up to half of a block, and after
    any; a packed pass with a masked branch for every verdict; and twice and four times as many, for guesses.
    """
    packed = (block_size + 1) ** 2
    return (block_size + block_size // 2, 2 * block_size, packed, 2 * packed, 4 * packed)


class CompiledDrafter(CompiledTarget):
    """
    What is compiled and packed for one drafter.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter. It is not referred to, its modules are.

    Attributes:
        reason (`str`, *optional*): Why it runs eagerly, if it must.
    """

    def __init__(self, drafter):
        super().__init__(drafter._backbone, pass_buckets(drafter.config.block_size))

    @property
    def backbone(self):
        return self._stand_in

    def run(self, cache: "DraftingCache", embeds: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
        """The last hidden states of a pass, of shape `(1, tokens, hidden)`, or `None` where it must run eagerly."""
        num_tokens = embeds.shape[1]
        bucket = next((bucket for bucket in self._buckets if bucket >= num_tokens), None)
        if bucket is None or self.reason is not None or embeds.shape[0] != 1 or cache.get_seq_length() == 0:
            return None
        cache.begin_static_pass(bucket)
        num_kept = 0
        try:
            hidden_states = self._static_pass(cache, embeds, layout, bucket)
            num_kept = num_tokens
        except NotServedError as error:
            self._refuse(self._stand_in, str(error))
            return None
        finally:
            cache.end_static_pass(num_kept)
        self.num_static_passes += 1
        return hidden_states[:, :num_tokens]

    def _static_pass(self, cache, embeds, layout, bucket) -> torch.Tensor:
        num_missing = bucket - embeds.shape[1]
        positions = layout.position_ids
        layout = dataclasses.replace(layout, is_plain_causal=False)  # its mask is to be written out
        masks = attention_masks(layout, self._stand_in.config, embeds.dtype)
        if isinstance(masks, dict):
            masks = {name: _over_storage(mask, cache.capacity, bucket) for name, mask in masks.items()}
        else:
            masks = _over_storage(masks, cache.capacity, bucket)
        if num_missing:
            embeds = torch.cat([embeds, embeds[:, -1:].expand(1, num_missing, -1)], dim=1)
            positions = torch.cat([positions, positions[:, -1:].expand(1, num_missing)], dim=1)
        outputs = self._stand_in.base_model(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        return outputs.last_hidden_state

    @torch.no_grad()
    def warm_up(self, drafter, max_context: int, num_packed: int | None):
        """
        Compiles ahead what a text of up to `max_context` tokens needs.

        Args:
            num_packed (`int`, *optional*): Tokens of a packed pass; `None` for synchronous drafts alone.
        """
        self.refresh(drafter._backbone)
        sizes = list(self._buckets[:2])
        if num_packed is not None:
            sizes += [bucket for bucket in self._buckets if bucket >= num_packed][:1]
        capacity = MIN_CAPACITY
        device = next(drafter.parameters()).device
        while self.reason is None and capacity <= capacity_for(max_context + sizes[-1]):
            for size in sizes:
                if size + 1 > capacity:
                    continue
                cache = DraftingCache(self)
                ids = torch.zeros(1, size, dtype=torch.long, device=device)
                drafter.packed_forward(ids[:, :1], lay_out(1, device=device), cache=cache, logits_to_keep=1)
                for layer in cache.layers:
                    layer.reserve(capacity)
                drafter.packed_forward(ids, lay_out(size, num_cached=1, device=device), cache=cache, logits_to_keep=1)
            capacity *= 2


class DraftingCache(GrowingStaticCache):
    """The KV storage of one session; `packed_forward` asks it to run the pass."""

    def __init__(self, compiled: CompiledDrafter):
        super().__init__(compiled.num_layers)
        self._compiled = compiled

    @property
    def is_compiling(self) -> bool:
        return self._compiled.is_compiling

    @property
    def backbone(self):
        """What projects hidden states, over a packed head where there is one."""
        return self._compiled.backbone

    def run_pass(self, embeds: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
        """See [`CompiledDrafter.run`]."""
        return self._compiled.run(self, embeds, layout)


def _over_storage(mask: torch.Tensor, capacity: int, num_tokens: int) -> torch.Tensor:
    """
    A mask over what is filled, of shape `(1, 1, tokens, filled)`, as one over the whole storage and a whole bucket,
    `(1, 1, num_tokens, capacity)`. Padding sees the storage's first place: a row that sees nothing gives NaN.
    """
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    whole = mask.new_full((1, 1, num_tokens, capacity), hidden)
    whole[:, :, : mask.shape[2], : mask.shape[3]] = mask
    whole[:, :, mask.shape[2] :, 0] = True if mask.dtype == torch.bool else 0.0
    return whole


def warm_up(drafter, max_context: int):
    """Compiles ahead what the drafter's own options ask for; see `D3DDrafterForCausalLM.warmup`."""
    options = DraftingOptions.resolve(GenerationConfig(), drafter.generation_config, drafter.config.block_size)
    num_packed = None
    if options.drafting_mode != "sync":
        num_packed = options.num_packed_tokens(drafter.config.block_size)
    compiled_drafter(drafter).warm_up(drafter, max_context, num_packed)


__all__ = [
    "CompiledDrafter",
    "DraftingCache",
    "compiled_drafter",
    "count_eager",
    "pass_buckets",
    "storage_for",
    "warm_up",
]
