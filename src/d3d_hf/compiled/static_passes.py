"""What compiled and graphed passes have in common: they are made for a model as it is, and dropped when it changes."""

import logging
import threading

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.backbones import cache_argument, decoder_layers
from ..model.storage import GrowingCache
from .layer_graph import NotServedError, signature_of
from .packed_weights import version_of


logger = logging.getLogger(__name__)

# Arguments of a forward that a static pass knows; the others must be absent.
_KNOWN_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict")


class StaticPasses:
    """
    Passes of fixed sizes through one model. They refer to the model's modules, never to the model.

    Args:
        model (`PreTrainedModel`): The model.
        buckets (`tuple[int, ...]`): Tokens of a static pass, ascending.

    Attributes:
        reason (`str`, *optional*): Why the model cannot be served, if it cannot.
        num_static_passes (`int`): Passes that ran compiled, or were replayed.
    """

    # What a model must be to be served: its device and attention, and dtypes with the largest difference from its own
    # forward that counts as rounding, of a token's hidden state, relative to its norm.
    device_type: str
    attention: tuple[str, ...]
    tolerances: dict[torch.dtype, float]

    def __init__(self, model: PreTrainedModel, buckets: tuple[int, ...]):
        self._buckets = buckets
        self.cache_argument = cache_argument(model)
        self._lock = threading.Lock()
        self._told = None
        self._signature = None
        self.num_layers = 0
        self.num_static_passes = 0
        self.reason = None
        self.refresh(model)

    @torch.no_grad()
    def refresh(self, model: PreTrainedModel):
        """Looks at the model as it is and drops what no longer fits it."""
        with self._lock:
            try:
                signature = self._signature_of(model)
                if signature != self._signature:
                    self._signature = signature
                    self.reason = None
                    self._parameters = list(model.parameters())
                    self._build(model)
                else:
                    self._look_at_weights()
                self._versions = self._sum_of_versions()
            except NotServedError as error:
                self._drop()
                self._refuse(model, str(error))

    def _build(self, model: PreTrainedModel):
        """Begins anew for a model that was not known like this."""
        raise NotImplementedError

    def _look_at_weights(self):
        """Drops what does not follow when a weight is written to."""

    def _drop(self):
        self._signature = None

    def _sum_of_versions(self) -> int:
        return sum(map(version_of, self._parameters))

    def _refuse(self, model: PreTrainedModel, reason: str):
        self.reason = reason
        if reason != self._told:
            self._told = reason
            logger.warning(f"{type(model).__name__} cannot be compiled and runs as before: {reason}.")

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """Draft tokens that fill a pass, behind the token that they hang on."""
        return tuple(bucket - 1 for bucket in self._buckets if bucket > 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest static pass."""
        return self._buckets[-1]

    def buckets_up_to(self, num_tokens: int) -> list[int]:
        """The buckets up to the one that holds so many tokens."""
        shorter = [bucket for bucket in self._buckets if bucket < num_tokens]
        return list(self._buckets[: len(shorter) + 1])

    def _bucket_for(self, num_tokens: int) -> int | None:
        """The smallest pass that holds so many tokens."""
        return next((bucket for bucket in self._buckets if bucket >= num_tokens), None)

    def _signature_of(self, model: PreTrainedModel) -> tuple:
        """What a model must have in common with itself before for its passes to be kept."""
        implementation = model.config._attn_implementation
        if model.config.is_encoder_decoder:
            raise NotServedError("it is an encoder-decoder model")
        if implementation not in self.attention:
            raise NotServedError(f"its attention is {implementation!r}, not one of {self.attention}")
        if getattr(model, "is_quantized", False):
            raise NotServedError("its weights are quantised")
        tensors = [*model.parameters(), *model.buffers()]
        if any(tensor.device.type != self.device_type for tensor in tensors):
            raise NotServedError(f"it is on {model.device}, and its passes are for {self.device_type}")
        if model.dtype not in self.tolerances:
            raise NotServedError(f"its dtype is {model.dtype}, not one of {tuple(self.tolerances)}")
        layers = tuple(map(signature_of, layers_of(model)))
        identities = tuple(map(id, (*model.modules(), *tensors)))
        return layers, identities, model.dtype, implementation


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    try:
        return decoder_layers(model)
    except (ValueError, AttributeError):
        raise NotServedError("its decoder layers do not stand in one list, each on its own") from None


def serves(passes: StaticPasses, model: PreTrainedModel, kwargs: dict, cache: GrowingCache) -> bool:
    """Whether a call of a target's forward is one that a static pass can take over."""
    ids, mask, to_keep = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("logits_to_keep", 0)
    asked = ("output_attentions", "output_hidden_states")
    others = (value for name, value in kwargs.items() if name not in (*_KNOWN_ARGUMENTS, passes.cache_argument))
    return (
        passes.reason is None
        and cache.get_seq_length() > 0
        and ids is not None
        and ids.shape[0] == 1
        and ids.shape[1] <= passes.longest
        and (mask is None or isinstance(mask, dict) or mask.dim() in (2, 4))
        and isinstance(to_keep, int)
        and kwargs.get("use_cache") is not False
        and kwargs.get("return_dict", model.config.return_dict) is not False
        and not any(getattr(model.config, name, False) for name in asked)
        and all(value is None or value is False for value in others)
        and not model.training
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(passes.device_type)
        and cache.holds(model.dtype)
    )


def over_storage(masks, capacity: int, num_tokens: int):
    """
    Masks of a pass over what is filled, each of shape `(1, 1, tokens, filled)`, as those of a whole bucket over the
    whole storage, `(1, 1, num_tokens, capacity)`. Padding is seen by nothing, and sees the storage's first place: a
    row that sees nothing gives NaN.

    Args:
        masks (`torch.Tensor` or `dict` of them): Boolean or additive.
        capacity (`int`): Of the storage.
        num_tokens (`int`): Of the bucket.
    """
    if isinstance(masks, dict):
        return {name: over_storage(mask, capacity, num_tokens) for name, mask in masks.items()}
    hidden = False if masks.dtype == torch.bool else torch.finfo(masks.dtype).min
    whole = masks.new_full((1, 1, num_tokens, capacity), hidden)
    whole[:, :, : masks.shape[2], : masks.shape[3]] = masks
    whole[:, :, masks.shape[2] :, 0] = True if masks.dtype == torch.bool else 0.0
    return whole


__all__ = ["StaticPasses", "layers_of", "over_storage", "serves"]
