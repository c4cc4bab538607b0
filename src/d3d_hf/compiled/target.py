"""The target's forward over few tokens, compiled: what plain decoding and verification consist of.

`compile_target` gives a model a subclass of its own class. Its `generate` makes a [`GrowingCache`] where it
would make a dynamic one; prefill runs eagerly over it, and every forward after that, of one token or of a draft, is
padded to a bucket and run as a static pass: the model's own code around its layers (embedding, masks, RoPE, norm,
head), and for each layer a call of one compiled graph. The first pass of a graph through each layer runs the layer's
own forward too, and the graph is used only if both agree.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from ..model.backbones import cache_argument
from ..model.generation_hook import is_drafter
from ..model.storage import MIN_CAPACITY, GrowingCache, capacity_for
from .graph_backend import graphs_for
from .graphed_target import GraphedTarget
from .layer_graph import LayerGraph, NotServedError, has_hooks, signature_of
from .packed_weights import PackedWeights, can_pack, packed_linear
from .static_passes import StaticPasses, layers_of, over_storage, serves


logger = logging.getLogger(__name__)

DRAFT_LENGTHS = (8, 16, 32)

_STATE = "_compiled_target"


def compile_target(
    model: PreTrainedModel, draft_lengths: Sequence[int] = DRAFT_LENGTHS, max_context: int | None = None
) -> PreTrainedModel:
    r"""
    Makes `model.generate` run its forwards after the prefill compiled: plain, with any assistant, with a D3D drafter.
    Batches, beams, prefill and calls that ask for attentions or hidden states run as before, and so does a model that
    cannot be served (one line in the log says why).

    On a CPU one decoder layer is compiled for each draft length and each capacity of the KV cache (powers of two from
    256), when it is first needed or ahead of time, and serves all layers. On CPUs with oneDNN the weights of linear
    maps are kept a second time in the layout that its kernels read, which doubles their memory. On a GPU the whole
    forward is captured as a CUDA graph, for each draft length and capacity likewise; its KV storage is kept for the
    next generation.

    Changed weights, dtypes, devices, adapters and modules are noticed when the next generation begins. Hooks inside
    decoder layers switch compiled forwards off. Copies and pickles of the model are plain models.

    Args:
        model (`PreTrainedModel`): A decoder-only model; its class becomes a subclass of itself.
        draft_lengths (sequence of `int`, *optional*, defaults to `(8, 16, 32)`):
            Draft tokens of one verification, at most; a shorter draft is padded to the next length. A longer one runs
            eagerly. Length 0, plain decoding, is always there.
        max_context (`int`, *optional*):
            Compile ahead for texts of up to this many tokens. Default: compile when it is needed, which delays a
            generation by some seconds per graph.

    Returns:
        `PreTrainedModel`: `model` itself.

    Raises:
        ValueError: `model` is no causal language model of transformers, or an argument is out of range.
    """
    if hasattr(model, "get_base_model"):
        raise ValueError(f"{type(model).__name__} wraps a model: compile the model inside, model.get_base_model().")
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ValueError(f"{type(model).__name__} is no model of transformers that generates: pass one.")
    if is_drafter(model):
        raise ValueError(f"{type(model).__name__} is a drafter: pass the target that it drafts for.")
    lengths = sorted(set(draft_lengths))
    if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise ValueError(f"draft_lengths is {draft_lengths!r}: give numbers of draft tokens, each at least 1.")
    if max_context is not None and (not isinstance(max_context, int) or max_context < 1):
        raise ValueError(f"max_context is {max_context!r}: give a number of tokens, at least 1.")
    uncompile_target(model)
    buckets, graphs = (1, *(length + 1 for length in lengths)), graphs_for(model.device)
    state = CompiledTarget(model, buckets) if graphs is None else GraphedTarget(model, buckets, graphs)
    if state.reason is None:
        model.__dict__[_STATE] = state
        model.__class__ = _compiled_class(type(model))
        if max_context is not None:
            state.warm_up(model, max_context)
    return model


def uncompile_target(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `compile_target` and frees what it compiled and packed; does nothing to other models. Returns `model`."""
    if model.__dict__.pop(_STATE, None) is not None:
        model.__class__ = type(model)._plain_class
    return model


@contextlib.contextmanager
def compiled_target(model: PreTrainedModel, **kwargs):
    """`compile_target(model, **kwargs)` for the duration of a `with` block."""
    try:
        yield compile_target(model, **kwargs)
    finally:
        uncompile_target(model)


