"""KV storage that grows by doubling, for the target and the drafter, eager and compiled.

Forwards see views of what is filled, as a `DynamicCache` would give them, but nothing is copied when tokens come:
they are written behind those before. Every key is kept; a sliding window is the mask's business. After a verdict the
keys and values of the accepted path are moved to the front of their pass, all layers at once. During a *static pass*
the same storage is shown whole, with the places of the new tokens given by a tensor: every shape is fixed, as a
compiled graph needs it.
"""

from collections.abc import Sequence

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .packing import PackedLayout


MIN_CAPACITY = 256
# Tokens after the prompt that the first storage has room for; a longer text makes it grow.
_FIRST_ROOM = 256
# A pass may write this many places beyond the text's end.
_SLACK = 32


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity, a power of two, that holds `num_tokens`."""
    return max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())


def first_capacity(num_tokens: int) -> int:
    """The capacity of storage that begins with `num_tokens` and whose text's length is not known."""
    return capacity_for(num_tokens + _FIRST_ROOM + _SLACK)


class Storage:
    """
    Keys and values of all layers, zero where nothing was written. Layers that are alike share one tensor.

    Args:
        num_layers (`int`): Of the model.
        capacity (`int`): Tokens that there is room for.
    """

    def __init__(self, num_layers: int, capacity: int):
        self.capacity = capacity
        self._stack = None  # (layers, 2, batch, heads, capacity, head_dim)
        self._layers = [None] * num_layers  # keys and values of each, (batch, heads, capacity, head_dim)

    def of(
        self, index: int, key_states: torch.Tensor, value_states: torch.Tensor, length: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """
        Room for one layer's keys and values; the same memory as before if they are of the same kind. The first
        `length` tokens stay, in the wider dtype where these have another, as under autocast.
        """
        held, states = self._layers[index], (key_states, value_states)
        if held is None or any(map(_differ, held, states)):
            held = self._layers[index] = self._widened(index, states, length) if length else self._make(index, *states)
        return held

    def _widened(self, index: int, states: tuple[torch.Tensor, ...], length: int) -> tuple[torch.Tensor, ...]:
        held = self._layers[index]
        dtypes = (torch.promote_types(old.dtype, new.dtype) for old, new in zip(held, states))
        wider = tuple(old[:, :, :0].to(dtype) for old, dtype in zip(held, dtypes))
        if not any(map(_differ, held, wider)):
            return held
        made = self._make(index, *wider)
        for new, old in zip(made, held):
            new[:, :, :length] = old[:, :, :length]
        return made

    def _make(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._stack is None and not _differ(keys, values):
            shape = (len(self._layers), 2, *keys.shape[:2], self.capacity, keys.shape[3])
            self._stack = _zeros(shape, keys)
        if self._stack is not None and not any(_differ(self._stack[index, 0], states) for states in (keys, values)):
            # Not as views, which no forward with gradients could write to.
            return self._stack[index, 0].data, self._stack[index, 1].data
        return tuple(_zeros((*each.shape[:2], self.capacity, each.shape[3]), each) for each in (keys, values))

    def held(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keys and values of a layer as they are; `None` before its first tokens."""
        return self._layers[index] or (None, None)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory, each piece once."""
        stack = [] if self._stack is None else [self._stack]
        return stack + [tensor for pair in self._layers if pair is not None for tensor in pair if self._is_own(tensor)]

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return self._stack is None or tensor.untyped_storage().data_ptr() != self._stack.untyped_storage().data_ptr()

    def copy_from(self, other: "Storage", length: int):
        """Takes over the first `length` tokens of another storage."""
        for index, pair in enumerate(other._layers):
            if pair is not None:
                for new, old in zip(self.of(index, *pair), pair):
                    new[:, :, :length] = old[:, :, :length]

    def move(self, start: int, places: Sequence[int]):
        """Moves the tokens at `places`, ascending and none before `start`, to `start` and the places after it."""
        moved = {}
        for tensor in self.tensors:
            if tensor.device not in moved:
                moved[tensor.device] = torch.tensor(places, device=tensor.device)
            chosen = tensor.index_select(-2, moved[tensor.device])
            tensor.narrow(-2, start, len(places)).copy_(chosen)


def _differ(stored: torch.Tensor, states: torch.Tensor) -> bool:
    is_alike = stored.shape[:2] == states.shape[:2] and stored.shape[3] == states.shape[3]
    return not is_alike or stored.dtype != states.dtype or stored.device != states.device


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Not an inference tensor, which no other thread could write to outside inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


class StorageHolder:
    """
    What the layers of one cache have in common: the storage that they are in, which is exchanged when it is full.

    Args:
        num_layers (`int`): Of the model.
        max_length (`int`, *optional*): Tokens that the text will have at most, if known: a first guess of the size.
    """

    def __init__(self, num_layers: int, max_length: int | None = None):
        self.num_layers, self.max_length = num_layers, max_length
        self.storage = None
        self.positions = None  # of the tokens of a static pass

    def reserve(self, num_tokens: int, length: int = 0):
        """Room for `num_tokens` in all; growing copies the first `length`."""
        old = self.storage
        if old is None:
            self.storage = self._take(self._first_capacity(num_tokens))
        elif num_tokens > old.capacity:
            self.storage = self._take(capacity_for(num_tokens))
            self.storage.copy_from(old, length)
            self._give_back(old)

    def _first_capacity(self, num_tokens: int) -> int:
        wanted = num_tokens + _FIRST_ROOM
        if self.max_length is not None:
            wanted = max(num_tokens, min(wanted, self.max_length))
        return capacity_for(wanted + _SLACK)

    def _take(self, capacity: int) -> Storage:
        return Storage(self.num_layers, capacity)

    def _give_back(self, storage: Storage):
        """Storage that is not used any more."""


class StorageLayer(CacheLayerMixin):
    """One layer's keys and values, of shape `(batch, heads, capacity, head_dim)`."""

    is_sliding = False  # all keys are kept
    is_croppable = True

    def __init__(self, holder: StorageHolder, index: int):
        self._holder, self._index = holder, index
        self.length = 0
        super().__init__()

    keys = property(lambda self: self._held(0), lambda self, value: None)
    values = property(lambda self: self._held(1), lambda self, value: None)

    def _held(self, which: int) -> torch.Tensor | None:
        storage = self._holder.storage
        return None if storage is None else storage.held(self._index)[which]

    @property
    def positions(self) -> torch.Tensor | None:
        return self._holder.positions

    @property
    def is_compileable(self) -> bool:
        # Read by transformers as "masks must be written out", and by `generate` as "compile the whole forward".
        return self._holder.positions is not None

    @property
    def capacity(self) -> int:
        return 0 if self._holder.storage is None or not self.is_initialized else self._holder.storage.capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None):
        value_states = key_states if value_states is None else value_states  # older releases pass the keys alone
        self.device, self.dtype = key_states.device, key_states.dtype
        self._holder.reserve(key_states.shape[2])
        self._holder.storage.of(self._index, key_states, value_states)
        self.is_initialized = True

    def reserve(self, num_tokens: int):
        """Room for `num_tokens` in all; growing copies what is filled."""
        self._holder.reserve(num_tokens, self.length)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = self._holder.positions
        if positions is not None:
            self.keys.index_copy_(2, positions, key_states)
            self.values.index_copy_(2, positions, value_states)
            return self.keys, self.values
        start, self.length = self.length, self.length + key_states.shape[2]
        # Layers that come later in the pass have been copied up to where this one began.
        self._holder.reserve(self.length, start)
        keys, values = self._holder.storage.of(self._index, key_states, value_states, start)
        keys[:, :, start : self.length] = key_states
        values[:, :, start : self.length] = value_states
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self._holder.positions is None else self.capacity), 0

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
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()
        self.length = 0


class GrowingCache(Cache):
    """
    A cache over [`Storage`] that grows by doubling.

    Args:
        num_layers (`int`): Of the model.
        max_length (`int`, *optional*): Tokens that the text will have at most, if known: a first guess of the size.
        holder ([`StorageHolder`], *optional*): Where the storage comes from. Default: it is the cache's own.

    Attributes:
        layout ([`PackedLayout`], *optional*):
            Of the pass that runs over it, where that verifies a tree: for those who would rather not read it off a
            mask. `None` otherwise.
    """

    def __init__(self, num_layers: int, max_length: int | None = None, holder: StorageHolder | None = None):
        self._holder = StorageHolder(num_layers, max_length) if holder is None else holder
        self.layout: PackedLayout | None = None
        super().__init__(layers=[StorageLayer(self._holder, index) for index in range(num_layers)])

    @property
    def storage(self) -> Storage | None:
        """`None` before the first forward."""
        return self._holder.storage

    @property
    def capacity(self) -> int:
        """Tokens that the storage has room for; 0 before the first forward."""
        return 0 if self.storage is None else self.storage.capacity

    def reserve(self, num_tokens: int):
        """Room for `num_tokens` in all."""
        self._holder.reserve(num_tokens, self.get_seq_length())

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether all keys and values are of one dtype; under autocast they may be of two."""
        return all(layer.keys.dtype == layer.values.dtype == dtype for layer in self.layers if layer.is_initialized)

    def keep(self, start: int, places: Sequence[int]):
        """
        Keeps the text up to `start` and, after it, the tokens at `places`; the rest is cropped.

        Args:
            start (`int`): Tokens that stay where they are.
            places (sequence of `int`): Ascending, none before `start`.
        """
        length = start + len(places)
        if places and places[-1] >= length:  # else they stand there already
            self.storage.move(start, places)
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def begin_static_pass(self, num_tokens: int):
        """Shows the whole storage until `end_static_pass`; the pass writes `num_tokens` places after the text."""
        length = self.get_seq_length()
        self.reserve(length + num_tokens)
        self.show_whole(torch.arange(length, length + num_tokens, device=self.layers[0].device))

    def show_whole(self, positions: torch.LongTensor | None):
        """Shows the whole storage, of which a pass writes the places at `positions`; `None`: what is filled again."""
        self._holder.positions = positions

    def end_static_pass(self, num_kept: int):
        """Counts the first `num_kept` tokens of the pass as text; the places after them are written anew later."""
        self.show_whole(None)
        self.count(num_kept)

    def count(self, num_tokens: int):
        """Counts tokens whose keys and values stand behind the text."""
        for layer in self.layers:
            layer.length += num_tokens


__all__ = [
    "MIN_CAPACITY",
    "GrowingCache",
    "Storage",
    "StorageHolder",
    "StorageLayer",
    "capacity_for",
    "first_capacity",
]
