"""Grouped-query attention over selected blocks (MiniMax-M3) in Triton: decode, verification and exact prefill.

Bits of a row depend on the row alone. Every selected block gives a partial result (maximum, sum, output) computed from
that block only, and a row adds up its partials in ascending order with one sequence of operations. A program may do so
in registers, or programs may share a row and leave partials in memory for a second kernel: the numbers are the same.
Rows of one request may also share a program, which then walks the union of their blocks; what a row did not select
leaves its sums untouched.

Weights are added up as a product with ones: matrix units add in one order, however keys lie on warps. On NVIDIA's GPUs
up to Hopper that order is also the same for every number of rows of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skipstone.core.batch import Span
from skipstone.errors import ShapeError
from skipstone.kernels.gpu import sparse_gqa_chunk
from skipstone.kernels.gpu.descriptors import capability
from skipstone.kernels.gpu.gemm import is_hip
from skipstone.kernels.gpu.partial_sums import LOG2_E
from skipstone.kernels.gpu.sparse_gqa_parts import add_block, add_pair, add_tile
from skipstone.kernels.gpu.sparse_gqa_prefill import MOST_DECODE_ROWS, prefill
from skipstone.kernels.gpu.sparse_gqa_union import Union, most_rows, pdl_options, union_of_rows, whole_rows

FULL_GRID = 128  # programs that keep the GPU busy: about one per multiprocessor of an H200
MOST_HEADS = 64  # rows of a matrix product
ONES = 8  # columns of the product that adds up weights; AMD's narrowest has 16


class AttendConfig(NamedTuple):
    """Tile shape and launch parameters. `keys` reaches the bits, and depends on shapes alone."""

    heads: int  # rows of a matrix product: query rows times the heads of a group
    keys: int
    warps: int
    stages: int
    pair: bool = False  # a block is two tiles of keys, and both are taken at once


def attend_config(dtype: torch.dtype, unit: int, heads: int, programs: int) -> AttendConfig:
    """Tiles for blocks of `unit` tokens and programs of `heads` heads.

    Measured on an H200: few heads want whole blocks, as the steps of a block take longer than its products; then two
    programs per multiprocessor want shared memory for one block each, and a single one for two.
    """
    if dtype == torch.float32:
        return AttendConfig(16, min(unit & -unit, 16), 4, 1)
    keys = min(unit & -unit, 64)
    if is_hip():
        return AttendConfig(MOST_HEADS, keys, 4, 2)
    if heads >= MOST_HEADS or capability() >= 100:  # Blackwell multiplies many rows with another unit than few
        return AttendConfig(MOST_HEADS, keys, 4, 3)
    return AttendConfig(max(16, heads), keys, 4, 2 if programs > FULL_GRID else 3, unit == 2 * keys)


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
    rows_each, splits = plan(requests, n, indices.shape[1], indices.shape[2], q.shape[1], q.dtype)
    heads = rows_each * triton.next_power_of_2(q.shape[1] // indices.shape[1])
    if n > MOST_DECODE_ROWS and splits == 1 and sparse_gqa_chunk.chunk_fits(k_cache, v_cache, heads):
        shape = attend_config(k_cache.dtype, unit, heads, FULL_GRID)
        tiles = sparse_gqa_chunk.ChunkConfig(rows_each, shape.heads, shape.keys, ONES)
        return sparse_gqa_chunk.attend_chunk(q, k_cache, v_cache, indices, unit, span, scale, tiles)
    return attend(q, k_cache, v_cache, indices, unit, span, scale, rows_each, splits)


def plan(requests: int, n: int, kv_heads: int, budget: int, heads: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows per program and programs per row, from counts that are known when a graph is captured.

    Measured on an H200: sharing pays once it still fills the GPU; below that every row gets a program of its own, and
    several once half of the GPU would be idle: one for each block, or as many as fill it.
    """
    group = triton.next_power_of_2(heads // kv_heads)
    most = 16 if dtype == torch.float32 else MOST_HEADS
    shared = min(most // group, triton.next_power_of_2(n), most_rows(budget))
    if requests * kv_heads * triton.cdiv(n, shared) >= FULL_GRID:
        return shared, 1
    programs = requests * kv_heads * n
    if 2 * programs >= FULL_GRID:
        return 1, 1
    return 1, budget if programs * budget <= 2 * FULL_GRID else FULL_GRID // programs


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
    tiles: AttendConfig | None = None,
) -> Tensor:
    """`sparse_gqa` with a given number of rows per program and of programs per row."""
    requests, n = span.positions.shape
    rows, heads, width = q.shape
    q = whole_rows(q)
    kv_heads, budget = indices.shape[1:]
    group = heads // kv_heads
    padded, row_tiles = triton.next_power_of_2(group), triton.cdiv(n, rows_each)
    share = triton.cdiv(budget, splits)
    splits = triton.cdiv(budget, share)
    grid = (row_tiles, splits, requests * kv_heads)
    tiles = tiles or attend_config(k_cache.dtype, unit, padded * rows_each, grid[0] * grid[1] * grid[2])
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    slots = 1 + (splits - 1) * share if splits > 1 else 0
    part_out = torch.empty(rows, kv_heads, slots, group, width, dtype=torch.float32, device=q.device)
    part_max, part_sum = torch.empty(2, rows, kv_heads, slots, group, dtype=torch.float32, device=q.device)
    union = union_of_rows(indices, unit, span, rows_each, k_cache.shape[2]) if rows_each > 1 else Union(*[indices] * 4)
    pdl = pdl_options()
    common = {"GROUP": group, "WIDTH": width, "PDL": bool(pdl), "enable_fp_fusion": False, **pdl}
    _attend_kernel[grid](
        q, k_cache, v_cache, out, indices, *union, span.positions.contiguous(), span.block_table,
        part_out, part_max, part_sum, q.stride(0), n, span.block_table.stride(0), scale * LOG2_E, KV_HEADS=kv_heads,
        GROUP_PAD=padded, BUDGET=budget, BUDGET_PAD=triton.next_power_of_2(budget), SHARE=share,
        SHARE_PAD=triton.next_power_of_2(share), UNIT=unit, BLOCK_SIZE=k_cache.shape[2], ROWS=rows_each,
        HEADS=tiles.heads, KEYS=tiles.keys, PAIR=tiles.pair, ONES=16 if is_hip() else ONES, num_warps=tiles.warps,
        num_stages=tiles.stages, **common,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows * kv_heads, group)](out, part_out, part_max, part_sum, SLOTS=slots, num_warps=1, **common)
    return out


