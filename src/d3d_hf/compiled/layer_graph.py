"""One decoder layer compiled once, for every layer that is built alike.

The layer's own code is traced with its weights, its KV storage and all tensors of the call as inputs, so that the
graph holds no state: a changed weight is seen by the next call, and thirty layers cost the compile time of one.
"""

import contextlib
import copy
import functools
import logging
import operator
import threading

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from ..model.storage import GrowingCache
from .grouped_attention import grouping
from .packed_weights import lower_packed_linear, packed_linear, recorded_as_packed


# Given with the call, never through Inductor's global config. The C++ wrapper makes the graph one call that releases
# Python's lock; asserting sizes would ask packed weights for strides, which they do not have; CPU threads are those of
# the thread that calls, not of the one that compiled.
_OPTIONS = {"cpp_wrapper": True, "size_asserts": False, "cpp.dynamic_threads": True}
# Reports what cannot be traced as errors of its own, with a traceback.
_FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
_IDLE_HOOKS = "transformers.utils.output_capturing"
_compiling = threading.Lock()


class NotServedError(Exception):
    """Why a model cannot be compiled; it runs as before then."""


class _OneLayerCache:
    """What a layer sees of the KV cache while it is traced: its own storage."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor):
        self._keys, self._values, self._positions = keys, values, positions

    def update(self, key_states, value_states, *args, **kwargs):
        self._keys.index_copy_(2, self._positions, key_states)
        self._values.index_copy_(2, self._positions, value_states)
        return self._keys, self._values


class LayerGraph:
    """
    A layer's forward for fixed shapes, compiled.

    Args:
        layer (`nn.Module`): One of those that it is to serve. Not changed and not kept.
        args, kwargs: Of a call of the layer during a static pass, a [`GrowingCache`] among them.
        index (`int`): The layer's place in the cache.

    Raises:
        NotServedError: The layer cannot be traced or compiled as one graph.
    """

    def __init__(self, layer: nn.Module, args: tuple, kwargs: dict, index: int):
        storage = _cache_in(args, kwargs).layers[index]
        self._paths = list(_tensor_paths((args, kwargs)))
        self._names = [name for name, _ in _tensors_of(layer)]
        tensors = [tensor.detach() for _, tensor in _tensors_of(layer)]
        example = [storage.keys, storage.values, storage.positions, *tensors, *self._inputs(args, kwargs)]
        # Tensors of the copy are the layer's own: tracing puts others in their places, which the model must not see.
        shared = {id(item): item for item in (*layer.parameters(), *layer.buffers())}
        config = getattr(layer, "config", None) or getattr(getattr(layer, "self_attn", None), "config", None)
        twin = copy.deepcopy(layer, {**shared, id(config): grouping(config)})
        self._is_tuple = None

        def step(keys, values, positions, *rest):
            weights, inputs = dict(zip(self._names, rest)), iter(rest[len(self._names) :])
            own = _OneLayerCache(keys, values, positions)
            call_args, call_kwargs = _with_tensors((args, kwargs), inputs, own)
            output = functional_call(twin, weights, call_args, call_kwargs)
            self._is_tuple = isinstance(output, tuple)
            hidden_states, *others = output if self._is_tuple else (output,)
            if not isinstance(hidden_states, torch.Tensor) or any(other is not None for other in others):
                raise NotServedError("its layers return more than hidden states")
            return (hidden_states,)

        with _compiling, torch.no_grad():
            lower_packed_linear()
            try:
                with recorded_as_packed(), _quiet(_FAKE_TENSOR_LOG):
                    graph = make_fx(step, tracing_mode="fake")(*example)
                packed = _keep_packable(graph)
                self._is_packed = [3 + i in packed for i in range(len(self._names))]
                self._run = torch._inductor.compile(graph, example, options=_OPTIONS)
            except NotServedError:
                raise
            except Exception as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                raise NotServedError(f"a layer did not compile ({type(error).__name__}: {reason})") from error

    def weights_of(self, layer: nn.Module, packed_weights) -> list[torch.Tensor]:
        """What the graph takes as the weights of a layer that is built like the one it was made from."""
        return [
            packed_weights.of(tensor) if is_packed else tensor
            for (_, tensor), is_packed in zip(_tensors_of(layer), self._is_packed)
        ]

    def __call__(self, weights: list[torch.Tensor], args: tuple, kwargs: dict, index: int):
        storage = _cache_in(args, kwargs).layers[index]
        (hidden_states,) = self._run(
            storage.keys, storage.values, storage.positions, *weights, *self._inputs(args, kwargs)
        )
        return (hidden_states,) if self._is_tuple else hidden_states

    def _inputs(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        call = (args, kwargs)
        return [functools.reduce(operator.getitem, path, call) for path in self._paths]


def signature_of(layer: nn.Module) -> tuple:
    """
    What two layers must have in common to share a graph, and one layer with itself before to keep it: classes, plain
    attributes (those that say which adapter is active among them), shapes, dtypes and devices; not the layer's number.

    Raises:
        NotServedError: The layer carries hooks, which a graph would not call.
    """
    parts = []
    for name, module in layer.named_modules():
        if has_hooks(module):
            raise NotServedError(f"{name or 'a layer'} carries hooks")
        plain = {
            key: value
            for key, value in vars(module).items()
            if key != "layer_idx" and not key.endswith("_hooks") and _is_plain(value)
        }
        parts.append((name, type(module), repr(plain)))
    parts += [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in _tensors_of(layer)]
    return tuple(parts)


def has_hooks(module: nn.Module) -> bool:
    """Whether a graph in the module's place would leave hooks uncalled."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # Those that transformers leaves behind where hidden states were asked for once are idle otherwise.
    return hasattr(module, "_hf_hook") or any(getattr(hook, "__module__", None) != _IDLE_HOOKS for hook in hooks)


@contextlib.contextmanager
def _quiet(name: str):
    log = logging.getLogger(name)
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _is_plain(value) -> bool:
    if isinstance(value, (tuple, list, set)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def _tensors_of(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _cache_in(args: tuple, kwargs: dict) -> GrowingCache:
    for value in (*kwargs.values(), *args):
        if isinstance(value, GrowingCache):
            return value
    raise NotServedError("its layers do not take the KV cache")


def _tensor_paths(value, path=()):
    """Where the tensors are in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, (tuple, list)):
        for key, item in enumerate(value):
            yield from _tensor_paths(item, (*path, key))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensor_paths(item, (*path, key))


def _with_tensors(value, tensors, cache: _OneLayerCache):
    """The same structure with other tensors, in the order of `_tensor_paths`, and another cache."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, GrowingCache):
        return cache
    if isinstance(value, (tuple, list)):
        return type(value)([_with_tensors(item, tensors, cache) for item in value])
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors, cache) for key, item in value.items()}
    return value


def _keep_packable(graph: torch.fx.GraphModule) -> set[int]:
    """
    The placeholders, by number, that are weights of `packed_linear` and nothing else. Where a weight is computed, or
    used otherwise too, the linear map becomes an ordinary one.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    packed = {
        number
        for number, node in enumerate(placeholders)
        if node.users
        and all(user.target is packed_linear and user.args.index(node) == 1 for user in node.users)
        and all(user.args.count(node) == 1 for user in node.users)
    }
    weights = {placeholders[number] for number in packed}
    for node in graph.graph.nodes:
        if node.target is packed_linear and node.args[1] not in weights:
            node.target = torch.ops.aten.linear.default
    graph.recompile()
    return packed


__all__ = ["LayerGraph", "NotServedError", "has_hooks", "signature_of"]
