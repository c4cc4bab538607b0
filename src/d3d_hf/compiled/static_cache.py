"""A KV cache whose storage is static and whose manners are those of a dynamic one.

Eager forwards see views of what is filled, as a `DynamicCache` would give them, so that prefill, masks and cropping
work as ever and nothing is copied when a token comes. During a *static pass* the same storage is shown whole, with the
places of the new tokens given by a tensor: every shape is fixed, as a compiled graph needs it.
"""

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


MIN_CAPACITY = 256
# Tokens after the prompt that the first storage has room for; a longer text makes it grow.
_FIRST_ROOM = 256
# A static pass may write this many places beyond the text's end.
_SLACK = 32


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity, a power of two, that holds `num_tokens`."""
    return max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())


def first_capacity(num_tokens: int) -> int:
    """The capacity of storage that begins with `num_tokens` and whose text's length is not known."""
    return capacity_for(num_tokens + _FIRST_ROOM + _SLACK)


class StorageLayer(CacheLayerMixin):
    """One layer's keys and values, of shape `(batch, heads, capacity, head_dim)`, zero where nothing was written."""

    is_sliding = False  # all keys are kept; a sliding window is the mask's business
    is_croppable = True

    def __init__(self, max_length: int | None = None):
        super().__init__()
        self.length = 0
        self.positions = None
        self._max_length = max_length

    @property
    def is_compileable(self) -> bool:
        # Read by transformers as "masks must be written out", and by `generate` as "compile the whole forward".
        return self.positions is not None

    @property
    def capacity(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None):
        value_states = key_states if value_states is None else value_states  # older releases pass the keys alone
        self.device, self.dtype = key_states.device, key_states.dtype
        capacity = self._first_capacity(key_states.shape[2])
        self.keys = zeros_like_states(key_states, capacity)
        self.values = zeros_like_states(value_states, capacity)
        self.is_initialized = True

    def _first_capacity(self, num_tokens: int) -> int:
        wanted = num_tokens + _FIRST_ROOM
        if self._max_length is not None:
            wanted = max(num_tokens, min(wanted, self._max_length))
        return capacity_for(wanted + _SLACK)

    def reserve(self, num_tokens: int):
        """Room for `num_tokens` in all; growing copies what is filled."""
        if num_tokens <= self.capacity:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = zeros_like_states(old, capacity_for(num_tokens))
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.positions is not None:
            self.keys.index_copy_(2, self.positions, key_states)
            self.values.index_copy_(2, self.positions, value_states)
            return self.keys, self.values
        start, end = self.length, self.length + key_states.shape[2]
        self.reserve(end)
        self.length = end
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.positions is None else self.capacity), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in some releases

    def crop(self, tokens_to_remove: int):
        """Negative: that many tokens fewer. Positive, as older releases call it: that many tokens stay."""
        if tokens_to_remove < 0:
            self.length = max(0, self.length + tokens_to_remove)
        elif tokens_to_remove > 0:
            self.length = min(self.length, tokens_to_remove)

    def reset(self):
        super().reset()
        self.length = 0


def zeros_like_states(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Storage for states. Not an inference tensor, which no other thread could write to outside inference mode."""
    with torch.inference_mode(False):
        shape = (*states.shape[:2], capacity, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)


class GrowingStaticCache(Cache):
    """
    Static storage in powers of two, for one sequence at a time.

    Args:
        num_layers (`int`): Of the model.
        max_length (`int`, *optional*): Tokens that the text will have at most, if known: a first guess of the size.
    """

    def __init__(self, num_layers: int, max_length: int | None = None):
        super().__init__(layers=[StorageLayer(max_length) for _ in range(num_layers)])

    @property
    def capacity(self) -> int:
        """Tokens that the storage has room for; 0 before the first forward."""
        return self.layers[0].capacity

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether all keys and values are of one dtype; under autocast they may be of two."""
        return all(layer.keys.dtype == layer.values.dtype == dtype for layer in self.layers if layer.is_initialized)

    def begin_static_pass(self, num_tokens: int):
        """Shows the whole storage until `end_static_pass`; the pass writes `num_tokens` places after the text."""
        length = self.get_seq_length()
        positions = torch.arange(length, length + num_tokens, device=self.layers[0].device)
        for layer in self.layers:
            layer.reserve(length + num_tokens)
            layer.positions = positions

    def end_static_pass(self, num_kept: int):
        """Counts the first `num_kept` tokens of the pass as text; the places after them are written anew later."""
        for layer in self.layers:
            layer.positions = None
            layer.length += num_kept


__all__ = [
    "MIN_CAPACITY",
    "GrowingStaticCache",
    "StorageLayer",
    "capacity_for",
    "first_capacity",
    "zeros_like_states",
]
