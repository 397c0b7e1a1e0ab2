"""MiniMax-M3's block selection in two launches: scores of all blocks, then the best of them in ascending order.

Scores are kept as integers that sort like floats, so that selection is integer work and has one total order: higher
score first, then the lower id, NaN last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from skipstone.core.batch import Span
from skipstone.kernels.gpu.descriptors import multiprocessors
from skipstone.kernels.gpu.gemm import compile_options, is_hip

UNSEEN = tl.constexpr(-(1 << 31))  # the key of what a row does not see; no score has it
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
MAX_SCRATCH = 1 << 24  # scores per call of the score kernel: 64 MB, about what the last-level cache holds


class ScoreConfig(NamedTuple):
    """How a program of the score kernel is shaped; bits of a score do not depend on any of it."""

    rows: int  # (row, index head) pairs of one program
    tokens: int  # keys of one matrix product, at most
    warps: int
    stages: int
    programs: int  # per multiprocessor, while there are blocks enough


def block_score_config(columns: int, itemsize: int, hip: bool) -> ScoreConfig:
    """Shape for `columns` (row, index head) pairs per request.

    A row must have the same bits alone, beside drafts and in a chunk of a prompt. On AMD the matrix instruction is
    pinned; on an H200 all tiles, of 16 to 128 pairs, gave equal bits, as both of its instructions add up alike.
    """
    if itemsize == 4:
        return ScoreConfig(16, 32, 4, 2, 4)
    if hip:
        return ScoreConfig(16, 128, 4, 2, 4) if columns <= 16 else ScoreConfig(64, 128, 4, 2, 4)
    if columns <= 64:
        return ScoreConfig(16 if columns <= 16 else 64, 128, 4, 3, 2)
    return ScoreConfig(128, 128, 4, 2, 2)


def block_select(
    index_q: Tensor, index_k_cache: Tensor, span: Span, unit: int, budget: int, init: int, local: int, exact: bool
) -> Tensor:
    """The `budget` best blocks of `unit` tokens of each row and index head, with the first and last ones forced.

    index_q [R * n, G, D], index_k_cache [num_blocks, 1, block_size, D]. Returns [R * n, G, budget] int32, ascending,
    then PAD. Exact and free form are the same kernels.
    """
    requests, n = span.positions.shape
    total, groups, width = index_q.shape
    table_width, block_size = span.block_table.shape[1], index_k_cache.shape[2]
    candidates = table_width * (block_size // unit)
    rows = max(min(n, MAX_SCRATCH // (requests * groups * candidates)), 1)  # per request and slice
    keys = torch.empty(requests * rows * groups * candidates, dtype=torch.int32, device=index_q.device)
    chosen = torch.empty((total, groups, budget), dtype=torch.int32, device=index_q.device)
    positions, table, q = span.positions.contiguous(), span.block_table.contiguous(), index_q.contiguous()
    shape = block_score_config(n * groups, index_q.element_size(), is_hip())
    constants = {"G": groups, "UNIT": unit, "BUDGET": budget}
    score = {"D": width, "PER_BLOCK": block_size // unit, "BLOCK_D": triton.next_power_of_2(width)}
    tile = {"BLOCK_M": shape.rows, "BLOCK_N": min(triton.next_power_of_2(unit), shape.tokens)}
    options = {"num_warps": shape.warps, "num_stages": shape.stages, **compile_options(is_hip())}
    pick = {"INIT": init, "LOCAL": local, "KEPT": max(triton.next_power_of_2(budget), 8)}
    for first in range(0, n, rows):
        count = min(rows, n - first)
        tiles = triton.cdiv(count * groups, shape.rows)
        splits = max(min(shape.programs * multiprocessors(q.device) // (requests * tiles), candidates), 1)
        if tiles > 1:
            splits = max(splits, triton.cdiv(candidates, 16))
        inputs = (q, index_k_cache, positions, table, keys, n, first, count, table_width, candidates, splits)
        _score_kernel[(splits, tiles, requests)](*inputs, **constants, **score, **tile, **options)
        choice = (keys, positions, chosen, n, first, count, candidates)
        warps = pick_warps(requests * count * groups)
        _pick_kernel[(count * groups, requests)](*choice, **constants, **pick, num_warps=warps)
    return chosen


def pick_warps(programs: int) -> int:
    """Latency counts where few rows choose, work where many do."""
    return 4 if programs <= 2048 else 1


@triton.jit
def order_key(scores):
    """float32 -> int32 that sorts alike: NaN and -inf as the lowest number, +inf as the highest, -0 as 0."""
    largest: tl.constexpr = 3.4028234663852886e38
    scores = tl.where(scores == scores, scores, -largest)
    scores = tl.minimum(tl.maximum(scores, -largest), largest)
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_best(scores):
    """Largest of each row of scores [M, N]; NaN where there is any."""
    if not INTERPRETED:
        return tl.reduce(scores, 1, _larger)
    # The interpreter calls a reduction of one's own once per element.
    broken = tl.max((scores != scores).to(tl.int32), axis=1)
    return tl.where(broken != 0, float("nan"), tl.max(scores, axis=1))


@triton.jit
def _best_of_block(
    q,  # [M, BLOCK_D]
    cache_ptr,
    table_ptr,  # the request's
    position,  # [M]
    block,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Largest score of each query among the keys that it sees of one block [M]."""
    physical = tl.load(table_ptr + block // PER_BLOCK).to(tl.int64)
    dim = tl.arange(0, q.shape[1])
    k_ptr = cache_ptr + (physical * PER_BLOCK + block % PER_BLOCK) * (UNIT * D) + dim[None, :]
    best = tl.full([q.shape[0]], float("-inf"), tl.float32)
    for start in tl.static_range(0, UNIT, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        if UNIT % BLOCK_N == 0 and q.shape[1] == D:
            k = tl.load(k_ptr + token[:, None] * D)
        else:
            k = tl.load(k_ptr + token[:, None] * D, mask=(token < UNIT)[:, None] & (dim < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((block * UNIT + token)[None, :] <= position[:, None], scores, float("-inf"))
        if UNIT % BLOCK_N != 0:
            scores = tl.where((token < UNIT)[None, :], scores, float("-inf"))
        best = _larger(best, _block_best(scores))
    return best


@triton.jit(do_not_specialize=["n", "first", "count", "table_width", "candidates", "splits"])
def _score_kernel(
    q_ptr,  # [R * n, G, D]
    cache_ptr,  # [num_blocks, 1, PER_BLOCK * UNIT, D]
    positions_ptr,  # [R, n]
    table_ptr,  # [R, table_width]
    keys_ptr,  # [R, count * G, candidates] int32
    n,
    first,
    count,
    table_width,
    candidates,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BUDGET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scores of every `splits`-th block for one tile of rows. Nothing is done where all rows take every block."""
    split = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last rows see most and start first
    request = tl.program_id(2)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = pair < count * G
    row = request.to(tl.int64) * n + first + pair // G
    position = tl.load(positions_ptr + row, mask=real, other=-1).to(tl.int32)
    dim = tl.arange(0, BLOCK_D)
    present = real[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + (row * G + pair % G)[:, None] * D + dim[None, :], mask=present, other=0.0)
    visible = (tl.max(position, axis=0) + UNIT) // UNIT
    visible = tl.where(visible > BUDGET, visible, 0)
    out = keys_ptr + (request.to(tl.int64) * count * G + pair) * candidates
    table_ptr += request.to(tl.int64) * table_width
    for block in range(split, visible, splits):
        best = _best_of_block(q, cache_ptr, table_ptr, position, block, D, UNIT, PER_BLOCK, BLOCK_N)
        tl.store(out + block, order_key(best), mask=real)


@triton.jit
def _ranked(keys_ptr, bases, stride, visible, candidates, INIT: tl.constexpr, LOCAL: tl.constexpr, DEPTH: tl.constexpr):
    """Best entry of each class {base, base + stride, ...} of visible blocks, as one sortable int64; its rank."""
    classes: tl.constexpr = bases.shape[0]
    best = tl.full([classes], -(1 << 63), tl.int64)
    for start in range(0, tl.cdiv(visible, stride), DEPTH):
        block = bases[:, None] + stride * (start + tl.arange(0, DEPTH))[None, :]
        key = tl.load(keys_ptr + block, mask=block < visible, other=UNSEEN)
        forced = (block < INIT) | (block >= visible - LOCAL)
        key = tl.where(forced, 0x7FFFFFFF, key)
        key = tl.where(block < visible, key, UNSEEN)
        packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)
        best = tl.maximum(best, tl.max(packed, axis=1))
    return tl.sum((best[None, :] > best[:, None]).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["n", "first", "count", "candidates"])
def _pick_kernel(
    keys_ptr,  # [R, count * G, candidates] int32
    positions_ptr,  # [R, n]
    out_ptr,  # [R * n, G, BUDGET] int32
    n,
    first,
    count,
    candidates,
    G: tl.constexpr,
    UNIT: tl.constexpr,
    BUDGET: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    KEPT: tl.constexpr,  # power of two, at least BUDGET
):
    """The BUDGET best blocks of one row and index head.

    The best KEPT blocks lie in the KEPT classes (block id modulo a stride) with the best members. Each round splits
    these in four, until classes are single blocks.
    """
    pair = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    row = request * n + first + pair // G
    visible = (tl.load(positions_ptr + row).to(tl.int32) + UNIT) // UNIT
    keys_ptr += (request * count * G + pair) * candidates
    out_ptr += (row * G + pair % G) * BUDGET
    if visible <= BUDGET:
        entry = tl.arange(0, KEPT)
        tl.store(out_ptr + entry, tl.where(entry < visible, entry, -1), mask=entry < BUDGET)
    else:
        classes: tl.constexpr = 4 * KEPT
        bases = tl.arange(0, classes)
        stride = classes
        rank = _ranked(keys_ptr, bases, stride, visible, candidates, INIT, LOCAL, 16)
        while stride < visible:
            kept = tl.arange(0, KEPT)
            bases = tl.sum(tl.where(rank[None, :] == kept[:, None], bases[None, :], 0), axis=1)
            bases = tl.reshape(bases[:, None] + stride * tl.arange(0, 4)[None, :], [classes])
            stride *= 4
            rank = _ranked(keys_ptr, bases, stride, visible, candidates, INIT, LOCAL, 4)
        chosen = rank < BUDGET
        place = tl.sum((chosen[None, :] & (bases[None, :] < bases[:, None])).to(tl.int32), axis=1)
        tl.store(out_ptr + place, bases, mask=chosen)
