"""Workers: where packed passes run. The one file that knows about threads and streams.

A worker runs one job at a time, in the order of submission. [`ThreadWorker`] runs them in a thread of its own, beside
the target's forward; [`InlineWorker`] runs them in the caller's thread at once, and is the reference of the other.
"""

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch


STOP_TIMEOUT_S = 5.0
_PARKING_TIMEOUT_S = 60.0
_live_workers = weakref.WeakSet()
_idle_streams, _streams_lock = {}, threading.Lock()


@dataclass
class JobResult:
    """
    Attributes:
        value: What the job returned. Its CUDA tensors are safe to use once [`Worker.take`] has returned.
        start_s, end_s (`float`): `time.perf_counter()` around the job, on the thread that ran it.
    """

    value: Any
    start_s: float
    end_s: float
    ready: Any = None


class InlineWorker:
    """Runs each job in the caller's thread when it is submitted. For tests, and to compare with."""

    def submit(self, job: Callable[[], Any]) -> Future:
        future = Future()
        _run(future, job)
        return future

    def take(self, future: Future, timeout_s: float) -> JobResult:
        return future.result(timeout=0)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        return True


class ThreadWorker:
    """
    Runs jobs in a daemon thread that starts with the first one and ends with `stop`.

    The thread sets what PyTorch keeps per thread: gradients off, and `num_threads` CPU threads. On a CUDA device it
    works on a stream of its own, which waits for what the caller's stream was given before `submit`; `take` makes the
    caller's stream wait for the result, not the caller.

    Args:
        device (`torch.device`): Where the jobs compute.
        num_threads (`int`, *optional*): CPU threads of the worker; `None` leaves PyTorch's default.
    """

    def __init__(self, device: torch.device, num_threads: int | None = None):
        self._device, self._num_threads = device, num_threads
        self._jobs = queue.SimpleQueue()
        self._thread = None
        self._is_stopped = False

    def submit(self, job: Callable[[], Any]) -> Future:
        """
        Queues a job. The future holds a [`JobResult`], or the exception that the job raised.

        Raises:
            RuntimeError: The worker was stopped.
        """
        if self._is_stopped:
            raise RuntimeError("The worker was stopped: make another one.")
        future = Future()
        after = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._jobs.put((future, job, after))
        if self._thread is None:
            # The thread knows the queue, not the worker, so that a worker that is dropped can end it.
            arguments = (self._jobs, self._device, self._num_threads)
            self._thread = threading.Thread(target=_serve, args=arguments, name="d3d-drafting", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
            _live_workers.add(self)
        return future

    def take(self, future: Future, timeout_s: float) -> JobResult:
        """
        Waits for a job.

        Raises:
            TimeoutError: It did not end in time. Whatever the job raised, otherwise.
        """
        result = future.result(timeout=timeout_s)
        if result.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(result.ready)
            for tensor in vars(result.value).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)
        return result

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """
        Drops the jobs that have not begun, waits for the one that runs, and ends the thread. Idempotent.

        Returns:
            `bool`: Whether the thread has ended; one that hangs is left behind, as a daemon.
        """
        self._is_stopped = True
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        with contextlib.suppress(queue.Empty):
            while True:
                future, *_ = self._jobs.get_nowait()
                future.cancel()
        self._jobs.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()


def _serve(jobs: queue.SimpleQueue, device: torch.device, num_threads: int | None):
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with torch.no_grad(), _own_stream(device) as stream:
        while True:
            try:
                item = jobs.get(timeout=_PARKING_TIMEOUT_S)
            except queue.Empty:
                continue
            if item is None:
                return
            future, job, after = item
            if after is not None:
                stream.wait_event(after)
            _run(future, job, stream)
            del item, future, job  # or the thread would hold the last job's tensors while it waits


@contextlib.contextmanager
def _own_stream(device: torch.device):
    """A CUDA stream that no other worker uses meanwhile; `None` elsewhere. PyTorch has few, and deals them in turn."""
    if device.type != "cuda":
        yield None
        return
    with _streams_lock:
        idle = _idle_streams.setdefault(device, [])
        stream = idle.pop() if idle else torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        with _streams_lock:
            idle.append(stream)


def _run(future: Future, job: Callable[[], Any], stream=None):
    if not future.set_running_or_notify_cancel():
        return
    start_s = time.perf_counter()
    try:
        value = job()
        ready = None if stream is None else stream.record_event()
        result = JobResult(value, start_s, time.perf_counter(), ready)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


@atexit.register
def _stop_all():
    for worker in list(_live_workers):
        worker.stop(timeout_s=2.0)


class CpuThreadShare:
    """
    Gives the calling thread its share of PyTorch's CPU threads while a worker uses the rest: two pools that together
    exceed the cores slow every operation down. The count is per thread: who changed it puts it back.
    """

    def __init__(self):
        self._before = None

    @staticmethod
    def worker_share() -> int:
        return max(1, torch.get_num_threads() // 2)

    def divide(self):
        if self._before is None:
            self._before = torch.get_num_threads()
            torch.set_num_threads(max(1, self._before - self._before // 2))

    def restore(self):
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


__all__ = ["STOP_TIMEOUT_S", "CpuThreadShare", "InlineWorker", "JobResult", "ThreadWorker"]
