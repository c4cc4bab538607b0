"""The target's forward over few tokens as a CUDA graph: see graphed.py, and target.py for where it stands."""

import torch
from transformers import PreTrainedModel

from ..model.packing import PackedLayout, lay_out
from ..model.storage import MIN_CAPACITY, capacity_for
from .graphed import EXTRA, IDS, GraphedPasses, integers_of, static_masks
from .layer_graph import NotServedError
from .pooled_cache import PooledCache
from .static_passes import serves


class GraphedTarget(GraphedPasses):
    """
    The graphed twin of [`CompiledTarget`], behind the same interface.

    Graphs are captured by the forward that first needs them.
    """

    def make_cache(self, max_length: int | None = None) -> PooledCache:
        return PooledCache(self.pool, max_length)

    def forward(self, model: PreTrainedModel, kwargs: dict):
        """The model's outputs, or `None` where its own forward must run."""
        cache = kwargs.get(self.cache_argument)
        if not isinstance(cache, PooledCache):
            return None
        cache.touch()
        if not serves(self, model, kwargs, cache) or not self._is_served(cache) or _has_padding(kwargs):
            return None
        ids = kwargs["input_ids"]
        num_tokens = ids.shape[1]
        bucket = self._bucket_for(num_tokens)
        cache.reserve(cache.get_seq_length() + bucket)
        if bucket not in cache.storage.graphs:
            self._make(model, cache, bucket)
        if self.reason is not None:
            return None
        # Padding goes on after the text, as tokens of it: their keys lie behind what is counted.
        layout = self._example(bucket, cache.get_seq_length())
        rows = {IDS: ids, EXTRA: kwargs.get("position_ids")}
        on_device = {row: tensor for row, tensor in rows.items() if tensor is not None}
        logits = self._replay(cache, integers_of(layout, bucket, extra=self._extra(layout)), num_tokens, on_device)
        to_keep = kwargs.get("logits_to_keep") or num_tokens
        return self._output_class(**{"logits": logits[:, -min(to_keep, num_tokens) :], self._cache_output: cache})

    def _example(self, bucket: int, num_cached: int) -> PackedLayout:
        return lay_out(bucket, num_cached=num_cached, device="cpu")

    def _extra(self, layout: PackedLayout) -> torch.Tensor:
        return layout.position_ids  # of RoPE; visibility goes by place

    def _make(self, model: PreTrainedModel, cache: PooledCache, bucket: int):
        plain_forward = type(model)._plain_class.forward

        def run(integers):
            outputs = plain_forward(
                model,
                input_ids=integers[0, :, IDS].long(),
                position_ids=integers[0, :, EXTRA].long(),
                attention_mask=static_masks(integers, model.config, cache.capacity, model.dtype),
                use_cache=True,
                return_dict=True,
                **{self.cache_argument: cache},
            )
            others = {name for name, value in outputs.items() if value is not None and name != "logits"}
            self._cache_output = next((name for name in others if outputs[name] is cache), None)
            if others != {self._cache_output}:
                raise NotServedError(f"its outputs hold more than logits: {sorted(others)}")
            self._output_class = type(outputs)
            return outputs.logits

        def own(ids, layout):
            return plain_forward(model, input_ids=ids, use_cache=True, **{self.cache_argument: cache}).logits

        self._capture(model, cache, bucket, run, own)

    @torch.no_grad()
    def warm_up(self, model: PreTrainedModel, max_context: int):
        """Captures every bucket at every capacity up to a context length."""
        capacity = MIN_CAPACITY
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        while self.reason is None and capacity <= capacity_for(max_context + self.longest):
            cache = self.make_cache(max_length=1)
            type(model)._plain_class.forward(model, input_ids=ids, use_cache=True, **{self.cache_argument: cache})
            cache.reserve(capacity)
            for bucket in self._buckets:
                self._make(model, cache, bucket)
            capacity *= 2
            cache.release()


def _has_padding(kwargs: dict) -> bool:
    mask = kwargs.get("attention_mask")
    return mask is not None and not bool(mask.all())


__all__ = ["GraphedTarget"]
