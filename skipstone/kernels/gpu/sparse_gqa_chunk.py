"""Exact attention over selected blocks for chunks of a prompt, with tiles loaded by TMA.

For NVIDIA GPUs that load through tensor descriptors. A program takes a tile of neighbouring rows and walks the union of
their blocks in ascending order. Blocks that lie before the first of the rows, all but the last one or two, need no mask
of keys: a row that did not select one drops its part. The numbers are those of `sparse_gqa`, block by block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from skipstone.core.batch import Span
from skipstone.kernels.gpu.descriptors import capability, describable
from skipstone.kernels.gpu.partial_sums import LOG2_E
from skipstone.kernels.gpu.sparse_gqa_parts import add_block, add_tile
from skipstone.kernels.gpu.sparse_gqa_union import union_of_rows, whole_rows


class ChunkConfig(NamedTuple):
    """Tile shape and launch parameters. `keys` reaches the bits."""

    rows: int  # query rows of a tile, a power of two
    heads: int  # rows of a matrix product
    keys: int
    ones: int  # columns of the product that adds up weights
    warps: int = 4
    stages: int = 2


def chunk_fits(k_cache: Tensor, v_cache: Tensor, heads: int) -> bool:
    """Whether chunks can be attended to here, by programs of `heads` heads that fill a product."""
    return capability() >= 90 and heads >= 64 and describable(k_cache) and describable(v_cache)


def attend_chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    unit: int,
    span: Span,
    scale: float,
    tiles: ChunkConfig,
) -> Tensor:
    """`sparse_gqa` in exact mode, by tiles of rows; see there for the shapes."""
    requests, n = span.positions.shape
    kv_heads, budget = indices.shape[1:]
    group, width = q.shape[1] // kv_heads, q.shape[2]
    q = whole_rows(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    union = union_of_rows(indices, unit, span, tiles.rows, k_cache.shape[2])
    keys, values = (TensorDescriptor.from_tensor(c.view(-1, width), [tiles.keys, width]) for c in (k_cache, v_cache))
    _chunk_kernel[(triton.cdiv(n, tiles.rows), requests * kv_heads)](
        q, k_cache, v_cache, keys, values, out, *union, span.positions.contiguous(), q.stride(0), n,
        scale * LOG2_E, KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), WIDTH=width,
        BUDGET_PAD=triton.next_power_of_2(budget), UNIT=unit, BLOCK_SIZE=k_cache.shape[2], ROWS=tiles.rows,
        HEADS=tiles.heads, KEYS=tiles.keys, ONES=tiles.ones, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _take(selects, m_i, l_i, acc, part_max, part_sum, part):
    """Add a block's partial result to the rows that selected it."""
    new_m, new_l, new_acc = add_block(m_i, l_i, acc, part_max, part_sum, part)
    m_i = tl.where(selects, new_m, m_i)
    l_i = tl.where(selects, new_l, l_i)
    return m_i, l_i, tl.where(selects[:, None], new_acc, acc)


@triton.jit(do_not_specialize=["n"])
def _chunk_kernel(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_ptr,  # [num_blocks, G, block_size, D]
    v_ptr,  # as k
    k_rows,  # descriptors of the caches as [rows, D]
    v_rows,
    out_ptr,  # [T, H, D]
    block_ptr,  # see Union
    page_ptr,
    rows_ptr,
    count_ptr,
    positions_ptr,  # [R, n]
    q_stride,
    n,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ONES: tl.constexpr,
):
    TILES: tl.constexpr = UNIT // KEYS
    row_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows may have most blocks and start first
    kv_head = tl.program_id(1) % KV_HEADS
    request = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    m = tl.arange(0, HEADS)
    member = m // GROUP_PAD
    local_row = row_tile * ROWS + member
    real = (member < ROWS) & (local_row < n) & (m % GROUP_PAD < GROUP)
    row = request * n + local_row
    d = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    position = tl.load(positions_ptr + row, mask=real, other=-1).to(tl.int32)
    last_position = tl.max(position)
    first_position = tl.min(tl.where(position >= 0, position, 2147483647))
    tile = (request * tl.num_programs(0) + row_tile) * KV_HEADS + kv_head
    entries = tile * (ROWS * BUDGET_PAD)
    count = tl.load(count_ptr + tile)
    entry = tl.arange(0, ROWS * BUDGET_PAD)
    listed = tl.load(block_ptr + entries + entry, mask=entry < count, other=0)
    whole = tl.sum(((entry < count) & (listed * UNIT + UNIT - 1 <= first_position)).to(tl.int32))
    q_place = row * q_stride + (kv_head * GROUP + m % GROUP_PAD) * WIDTH
    q = tl.load(q_ptr + q_place[:, None] + d, mask=real[:, None], other=0.0)

    m_i = tl.full([HEADS], float("-inf"), tl.float32)
    l_i = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    part_max, part_sum, part = m_i, l_i, acc
    block = tl.load(block_ptr + entries, mask=count > 0, other=0)
    page = tl.load(page_ptr + entries, mask=count > 0, other=0)
    chosen_by = tl.load(rows_ptr + entries, mask=count > 0, other=0)
    for i in range(whole * TILES):
        place = (page * KV_HEADS + kv_head) * BLOCK_SIZE + (block * UNIT + i % TILES * KEYS) % BLOCK_SIZE
        k = k_rows.load([place, 0])
        v = v_rows.load([place, 0])
        selects = (chosen_by >> member & 1) != 0
        following = entries + (i + 1) // TILES
        block = tl.load(block_ptr + following, mask=(i + 1) // TILES < count, other=0)
        page = tl.load(page_ptr + following, mask=(i + 1) // TILES < count, other=0)
        chosen_by = tl.load(rows_ptr + following, mask=(i + 1) // TILES < count, other=0)
        part_max, part_sum, part = add_tile(
            q, k, v, part_max, part_sum, part, position, key, scale, i % TILES == 0, False, ONES
        )
        if i % TILES == TILES - 1:
            m_i, l_i, acc = _take(selects, m_i, l_i, acc, part_max, part_sum, part)
    for i in tl.range(whole, count, num_stages=1):
        first = tl.load(block_ptr + entries + i) * UNIT
        wide = tl.load(page_ptr + entries + i).to(tl.int64)
        selects = (tl.load(rows_ptr + entries + i) >> member & 1) != 0
        place = ((wide * KV_HEADS + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE) * WIDTH
        part_max, part_sum, part = m_i, l_i, acc
        for t in tl.static_range(TILES):
            start = t * KEYS
            # For values that nobody sees, a seen one is read: they have no weight, but may be no numbers.
            seen = tl.minimum(start + key, tl.maximum(last_position - first, 0))
            k = tl.load(k_ptr + place + ((start + key)[:, None] * WIDTH + d))
            v = tl.load(v_ptr + place + (seen[:, None] * WIDTH + d))
            limit = position - first - start
            part_max, part_sum, part = add_tile(
                q, k, v, part_max, part_sum, part, limit, key, scale, t == 0, True, ONES
            )
        m_i, l_i, acc = _take(selects, m_i, l_i, acc, part_max, part_sum, part)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_place = (row * KV_HEADS + kv_head) * GROUP + m % GROUP_PAD
    tl.store(out_ptr + out_place[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
