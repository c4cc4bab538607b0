"""Linear maps over weights in oneDNN's own layout.

A bf16 product of few rows spends half of its time putting the weight into the layout that the kernel reads. Here that
is done once per weight. torch.compile does the same under `freezing`, but makes the weights part of the graph, so that
every layer is a graph of its own; `packed_linear` takes them as inputs, and one graph serves all layers.

Packed weights are copies: the memory of the linear maps doubles. `PackedWeights` notices when an original changes.
"""

import logging

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


logger = logging.getLogger(__name__)

_NUM_SAMPLES = 64

_library = torch.library.Library("d3d_hf", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


for _key in ("CPU", "MkldnnCPU"):
    _library.impl("packed_linear", _packed_linear, _key)


@torch.library.register_fake("d3d_hf::packed_linear", lib=_library)
def _packed_linear_shape(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


packed_linear = torch.ops.d3d_hf.packed_linear.default


def lower_packed_linear():
    """
    Tells Inductor to call oneDNN straight from its C++ code. Where a release has no such way, the graph calls the
    Python function above instead: the same result, a few microseconds dearer per call.
    """
    from torch._inductor import lowering

    if packed_linear in lowering.lowerings:
        return
    try:
        from torch._inductor.ir import TensorBox
        from torch._inductor.mkldnn_ir import LinearUnary

        lowering.register_lowering(packed_linear, type_promotion_kind=None)(
            lambda x, weight, bias: TensorBox.create(LinearUnary.create(x, weight, bias, "none", [], ""))
        )
    except (ImportError, AttributeError, TypeError) as error:
        logger.info(f"Inductor does not know oneDNN's linear maps as expected ({error!r}): called from Python.")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has linear maps over packed weights of this kind on this machine."""
    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class recorded_as_packed(TorchFunctionMode):
    """While a layer is traced: linear maps are recorded as `packed_linear`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, input, weight, bias=None):
        if input.dtype == weight.dtype and can_pack(weight):
            return packed_linear(input, weight, bias)
        return nn.functional.linear(input, weight, bias)


class PackedWeights:
    """Packed copies of parameters, made when they are asked for and dropped when the parameter changes."""

    def __init__(self):
        self._copies = {}

    @torch.no_grad()
    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The packed copy of a parameter of shape `(out, in)`."""
        known = self._copies.get(id(parameter))
        if known is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(parameter.detach().contiguous(), None)
            known = self._copies[id(parameter)] = (parameter, _fingerprint(parameter), packed)
        return known[2]

    def drop_changed(self) -> bool:
        """Drops the copies whose originals were moved, cast or written to; whether there were any."""
        changed = [key for key, (parameter, mark, _) in self._copies.items() if _fingerprint(parameter) != mark]
        for key in changed:
            del self._copies[key]
        return bool(changed)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter, _, _ in self._copies.values())


@torch.no_grad()
def _fingerprint(parameter: torch.Tensor) -> tuple:
    """
    Of the values a sample: writing through `.data`, as PEFT does when it merges, leaves no other trace. A change of a
    few single elements by that way can escape it.
    """
    values = parameter.detach().reshape(-1)
    sample = values[:: max(1, values.shape[0] // _NUM_SAMPLES)].double()
    weights = torch.arange(1, sample.shape[0] + 1, dtype=torch.float64, device=sample.device)
    return values.data_ptr(), parameter.dtype, version_of(parameter), float(sample @ weights)


def version_of(tensor: torch.Tensor) -> int:
    """Counts in-place changes; inference tensors keep no count."""
    return 0 if tensor.is_inference() else tensor._version


__all__ = ["PackedWeights", "can_pack", "lower_packed_linear", "packed_linear", "recorded_as_packed", "version_of"]
