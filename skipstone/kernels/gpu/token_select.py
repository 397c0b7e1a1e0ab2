"""DeepSeek-V3.2's token selection in two launches: scores of all tokens, then the best of them in ascending order.

Keys and queries in FP8 are multiplied as they are where the matrix unit does that. Hopper's keeps about 14 bits of such
a sum: scores are off by 1.4e-4 of their spread, where the format has already cost some percent. A row's bits do not
depend on the tiles (measured). AMD's units have another FP8 or were never tried: there keys become float16, exactly.

Scores are kept as integers that sort like floats. The second kernel holds one row's candidates in registers. Long rows
first choose among chunks of 8 tokens by their best token: the budget's best tokens lie in the budget's best chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.gpu.descriptors import multiprocessors
from skipstone.kernels.gpu.gemm import compile_options, is_hip
from skipstone.kernels.gpu.select import UNSEEN, ScoreConfig, order_key

CHUNK = 8
MAX_SCRATCH = 1 << 26  # scores per call of the score kernel: 256 MB
MOST_DRAFTED = 8  # rows per request up to which bfloat16 keys are read in smaller tiles
ROUNDING = 1024  # score rows are this many tokens or a multiple apart, so that tables of many lengths look alike


def token_score_config(rows: int, itemsize: int, hip: bool) -> ScoreConfig:
    """Shape for `rows` rows per request. The loop over tiles of tokens prefetches (stages - 2) // 2 + 1 tiles."""
    if itemsize == 4:
        return ScoreConfig(1, 32, 4, 2, 4)
    if hip:
        return ScoreConfig(1, 128, 4, 2, 4)
    if itemsize == 1:
        return ScoreConfig(1, 128, 4, 5, 3) if rows == 1 else ScoreConfig(2, 128, 4, 5, 2)
    if rows <= MOST_DRAFTED:
        return ScoreConfig(1, 64, 4, 3, 4) if rows == 1 else ScoreConfig(2, 64, 4, 5, 2)
    return ScoreConfig(2, 128, 4, 3, 1)


def pick_warps(hip: bool) -> int:
    """A row's candidates fill the registers of this many warps."""
    return 16 if hip else 8


