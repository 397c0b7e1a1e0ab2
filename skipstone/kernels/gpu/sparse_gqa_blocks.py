"""Prefill attention over selected blocks in the order of the blocks, for rows whose neighbours selected other blocks.

The rows that selected a block are gathered, so that its keys and values are loaded once for many of them and matrix
products have full tiles. Every (row, block) leaves a normalised partial output, which a second pass weighs and adds up.
Which tiles of rows take part is decided on the GPU, by the size of their unions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.gpu.partial_sums import LOG2_E
from skipstone.kernels.gpu.sparse_gqa_union import Union, chosen_blocks


class BlockConfig(NamedTuple):
    """Rows per tile and launch parameters of the pass over blocks."""

    rows: int  # rows of a tile; times the heads of a group they are the rows of a matrix product
    repeat: int  # tiles of one program, which share the keys and values that it holds
    warps: int
    stages: int
    scratch: int = 1 << 29  # bytes of partial outputs that are kept at a time


def block_config(dtype: torch.dtype, group: int, hip: bool) -> BlockConfig:
    """Tiles for caches of `dtype` and groups of `group` heads."""
    heads = 16 if dtype == torch.float32 else 64
    single = hip or dtype == torch.float32
    return BlockConfig(heads // triton.next_power_of_2(group), 8, 4, 1 if single else 2)


def attend_by_blocks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    indices: Tensor,
    unit: int,
    span: Span,
    scale: float,
    union: Union,
    tile_rows: int,
    limit: int,
    tiles: BlockConfig,
) -> None:
    """Write `out` for the rows of all tiles whose union has more than `limit` blocks. `unit` is a power of two."""
    requests, n = span.positions.shape
    kv_heads, budget = indices.shape[1:]
    width, group = q.shape[2], q.shape[1] // kv_heads
    units = span.block_table.shape[1] * (k_cache.shape[2] // unit)
    buckets = requests * units * kv_heads
    all_tiles = requests * triton.cdiv(n, tile_rows)
    row_bytes = kv_heads * budget * group * width * q.element_size()
    chunk_tiles = min(all_tiles, max(1, tiles.scratch // (row_bytes * tile_rows)))
    capacity = min(chunk_tiles, triton.cdiv(n, tile_rows)) * tile_rows
    per_program = tiles.rows * tiles.repeat
    programs = triton.cdiv(chunk_tiles * tile_rows * budget * kv_heads, per_program) + buckets
    integers: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    chunks = triton.cdiv(all_tiles, chunk_tiles)
    counts = torch.zeros(chunks, buckets, **integers)
    lists = torch.empty(buckets, capacity, **integers)
    work = torch.empty(1 + 2 * programs, **integers)
    parts = torch.empty(chunk_tiles * tile_rows, kv_heads, budget, group, width, dtype=q.dtype, device=q.device)
    weights = torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device)
    reach = span.positions.amax(dim=1).to(torch.int32)  # [R]
    shape = {"KV_HEADS": kv_heads, "BUDGET": budget, "BUDGET_PAD": triton.next_power_of_2(budget), "ROWS": tile_rows}
    heads = {"GROUP": group, "GROUP_PAD": triton.next_power_of_2(group), "WIDTH": width}
    for chunk in range(chunks):
        first = chunk * chunk_tiles
        here = min(chunk_tiles, all_tiles - first)
        _register_kernel[(here * kv_heads,)](
            indices, span.positions, union.size, counts[chunk], lists, n, first, units, capacity, limit, **shape
        )
        _schedule_kernel[(1,)](counts[chunk], work, buckets, programs, PER_PROGRAM=per_program, BLOCK=1024)
        _block_kernel[(programs,)](
            q, k_cache, v_cache, span.positions, span.block_table, reach, counts[chunk], lists, work, parts, weights,
            q.stride(0), n, first, units, capacity, programs, span.block_table.stride(0), scale * LOG2_E,
            **shape, **heads, UNIT=unit, BLOCK_SIZE=k_cache.shape[2], BLOCK_ROWS=tiles.rows, REPEAT=tiles.repeat,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        _weigh_kernel[(here * tile_rows * kv_heads,)](
            indices, span.positions, union.size, parts, weights, out, n, first, limit, **shape, **heads, num_warps=4
        )


@triton.jit(do_not_specialize=["n", "first_tile", "units", "capacity", "limit"])
def _register_kernel(
    indices_ptr,  # [T, G, S]
    positions_ptr,  # [R, n]
    union_count_ptr,  # [R, row tiles, G]
    count_ptr,  # [R, units, G] int32, zeros
    list_ptr,  # [R, units, G, capacity]: rows that selected a block, as (row in the chunk) * S + column
    n,
    first_tile,
    units,
    capacity,
    limit,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    kv_head = pid % KV_HEADS
    local_tile = pid // KV_HEADS
    tile = first_tile + local_tile
    if tl.load(union_count_ptr + tile * KV_HEADS + kv_head) <= limit:
        return
    row_tiles = (n + ROWS - 1) // ROWS
    request = (tile // row_tiles).to(tl.int64)
    entry = tl.arange(0, ROWS * BUDGET_PAD)
    block = chosen_blocks(
        indices_ptr, positions_ptr, request, tile % row_tiles, kv_head, n, entry, KV_HEADS, BUDGET, BUDGET_PAD, ROWS
    )
    bucket = (request * units + block) * KV_HEADS + kv_head
    place = tl.atomic_add(count_ptr + bucket, 1, mask=block >= 0, sem="relaxed")
    mine = (local_tile * ROWS + entry // BUDGET_PAD) * BUDGET + entry % BUDGET_PAD
    tl.store(list_ptr + bucket * capacity + place, mine, mask=block >= 0)


@triton.jit(do_not_specialize=["buckets", "programs"])
def _schedule_kernel(
    count_ptr,  # [buckets] int32
    work_ptr,  # [1 + 2 * programs] int32: programs that have work; bucket of each; its place among the bucket's
    buckets,
    programs,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = 0
    for first in range(0, buckets, BLOCK):
        bucket = first + tl.arange(0, BLOCK)
        count = tl.load(count_ptr + bucket, mask=bucket < buckets, other=0)
        needed = (count + PER_PROGRAM - 1) // PER_PROGRAM
        at = begin + tl.cumsum(needed, axis=0) - needed
        for i in range(tl.max(needed)):
            tl.store(work_ptr + 1 + at + i, bucket, mask=i < needed)
            tl.store(work_ptr + 1 + programs + at + i, i, mask=i < needed)
        begin += tl.sum(needed)
    tl.store(work_ptr, begin)


@triton.jit(do_not_specialize=["n", "first_tile", "units", "capacity", "programs", "table_stride"])
def _block_kernel(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_ptr,  # [num_blocks, G, block_size, D]
    v_ptr,  # as k
    positions_ptr,  # [R, n]
    table_ptr,  # [R, blocks]
    reach_ptr,  # [R] int32, the last position of each request
    count_ptr,  # [R, units, G]
    list_ptr,  # [R, units, G, capacity]
    work_ptr,  # see _schedule_kernel
    part_ptr,  # [chunk rows, G, S, group, D]
    weight_ptr,  # [chunk rows, G, S, group] float32: log2 of the sum of exponentials
    q_stride,
    n,
    first_tile,
    units,
    capacity,
    programs,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    REPEAT: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid >= tl.load(work_ptr):
        return
    bucket = tl.load(work_ptr + 1 + pid).to(tl.int64)
    begin = tl.load(work_ptr + 1 + programs + pid) * (BLOCK_ROWS * REPEAT)
    end = tl.minimum(tl.load(count_ptr + bucket), begin + BLOCK_ROWS * REPEAT)
    kv_head = bucket % KV_HEADS
    request = bucket // KV_HEADS // units
    start = (bucket // KV_HEADS % units).to(tl.int32) * UNIT
    page = tl.load(table_ptr + request * table_stride + start // BLOCK_SIZE).to(tl.int64)
    row_tiles = (n + ROWS - 1) // ROWS
    key = tl.arange(0, UNIT)
    d = tl.arange(0, WIDTH)
    at = ((page * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE + key)[:, None] * WIDTH + d
    k = tl.load(k_ptr + at)
    v = tl.load(v_ptr + at, mask=key[:, None] <= tl.load(reach_ptr + request) - start, other=0.0)
    m = tl.arange(0, BLOCK_ROWS * GROUP_PAD)
    member = m // GROUP_PAD
    head = m % GROUP_PAD
    list_ptr += bucket * capacity
    chosen = tl.load(list_ptr + begin + member, mask=begin + member < end, other=0)
    for first in range(begin, end, BLOCK_ROWS):
        real = (first + member < end) & (head < GROUP)
        local_row = chosen // BUDGET
        tile = first_tile + local_row // ROWS
        row = request * n + tile % row_tiles * ROWS + local_row % ROWS
        place = (local_row.to(tl.int64) * KV_HEADS + kv_head) * BUDGET + chosen % BUDGET
        q_at = (row * q_stride + (kv_head * GROUP + head) * WIDTH)[:, None] + d
        q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0)
        limit = tl.load(positions_ptr + row, mask=real, other=0).to(tl.int32) - start
        following = first + BLOCK_ROWS + member
        chosen = tl.load(list_ptr + following, mask=following < end, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
        m_i = tl.max(scores, axis=1) * scale
        base = tl.where(m_i == float("-inf"), 0.0, m_i)
        weights = tl.exp2(scores * scale - base[:, None])
        l_i = tl.sum(weights, axis=1)
        part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        part = part / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        part_at = place * GROUP + head
        tl.store(weight_ptr + part_at, m_i + tl.log2(l_i), mask=real)
        tl.store(part_ptr + part_at[:, None] * WIDTH + d, part.to(part_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["n", "first_tile", "limit"])
def _weigh_kernel(
    indices_ptr,  # [T, G, S]
    positions_ptr,  # [R, n]
    union_count_ptr,  # [R, row tiles, G]
    part_ptr,  # [chunk rows, G, S, group, D]
    weight_ptr,  # [chunk rows, G, S, group] float32
    out_ptr,  # [T, H, D]
    n,
    first_tile,
    limit,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pid = tl.program_id(0)
    kv_head = pid % KV_HEADS
    local_row = pid // KV_HEADS
    tile = first_tile + local_row // ROWS
    row_tiles = (n + ROWS - 1) // ROWS
    local = tile % row_tiles * ROWS + local_row % ROWS
    if (tl.load(union_count_ptr + tile * KV_HEADS + kv_head) <= limit) | (local >= n):
        return
    row = (tile // row_tiles).to(tl.int64) * n + local
    position = tl.load(positions_ptr + row)
    entry = tl.arange(0, BUDGET_PAD)
    indices = indices_ptr + (row * KV_HEADS + kv_head) * BUDGET
    chosen = tl.load(indices + entry, mask=(entry < BUDGET) & (position >= 0), other=-1) >= 0
    count = tl.sum(chosen.to(tl.int32))
    h = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, WIDTH)
    place = (pid.to(tl.int64) * BUDGET + entry)[:, None] * GROUP + h[None, :]
    logs = tl.load(weight_ptr + place, mask=chosen[:, None] & (h < GROUP)[None, :], other=float("-inf"))
    m_i = tl.max(logs, axis=0)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    acc = tl.zeros([GROUP_PAD, WIDTH], tl.float32)
    l_i = tl.zeros([GROUP_PAD], tl.float32)
    for i in tl.range(0, count, num_stages=4):
        at = (pid.to(tl.int64) * BUDGET + i) * GROUP + h
        weight = tl.exp2(tl.load(weight_ptr + at, mask=h < GROUP, other=0.0) - m_i)
        part = tl.load(part_ptr + at[:, None] * WIDTH + d, mask=(h < GROUP)[:, None], other=0.0)
        acc += part.to(tl.float32) * weight[:, None]
        l_i += weight
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    to = (row * KV_HEADS + kv_head) * GROUP + h
    tl.store(out_ptr + to[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty), mask=(h < GROUP)[:, None])