class _CompiledModel:
    """Goes before a model's class in the class that `compile_target` gives it."""

    @property
    def draft_tree_sizes(self) -> tuple[int, ...]:
        """Nodes of a draft that compiled passes are made for: those of draft trees are chosen among them."""
        return self.__dict__[_STATE].draft_sizes

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, mode, batch_size, max_cache_length, **kwargs
    ):
        state, key = self.__dict__[_STATE], cache_argument(self)
        was_given = model_kwargs.get(key) is not None
        result = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, mode, batch_size, max_cache_length, **kwargs
        )
        state.refresh(self)
        is_single = batch_size == 1 and generation_config.num_beams == generation_config.num_return_sequences == 1
        is_ordinary = type(model_kwargs.get(key)) is DynamicCache and generation_config.cache_implementation is None
        if state.reason is None and is_single and is_ordinary and not was_given and not generation_config.is_assistant:
            model_kwargs[key] = state.make_cache(max_cache_length)
        return result

    def __reduce_ex__(self, protocol):
        """A copy, or what comes out of a pickle, is a plain model."""
        _, _, state, *_ = super().__reduce_ex__(protocol)
        state = {name: value for name, value in state.items() if name != _STATE}
        return _new, (type(self)._plain_class,), state


def _new(plain_class: type):
    return plain_class.__new__(plain_class)


