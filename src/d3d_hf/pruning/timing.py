"""How long a drafter's passes take on this machine."""

import statistics
import time

import torch
from transformers import DynamicCache

from ..cost_model.measure import synchronize
from ..model.packing import lay_out


NUM_CACHED = 256  # context tokens in the cache of a timed pass


@torch.no_grad()
def pass_times(drafter, num_repeats: int = 9) -> dict[str, float]:
    """
    Milliseconds of a synchronous draft and of a packed one (a masked branch after every possible verdict), each with
    the vocabulary projection of one block, over `NUM_CACHED` tokens of context, batch size 1; medians after a warm-up.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): In eval mode.
        num_repeats (`int`, *optional*, defaults to 9): Timed passes of each kind.

    Returns:
        `dict` with `synchronous_pass_ms` and `packed_pass_ms`.
    """
    size, device = drafter.config.block_size, drafter.device
    cache = DynamicCache()
    drafter.packed_forward(_ids(NUM_CACHED, device), lay_out(NUM_CACHED, device=device), cache=cache, logits_to_keep=1)

    def time_ms(num_context: int, num_slots: tuple[int, ...]) -> float:
        anchors = torch.arange(NUM_CACHED + num_context - len(num_slots), NUM_CACHED + num_context, device=device)
        layout = lay_out(num_context, anchors[None], num_slots, num_cached=NUM_CACHED)
        seconds = []
        for _ in range(num_repeats + 1):
            synchronize(device)
            start = time.perf_counter()
            drafter.packed_forward(_ids(layout.num_tokens, device), layout, cache=cache, logits_to_keep=size)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            cache.crop(-layout.num_tokens)
        return 1000 * statistics.median(seconds[1:])

    return {
        "synchronous_pass_ms": time_ms(1, (size - 1,)),
        "packed_pass_ms": time_ms(size + 1, (size,) * (size + 1)),
    }


def _ids(length: int, device: torch.device) -> torch.LongTensor:
    return torch.zeros(1, length, dtype=torch.long, device=device)


__all__ = ["NUM_CACHED", "pass_times"]
