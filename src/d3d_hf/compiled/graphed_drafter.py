"""The drafter's passes, synchronous drafts and packed passes, as CUDA graphs: see graphed.py, and drafter.py."""

import torch

from ..kernels.visibility import POSITION
from ..model.packing import PackedLayout, lay_out
from ..model.storage import capacity_for, first_capacity
from .graph_backend import CudaGraphs
from .graphed import EXTRA, IDS, GraphedPasses, integers_of, static_masks
from .pooled_cache import PooledCache


class GraphedDrafter(GraphedPasses):
    """
    The graphed twin of [`CompiledDrafter`], behind the same interface: its caches run the passes of a session.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The drafter. It is not referred to.
        buckets (`tuple[int, ...]`): Tokens of a static pass, ascending; the second holds every synchronous draft.
        backend ([`CudaGraphs`]): Captures and replays.
    """

    def __init__(self, drafter, buckets: tuple[int, ...], backend: CudaGraphs):
        super().__init__(drafter._backbone, buckets, backend)

    @property
    def ready(self) -> bool:
        """Whether drafting runs graphed without being asked to: capturing is cheap enough to always pay."""
        return self.reason is None

    @property
    def longest_synchronous(self) -> int:
        return self._buckets[1]

    def make_cache(self, compiles: bool = True) -> "GraphedDraftingCache":
        return GraphedDraftingCache(self)

    def make(self, drafter, cache: PooledCache, bucket: int):
        """Captures a pass over a cache's storage, unless it is there."""
        backbone = drafter._backbone

        def run(integers):
            ids, is_mask_slot = integers[0, :, IDS].long(), integers[0, :, EXTRA].bool()
            embeds = drafter.embed_slots(ids, is_mask_slot)
            outputs = backbone.base_model(
                inputs_embeds=embeds,
                position_ids=integers[0, :, POSITION].long(),
                attention_mask=static_masks(integers, backbone.config, cache.capacity, embeds.dtype),
                use_cache=True,
                **{self.cache_argument: cache},
            )
            return outputs.last_hidden_state

        def own(ids, layout):
            return drafter._run_backbone(drafter.embed_slots(ids, layout.is_mask_slot), layout, cache)

        self._capture(backbone, cache, bucket, run, own)

    def run(self, cache: PooledCache, input_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
        """The last hidden states of a pass, of shape `(1, tokens, hidden)`, or `None` where it must run eagerly."""
        num_tokens = input_ids.shape[1]
        bucket = self._bucket_for(num_tokens)
        cache.touch()
        if (
            bucket is None
            or input_ids.shape[0] != 1
            or not self._is_served(cache)
            or bucket not in cache.storage.graphs
            or not self._has_room(cache, bucket)
            or layout.num_cached != cache.get_seq_length()
        ):
            return None
        values = integers_of(layout, bucket, input_ids, self._extra(layout))
        return self._replay(cache, values, num_tokens, on_device={})

    def _example(self, bucket: int, num_cached: int) -> PackedLayout:
        return lay_out(1, torch.tensor([[num_cached]]), (bucket - 1,), num_cached=num_cached)

    def _extra(self, layout: PackedLayout) -> torch.Tensor:
        return layout.is_mask_slot

    @torch.no_grad()
    def warm_up(self, drafter, max_context: int, longest: int):
        """Captures the buckets up to `longest` tokens at every capacity up to a context length."""
        capacity = first_capacity(1)
        while self.reason is None and capacity <= capacity_for(max_context + longest + self.longest_synchronous):
            cache = self.make_cache()
            ids = torch.zeros(1, 1, dtype=torch.long)
            drafter.packed_forward(ids, lay_out(1, device="cpu"), cache=cache, logits_to_keep=1)
            cache.reserve(capacity)
            for bucket in self.buckets_up_to(longest):
                if self._has_room(cache, bucket):
                    self.make(drafter, cache, bucket)
            capacity *= 2
            cache.release()


class GraphedDraftingCache(PooledCache):
    """
    The KV storage of one session; `packed_forward` asks it to run the pass. Ids and layouts are wanted on the CPU: all
    of them together are one copy.

    Args:
        passes ([`GraphedDrafter`]): Where passes are captured.
    """

    def __init__(self, passes: GraphedDrafter):
        super().__init__(passes.pool)
        self._passes = passes

    def prepare(self, drafter, num_packed: int | None = None):
        """
        Captures what the next passes need and lack, over larger storage if the text has come near the end of this. For
        the caller's thread, while no pass runs.

        Args:
            num_packed (`int`, *optional*): Tokens of a packed pass at most; `None` for synchronous drafts alone.
        """
        passes = self._passes
        if self.storage is None or passes.reason is not None:
            return  # the prefill runs eagerly, and decides how large the storage is
        wanted = passes.longest_synchronous if num_packed is None else num_packed
        buckets = passes.buckets_up_to(wanted)
        # A packed pass may come after a first one over its context.
        self.reserve(self.get_seq_length() + buckets[-1] + passes.longest_synchronous)
        for bucket in buckets:
            passes.make(drafter, self, bucket)

    def is_ready_for(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens would be replayed, once it is prepared."""
        return self._passes.reason is None and num_tokens <= self._passes.longest

    def run_static(self, input_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
        """See [`GraphedDrafter.run`]."""
        return self._passes.run(self, input_ids, layout)


__all__ = ["GraphedDrafter", "GraphedDraftingCache"]
