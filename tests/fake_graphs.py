"""A stand-in for CUDA graphs on the CPU, which keeps their rules."""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode


aten = torch.ops.aten


class _Capturing(TorchDispatchMode):
    """Refuses what a capture refuses: reading a value back, and copying one in that Python holds."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        if packet in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.lift_fresh):
            raise RuntimeError(f"{packet} is not permitted when stream is capturing")
        if packet is aten.index and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise RuntimeError("a mask as an index is not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class FakeGraphs:
    """Keeps the rules of CUDA graphs on the CPU."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.captures, self.threads, self.sent = [], set(), []
        self.num_replays = 0
        self.error = None

    def new_workspace(self):
        return threading.Lock()  # graphs that share one never run at the same time

    def capture(self, function, buffers, workspace):
        if self.error is not None:
            raise self.error
        self.threads.add(threading.current_thread())
        addresses = [buffer.data_ptr() for buffer in buffers]
        with _Capturing():
            output = function().clone()
        self.captures.append(tuple(buffers[0].shape) if buffers else ())

        def replay():
            assert workspace.acquire(blocking=False), "two passes ran at once over what they share"
            try:
                assert [buffer.data_ptr() for buffer in buffers] == addresses, "a buffer moved"
                output.copy_(function())
                self.num_replays += 1
            finally:
                workspace.release()
            return output

        return replay

    def send(self, values, buffer):
        assert values.device.type == "cpu" and values.shape == buffer.shape
        self.sent.append(values.numel())
        buffer.copy_(values)

    def current_stream(self):
        return threading.get_ident()

    def wait_for(self, streams):
        pass

    def retire(self, tensors, streams):
        pass

    def is_autocast(self):
        return torch.is_autocast_enabled("cpu")
