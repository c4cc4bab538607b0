"""One generation, measured in the same way whatever drafts for it: by its forwards and by what is streamed."""

import functools
import time
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from ..cost_model.measure import synchronize


@dataclass
class Generation:
    """
    Attributes:
        ids (`list[int]`): The new tokens.
        seconds (`float`): From the call of `generate` to its return.
        first_token_seconds (`float`): From the call to the first new token that reached the streamer.
        rounds (`list[tuple[int, int]]`): For each forward of the target: draft tokens verified, new tokens emitted.
        peak_memory_bytes (`int`, *optional*):
            Most memory while it ran, of all that the process holds: allocated on a CUDA device, else resident
            (Linux; `None` elsewhere).
    """

    ids: list[int]
    seconds: float
    first_token_seconds: float
    rounds: list[tuple[int, int]] = field(default_factory=list)
    peak_memory_bytes: int | None = None


class _Recorder(BaseStreamer):
    """As a streamer, notes new tokens and when they come; as a context manager, how many each forward is fed."""

    def __init__(self, model, prompt_length: int):
        self._model, self._prompt_length = model, prompt_length
        self.num_fed, self.num_new, self.first_time = [], [], None
        self._has_prompt, self._is_new_round = False, False

    def put(self, value: torch.Tensor):
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self.first_time is None:
            self.first_time = time.perf_counter()
        # A round's tokens come in one chunk or one by one; another forward has run before the next round's.
        if self._is_new_round:
            self.num_new.append(0)
            self._is_new_round = False
        self.num_new[-1] += value.numel()

    def end(self):
        pass

    def __enter__(self):
        self._previous = self._model.__dict__.get("forward")
        forward = self._model.forward

        @functools.wraps(forward)  # generate reads the signature
        def recorded(*args, **kwargs):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self.num_fed.append(ids.shape[1])
            self._is_new_round = True
            return forward(*args, **kwargs)

        self._model.forward = recorded
        return self

    def __exit__(self, *exc_info):
        del self._model.forward
        if self._previous is not None:
            self._model.forward = self._previous

    def rounds(self) -> list[tuple[int, int]]:
        # A loop that looks one step ahead may have run one forward more than it kept.
        known = [self._prompt_length, *[1] * (len(self.num_fed) - 1)]
        return [(fed - before, new) for fed, before, new in zip(self.num_fed, known, self.num_new)]


def record(target, prompt_ids: list[int], config: GenerationConfig, **kwargs) -> Generation:
    """
    Generates once.

    Args:
        target (`PreTrainedModel`): The model that answers.
        prompt_ids (`list[int]`): The prompt.
        config (`GenerationConfig`): Of the call.
        kwargs: Further arguments of `generate`: an assistant.
    """
    input_ids = torch.tensor([prompt_ids], device=target.device)
    reset_peak_memory(target.device)
    with _Recorder(target, len(prompt_ids)) as recorder:
        synchronize(target.device)
        start = time.perf_counter()
        output = target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            streamer=recorder,
            **kwargs,
        )
        synchronize(target.device)
        end = time.perf_counter()
    return Generation(
        ids=output[0, len(prompt_ids) :].tolist(),
        seconds=end - start,
        first_token_seconds=(recorder.first_time or end) - start,
        rounds=recorder.rounds(),
        peak_memory_bytes=peak_memory_bytes(target.device),
    )


def reset_peak_memory(device: torch.device):
    """Begins anew to look for the most memory; does nothing where the system does not allow it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory since [`reset_peak_memory`]: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
    return 1024 * int(line.split()[1])


__all__ = ["Generation", "peak_memory_bytes", "record", "reset_peak_memory"]