def token_select(
    index_q: Tensor,
    head_weights: Tensor,
    index_k_cache: Tensor,
    index_k_scale: Tensor | None,
    span: Span,
    budget: int,
    exact: bool,
) -> Tensor:
    """The `budget` best tokens of each row by sum over heads of weight * relu(q . k), times the key's scale.

    index_q [R * n, HI, D], head_weights [R * n, HI] float32, index_k_cache [num_blocks, 1, block_size, D], and for FP8
    keys and queries index_k_scale [num_blocks, 1, block_size, 1] float32. Returns [R * n, 1, budget] int32, ascending,
    then PAD. Exact and free form are the same kernels.
    """
    requests, n = span.positions.shape
    total, heads, width = index_q.shape
    table_width, block_size = span.block_table.shape[1], index_k_cache.shape[2]
    length = triton.cdiv(table_width * block_size, ROUNDING) * ROUNDING
    rows = max(min(n, MAX_SCRATCH // (requests * length)), 1)  # per request and slice
    keys = torch.empty(requests * rows * length, dtype=torch.int32, device=index_q.device)
    best = torch.empty(requests * rows * (length // CHUNK), dtype=torch.int32, device=index_q.device)
    chosen = torch.empty((total, 1, budget), dtype=torch.int32, device=index_q.device)
    q, weights = index_q.contiguous(), head_weights.contiguous()
    positions, table = span.positions.contiguous(), span.block_table.contiguous()
    shape = token_score_config(n, index_q.element_size(), is_hip())
    constants = {"BUDGET": budget, "CHUNK": CHUNK}
    score = {"HEADS": heads, "D": width, "BLOCK_SIZE": block_size, "ROWS": shape.rows, "TOKENS": shape.tokens}
    score |= {"FP8": index_k_scale is not None, "WIDEN": index_k_scale is not None and is_hip()}
    padded = {"BLOCK_H": max(triton.next_power_of_2(heads), 16), "BLOCK_D": triton.next_power_of_2(width)}
    options = {"STAGES": shape.stages, "num_warps": shape.warps, **compile_options(is_hip())}
    direct, longest = triton.next_power_of_2(budget * CHUNK), triton.next_power_of_2(length)
    pick = {"BUDGET_PAD": triton.next_power_of_2(budget), "DIRECT": min(direct, longest)}
    pick["CHUNKS"] = longest // CHUNK if length > direct else 0
    pieces = triton.cdiv(table_width * block_size, shape.tokens)
    for first in range(0, n, rows):
        count = min(rows, n - first)
        tiles = triton.cdiv(count, shape.rows)
        splits = max(min(shape.programs * multiprocessors(q.device) // (requests * tiles), pieces), 1)
        if tiles > 1:
            splits = max(splits, triton.cdiv(pieces, 16))
        tensors = (q, weights, index_k_cache, index_k_scale, positions, table, keys, best)
        numbers = (n, first, count, table_width, length, splits)
        _score_kernel[(splits, tiles, requests)](*tensors, *numbers, **constants, **score, **padded, **options)
        inputs = (keys, best, positions, chosen, n, first, count, length)
        _pick_kernel[(count, requests)](*inputs, **constants, **pick, num_warps=pick_warps(is_hip()))
    return chosen


@triton.jit(do_not_specialize=["n", "first", "count", "table_width", "splits"])
def _score_kernel(
    q_ptr,  # [R * n, HEADS, D]
    weights_ptr,  # [R * n, HEADS] float32
    cache_ptr,  # [num_blocks, 1, BLOCK_SIZE, D]
    scale_ptr,  # [num_blocks, 1, BLOCK_SIZE, 1] float32, if FP8
    positions_ptr,  # [R, n]
    table_ptr,  # [R, table_width]
    keys_ptr,  # [R, count, length] int32
    best_ptr,  # [R, count, length / CHUNK] int32, the largest key of each chunk
    n,
    first,
    count,
    table_width,
    length,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BUDGET: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FP8: tl.constexpr,
    WIDEN: tl.constexpr,  # FP8 to float16, where the matrix unit has no products of this FP8
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of every `splits`-th tile of tokens for a few rows. Nothing is done where the rows take every token.

    A token that a row does not see gets UNSEEN.
    """
    split = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last rows see most and start first
    request = tl.program_id(2).to(tl.int64)
    local = tile * ROWS + tl.arange(0, ROWS)
    position = tl.load(positions_ptr + request * n + first + local, mask=local < count, other=-1).to(tl.int32)
    visible = tl.max(position, axis=0) + 1
    visible = tl.where(visible > BUDGET, visible, 0)
    # Rows and heads are one dimension of the product.
    column = tl.arange(0, ROWS * BLOCK_H)
    head = column % BLOCK_H
    own = tile * ROWS + column // BLOCK_H
    real = (own < count) & (head < HEADS)
    column_row = (request * n + first + own) * HEADS + head
    weights = tl.load(weights_ptr + column_row, mask=real, other=0.0)
    dim = tl.arange(0, BLOCK_D)
    q = tl.load(q_ptr + column_row[:, None] * D + dim[None, :], mask=real[:, None] & (dim < D)[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float16)
    keys_ptr += (request * count + local[None, :]) * length
    best_ptr += (request * count + local[None, :]) * (length // CHUNK)
    written = (local < count)[None, :]
    # With stages of its own the loop prefetches what no product needs as well: the keys' scales.
    for piece in tl.range(split, tl.cdiv(visible, TOKENS), splits, num_stages=STAGES):
        token = piece * TOKENS + tl.arange(0, TOKENS)
        block = tl.load(
            table_ptr + request * table_width + token // BLOCK_SIZE, mask=token < table_width * BLOCK_SIZE, other=0
        )
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        place = slot * D
        if BLOCK_D == D:
            k = tl.load(cache_ptr + place[:, None] + dim[None, :])
        else:
            k = tl.load(cache_ptr + place[:, None] + dim[None, :], mask=(dim < D)[None, :], other=0.0)
        if WIDEN:
            k = k.to(tl.float16)
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
        if HEADS != BLOCK_H:
            products = tl.where((head < HEADS)[None, :], products, 0.0)
        scores = tl.sum(tl.reshape(products, [TOKENS, ROWS, BLOCK_H]), axis=2)
        if FP8:
            scores *= tl.load(scale_ptr + slot)[:, None]
        key = tl.where(token[:, None] <= position[None, :], order_key(scores), UNSEEN)
        tl.store(keys_ptr + token[:, None], key, mask=written)
        chunk = piece * (TOKENS // CHUNK) + tl.arange(0, TOKENS // CHUNK)
        tl.store(
            best_ptr + chunk[:, None], tl.max(tl.reshape(key, [TOKENS // CHUNK, CHUNK, ROWS]), axis=1), mask=written
        )


@triton.jit
def _taken(keys, count, BUDGET: tl.constexpr):
    """Places of the BUDGET largest of keys [N] in ascending order of index, lower index first among equals; else -1.

    `count` entries, more than BUDGET, are candidates; the others are UNSEEN. The key of the last one taken is kept
    between `low` and `high`: guessed from how many keys lie above each, then by halves, in turn.
    """
    low = tl.min(tl.where(keys == UNSEEN, 0x7FFFFFFF, keys), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    at_low = count  # keys >= low
    at_high = 0  # keys >= high
    turn = 0
    while (high - low > 1) & (at_low != BUDGET):
        share = (at_low - BUDGET).to(tl.float32) / (at_low - at_high).to(tl.float32)
        share = tl.where(turn % 2 == 0, share, 0.5)
        middle = low + ((high - low).to(tl.float32) * share).to(tl.int64)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        above = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = above >= BUDGET
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, above, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, above)
        turn += 1
    # With exactly BUDGET keys at or above `low` all are taken; else `low` is the key of the last one and is shared.
    sure = tl.where(at_low == BUDGET, low - 1, low).to(tl.int32)
    room = tl.where(at_low == BUDGET, 0, BUDGET - at_high)
    above = keys > sure
    equal = keys == sure
    # One scan counts both: at most BUDGET keys above, in the upper half; keys that are equal in the lower.
    counts = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), axis=0)
    equals = counts & 0xFFFF
    place = (counts >> 16) + tl.minimum(equals, room) - 1
    return tl.where(above | (equal & (equals <= room)), place, -1)


@triton.jit(do_not_specialize=["n", "first", "count"])
def _pick_kernel(
    keys_ptr,  # [R, count, length] int32
    best_ptr,  # [R, count, length / CHUNK] int32
    positions_ptr,  # [R, n]
    out_ptr,  # [R * n, BUDGET] int32
    n,
    first,
    count,
    length,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    DIRECT: tl.constexpr,  # rows up to this long are chosen from at once
    CHUNKS: tl.constexpr,  # at least the chunks of the longest row; 0: no row is longer than DIRECT
):
    """The BUDGET best tokens of one row."""
    local = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    row = request * n + first + local
    visible = tl.load(positions_ptr + row).to(tl.int32) + 1
    keys_ptr += (request * count + local) * length
    best_ptr += (request * count + local) * (length // CHUNK)
    out_ptr += row * BUDGET
    if visible <= BUDGET:
        every = tl.arange(0, BUDGET_PAD)
        tl.store(out_ptr + every, tl.where(every < visible, every, -1), mask=every < BUDGET)
    else:
        entry = tl.arange(0, DIRECT)
        token = entry
        if CHUNKS > 0:  # noqa: SIM102 (a constant around a condition of the row)
            if visible > DIRECT:
                chunk = tl.arange(0, CHUNKS)
                chunks = tl.cdiv(visible, CHUNK)
                best = tl.load(best_ptr + chunk, mask=chunk < chunks, other=UNSEEN)
                place = _taken(best, chunks, BUDGET)
                tl.store(out_ptr + place, chunk, mask=place >= 0)
                tl.debug_barrier()
                chunk_of = tl.load(out_ptr + entry // CHUNK, mask=entry < BUDGET * CHUNK, other=0x7FFFFFF)
                token = chunk_of * CHUNK + entry % CHUNK
                tl.debug_barrier()
        keys = tl.load(keys_ptr + token, mask=token < visible, other=UNSEEN)
        # Unseen tokens of a chunk are UNSEEN and do not count.
        place = _taken(keys, tl.sum((keys != UNSEEN).to(tl.int32), axis=0), BUDGET)
        tl.store(out_ptr + place, token, mask=place >= 0)
