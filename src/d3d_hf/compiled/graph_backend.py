"""CUDA graphs, behind the few calls that static passes need of them. The one file here that knows about CUDA.

A graph replays the kernels of a function with one call, which releases Python's lock, over the very memory that the
function read and wrote when it was captured: what goes in is copied into buffers, what comes out stands where it did.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch


# Kernels are compiled, tuned and loaded in the first calls of a function, none of which may happen during a capture.
_NUM_WARM_UPS = 2
# A capture waits for the device and empties the allocator's cache, which no other capture may be in the midst of.
_capturing = threading.Lock()


class CudaGraphs:
    """
    Captures and replays on one device.

    Args:
        device (`torch.device`): A CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = torch.device(device)

    def new_workspace(self) -> Any:
        """
        What graphs share that never run at the same time: a memory pool, and a stream to be captured on. The stream
        is theirs alone: cuBLAS keeps a scratch buffer per stream, which the graphs go on using.
        """
        with torch.cuda.device(self.device):
            return torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)

    @torch.no_grad()
    def capture(
        self, function: Callable[[], torch.Tensor], buffers: list[torch.Tensor], workspace: Any
    ) -> Callable[[], torch.Tensor]:
        """
        Makes a graph of a function. Runs it a few times on the way.

        Args:
            function (`Callable`): Takes nothing, reads `buffers` and what never moves, and returns one tensor.
            buffers (`list[torch.Tensor]`): What its caller fills before each replay; never reallocated.
            workspace: Of `new_workspace`.

        Returns:
            `Callable`: Replays the graph on the current stream of the device and returns the function's output, which
            the next replay overwrites.

        Raises:
            RuntimeError: The function does something that cannot be captured.
        """
        pool, stream = workspace
        graph = torch.cuda.CUDAGraph()
        with (
            _capturing,
            torch.inference_mode(False),
            torch.no_grad(),
            torch.cuda.device(self.device),
            torch.autocast("cuda", enabled=False),
        ):
            caller = torch.cuda.current_stream()
            stream.wait_stream(caller)
            # A capture that fails leaves its stream current: this block puts the caller's back.
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    function()
                # Thread-local: other threads may allocate, and launch on streams of their own, meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    output = function()
            caller.wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def send(self, values: torch.Tensor, buffer: torch.Tensor):
        """
        Copies a tensor, of the CPU or the device, into a buffer, in the order of the current stream; nothing is
        waited for.
        """
        with torch.cuda.device(self.device):
            buffer.copy_(values if values.is_cuda else values.pin_memory(), non_blocking=True)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def wait_for(self, streams):
        """Lets the current stream wait for all that was launched on others."""
        current = self.current_stream()
        for stream in streams:
            if stream != current:
                current.wait_stream(stream)

    def retire(self, tensors: list[torch.Tensor], streams):
        """Keeps the memory of tensors that are about to be freed until those streams have come so far."""
        for stream in streams:
            for tensor in tensors:
                tensor.record_stream(stream)

    def is_autocast(self) -> bool:
        return torch.is_autocast_enabled("cuda")


def graphs_for(device: torch.device) -> CudaGraphs | None:
    """The graphs of a device, or `None` where there are none: passes are compiled there."""
    return CudaGraphs(device) if torch.device(device).type == "cuda" else None


__all__ = ["CudaGraphs", "graphs_for"]
