"""KV storage that outlives a generation, since the graphs that were captured over it do.

A graph reads and writes the memory that it was captured with. So the storage, and the graphs with it, belong to a
pool: a generation's cache takes storage out of it, moves to a larger one when the text outgrows it, and gives it back
at the end. Each capacity is kept once while it is idle, which together is less than twice the largest.
"""

import threading
import weakref

import torch

from .static_cache import GrowingStaticCache, StorageLayer, capacity_for, zeros_like_states


class StaticStorage:
    """
    Keys and values of all layers, and the graphs over them.

    Args:
        num_layers (`int`): Layers.
        capacity (`int`): Tokens.
        workspace: What its graphs share, see [`CudaGraphs.new_workspace`].

    Attributes:
        graphs (`dict[int, StaticPass]`): By tokens of the pass.
        streams (`set`): Those that worked on it.
    """

    def __init__(self, num_layers: int, capacity: int, workspace):
        self.capacity, self.workspace = capacity, workspace
        self.graphs, self.streams = {}, set()
        self._tensors = [None] * num_layers

    def of(self, index: int, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Room for one layer's keys and values; the same memory as before if they are of the same kind."""
        held, states = self._tensors[index], (key_states, value_states)
        if held is None or any(map(_differ, held, states)):
            self.graphs.clear()
            held = self._tensors[index] = tuple(zeros_like_states(each, self.capacity) for each in states)
        return held

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self._tensors if pair is not None for tensor in pair]


def _differ(stored: torch.Tensor, states: torch.Tensor) -> bool:
    is_alike = stored.shape[:2] == states.shape[:2] and stored.shape[3] == states.shape[3]
    return not is_alike or stored.dtype != states.dtype or stored.device != states.device


class StoragePool:
    """
    Args:
        num_layers (`int`): Of the model.
        backend ([`CudaGraphs`]): Where the storage is.
    """

    def __init__(self, num_layers: int, backend):
        self.num_layers, self.backend = num_layers, backend
        self._idle, self._lock = {}, threading.Lock()

    @torch.no_grad()
    def take(self, capacity: int) -> StaticStorage:
        """Storage that nobody else uses, zero throughout in the order of the current stream."""
        with self._lock:
            storage = self._idle.pop(capacity, None)
        if storage is None:
            return StaticStorage(self.num_layers, capacity, self.backend.new_workspace())
        self.backend.wait_for(storage.streams)
        storage.streams.clear()
        for tensor in storage.tensors:
            tensor.zero_()  # what masks hide must be finite
        return storage

    def give_back(self, storage: StaticStorage):
        with self._lock:
            is_kept = self._idle.setdefault(storage.capacity, storage) is storage
        if not is_kept:
            self.backend.retire(storage.tensors, storage.streams)


class _Lease:
    """What the layers of one cache hold of the pool; it knows the layers, not the cache."""

    def __init__(self, pool: StoragePool):
        self.pool, self.storage, self.layers = pool, None, []

    def begin(self, capacity: int) -> StaticStorage:
        if self.storage is None:
            self.storage = self.pool.take(capacity)
        return self.storage

    def grow(self, num_tokens: int):
        """Moves to larger storage: what is filled is copied, graphs are those of the larger one."""
        old, self.storage = self.storage, self.pool.take(capacity_for(num_tokens))
        self.touch()
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                keys, values = self.storage.of(index, layer.keys, layer.values)
                keys[:, :, : layer.length] = layer.keys[:, :, : layer.length]
                values[:, :, : layer.length] = layer.values[:, :, : layer.length]
                layer.keys, layer.values = keys, values
        old.streams |= self.storage.streams
        self.pool.give_back(old)

    def touch(self):
        """Notes that the current stream works on the storage."""
        if self.storage is not None:
            self.storage.streams.add(self.pool.backend.current_stream())

    def end(self):
        storage, self.storage = self.storage, None
        self.layers = []
        if storage is not None:
            self.pool.give_back(storage)


class _PooledLayer(StorageLayer):
    def __init__(self, lease: _Lease, index: int, max_length: int | None):
        super().__init__(max_length)
        self._lease, self._index = lease, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None):
        value_states = key_states if value_states is None else value_states
        self.device, self.dtype = key_states.device, key_states.dtype
        storage = self._lease.begin(self._first_capacity(key_states.shape[2]))
        self._lease.touch()
        self.keys, self.values = storage.of(self._index, key_states, value_states)
        self.is_initialized = True

    def reserve(self, num_tokens: int):
        if num_tokens > self.capacity:
            self._lease.grow(num_tokens)


class PooledStaticCache(GrowingStaticCache):
    """
    A [`GrowingStaticCache`] over storage out of a pool, to which it returns when the cache is dropped or released. A
    copy of it has storage of its own.

    Args:
        pool ([`StoragePool`]): The pool.
        max_length (`int`, *optional*): As in [`GrowingStaticCache`].
    """

    def __init__(self, pool: StoragePool, max_length: int | None = None):
        super().__init__(0)
        self._lease = _Lease(pool)
        self.layers = [_PooledLayer(self._lease, index, max_length) for index in range(pool.num_layers)]
        self._lease.layers = self.layers
        self.release = weakref.finalize(self, self._lease.end)
        self.release.atexit = False

    @property
    def storage(self) -> StaticStorage | None:
        """`None` before the first forward."""
        return self._lease.storage

    @property
    def pool(self) -> StoragePool:
        return self._lease.pool

    def reserve(self, num_tokens: int):
        """Room for `num_tokens` in all."""
        self.layers[0].reserve(num_tokens)

    def touch(self):
        """Notes that the current stream works on the storage."""
        self._lease.touch()

    def count(self, num_tokens: int):
        """Counts tokens whose keys and values a graph has written behind the text."""
        for layer in self.layers:
            layer.length += num_tokens

    def __deepcopy__(self, memo) -> GrowingStaticCache:
        copied = GrowingStaticCache(len(self.layers))
        for old, new in zip(self.layers, copied.layers):
            if old.is_initialized:
                new.device, new.dtype, new.is_initialized = old.device, old.dtype, True
                new.keys, new.values, new.length = old.keys.clone(), old.values.clone(), old.length
        return copied


__all__ = ["PooledStaticCache", "StaticStorage", "StoragePool"]
