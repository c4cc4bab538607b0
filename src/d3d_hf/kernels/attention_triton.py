"""
Triton kernels of packed attention; attention.py has the interface and the readable twin.

One program takes a tile of rows, the query heads that share a head of keys for some consecutive tokens, through one
part of the keys (flash-decoding, Dao et al. 2023): cached tokens that every row of the tile sees run without a mask,
the ends of windows and the tokens of the pass itself with one, made from the integers of visibility.py (a tree's
ancestors are bits of one number for each row and tile of keys). Where the keys are divided, a second kernel merges the
parts by log-sum-exp. Programs of one part run side by side over the tiles, so that a part of the cache is read from
memory once and serves the other tiles from the L2 cache.

Never stored: a mask, the scores, repeated keys. With more than one part, float32 outputs of each part are.
"""

import functools

import torch
import triton
import triton.language as tl

from ..model.packing import CONTEXT, NODE, PADDING
from .visibility import BRANCH, BRANCH_LIMIT, CONTEXT_LIMIT, NUM_CACHED, NUM_ROWS, POSITION, WINDOW, WORD_BITS


_CONTEXT, _NODE, _PADDING = tl.constexpr(CONTEXT), tl.constexpr(NODE), tl.constexpr(PADDING)
_POSITION, _BRANCH = tl.constexpr(POSITION), tl.constexpr(BRANCH)
_CONTEXT_LIMIT, _BRANCH_LIMIT = tl.constexpr(CONTEXT_LIMIT), tl.constexpr(BRANCH_LIMIT)
_NUM_CACHED, _WINDOW, _NUM_ROWS = tl.constexpr(NUM_CACHED), tl.constexpr(WINDOW), tl.constexpr(NUM_ROWS)
_WORD_BITS, _LOG2_WORD_BITS = tl.constexpr(WORD_BITS), tl.constexpr(WORD_BITS.bit_length() - 1)
_FAR = tl.constexpr(2**30)

_MERGED_ROWS = 8
# A part of the keys is at least so many tiles: less is not worth merging.
_MIN_TILES = 4
_LOG2_E = 1.4426950408889634


