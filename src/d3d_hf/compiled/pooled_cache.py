"""KV storage that outlives a generation, since the graphs that were captured over it do.

A graph reads and writes the memory that it was captured with. So the storage, and the graphs with it, belong to a
pool: a generation's cache takes storage out of it, moves to a larger one when the text outgrows it, and gives it back
at the end. Each capacity is kept once while it is idle, which together is less than twice the largest.
"""

import threading
import weakref

import torch

from ..model.storage import GrowingCache, Storage, StorageHolder


class StaticStorage(Storage):
    """
    Storage, and the graphs over it.

    Args:
        num_layers (`int`): Layers.
        capacity (`int`): Tokens.
        workspace: What its graphs share, see [`CudaGraphs.new_workspace`].

    Attributes:
        graphs (`dict[int, StaticPass]`): By tokens of the pass.
        streams (`set`): Those that worked on it.
    """

    def __init__(self, num_layers: int, capacity: int, workspace):
        super().__init__(num_layers, capacity)
        self.workspace = workspace
        self.graphs, self.streams = {}, set()

    def _make(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.graphs.clear()
        return super()._make(index, keys, values)


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


class _Lease(StorageHolder):
    """What the layers of one cache hold of the pool."""

    def __init__(self, pool: StoragePool, max_length: int | None):
        super().__init__(pool.num_layers, max_length)
        self.pool, self._has_ended = pool, False

    def _take(self, capacity: int) -> StaticStorage:
        storage = self.pool.take(capacity)
        storage.streams.add(self.pool.backend.current_stream())
        return storage

    def _give_back(self, storage: StaticStorage):
        storage.streams.add(self.pool.backend.current_stream())
        self.pool.give_back(storage)

    def touch(self):
        """Notes that the current stream works on the storage."""
        if self.storage is not None:
            self.storage.streams.add(self.pool.backend.current_stream())

    def end(self):
        if self.storage is not None and not self._has_ended:
            self._has_ended = True
            self.pool.give_back(self.storage)


class PooledCache(GrowingCache):
    """
    A [`GrowingCache`] over storage out of a pool, to which it returns when the cache is dropped or released. A copy of
    it has storage of its own.

    Args:
        pool ([`StoragePool`]): The pool.
        max_length (`int`, *optional*): As in [`GrowingCache`].
    """

    def __init__(self, pool: StoragePool, max_length: int | None = None):
        super().__init__(pool.num_layers, holder=_Lease(pool, max_length))
        self.release = weakref.finalize(self, self._holder.end)
        self.release.atexit = False

    @property
    def pool(self) -> StoragePool:
        return self._holder.pool

    def touch(self):
        """Notes that the current stream works on the storage."""
        self._holder.touch()

    def __deepcopy__(self, memo) -> GrowingCache:
        copied = GrowingCache(len(self.layers))
        copied._holder.storage = Storage(len(self.layers), self.capacity)
        copied.storage.copy_from(self.storage, self.get_seq_length())
        for old, new in zip(self.layers, copied.layers):
            if old.is_initialized:
                new.device, new.dtype, new.is_initialized, new.length = old.device, old.dtype, True, old.length
        return copied


__all__ = ["PooledCache", "StaticStorage", "StoragePool"]
