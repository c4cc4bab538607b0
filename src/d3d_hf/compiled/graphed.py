"""Static passes as CUDA graphs: a whole pass is one copy into the device's memory and one replay.

A pass of up to a bucket of tokens is captured with everything that depends on the round read from one small tensor of
integers: token ids, positions, who sees whom, and how many tokens the KV storage holds. It embeds the tokens, makes
the masks (or hands the integers to an attention that reads them), runs the model's own layers over the pool's storage,
and leaves hidden states or logits behind. Filling the tensor is all that Python does per round, and the replay
releases its lock: the thread that drafts does not hold up the one that verifies.

Graphs are captured on the caller's thread, when they are first needed or by `warmup`, and again over larger storage
when a text outgrows it. Whatever cannot be captured runs eagerly, and one line in the log says why.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..kernels.visibility import BRANCH, NO_WINDOW, NUM_CACHED, WINDOW, dense_visibility, visibility_of
from ..model.backbones import refuse_unpackable
from ..model.packing import PADDING, PackedLayout, additive, layer_windows
from .graph_backend import CudaGraphs
from .layer_graph import NotServedError
from .pooled_cache import PooledCache, StoragePool
from .static_passes import StaticPasses, layers_of


logger = logging.getLogger(__name__)

# Rows of the tensor of integers, behind those of visibility.py: token ids, and what the kind of pass needs besides.
IDS, EXTRA, _NUM_OWN_ROWS = -2, -1, 2


@dataclass
class StaticPass:
    """
    A captured pass over one storage.

    Attributes:
        integers (`torch.IntTensor` of shape `(1, 1, rows, bucket)`): What it reads; filled before each replay.
        replay (`Callable`): Runs it and returns its output, which the next replay overwrites.
    """

    integers: torch.IntTensor
    replay: Callable[[], torch.Tensor]


class GraphedPasses(StaticPasses):
    """
    Static passes on a GPU.

    Args:
        model (`PreTrainedModel`): The model.
        buckets (`tuple[int, ...]`): Tokens of a static pass, ascending.
        backend ([`CudaGraphs`]): Captures and replays.
    """

    attention = ("d3d_packed", "sdpa", "eager")
    # Of a whole pass, whose layers add up what the model's own forward rounds otherwise.
    tolerances = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 3e-2}

    def __init__(self, model: PreTrainedModel, buckets: tuple[int, ...], backend: CudaGraphs):
        self.backend = backend
        self.device_type = backend.device.type
        super().__init__(model, buckets)

    def _signature_of(self, model: PreTrainedModel) -> tuple:
        # A graph reads each weight where it stood: values may change, addresses may not.
        addresses = tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
        return *super()._signature_of(model), addresses

    def _build(self, model: PreTrainedModel):
        try:
            refuse_unpackable(model.config)  # masks are made here, by positions and windows alone
        except ValueError as error:
            raise NotServedError(str(error)) from None
        self._dtype, self.num_layers = model.dtype, len(layers_of(model))
        self._num_embeddings = model.get_input_embeddings().weight.shape[0]
        # Storage that is lent goes back to the pool that it came from, and vanishes with it.
        self.pool = StoragePool(self.num_layers, self.backend)

    def _drop(self):
        super()._drop()
        self.pool = StoragePool(0, self.backend)

    def _is_served(self, cache: PooledCache) -> bool:
        return (
            self.reason is None
            and cache.pool is self.pool
            and cache.storage is not None
            and cache.holds(self._dtype)
            and not torch.is_grad_enabled()
            and not self.backend.is_autocast()
        )

    def _has_room(self, cache: PooledCache, bucket: int) -> bool:
        return cache.get_seq_length() + bucket <= cache.capacity

    def _capture(self, model: PreTrainedModel, cache: PooledCache, bucket: int, run, own):
        """
        Makes the graph of `run(integers)` over a cache's storage, unless it is there, and compares it with `own(ids,
        layout)`, the model's own forward over the same cache. What they write lies behind the text.
        """
        storage = cache.storage
        if self.reason is not None or bucket in storage.graphs:
            return
        cache.touch()
        logger.info(f"Capturing a pass of {bucket} tokens over a KV cache of {storage.capacity}.")
        try:
            storage.graphs[bucket] = self._captured(cache, bucket, run, own)
        except NotServedError as error:
            self._refuse(model, str(error))
        except Exception as error:  # whatever it is, the model's own forward remains
            while error.__context__ is not None:  # a capture that was broken off says so, not why
                error = error.__context__
            reason = (str(error).strip().splitlines() or [""])[0]
            self._refuse(model, f"a pass was not captured ({type(error).__name__}: {reason})")

    @torch.no_grad()
    def _captured(self, cache: PooledCache, bucket: int, run, own) -> StaticPass:
        length = cache.get_seq_length()
        ids = torch.arange(bucket)[None] % self._num_embeddings
        layout = self._example(bucket, length)
        with torch.inference_mode(False), torch.autocast(self.device_type, enabled=False):
            integers = integers_of(layout, bucket, ids, self._extra(layout)).to(self.backend.device)

            def function():
                # Where keys and values go is read on the device: the next round's places are others.
                places = integers[0, 0, NUM_CACHED, :1].long() + torch.arange(bucket, device=integers.device)
                cache.show_whole(places)
                try:
                    return run(integers)
                finally:
                    cache.show_whole(None)

            try:
                expected = own(ids.to(integers.device), layout.to(integers.device)).float()
            finally:
                cache.keep(length, [])  # however far through the layers it came
            replay = self.backend.capture(function, [integers, *cache.storage.tensors], cache.storage.workspace)
            output = replay().float()
        norm = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        gap = float(((output - expected).norm(dim=-1) / norm).max())
        if not gap <= self.tolerances[self._dtype]:
            raise NotServedError(f"a replayed pass of {bucket} tokens differs from the model's own by {gap:.2g}")
        return StaticPass(integers, replay)

    def _example(self, bucket: int, num_cached: int) -> PackedLayout:
        """A whole pass to capture with."""
        raise NotImplementedError

    def _extra(self, layout: PackedLayout) -> torch.Tensor:
        """What this kind of pass needs besides ids and visibility, of shape `(1, tokens)`."""
        raise NotImplementedError

    def _replay(
        self, cache: PooledCache, values: torch.IntTensor, num_tokens: int, on_device: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """
        One round: the output's rows that are tokens, in memory of their own.

        Args:
            values (`torch.IntTensor` of shape `(1, 1, rows, bucket)`): What the pass reads, of [`integers_of`].
            num_tokens (`int`): Tokens that are no padding.
            on_device (`dict[int, torch.Tensor]`): Rows that are on the device already, each of shape `(1, tokens)`.
        """
        cache.touch()
        static = cache.storage.graphs[values.shape[-1]]
        self.backend.send(values, static.integers)
        for row, tensor in on_device.items():
            static.integers[:, 0, row, : tensor.shape[1]].copy_(tensor)
        output = static.replay()[:, :num_tokens].clone()
        cache.count(num_tokens)
        self.num_static_passes += 1
        return output


def integers_of(
    layout: PackedLayout, bucket: int, ids: torch.Tensor | None = None, extra: torch.Tensor | None = None
) -> torch.IntTensor:
    """
    What a pass reads, on the layout's device: visibility, with words of a tree whether there is one or not, token ids
    and `extra` per token; `(1, 1, rows, bucket)`, of which the tokens after the layout's own are padding.
    """
    visibility = visibility_of(layout, num_tokens=bucket, has_tree=True)
    own = visibility.new_zeros(1, 1, _NUM_OWN_ROWS, bucket)
    for row, values in ((IDS, ids), (EXTRA, extra)):
        if values is not None:
            own[0, 0, row, : values.shape[-1]] = values[0]
    return torch.cat([visibility, own], dim=2)


def static_masks(integers: torch.IntTensor, config, capacity: int, dtype: torch.dtype):
    """
    The masks of a static pass, made on the device from what it reads, in the form that the backbone takes: see
    `packing.attention_masks`, of which this is the twin for a whole KV storage.

    Args:
        integers (`torch.IntTensor` of shape `(1, 1, rows, tokens)`): Of a [`StaticPass`].
        config (`PreTrainedConfig`): The backbone's.
        capacity (`int`): Places of the storage.
        dtype (`torch.dtype`): Of the activations.

    Returns:
        One mask, or a `dict` from layer type to mask if windows are mixed: `(1, 1, tokens, capacity)`, or the integers
        themselves for `"d3d_packed"`.
    """
    visibility = integers[:, :, :IDS]
    masks = {}
    for layer_type, window in layer_windows(config).items():
        seen = visibility.clone()
        seen[:, :, WINDOW].fill_(NO_WINDOW if window is None else window)
        if config._attn_implementation != "d3d_packed":
            # A row that sees nothing gives NaN, which would spread through keys and values: padding sees itself.
            own_places = seen[:, :, NUM_CACHED] + torch.arange(seen.shape[3], device=seen.device)
            itself = own_places[..., None] == torch.arange(capacity, device=seen.device)
            is_padding = seen[:, :, BRANCH] == PADDING
            seen = dense_visibility(seen, capacity) | (is_padding[..., None] & itself)
            if config._attn_implementation == "eager":
                seen = additive(seen, dtype)
        masks[layer_type] = seen
    return masks if len(masks) > 1 else next(iter(masks.values()))


__all__ = ["EXTRA", "IDS", "GraphedPasses", "StaticPass", "integers_of", "static_masks"]
