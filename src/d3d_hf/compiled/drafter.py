"""The drafter's passes, compiled: a synchronous draft or a packed pass as one static pass over static KV storage.

A pass is padded to a bucket of tokens and runs through the backbone's own code, with one compiled graph in the place
of each decoder layer, as the target's does. Graphs are made ahead, on the caller's thread: a pass of a size that has
none, the prefill among them, runs eagerly over the same storage. What is compiled belongs to the drafter and serves
all its sessions; the storage belongs to a session.
"""

import dataclasses
import threading
import weakref

import torch
from transformers import GenerationConfig

from ..model.backbones import execution_device, max_draft_positions
from ..model.drafting_options import DraftingOptions
from ..model.packing import PackedLayout, attention_masks, lay_out
from ..model.storage import GrowingCache, capacity_for, first_capacity
from .graph_backend import graphs_for
from .graphed_drafter import GraphedDrafter, GraphedDraftingCache
from .static_passes import over_storage
from .target import CompiledPasses


# Graphs that are compiled without being asked for cost about this long, and save about this share of an eager pass.
_COMPILE_S, _SAVED_SHARE = 10.0, 0.3

_known = weakref.WeakKeyDictionary()
_eager_seconds = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compiled_drafter(drafter) -> "CompiledDrafter | GraphedDrafter":
    """
    What is compiled, or captured on a GPU, for a drafter in this process; it does not hang on the model, which stays
    as it is.
    """
    graphs = graphs_for(execution_device(drafter))
    with _lock:
        known = _known.get(drafter)
        if graphs is None and not isinstance(known, CompiledDrafter):
            known = CompiledDrafter(drafter)
        elif graphs is not None and not (isinstance(known, GraphedDrafter) and known.backend.device == graphs.device):
            known = GraphedDrafter(drafter, pass_buckets(drafter.config.block_size), graphs)
        _known[drafter] = known
        return known


def storage_for(drafter, compile_drafter: str | bool) -> "DraftingCache | GraphedDraftingCache | None":
    """
    Storage for a session whose passes are to run compiled, or `None` if they are to run eagerly. On a GPU passes are
    captured in the first rounds, which takes no longer than a few of them.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter.
        compile_drafter (`bool` or `"auto"`):
            `"auto"` compiles once drafting eagerly has lost more time in this process than compiling takes.
    """
    on_gpu = graphs_for(execution_device(drafter)) is not None
    is_earned = on_gpu or _eager_seconds.get(drafter, 0.0) * _SAVED_SHARE > _COMPILE_S
    compiles = compile_drafter is True or (compile_drafter == "auto" and is_earned)
    is_warm = compile_drafter == "auto" and drafter in _known and bool(_known[drafter].ready)
    if not compiles and not is_warm:
        return None
    compiled = compiled_drafter(drafter)
    compiled.refresh(drafter._backbone)
    return None if compiled.reason is not None else compiled.make_cache(compiles)


def count_eager(drafter, seconds: float):
    """Counts time that a generation spent on drafting eagerly."""
    with _lock:
        _eager_seconds[drafter] = _eager_seconds.get(drafter, 0.0) + seconds