@functools.cache
def _compiled_class(plain_class: type) -> type:
    """The subclass, under the name of the class itself: it is written to configs and model cards."""

    @functools.wraps(plain_class.forward)  # generate reads the signature
    def forward(self, *args, **kwargs):
        outputs = None if args else self.__dict__[_STATE].forward(self, kwargs)
        return plain_class.forward(self, *args, **kwargs) if outputs is None else outputs

    names = {name: getattr(plain_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {**names, "forward": forward, "_plain_class": plain_class}
    return type(plain_class.__name__, (_CompiledModel, plain_class), members)


class CompiledPasses(StaticPasses):
    """Static passes on the CPU, one compiled graph in the place of each layer."""

    device_type = "cpu"
    attention = ("sdpa", "eager")
    tolerances = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

    def _build(self, model: PreTrainedModel):
        layers = layers_of(model)
        signatures = list(map(signature_of, layers))
        groups = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
        self._packed = PackedWeights()
        self._graphs, self._graph_lock = {}, threading.Lock()
        self._layers = [
            _CompiledLayer(layer, index, groups[signature], self)
            for index, (layer, signature) in enumerate(zip(layers, signatures))
        ]
        self.num_layers = len(layers)
        self._stand_in = _with_layers(model, self._layers, self._packed)

    def _drop(self):
        super()._drop()
        self._stand_in = None

    def _look_at_weights(self):
        if self._packed.drop_changed():
            self._forget_weights()

    def _forget_weights(self):
        for layer in self._layers:
            layer.forget_weights()

    def _run_static(self, model: PreTrainedModel, cache: GrowingCache, bucket: int, num_tokens: int, run):
        """What `run()` returns, a pass of `bucket` tokens of which `num_tokens` are kept; `None` if it is refused."""
        num_kept = 0
        cache.begin_static_pass(bucket)
        try:
            outputs = run()
            num_kept = num_tokens
        except NotServedError as error:
            self._refuse(model, str(error))
            return None
        finally:
            cache.end_static_pass(num_kept)
        self.num_static_passes += 1
        return outputs

    def graph_for(self, layer: nn.Module, group: int, args: tuple, kwargs: dict, index: int, key: tuple) -> LayerGraph:
        """The graph for a layer and the shapes of a call, compiled if it is not there."""
        graph = self._graphs.get((group, *key))
        if graph is None:
            with self._graph_lock:
                graph = self._graphs.get((group, *key))
                if graph is None:
                    logger.info(f"Compiling a decoder layer for {key[0]} tokens over a KV cache of {key[1]}.")
                    graph = self._graphs[(group, *key)] = LayerGraph(layer, args, kwargs, index)
        return graph


class CompiledTarget(CompiledPasses):
    """What is compiled and packed for one target."""

    def make_cache(self, max_length: int | None = None) -> GrowingCache:
        return GrowingCache(self.num_layers, max_length)

    def forward(self, model: PreTrainedModel, kwargs: dict):
        """The model's outputs, or `None` where its own forward must run."""
        cache = kwargs.get(self.cache_argument)
        if not isinstance(cache, GrowingCache) or not serves(self, model, kwargs, cache):
            return None
        num_tokens = kwargs["input_ids"].shape[1]
        bucket = self._bucket_for(num_tokens)
        if self._sum_of_versions() != self._versions:
            self.refresh(model)
            if self.reason is not None:
                return None
        plain_forward, stand_in = type(model)._plain_class.forward, self._stand_in
        outputs = self._run_static(
            model,
            cache,
            bucket,
            num_tokens,
            lambda: plain_forward(stand_in, **_padded(kwargs, bucket, cache.capacity)),
        )
        if outputs is None:
            return None
        to_keep = kwargs.get("logits_to_keep") or num_tokens
        outputs.logits = outputs.logits[:, max(0, num_tokens - to_keep) : num_tokens]
        return outputs

    @torch.no_grad()
    def warm_up(self, model: PreTrainedModel, max_context: int):
        """Runs every bucket at every capacity up to a context length."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        capacity, is_training = MIN_CAPACITY, model.training
        model.eval()
        try:
            while self.reason is None and capacity <= capacity_for(max_context + self._buckets[-1]):
                cache = GrowingCache(self.num_layers, max_length=1)
                keywords = {self.cache_argument: cache, "use_cache": True, "return_dict": True}
                model(input_ids=ids, **keywords)
                cache.reserve(capacity)
                for bucket in self._buckets:
                    model(input_ids=ids.expand(1, bucket), **keywords)
                    cache.crop(-bucket)
                capacity *= 2
        finally:
            model.train(is_training)


class _CompiledLayer(nn.Module):
    """Stands in for a decoder layer during static passes."""

    def __init__(self, layer: nn.Module, index: int, group: int, state: CompiledPasses):
        super().__init__()
        self.layer = layer
        self._index, self._group, self._state = index, group, state
        self.forget_weights()

    def forget_weights(self):
        self._weights = {}

    def forward(self, *args, **kwargs):
        hidden_states = args[0] if args else kwargs["hidden_states"]
        cache = next(value for value in (*kwargs.values(), *args) if isinstance(value, GrowingCache))
        key = (hidden_states.shape[1], cache.capacity)
        known = self._weights.get(key)
        if known is not None:
            graph, weights = known
            return graph(weights, args, kwargs, self._index)
        return self._first_call(key, cache, args, kwargs)

    def _first_call(self, key: tuple, cache: GrowingCache, args: tuple, kwargs: dict):
        """Compares the graph with the layer's own forward, whose result is returned."""
        graph = self._state.graph_for(self.layer, self._group, args, kwargs, self._index, key)
        weights = graph.weights_of(self.layer, self._state._packed)
        compiled = graph(weights, args, kwargs, self._index)
        expected = self.layer(*args, **kwargs)
        if isinstance(expected, tuple):
            compiled, gap_to = compiled[0], expected[0]
        else:
            gap_to = expected
        # Padding may be embedded as zero.
        norm = gap_to.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        gap = ((compiled - gap_to).float().norm(dim=-1) / norm).max()
        if not gap <= self._state.tolerances[gap_to.dtype]:
            raise NotServedError(f"layer {self._index} and its graph differ by {gap:.2g} of the hidden state")
        self._weights[key] = (graph, weights)
        return expected

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _PackedHead(nn.Module):
    """The vocabulary projection over its packed weight."""

    def __init__(self, head: nn.Linear, packed: PackedWeights):
        super().__init__()
        self._head, self._packed = (head,), packed  # not as a module: the weights are listed once

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        (head,) = self._head
        return packed_linear(hidden_states, self._packed.of(head.weight), head.bias)


def _with_layers(model: PreTrainedModel, layers: list[nn.Module], packed: PackedWeights) -> PreTrainedModel:
    """A second object over the model's own modules, in which other modules stand in for the layers and the head."""
    base, replaced = model.base_model, layers_of(model)
    name = next(name for name, child in base.named_children() if child is replaced)
    new_base = _sharing(base, {name: nn.ModuleList(layers)})
    changes = {name: new_base for name, child in model.named_children() if child is base}
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and can_pack(head.weight) and not has_hooks(head):
        changes |= {name: _PackedHead(head, packed) for name, child in model.named_children() if child is head}
    return _sharing(model, changes)


def _sharing(module: nn.Module, changes: dict[str, nn.Module]) -> nn.Module:
    twin = object.__new__(getattr(type(module), "_plain_class", type(module)))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop(_STATE, None)
    twin.__dict__["_modules"] = {**module._modules, **changes}
    return twin


def _padded(kwargs: dict, bucket: int, capacity: int) -> dict:
    """A call's arguments for `bucket` tokens: the last one repeated, at the positions that follow, all logits kept."""
    ids, mask, positions = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    num_missing = bucket - ids.shape[1]
    padded = {name: value for name, value in kwargs.items() if name != "logits_to_keep"}
    padded["input_ids"] = torch.cat([ids, ids[:, -1:].expand(1, num_missing)], dim=1)
    if isinstance(mask, dict) or (mask is not None and mask.dim() == 4):
        padded["attention_mask"] = over_storage(mask, capacity, bucket)
    elif mask is not None:
        padded["attention_mask"] = torch.cat([mask, mask.new_ones(1, num_missing)], dim=1)
    if positions is not None:
        after = torch.arange(1, num_missing + 1, device=positions.device)
        padded["position_ids"] = torch.cat([positions, positions[:, -1:] + after], dim=1)
    return padded


__all__ = [
    "DRAFT_LENGTHS",
    "CompiledPasses",
    "CompiledTarget",
    "compile_target",
    "compiled_target",
    "uncompile_target",
]
