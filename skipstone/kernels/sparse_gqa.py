"""Grouped-query attention over selected blocks (MiniMax-M3) in Triton: decode, verification and exact prefill.

Bits of a row depend on the row alone. Every selected block gives a partial result (maximum, sum, output) computed from
that block only, and a row adds up its partials in ascending order with one sequence of operations. A program may do so
in registers, or programs may share a row and leave partials in memory for the last of them: the numbers are the same.
Rows of one request may also share a program, which then walks the union of their blocks; what a row did not select
leaves its sums untouched.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.errors import ShapeError
from skipstone.kernels.gemm import is_hip
from skipstone.kernels.sparse_gqa_prefill import MOST_DECODE_ROWS, prefill
from skipstone.kernels.sparse_gqa_union import LOG2_E, Union, most_rows, union_of_rows

FULL_GRID = 128  # programs that keep the GPU busy: about one per multiprocessor of an H200
MOST_SPLIT_ROWS = 4096  # rows times KV heads of a call that is split, at most


class Config(NamedTuple):
    """Tile shape and launch parameters. Only `keys` and `heads` reach the bits, and depend on shapes alone."""

    heads: int  # rows of a matrix product: query rows times the heads of a group
    keys: int
    warps: int
    stages: int


def config(dtype: torch.dtype, unit: int, split: bool, hip: bool) -> Config:
    """Tiles for caches of `dtype` and blocks of `unit` tokens, for whole rows or rows split over programs."""
    if dtype == torch.float32:
        return Config(16, min(unit & -unit, 16), 4, 1)
    return Config(64, min(unit & -unit, 64), 4, 2 if split or hip else 3)


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """Zeros that the last arriving program of a row sets back to zero, so that no launch has to clear them.

    One buffer for all calls: calls on one device must not overlap in time.
    """
    return torch.zeros(MOST_SPLIT_ROWS, dtype=torch.int32, device=device)


def sparse_gqa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, unit: int, span: Span, scale: float, exact: bool
) -> Tensor:
    """Attention of each row and KV head over its selected blocks of `unit` tokens.

    q [T, H, D] for the T = R * n rows of `span`, caches [num_blocks, G, block_size, D], indices [T, G, S] int32
    ascending then PAD. Returns [T, H, D]; a row without keys (position -1) gives zeros.
    """
    requests, n = span.positions.shape
    width = q.shape[2]
    if width & (width - 1) or not 16 <= width <= 128:
        raise ShapeError(f"head width {width}: the kernel takes powers of two from 16 to 128; use the plain-torch op")
    if n > MOST_DECODE_ROWS and not exact and most_rows(indices.shape[2]) > 1:
        return prefill(q, k_cache, v_cache, indices, unit, span, scale)
    rows_each, splits = plan(requests, n, indices.shape[1], indices.shape[2], q.shape[1], unit, q.dtype)
    return attend(q, k_cache, v_cache, indices, unit, span, scale, rows_each, splits)


def plan(
    requests: int, n: int, kv_heads: int, budget: int, heads: int, unit: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Rows per program and programs per row, from counts that are known when a graph is captured.

    Measured on an H200: sharing pays once it still fills the GPU; below that every row gets programs of its own, two
    per multiprocessor if there are few rows.
    """
    group = triton.next_power_of_2(heads // kv_heads)
    shared = min(config(dtype, unit, False, False).heads // group, triton.next_power_of_2(n), most_rows(budget))
    if requests * kv_heads * triton.cdiv(n, shared) >= FULL_GRID:
        return shared, 1
    programs = requests * kv_heads * n
    if programs >= FULL_GRID:
        return 1, 1
    return 1, min(budget, 1 << (2 * FULL_GRID // programs).bit_length() - 1)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    unit: int,
    span: Span,
    scale: float,
    rows_each: int,
    splits: int,
    tiles: Config | None = None,
) -> Tensor:
    """`sparse_gqa` with a given number of rows per program and of programs per row."""
    requests, n = span.positions.shape
    rows, heads, width = q.shape
    kv_heads, budget = indices.shape[1:]
    group = heads // kv_heads
    tiles = tiles or config(k_cache.dtype, unit, splits > 1, is_hip())
    out = torch.empty_like(q)
    saved = rows * kv_heads * budget * group if splits > 1 else 0
    part_out = torch.empty(max(saved * width, 1), dtype=torch.float32, device=q.device)
    part_max, part_sum = torch.empty(2, max(saved, 1), dtype=torch.float32, device=q.device)
    union = (
        union_of_rows(indices, unit, span, rows_each, k_cache.shape[2], False)
        if rows_each > 1
        else Union(*[indices] * 5)
    )
    row_tiles = triton.cdiv(n, rows_each)
    _attend_kernel[(requests * kv_heads * splits * row_tiles,)](
        q.contiguous(), k_cache, v_cache, out, indices, *union, span.positions.contiguous(), span.block_table,
        part_out, part_max, part_sum, arrival_counters(q.device), n, span.block_table.stride(0), scale * LOG2_E, splits,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), WIDTH=width, BUDGET=budget,
        BUDGET_PAD=triton.next_power_of_2(budget), UNIT=unit, KEYS=tiles.keys, BLOCK_SIZE=k_cache.shape[2],
        ROWS=rows_each, HEADS=tiles.heads, SPLIT=splits > 1, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,  # kernels must not round the same expressions differently
    )  # fmt: skip
    return out


@triton.jit
def _add_tile(q, k, v, top, total, acc, limit, key, scale, fresh):
    """Add one tile of keys to the partial result of its block; with `fresh` it is the block's first."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
    new_top = tl.max(scores, axis=1) * scale
    new_top = tl.where(fresh, new_top, tl.maximum(top, new_top))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    old = tl.exp2(top - base)
    total = tl.where(fresh, 0.0, total * old) + tl.sum(weights, axis=1)
    acc = tl.where(fresh, 0.0, acc * old[:, None])
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _combine(top, total, acc, part_max, part_sum, part):
    """Add a partial result to a row. Fused operations are spelled out, so that every kernel rounds alike."""
    new_top = tl.maximum(top, part_max)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp2(top - base)
    new = tl.exp2(part_max - base)
    total = tl.fma(total, old, part_sum * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), part * new[:, None])
    return new_top, total, acc


@triton.jit
def _merge(
    out_ptr, part_out_ptr, part_max_ptr, part_sum_ptr, row, kv_head, h, parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up the partial results of heads `h` of one row and KV head and write their output."""
    d = tl.arange(0, WIDTH)
    real = h < GROUP
    place = (row * KV_HEADS + kv_head) * BUDGET * GROUP + h
    top = tl.full(h.shape, float("-inf"), tl.float32)
    total = tl.zeros(h.shape, tl.float32)
    acc = tl.zeros([h.shape[0], WIDTH], tl.float32)
    for first in range(0, parts, TOGETHER):
        for i in tl.static_range(TOGETHER):  # unrolled, so that the loads of several parts overlap
            part = first + i
            here = real & (part < parts)
            at = place + part * GROUP
            part_max = tl.load(part_max_ptr + at, mask=here, other=float("-inf"), cache_modifier=".cg")
            part_sum = tl.load(part_sum_ptr + at, mask=here, other=0.0, cache_modifier=".cg")
            part_at = part_out_ptr + at[:, None] * WIDTH + d
            part_out = tl.load(part_at, mask=here[:, None], other=0.0, cache_modifier=".cg")
            new_top, new_total, new_acc = _combine(top, total, acc, part_max, part_sum, part_out)
            top = tl.where(here, new_top, top)
            total = tl.where(here, new_total, total)
            acc = tl.where(here[:, None], new_acc, acc)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = (row * KV_HEADS + kv_head) * GROUP + h
    tl.store(out_ptr + to[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["n", "table_stride", "splits"])
def _attend_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [num_blocks, G, block_size, D]
    v_ptr,  # as k
    out_ptr,  # [T, H, D]
    indices_ptr,  # [T, G, S]
    union_block_ptr,  # [R, row tiles, G, union limit]: selected by any row of the tile, ascending (ROWS > 1)
    union_page_ptr,  # as union_block: where it lies in the cache
    union_rows_ptr,  # as union_block: one bit per row of the tile
    union_count_ptr,  # [R, row tiles, G]
    union_full_ptr,
    positions_ptr,  # [R, n]
    table_ptr,  # [R, blocks]
    part_out_ptr,  # see _merge_kernel
    part_max_ptr,
    part_sum_ptr,
    arrived_ptr,  # [programs / splits] int32, zeros
    n,
    table_stride,
    scale,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TILES: tl.constexpr = UNIT // KEYS
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // UNIT
    pid = tl.program_id(0)
    row_tiles = (n + ROWS - 1) // ROWS
    # Programs of neighbouring rows run side by side: what one loads, the others find in the L2 cache.
    row_tile = pid % row_tiles
    split = pid // row_tiles % splits
    kv_head = pid // (row_tiles * splits) % KV_HEADS
    request = (pid // (row_tiles * splits * KV_HEADS)).to(tl.int64)

    m = tl.arange(0, HEADS)
    member = m // GROUP_PAD
    local_row = row_tile * ROWS + member
    real = (member < ROWS) & (local_row < n) & (m % GROUP_PAD < GROUP)
    row = request * n + local_row
    d = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    head_place = (row * KV_HEADS + kv_head) * GROUP + m % GROUP_PAD
    q = tl.load(q_ptr + head_place[:, None] * WIDTH + d, mask=real[:, None], other=0.0)
    position = tl.load(positions_ptr + row, mask=real, other=-1).to(tl.int32)
    last_position = tl.max(position)

    if ROWS == 1:
        list_ptr = indices_ptr + ((request * n + row_tile) * KV_HEADS + kv_head) * BUDGET
        entry = tl.arange(0, BUDGET_PAD)
        chosen = tl.load(list_ptr + entry, mask=entry < BUDGET, other=-1)
        count = tl.where(last_position >= 0, tl.sum((chosen >= 0).to(tl.int32)), 0)
        page_ptr, rows_ptr = list_ptr, list_ptr
    else:
        tile = (request * row_tiles + row_tile) * KV_HEADS + kv_head
        count = tl.load(union_count_ptr + tile)
        list_ptr = union_block_ptr + tile * (ROWS * BUDGET_PAD)
        page_ptr = union_page_ptr + tile * (ROWS * BUDGET_PAD)
        rows_ptr = union_rows_ptr + tile * (ROWS * BUDGET_PAD)
    table_ptr += request * table_stride
    first = 0
    last = count * TILES
    if SPLIT:
        share = (BUDGET + splits - 1) // splits * TILES
        first = split * share
        last = tl.minimum(last, first + share)

    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    part_max, part_sum, part = top, total, acc
    # The next block's place is read one round ahead: its latency hides behind the keys of this one.
    block, page, chosen_by = _entry(
        list_ptr, page_ptr, rows_ptr, table_ptr, first // TILES, first < last, PER_BLOCK, ROWS > 1
    )
    for i in range(first, last):
        start = block * UNIT + i % TILES * KEYS
        place = ((page * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE) * WIDTH
        at = key[:, None] * WIDTH + d
        k = tl.load(k_ptr + place + at)
        v = tl.load(v_ptr + place + at, mask=key[:, None] <= last_position - start, other=0.0)
        selects = (chosen_by >> member & 1) != 0
        limit = tl.where(selects, position - start, -1)
        block, page, chosen_by = _entry(
            list_ptr, page_ptr, rows_ptr, table_ptr, (i + 1) // TILES, i + 1 < last, PER_BLOCK, ROWS > 1
        )
        part_max, part_sum, part = _add_tile(q, k, v, part_max, part_sum, part, limit, key, scale, i % TILES == 0)
        if i % TILES == TILES - 1:
            if SPLIT:
                saved = ((row * KV_HEADS + kv_head) * BUDGET + i // TILES) * GROUP + m % GROUP_PAD
                tl.store(part_max_ptr + saved, part_max, mask=real)
                tl.store(part_sum_ptr + saved, part_sum, mask=real)
                tl.store(part_out_ptr + saved[:, None] * WIDTH + d, part, mask=real[:, None])
            else:
                new_top, new_total, new_acc = _combine(top, total, acc, part_max, part_sum, part)
                top = tl.where(selects, new_top, top)
                total = tl.where(selects, new_total, total)
                acc = tl.where(selects[:, None], new_acc, acc)

    if not SPLIT:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + head_place[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
    if SPLIT:
        tl.debug_barrier()  # every thread's partials come before the count
        group_id = pid // (row_tiles * splits) * row_tiles + row_tile
        if tl.atomic_add(arrived_ptr + group_id, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrived_ptr + group_id, 0)
            _merge(
                out_ptr, part_out_ptr, part_max_ptr, part_sum_ptr, request * n + row_tile, kv_head,
                tl.arange(0, GROUP_PAD), count, KV_HEADS, GROUP, WIDTH, BUDGET, 4,
            )  # fmt: skip


@triton.jit
def _entry(list_ptr, page_ptr, rows_ptr, table_ptr, index, wanted, PER_BLOCK: tl.constexpr, SHARED: tl.constexpr):
    """Block, its page and the rows that chose it (bits), at `index` of a list; zeros where it is not wanted."""
    block = tl.load(list_ptr + index, mask=wanted, other=0)
    if SHARED:
        page = tl.load(page_ptr + index, mask=wanted, other=0).to(tl.int64)
        chosen_by = tl.load(rows_ptr + index, mask=wanted, other=0)
    else:
        page = tl.load(table_ptr + block // PER_BLOCK, mask=wanted, other=0).to(tl.int64)
        chosen_by = 1
    return block, page, chosen_by