def pass_buckets(block_size: int) -> tuple[int, ...]:
    """
    Tokens of static passes: a synchronous draft after a verification that accepted up to half of a block, and after
    any; a packed pass with a branch for half of the verdicts, for all; and twice and four times as many, for guesses.
    """
    half, packed = block_size + 1 + block_size * (block_size // 2), (block_size + 1) ** 2
    sizes = {block_size + block_size // 2, 2 * block_size, half, packed, 2 * packed, 4 * packed}
    return tuple(sorted(sizes))


class CompiledDrafter(CompiledPasses):
    """
    What is compiled and packed for one drafter.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter. It is not referred to, its modules are.

    Attributes:
        reason (`str`, *optional*): Why it runs eagerly, if it must.
        ready (`set[tuple[int, int]]`): Sizes that have their graphs: tokens of a pass, and capacity of the storage.
    """

    def __init__(self, drafter):
        self.ready = set()
        super().__init__(drafter._backbone, pass_buckets(drafter.config.block_size))

    @property
    def backbone(self):
        return self._stand_in

    def _build(self, model):
        self.ready.clear()
        super()._build(model)

    def make_cache(self, compiles: bool = False) -> "DraftingCache":
        return DraftingCache(self, compiles)

    @property
    def longest_synchronous(self) -> int:
        return self._buckets[1]

    def size_of(self, cache: "DraftingCache", num_tokens: int) -> tuple[int, int] | None:
        """Bucket and capacity of a pass of so many tokens over a session's storage; `None` if it is too long."""
        bucket = self._bucket_for(num_tokens)
        if bucket is None:
            return None
        length = cache.get_seq_length() + bucket
        return bucket, cache.capacity if length <= cache.capacity else capacity_for(length)

    def run(self, cache: "DraftingCache", embeds: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
        """The last hidden states of a pass, of shape `(1, tokens, hidden)`, or `None` where it must run eagerly."""
        num_tokens, size, stand_in = embeds.shape[1], self.size_of(cache, embeds.shape[1]), self._stand_in
        if (
            self.reason is not None
            or not (size in self.ready or cache.is_warming)
            or embeds.shape[0] != 1
            or cache.get_seq_length() == 0
            or torch.is_autocast_enabled("cpu")
            or not cache.holds(embeds.dtype)
        ):
            return None
        bucket, _ = size
        hidden_states = self._run_static(
            stand_in, cache, bucket, num_tokens, lambda: self._static_pass(stand_in, cache, embeds, layout, bucket)
        )
        return None if hidden_states is None else hidden_states[:, :num_tokens]

    def _static_pass(self, stand_in, cache, embeds, layout, bucket) -> torch.Tensor:
        num_missing = bucket - embeds.shape[1]
        positions = layout.position_ids
        layout = dataclasses.replace(layout, is_plain_causal=False)  # its mask is to be written out
        masks = over_storage(attention_masks(layout, stand_in.config, embeds.dtype), cache.capacity, bucket)
        if num_missing:
            embeds = torch.cat([embeds, embeds[:, -1:].expand(1, num_missing, -1)], dim=1)
            positions = torch.cat([positions, positions[:, -1:].expand(1, num_missing)], dim=1)
        outputs = stand_in.base_model(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{self.cache_argument: cache},
        )
        return outputs.last_hidden_state

    @torch.no_grad()
    def make_ready(self, drafter, sizes):
        """Makes the graphs of sizes, pairs of tokens and capacity, that lack them."""
        device = next(drafter.parameters()).device
        for bucket, capacity in sizes:
            if (bucket, capacity) in self.ready or self.reason is not None or bucket >= capacity:
                continue
            cache = DraftingCache(self, is_warming=True)
            ids = torch.zeros(1, bucket, dtype=torch.long, device=device)
            drafter.packed_forward(ids[:, :1], lay_out(1, device=device), cache=cache, logits_to_keep=1)
            cache.reserve(capacity)
            if cache.capacity > capacity:
                continue  # storage is never so small
            drafter.packed_forward(ids, lay_out(bucket, num_cached=1, device=device), cache=cache, logits_to_keep=1)
            if self.reason is None:
                self.ready.add((bucket, capacity))


class DraftingCache(GrowingCache):
    """
    The KV storage of one session; `packed_forward` asks it to run the pass.

    Args:
        compiled ([`CompiledDrafter`]): Where the graphs are.
        compiles (`bool`, *optional*, defaults to `False`): Whether `prepare` makes graphs that are missing.
        is_warming (`bool`, *optional*, defaults to `False`): Whether passes are there to make graphs.
    """

    def __init__(self, compiled: CompiledDrafter, compiles: bool = False, is_warming: bool = False):
        super().__init__(compiled.num_layers)
        self._compiled, self._compiles, self.is_warming = compiled, compiles, is_warming

    @property
    def backbone(self):
        """What projects hidden states, over a packed head where there is one."""
        return self._compiled.backbone

    def prepare(self, drafter, num_packed: int | None = None):
        """
        Makes the graphs that the next passes need, if this session makes any. For the caller's thread, while no pass
        runs.

        Args:
            num_packed (`int`, *optional*): Tokens of a packed pass at most; `None` for synchronous drafts alone.
        """
        if not self._compiles or self.get_seq_length() == 0:
            return  # the prefill runs eagerly, and decides how large the storage is
        longest = self._compiled.longest_synchronous if num_packed is None else num_packed
        sizes = [self._compiled.size_of(self, bucket) for bucket in self._compiled.buckets_up_to(longest)]
        if not self._compiled.ready.issuperset(sizes):
            self._compiled.make_ready(drafter, sizes)

    def is_ready_for(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens would run compiled, or could be made to."""
        size = self._compiled.size_of(self, num_tokens)
        return size is not None and (self._compiles or size in self._compiled.ready)

    def run_pass(self, embeds: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
        """See [`CompiledDrafter.run`]."""
        return self._compiled.run(self, embeds, layout)


def warm_up(drafter, max_context: int):
    """
    Compiles ahead for texts of up to `max_context` tokens: synchronous drafts, and packed passes if the drafter's own
    mode is `"async"`; see `D3DDrafterForCausalLM.warmup`.
    """
    options = DraftingOptions.resolve(GenerationConfig(), drafter.generation_config, drafter.config.block_size)
    compiled = compiled_drafter(drafter)
    compiled.refresh(drafter._backbone)
    longest = compiled.longest_synchronous
    if options.drafting_mode == "async":
        longest = options.num_packed_tokens(drafter.config.block_size)
    max_positions = max_draft_positions(drafter.config.backbone_config)
    if max_positions is not None:
        max_context = min(max_context, max_positions)
    if isinstance(compiled, GraphedDrafter):
        compiled.warm_up(drafter, max_context, longest)
        return
    capacity = first_capacity(1)
    while capacity <= first_capacity(max_context):
        compiled.make_ready(drafter, [(bucket, capacity) for bucket in compiled.buckets_up_to(longest)])
        capacity *= 2


__all__ = [
    "CompiledDrafter",
    "DraftingCache",
    "compiled_drafter",
    "count_eager",
    "pass_buckets",
    "storage_for",
    "warm_up",
]
