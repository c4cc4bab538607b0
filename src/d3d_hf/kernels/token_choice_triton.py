"""
Triton kernels of the greedy choice; token_choice.py has the interface and the readable twin.

The vocabulary of each row is divided among programs, which read it once, keeping their largest logit, where it stands
and their sum of exponentials; a second kernel merges what they found. Never stored: float32 logits, probabilities.
"""

import torch
import triton
import triton.language as tl


_BLOCK = 2048
# Blocks that one program reads.
_NUM_BLOCKS = 2


@triton.jit
def _clean(logits):
    """In float32, NaN as -inf."""
    logits = logits.to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit(do_not_specialize=["width", "num_never", "num_parts"])
def choose_part(
    logits,
    never_drafted,
    tokens,
    peaks,
    totals,
    row_stride,
    width,
    num_never,
    num_parts,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Largest logit, its first place, and sum of `exp(logit - largest)` of a part of a row; `(rows, parts)` each."""
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    token = part * BLOCK * NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        ids = (part * NUM_BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        law = _clean(tl.load(logits + ids, mask=ids < width, other=float("-inf")))
        for index in range(num_never):
            law = tl.where(ids == tl.load(never_drafted + index), float("-inf"), law)
        block_peak, block_index = tl.max(law, axis=0, return_indices=True, return_indices_tie_break_left=True)
        new_peak = tl.maximum(peak, block_peak)
        token = tl.where(block_peak > peak, (part * NUM_BLOCKS + block) * BLOCK + block_index, token)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(law - base))
        peak = new_peak
    place = row * num_parts + part
    tl.store(tokens + place, token)
    tl.store(peaks + place, peak)
    tl.store(totals + place, total)


@triton.jit(do_not_specialize=["num_parts"])
def merge_choices(tokens, peaks, totals, chosen, chosen_logits, log_normalizers, num_parts, BLOCK: tl.constexpr):
    """Merges the parts of one row; ids ascend from part to part, so that the first of equals is the first id."""
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    is_part = parts < num_parts
    peak = tl.load(peaks + row * num_parts + parts, mask=is_part, other=float("-inf"))
    total = tl.load(totals + row * num_parts + parts, mask=is_part, other=0.0)
    best, index = tl.max(peak, axis=0, return_indices=True, return_indices_tie_break_left=True)
    has_choice = best > float("-inf")
    base = tl.where(has_choice, best, 0.0)
    total = tl.sum(total * tl.exp(peak - base))
    tl.store(chosen + row, tl.where(has_choice, tl.load(tokens + row * num_parts + index), 0).to(tl.int64))
    tl.store(chosen_logits + row, best)
    tl.store(log_normalizers + row, base + tl.log(total))


def launch(
    logits: torch.Tensor, width: int, never_drafted: list[int]
) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor]:
    """
    Launches the kernels on the current stream.

    Args:
        logits (`torch.Tensor` of shape `(rows, embedding_rows)`): Any float dtype.
        width (`int`): Ids to choose from, at most `embedding_rows`.
        never_drafted (`list[int]`): Ids below `width` that are left out.

    Returns:
        Tokens, their logits and the log-sum-exp, each of shape `(rows,)`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = logits.shape[0]
    num_parts = triton.cdiv(width, _BLOCK * _NUM_BLOCKS)
    left_out = _on_device(tuple(never_drafted), logits.device)
    peaks = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    totals, tokens = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    chosen = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    chosen_logits = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    log_normalizers = torch.empty_like(chosen_logits)
    if num_rows:
        choose_part[(num_rows, num_parts)](
            logits,
            left_out,
            tokens,
            peaks,
            totals,
            logits.stride(0),
            width,
            len(never_drafted),
            num_parts,
            BLOCK=_BLOCK,
            NUM_BLOCKS=_NUM_BLOCKS,
        )
        merge_choices[(num_rows,)](
            tokens,
            peaks,
            totals,
            chosen,
            chosen_logits,
            log_normalizers,
            num_parts,
            BLOCK=triton.next_power_of_2(num_parts),
        )
    return chosen, chosen_logits, log_normalizers


_left_out = {}


def _on_device(tokens: tuple[int, ...], device: torch.device) -> torch.IntTensor:
    """Ids on a device. They are few and the same in every round, and a copy could not be captured into a graph."""
    if (tokens, device) not in _left_out:
        _left_out[tokens, device] = torch.tensor(tokens or (-1,), dtype=torch.int32, device=device)
    return _left_out[tokens, device]


__all__ = ["choose_part", "launch", "merge_choices"]
