"""The target's forward over few tokens as a CUDA graph: see graphed.py, and target.py for where it stands."""

import torch
from transformers import PreTrainedModel

from ..model.packing import PackedLayout, additive, dense_visibility, lay_out, lay_out_tree, layer_windows
from ..model.storage import MIN_CAPACITY, capacity_for
from .graphed import EXTRA, IDS, GraphedPasses, integers_of, static_masks
from .layer_graph import NotServedError
from .pooled_cache import PooledCache
from .static_passes import serves


class GraphedTarget(GraphedPasses):
    """
    The graphed twin of [`CompiledTarget`], behind the same interface.

    Graphs are captured by the forward that first needs them. A graph serves chains and trees alike: those of a pass
    with a tree say so by the `layout` of their cache, which stands for the mask that they hold besides.
    """

    def make_cache(self, max_length: int | None = None) -> PooledCache:
        return PooledCache(self.pool, max_length)

    def forward(self, model: PreTrainedModel, kwargs: dict):
        """The model's outputs, or `None` where its own forward must run."""
        cache = kwargs.get(self.cache_argument)
        if not isinstance(cache, PooledCache):
            return None
        cache.touch()
        layout = cache.layout
        if layout is not None:
            kwargs = {**kwargs, "attention_mask": None}  # says what the layout says
        if not serves(self, model, kwargs, cache) or not self._is_served(cache) or _is_masked(kwargs):
            return None
        ids = kwargs["input_ids"]
        num_tokens, num_cached = ids.shape[1], cache.get_seq_length()
        if layout is not None and (layout.num_tokens, layout.num_cached) != (num_tokens, num_cached):
            return None
        bucket = self._bucket_for(num_tokens)
        cache.reserve(num_cached + bucket)
        if bucket not in cache.storage.graphs:
            self._make(model, cache, bucket)
        if self.reason is not None:
            return None
        if layout is None:
            # Padding goes on after the text, as tokens of it: their keys lie behind what is counted.
            layout = lay_out(bucket, num_cached=num_cached, device="cpu")
        rows = {IDS: ids, EXTRA: kwargs.get("position_ids")}
        on_device = {row: tensor for row, tensor in rows.items() if tensor is not None}
        values = integers_of(layout, bucket, extra=self._extra(layout))
        logits = self._replay(cache, values, num_tokens, on_device)
        to_keep = kwargs.get("logits_to_keep") or num_tokens
        return self._output_class(**{"logits": logits[:, -min(to_keep, num_tokens) :], self._cache_output: cache})

    def _example(self, bucket: int, num_cached: int) -> PackedLayout:
        return lay_out_tree(1, torch.arange(1, bucket, device="cpu") // 2, num_cached)  # two children each

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
            return plain_forward(
                model,
                input_ids=ids,
                position_ids=layout.position_ids,
                attention_mask=_dense_masks(layout, model.config, model.dtype),
                use_cache=True,
                **{self.cache_argument: cache},
            ).logits

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


def _is_masked(kwargs: dict) -> bool:
    """Whether a token sees something else than all tokens before it, as far as the arguments say."""
    mask = kwargs.get("attention_mask")
    return mask is not None and (isinstance(mask, dict) or mask.dim() != 2 or not bool(mask.all()))


def _dense_masks(layout: PackedLayout, config, dtype: torch.dtype):
    """Masks that are written out, whatever the attention is: `"d3d_packed"` hands them to SDPA."""
    masks = {kind: dense_visibility(layout, window)[:, None] for kind, window in layer_windows(config).items()}
    if config._attn_implementation == "eager":
        masks = {kind: additive(seen, dtype) for kind, seen in masks.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


__all__ = ["GraphedTarget"]