@triton.jit
def _fold(scores, value, peak, total, outputs, PRECISION: tl.constexpr):
    """Takes a tile of scores (base 2) and values into the running softmax of a tile of rows."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(peak - base)
    total = total * rescale + tl.sum(weights, 1)
    outputs = tl.dot(weights.to(value.dtype), value, outputs * rescale[:, None], input_precision=PRECISION)
    return new_peak, total, outputs


@triton.jit
def _bits_of(integers, first, is_token, num_tokens, num_integers):
    """
    Of each row, whether 64 tokens of the pass, from `first` on, are its ancestors: bits of one number. There may be no
    such tokens, before the pass or after it.
    """
    first_word = first >> _LOG2_WORD_BITS  # rounds down, negative numbers too
    shift = (first - first_word * _WORD_BITS).to(tl.uint64)
    bits = tl.zeros_like(is_token).to(tl.uint64)
    for step in tl.static_range(3):
        words = tl.where(is_token, first_word + step, -1)
        is_word = (words >= 0) & (words < num_integers - _NUM_ROWS)
        values = tl.load(integers + (words + _NUM_ROWS) * num_tokens, mask=is_word, other=0)
        values = values.to(tl.uint32, bitcast=True).to(tl.uint64)
        if step == 2:
            bits = bits >> shift | values << (63 - shift) << 1  # in two steps, since the shift may be none
        else:
            bits = bits | values << step * _WORD_BITS
    return bits


@triton.jit(do_not_specialize=["num_tokens", "num_integers", "num_splits"])
def attend_part(
    query,
    key,
    value,
    visibility,
    outputs,
    log_totals,
    scale,
    num_tokens,
    num_integers,  # per token
    num_splits,
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    key_batch_stride,
    key_head_stride,
    key_place_stride,
    value_batch_stride,
    value_head_stride,
    value_place_stride,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # query heads per head of keys
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TREE: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # one part: `outputs` are (batch, tokens, heads, head_dim), and final
    PRECISION: tl.constexpr,
):
    """
    A tile of rows against a part of the keys. Otherwise than with `IS_WHOLE`, `outputs` are float32 of shape `(parts,
    batch, heads, tokens, head_dim)` and `log_totals` (base 2) of shape `(parts, batch, heads, tokens)`.
    """
    tile, split, batch_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (batch_head // KV_HEADS).to(tl.int64), batch_head % KV_HEADS
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // SHARED, kv_head * SHARED + rows % SHARED
    is_token = tokens < num_tokens
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM

    integers = visibility + batch * num_integers * num_tokens
    position = tl.load(integers + _POSITION * num_tokens + tokens, mask=is_token, other=0)
    branch = tl.load(integers + _BRANCH * num_tokens + tokens, mask=is_token, other=_PADDING)
    context_limit = tl.load(integers + _CONTEXT_LIMIT * num_tokens + tokens, mask=is_token, other=0)
    branch_limit = tl.load(integers + _BRANCH_LIMIT * num_tokens + tokens, mask=is_token, other=0)
    num_cached = tl.load(integers + _NUM_CACHED * num_tokens)
    oldest = position - tl.load(integers + _WINDOW * num_tokens) + 1  # first position in the row's window
    is_padding = branch == _PADDING
    own_branch = tl.where(branch == _NODE, _PADDING, branch) if HAS_TREE else branch  # nodes have none

    # This program's part: of the keys that any row sees, whole tiles to each part.
    end = num_cached + num_tokens
    begin = tl.maximum(tl.min(tl.where(is_padding, _FAR, oldest)), 0) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), num_splits) * BLOCK_N
    start = tl.minimum(begin + split * length, end)
    stop = tl.minimum(start + length, end)
    # In it, the tiles of cached tokens that every row sees.
    seen_from = tl.maximum(tl.max(tl.where(is_padding, -_FAR, oldest)), 0)
    seen_to = tl.minimum(tl.min(tl.where(is_padding, _FAR, context_limit + 1)), num_cached)
    plain_from = tl.minimum(tl.maximum(tl.cdiv(seen_from, BLOCK_N) * BLOCK_N, start), stop)
    plain_to = tl.maximum(tl.minimum(seen_to, stop) // BLOCK_N * BLOCK_N, plain_from)

    row_offsets = batch * query_batch_stride + heads * query_head_stride + tokens * query_token_stride
    queries = tl.load(
        query + row_offsets[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0
    )
    key += batch * key_batch_stride + kv_head.to(tl.int64) * key_head_stride
    value += batch * value_batch_stride + kv_head.to(tl.int64) * value_head_stride

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for first in range(plain_from, plain_to, BLOCK_N):
        places = first + tl.arange(0, BLOCK_N)
        key_pointers = key + dims[:, None] + places[None, :] * key_place_stride  # (BLOCK_D, BLOCK_N)
        value_pointers = value + places[:, None] * value_place_stride + dims[None, :]
        if HEAD_DIM == BLOCK_D:
            keys, values = tl.load(key_pointers), tl.load(value_pointers)
        else:
            keys = tl.load(key_pointers, mask=is_dim[:, None], other=0.0)
            values = tl.load(value_pointers, mask=is_dim[None, :], other=0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        peak, total, output = _fold(scores, values, peak, total, output, PRECISION)

    num_before = tl.cdiv(plain_from - start, BLOCK_N)
    num_after = tl.cdiv(stop - plain_to, BLOCK_N)
    for masked_tile in range(num_before + num_after):
        is_before = masked_tile < num_before
        first = tl.where(is_before, start + masked_tile * BLOCK_N, plain_to + (masked_tile - num_before) * BLOCK_N)
        places = first + tl.arange(0, BLOCK_N)
        is_place = places < stop
        of_pass = places - num_cached
        is_of_pass = is_place & (of_pass >= 0)
        key_position = tl.load(integers + _POSITION * num_tokens + of_pass, mask=is_of_pass, other=0)
        key_branch = tl.load(integers + _BRANCH * num_tokens + of_pass, mask=is_of_pass, other=_CONTEXT)
        key_position = tl.where(is_of_pass, key_position, places)
        is_context = key_branch == _CONTEXT
        limit = tl.where(is_context[None, :], context_limit[:, None], branch_limit[:, None])
        is_seen = is_context[None, :] | (key_branch[None, :] == own_branch[:, None])
        is_seen = is_seen & (key_position[None, :] <= limit)
        if HAS_TREE:
            bits = _bits_of(integers + tokens, first - num_cached, is_token, num_tokens, num_integers)
            low, high = bits.to(tl.uint32), (bits >> _WORD_BITS).to(tl.uint32)
            number = tl.arange(0, BLOCK_N)[None, :]
            word = tl.where(number < _WORD_BITS, low[:, None], high[:, None])
            is_ancestor = (word >> (number % _WORD_BITS).to(tl.uint32)) & 1
            is_seen = is_seen | (is_ancestor != 0)
        is_seen = is_seen & (is_place & (key_branch != _PADDING))[None, :]
        is_seen = is_seen & (key_position[None, :] >= oldest[:, None])

        is_key = is_dim[:, None] & is_place[None, :]
        keys = tl.load(key + dims[:, None] + places[None, :] * key_place_stride, mask=is_key, other=0.0)
        is_value = is_place[:, None] & is_dim[None, :]
        values = tl.load(value + places[:, None] * value_place_stride + dims[None, :], mask=is_value, other=0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        scores = tl.where(is_seen, scores, float("-inf"))
        peak, total, output = _fold(scores, values, peak, total, output, PRECISION)

    sees = (total > 0) & (branch != _PADDING)
    output = tl.where(sees[:, None], output / tl.where(sees, total, 1.0)[:, None], 0.0)
    num_heads: tl.constexpr = KV_HEADS * SHARED
    if IS_WHOLE:
        places = (batch * num_tokens + tokens) * num_heads + heads
        is_kept = is_token[:, None] & is_dim[None, :]
        tl.store(outputs + places[:, None] * HEAD_DIM + dims[None, :], output.to(outputs.dtype.element_ty), is_kept)
    else:
        num_batches = tl.num_programs(2) // KV_HEADS
        places = ((split * num_batches + batch) * num_heads + heads) * num_tokens + tokens
        log_total = tl.where(sees, peak + tl.log2(tl.where(sees, total, 1.0)), float("-inf"))
        tl.store(log_totals + places, log_total, is_token)
        is_kept = (is_token & sees)[:, None] & is_dim[None, :]
        tl.store(outputs + places[:, None] * HEAD_DIM + dims[None, :], output, is_kept)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_heads", "num_splits"])
def merge_parts(
    parts,
    log_totals,
    outputs,
    num_rows,
    num_tokens,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """
    Merges parts of shape `(parts, batch, heads, tokens, head_dim)`, weighted by `2 ** log_totals`, into outputs of
    shape `(batch, tokens, heads, head_dim)`. A part in which a row saw nothing is not read.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_row, is_dim = rows < num_rows, dims < HEAD_DIM
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    places = rows.to(tl.int64)
    for _ in range(num_splits):
        log_total = tl.load(log_totals + places, mask=is_row, other=float("-inf"))
        is_read = (log_total > float("-inf"))[:, None] & is_dim[None, :]
        part = tl.load(parts + places[:, None] * HEAD_DIM + dims[None, :], mask=is_read, other=0.0)
        new_peak = tl.maximum(peak, log_total)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, rescale = tl.exp2(log_total - base), tl.exp2(peak - base)
        total = total * rescale + weight
        output = output * rescale[:, None] + part * weight[:, None]
        peak = new_peak
        places += num_rows
    output = output / tl.where(total > 0, total, 1.0)[:, None]

    tokens, batch_heads = rows % num_tokens, rows // num_tokens
    batch, heads = (batch_heads // num_heads).to(tl.int64), batch_heads % num_heads
    places = (batch * num_tokens + tokens) * num_heads + heads
    is_kept = is_row[:, None] & is_dim[None, :]
    tl.store(outputs + places[:, None] * HEAD_DIM + dims[None, :], output.to(outputs.dtype.element_ty), is_kept)


def tile_of(head_dim: int, dtype: torch.dtype, num_rows: int, is_amd: bool = False) -> dict[str, int]:
    """
    Sizes of a program: rows and keys of a tile, warps, and tiles of keys in flight. As large as registers allow.

    Args:
        head_dim (`int`): Of the heads.
        dtype (`torch.dtype`): Of the states.
        num_rows (`int`): Tokens x query heads that share a head of keys.
        is_amd (`bool`, *optional*, defaults to `False`): For a GPU of AMD.
    """
    if dtype == torch.float32:  # exact products, without matrix units on most devices
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    most_rows = 64 if head_dim > 128 or is_amd else 128
    block_m = min(most_rows, max(16, triton.next_power_of_2(num_rows)))
    num_warps = 8 if block_m * max(head_dim, 128) > 64 * 128 and not is_amd else 4
    return {"BLOCK_M": block_m, "BLOCK_N": 32 if head_dim > 128 else 64, "num_warps": num_warps, "num_stages": 2}


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: torch.IntTensor,
    scaling: float,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Launches the kernels on the current stream; arguments and result as in `packed_attention`."""
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    visibility = visibility.contiguous()
    batch, num_heads, num_tokens, head_dim = query.shape
    kv_heads, shared = key.shape[1], num_heads // key.shape[1]
    tile = tile_of(head_dim, query.dtype, num_tokens * shared, torch.version.hip is not None)
    num_tiles = triton.cdiv(num_tokens * shared, tile["BLOCK_M"])
    if num_splits is None:
        most = triton.cdiv(key.shape[2], _MIN_TILES * tile["BLOCK_N"])
        num_splits = max(1, min(_num_processors(query.device) // (num_tiles * batch * kv_heads), most))

    outputs = query.new_empty(batch, num_tokens, num_heads, head_dim)
    is_whole = num_splits == 1
    parts, log_totals = outputs, visibility  # of one part, the second is not read
    if not is_whole:
        parts = outputs.new_empty(num_splits, batch, num_heads, num_tokens, head_dim, dtype=torch.float32)
        log_totals = parts.new_empty(num_splits, batch, num_heads, num_tokens)
    block_d = max(16, triton.next_power_of_2(head_dim))  # products want at least 16
    attend_part[(num_tiles, num_splits, batch * kv_heads)](
        query,
        key,
        value,
        visibility,
        parts,
        log_totals,
        scaling * _LOG2_E,
        num_tokens,
        visibility.shape[2],
        num_splits,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        KV_HEADS=kv_heads,
        SHARED=shared,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HAS_TREE=visibility.shape[2] > NUM_ROWS,
        IS_WHOLE=is_whole,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **tile,
    )
    if not is_whole:
        num_rows = batch * num_heads * num_tokens
        merge_parts[(triton.cdiv(num_rows, _MERGED_ROWS),)](
            parts,
            log_totals,
            outputs,
            num_rows,
            num_tokens,
            num_heads,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=_MERGED_ROWS,
        )
    return outputs


__all__ = ["attend_part", "launch", "merge_parts", "tile_of"]