@triton.jit(do_not_specialize=["n", "table_stride"])
def _attend_kernel(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_ptr,  # [num_blocks, G, block_size, D]
    v_ptr,  # as k
    out_ptr,  # [T, H, D]
    indices_ptr,  # [T, G, S]
    union_block_ptr,  # [R, row tiles, G, union limit]: selected by any row of the tile, ascending (ROWS > 1)
    union_page_ptr,  # as union_block: where it lies in the cache
    union_rows_ptr,  # as union_block: one bit per row of the tile
    union_count_ptr,  # [R, row tiles, G]
    positions_ptr,  # [R, n]
    table_ptr,  # [R, blocks]
    part_out_ptr,  # [T, G, slots, group, D]: the first program's sums, then every other block's (SHARE < S)
    part_max_ptr,  # [T, G, slots, group]
    part_sum_ptr,
    q_stride,
    n,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    SHARE: tl.constexpr,  # entries of a row's list for each program
    SHARE_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PAIR: tl.constexpr,
    ONES: tl.constexpr,
    PDL: tl.constexpr,
):
    TILES: tl.constexpr = 1 if PAIR else UNIT // KEYS
    # Programs of neighbouring rows run side by side: what one loads, the others find in the L2 cache.
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    kv_head = tl.program_id(2) % KV_HEADS
    request = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    m = tl.arange(0, HEADS)
    member = m // GROUP_PAD
    local_row = row_tile * ROWS + member
    real = (member < ROWS) & (local_row < n) & (m % GROUP_PAD < GROUP)
    row = request * n + local_row
    d = tl.arange(0, WIDTH)
    key = tl.arange(0, UNIT // TILES)
    head = kv_head * GROUP + m % GROUP_PAD
    if PDL:
        gdc_wait()
        if SHARE < BUDGET:  # whole rows launch at their end: programs in between would spread these unevenly
            gdc_launch_dependents()
    entry = tl.arange(0, SHARE_PAD)
    position = tl.load(positions_ptr + row, mask=real, other=-1).to(tl.int32)
    last_position = tl.max(position)
    if ROWS == 1:
        index = split * SHARE + entry
        indices_ptr += ((request * n + row_tile) * KV_HEADS + kv_head) * BUDGET
        blocks = tl.load(indices_ptr + index, mask=(entry < SHARE) & (index < BUDGET), other=-1)
        blocks = tl.where(last_position >= 0, blocks, -1)
        table_ptr += request * table_stride
        pages = tl.load(table_ptr + blocks // (BLOCK_SIZE // UNIT), mask=blocks >= 0, other=0).to(tl.int32)
        count = tl.sum((blocks >= 0).to(tl.int32))
    else:
        tile = (request * tl.cdiv(n, ROWS) + row_tile) * KV_HEADS + kv_head
        blocks = union_block_ptr + tile * (ROWS * BUDGET_PAD)
        pages = union_page_ptr + tile * (ROWS * BUDGET_PAD)
        union_rows_ptr += tile * (ROWS * BUDGET_PAD)
        count = tl.load(union_count_ptr + tile)
    q = tl.load(q_ptr + (row * q_stride + head * WIDTH)[:, None] + d, mask=real[:, None], other=0.0)

    m_i = tl.full([HEADS], float("-inf"), tl.float32)
    l_i, acc = tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, WIDTH], tl.float32)
    part_max, part_sum, part = m_i, l_i, acc
    slot = (row * KV_HEADS + kv_head) * (1 + (tl.num_programs(1) - 1) * SHARE) + tl.maximum(1 + (split - 1) * SHARE, 0)
    saved = slot * GROUP + m
    value_key = tl.arange(0, KEYS)
    # The next block's place is read one round ahead: its latency hides behind the keys of this one.
    block, page, chosen_by = _entry(blocks, pages, union_rows_ptr, entry, 0, count, ROWS > 1)
    for i in range(count * TILES):
        start = block * UNIT + i % TILES * KEYS
        place = ((page * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE) * WIDTH
        # For values that nobody sees, a seen one is read: they have no weight, but what lies there may be no number.
        last_seen = tl.maximum(last_position - block * UNIT, 0) - i % TILES * KEYS
        k = tl.load(k_ptr + place + (key[:, None] * WIDTH + d))
        v = tl.load(v_ptr + place + d[None, :] + tl.minimum(value_key, last_seen)[:, None] * WIDTH)
        selects = (chosen_by >> member & 1) != 0
        limit = tl.where(selects, position - start, -1)
        block, page, chosen_by = _entry(blocks, pages, union_rows_ptr, entry, (i + 1) // TILES, count, ROWS > 1)
        if PAIR:
            second_v = tl.load(v_ptr + place + d[None, :] + tl.minimum(KEYS + value_key, last_seen)[:, None] * WIDTH)
            part_max, part_sum, part = add_pair(q, k, v, second_v, limit, key, scale, ONES)
        else:
            part_max, part_sum, part = add_tile(
                q, k, v, part_max, part_sum, part, limit, key, scale, i % TILES == 0, True, ONES
            )
        if i % TILES == TILES - 1:
            if SHARE == 1 and BUDGET > 1:
                m_i, l_i, acc = part_max, part_sum, part
            elif SHARE < BUDGET and split > 0:
                to = saved + i // TILES * GROUP
                _save(part_out_ptr, part_max_ptr, part_sum_ptr, to, d, part_max, part_sum, part, real, WIDTH)
            else:
                new_m, new_l, new_acc = add_block(m_i, l_i, acc, part_max, part_sum, part)
                m_i = tl.where(selects, new_m, m_i)
                l_i = tl.where(selects, new_l, l_i)
                acc = tl.where(selects[:, None], new_acc, acc)
    if SHARE == BUDGET:
        if PDL:
            gdc_launch_dependents()
        acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        out_place = row * (KV_HEADS * GROUP) + head
        tl.store(out_ptr + out_place[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
    elif SHARE == 1 or split == 0:
        _save(part_out_ptr, part_max_ptr, part_sum_ptr, saved, d, m_i, l_i, acc, real, WIDTH)
    else:
        for j in tl.static_range(SHARE):
            tl.store(part_max_ptr + saved + j * GROUP, m_i, mask=real & (j >= count))


@triton.jit
def _entry(blocks, pages, rows, entry, index, count, SHARED: tl.constexpr):
    """Block, its page and the rows that chose it (bits), at `index` of a list, which lies in memory if SHARED."""
    if SHARED:
        block = tl.load(blocks + index, mask=index < count, other=0)
        page = tl.load(pages + index, mask=index < count, other=0)
        chosen_by = tl.load(rows + index, mask=index < count, other=0)
    else:
        block = tl.sum(tl.where(entry == index, blocks, 0))
        page = tl.sum(tl.where(entry == index, pages, 0))
        chosen_by = 1
    return block, page.to(tl.int64), chosen_by


@triton.jit
def _save(out_ptr, max_ptr, sum_ptr, place, d, part_max, part_sum, part, real, WIDTH: tl.constexpr):
    """Leave a partial result for the merge."""
    tl.store(max_ptr + place, part_max, mask=real)
    tl.store(sum_ptr + place, part_sum, mask=real)
    tl.store(out_ptr + place[:, None] * WIDTH + d, part, mask=real[:, None])


@triton.jit
def _merge_kernel(
    out_ptr,  # [T, H, D]
    part_out_ptr,  # see _attend_kernel
    part_max_ptr,
    part_sum_ptr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the partial results of one row and head; a place without any has the maximum -inf."""
    place = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) + tl.arange(0, 1)
    d = tl.arange(0, WIDTH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    for i in tl.static_range(SLOTS):  # unrolled, so that all loads are under way at once
        at = (place * SLOTS + i) * GROUP + h
        part_max = tl.load(part_max_ptr + at)
        part_sum = tl.load(part_sum_ptr + at)
        part = tl.load(part_out_ptr + at[:, None] * WIDTH + d)
        new_m, new_l, new_acc = add_block(m_i, l_i, acc, part_max, part_sum, part)
        here = part_max > float("-inf")
        m_i = tl.where(here, new_m, m_i)
        l_i = tl.where(here, new_l, l_i)
        acc = tl.where(here[:, None], new_acc, acc)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out_ptr + (place * GROUP + h)[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty))
