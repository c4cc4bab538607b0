"""Layers left out of a drafter: for the length of a `with` block, or for good."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..model.backbones import config_with_layers, decoder_layers


_CACHE_NAMES = ("cache", "past_key_values", "layer_past")
# Whether layers of a class return a tuple; learned the first time that one is stood in for.
_returns_tuple: dict[type, bool] = {}


def prunable_layers(drafter) -> nn.ModuleList:
    """
    The layers of a drafter.

    Raises:
        ValueError: They cannot be found, or none of them can be left out.
    """
    try:
        return decoder_layers(drafter)
    except ValueError as error:
        raise ValueError(
            f"The drafter has no layers that can be pruned, make one of another backbone. {error}"
        ) from error


def original_indices(drafter) -> list[int]:
    """For each layer of a drafter, its index in the model that the drafter was made from."""
    return list(drafter.config.kept_layers or range(drafter.config.num_hidden_layers))


@contextlib.contextmanager
def layers_replaced(
    layers: nn.ModuleList, outputs: dict[int, Callable[[torch.Tensor], torch.Tensor]]
) -> Iterator[None]:
    """
    While it is open, the layers named return what a function makes of the hidden states that enter them.

    With a KV cache a layer still runs, for its place in the cache alone; without one it does no work.
    """
    replaced = [layers[index] for index in outputs]
    own_forwards = [vars(layer).get("forward") for layer in replaced]
    for layer, output in zip(replaced, outputs.values()):
        layer.forward = _stand_in(layer, layer.forward, output)
    try:
        yield
    finally:
        for layer, own_forward in zip(replaced, own_forwards):
            del layer.forward
            if own_forward is not None:
                layer.forward = own_forward


def _stand_in(layer: nn.Module, forward: Callable, output: Callable) -> Callable:
    def stand_in(*args, **kwargs):
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if type(layer) not in _returns_tuple or any(kwargs.get(name) is not None for name in _CACHE_NAMES):
            _returns_tuple[type(layer)] = isinstance(forward(*args, **kwargs), tuple)
        hidden_states = output(hidden_states)
        return (hidden_states,) if _returns_tuple[type(layer)] else hidden_states

    return stand_in


def skip_layers(drafter, layers: Sequence[int]):
    """
    A context manager in which a drafter computes as if it did not have some of its layers. Nothing is copied.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): Any call of it inside the block skips.
        layers (sequence of `int`): Indices among its layers.

    Raises:
        ValueError: Indices that repeat or do not exist, or all layers.
    """
    modules = prunable_layers(drafter)
    _check_removable(layers, len(modules))
    return layers_replaced(modules, {index: lambda hidden_states: hidden_states for index in layers})


def remove_layers(drafter, layers: Sequence[int]):
    """
    Removes layers for good: the drafter is changed, with every index and per-layer list that hangs on them. It can be
    saved, loaded and pruned again. `config.kept_layers` names those left by their index in the model that the drafter
    was made from.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): May carry an adapter, whose weights in these layers go too.
        layers (sequence of `int`): Indices among its layers as they are.

    Raises:
        ValueError: Indices that repeat or do not exist, all layers, or an adapter that names layers by index.
    """
    modules = prunable_layers(drafter)
    _check_removable(layers, len(modules))
    _check_adapter(drafter)
    kept = [index for index in range(len(modules)) if index not in set(layers)]
    kept_layers = [original_indices(drafter)[index] for index in kept]

    base = drafter.base_model
    name = next(name for name, child in base.named_children() if child is modules)
    setattr(base, name, nn.ModuleList(modules[index] for index in kept))
    for new_index, layer in enumerate(getattr(base, name)):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new_index
    for config in _backbone_configs(drafter):
        for field, value in vars(config_with_layers(config, kept)).items():
            if getattr(config, field) != value:
                setattr(config, field, value)
    drafter.config.kept_layers = kept_layers


def _backbone_configs(drafter) -> list:
    """The backbone's config, which modules may hold copies of."""
    holders = [drafter._backbone, *drafter.modules()]
    configs = [drafter.config.backbone_config, *(getattr(module, "config", None) for module in holders)]
    model_type = drafter.config.backbone_config.model_type
    return list({id(c): c for c in configs if getattr(c, "model_type", None) == model_type}.values())


def _check_removable(layers: Sequence[int], num_layers: int):
    if len(set(layers)) != len(layers) or not all(0 <= index < num_layers for index in layers):
        raise ValueError(f"The layers to leave out are {list(layers)}: give indices from 0 to {num_layers - 1}, once.")
    if len(layers) == num_layers:
        raise ValueError(f"All {num_layers} layers are to be left out: keep at least one.")


def _check_adapter(drafter):
    for config in getattr(drafter, "peft_config", {}).values():
        for name in ("layers_to_transform", "rank_pattern", "alpha_pattern"):
            if value := getattr(config, name, None):
                raise ValueError(
                    f"The drafter's adapter has {name}={value}, which names layers by their index: merge it before "
                    f"pruning, with D3DDrafterForCausalLM.from_pretrained(..., merge_adapter=True)."
                )


def merged_copy(drafter, dtype: torch.dtype | None = None):
    """
    A copy of a drafter to measure with: its adapter merged, in eval mode.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): Is not changed.
        dtype (`torch.dtype`, *optional*): Of the copy. Default: the drafter's.
    """
    copied = copy.deepcopy(drafter)
    for name, module in list(copied.named_modules()):
        if isinstance(module, AuxiliaryTrainingWrapper):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(module, BaseTunerLayer):
            module.merge()
            plain = module.get_base_layer()
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, plain)
    if hasattr(copied, "peft_config"):
        del copied.peft_config
        copied.config.adapter_base = None
    return copied.to(dtype or drafter.dtype).eval()


__all__ = ["layers_replaced", "merged_copy", "original_indices", "prunable_layers", "remove_layers", "skip_layers"]
