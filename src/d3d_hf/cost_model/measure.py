"""Forward times of a target and a drafter on this machine."""

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from transformers import DynamicCache, PreTrainedModel

from ..model.backbones import cache_argument
from ..model.packing import lay_out


@torch.no_grad()
def target_forward_ms(
    model: PreTrainedModel, token_counts: Iterable[int], context: int = 256, num_repeats: int = 7
) -> dict[int, float]:
    """
    Milliseconds of a target's forward over so many tokens after a cached context, all their logits included; medians
    after a warm-up, batch size 1, eager.

    Args:
        model (`PreTrainedModel`): In eval mode.
        token_counts (iterable of `int`): Numbers of tokens.
        context (`int`, *optional*, defaults to 256): Tokens in the cache.
        num_repeats (`int`, *optional*, defaults to 7): Timed forwards of each number.
    """
    cache, device = DynamicCache(), model.device
    arguments = {cache_argument(model): cache, "use_cache": True}
    model(_ids(context, device), logits_to_keep=1, **arguments)

    def forward(num_tokens: int):
        model(_ids(num_tokens, device), **arguments)
        cache.crop(-num_tokens)

    return _medians(forward, token_counts, num_repeats, device)


@torch.no_grad()
def drafter_forward_ms(
    drafter, token_counts: Iterable[int], context: int = 256, num_repeats: int = 7
) -> dict[int, float]:
    """
    Milliseconds of a drafter's packed pass over so many tokens, one of them context and the rest mask slots in
    branches of at most its block size, with the logits of one block; medians after a warm-up, batch size 1, eager.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): In eval mode.
        token_counts, context, num_repeats: As in [`target_forward_ms`].
    """
    cache, device, size = DynamicCache(), drafter.device, drafter.config.block_size
    drafter.packed_forward(_ids(context, device), lay_out(context, device=device), cache=cache, logits_to_keep=1)

    def forward(num_tokens: int):
        whole, rest = divmod(num_tokens - 1, size)
        slots = (size,) * whole + (rest,) * (rest > 0)
        anchors = torch.full((1, len(slots)), context, device=device) if slots else None
        layout = lay_out(1, anchors, slots, num_cached=context, device=device)
        drafter.packed_forward(_ids(num_tokens, device), layout, cache=cache, logits_to_keep=min(size, num_tokens))
        cache.crop(-num_tokens)

    return _medians(forward, token_counts, num_repeats, device)


def _medians(
    forward: Callable[[int], None], token_counts: Iterable[int], num_repeats: int, device: torch.device
) -> dict[int, float]:
    """The numbers of tokens take turns, so that a machine that gets slower or faster does not favour any."""
    counts = sorted(set(token_counts))
    times = {count: [] for count in counts}
    for repeat in range(num_repeats + 1):
        for count in counts:
            synchronize(device)
            start = time.perf_counter()
            forward(count)
            synchronize(device)
            if repeat:
                times[count].append(1e3 * (time.perf_counter() - start))
    return {count: statistics.median(values) for count, values in times.items()}


def _ids(length: int, device: torch.device) -> torch.LongTensor:
    return torch.ones(1, length, dtype=torch.long, device=device)


def synchronize(device: torch.device):
    """Waits until the device has done all that it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["drafter_forward_ms", "synchronize", "target_forward_ms"]
