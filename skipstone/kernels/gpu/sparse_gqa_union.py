"""The union of the blocks that neighbouring rows selected, so that a program can load each of them once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skipstone.core.batch import Span
from skipstone.kernels.gpu.descriptors import capability

UNION_LIMIT = 128  # selected blocks of all rows of a tile, at most: every pair of them is compared


def pdl_options() -> dict[str, bool]:
    """Options of programmatic dependent launch (PDL): a kernel begins early and waits for the results of the last."""
    return {"launch_pdl": True} if capability() >= 90 else {}


def most_rows(budget: int) -> int:
    """How many rows of `budget` blocks a union takes; they must fit the bits of an int32."""
    return max(1, min(16, UNION_LIMIT // triton.next_power_of_2(budget)))


def whole_rows(q: Tensor) -> Tensor:
    """q [T, H, D] with each row in one piece; rows may be apart, as where q is a part of wider rows."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()


class Union(NamedTuple):
    """For each tile of rows and KV head, the blocks that any of its rows selected, ascending: all int32."""

    block: Tensor  # [R, row tiles, G, rows * S rounded up]
    page: Tensor  # as block: the cache block that holds it
    rows: Tensor  # as block: bit i is set if row i of the tile selected it
    size: Tensor  # [R, row tiles, G]


def union_of_rows(indices: Tensor, unit: int, span: Span, rows_each: int, block_size: int) -> Union:
    """Unions over tiles of `rows_each` (a power of two) rows of a request. indices [T, G, S]: see Selection.

    Padding rows select nothing. Entries past the count hold anything.
    """
    requests, n = span.positions.shape
    kv_heads, budget = indices.shape[1:]
    row_tiles = triton.cdiv(n, rows_each)
    padded = triton.next_power_of_2(budget)
    lists = torch.empty(3, requests, row_tiles, kv_heads, rows_each * padded, dtype=torch.int32, device=indices.device)
    counts = torch.empty(requests, row_tiles, kv_heads, dtype=torch.int32, device=indices.device)
    union = Union(lists[0], lists[1], lists[2], counts)
    pdl = pdl_options()
    _union_kernel[(requests * row_tiles * kv_heads,)](
        indices, span.positions, span.block_table, *union, n, span.block_table.stride(0), KV_HEADS=kv_heads,
        BUDGET=budget, BUDGET_PAD=padded, ROWS=rows_each, UNIT=unit, BLOCK_SIZE=block_size, PDL=bool(pdl), num_warps=4,
        **pdl,
    )  # fmt: skip
    return union


@triton.jit
def chosen_blocks(indices_ptr, positions_ptr, request, row_tile, kv_head, n, entry,
            KV_HEADS: tl.constexpr, BUDGET: tl.constexpr, BUDGET_PAD: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Block ids of a tile's entries (row-major), -1 where a row has none."""
    row = row_tile * ROWS + entry // BUDGET_PAD
    column = entry % BUDGET_PAD
    position = tl.load(positions_ptr + request * n + row, mask=row < n, other=-1)
    wanted = (position >= 0) & (column < BUDGET)
    return tl.load(indices_ptr + ((request * n + row) * KV_HEADS + kv_head) * BUDGET + column, mask=wanted, other=-1)


@triton.jit(do_not_specialize=["n", "table_stride"])
def _union_kernel(
    indices_ptr,  # [T, G, S]
    positions_ptr,  # [R, n]
    table_ptr,  # [R, blocks]
    block_ptr,  # [R, row tiles, G, ROWS * BUDGET_PAD]
    page_ptr,
    rows_ptr,
    count_ptr,  # [R, row tiles, G]
    n,
    table_stride,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    row_tiles = (n + ROWS - 1) // ROWS
    kv_head = pid % KV_HEADS
    row_tile = pid // KV_HEADS % row_tiles
    request = (pid // (KV_HEADS * row_tiles)).to(tl.int64)
    ENTRIES: tl.constexpr = ROWS * BUDGET_PAD
    entry = tl.arange(0, ENTRIES)
    column = tl.arange(0, BUDGET_PAD)
    mine = chosen_blocks(
        indices_ptr, positions_ptr, request, row_tile, kv_head, n, entry, KV_HEADS, BUDGET, BUDGET_PAD, ROWS
    )
    earlier = entry // BUDGET_PAD
    rows = tl.zeros([ENTRIES], tl.int32)
    repeats = tl.zeros([ENTRIES], tl.int32)
    for r in range(ROWS):
        other = chosen_blocks(
            indices_ptr, positions_ptr, request, row_tile, kv_head, n, r * BUDGET_PAD + column,
            KV_HEADS, BUDGET, BUDGET_PAD, ROWS,
        )  # fmt: skip
        has = tl.sum((mine[:, None] == other[None, :]).to(tl.int32), axis=1)
        rows += has << r
        repeats += tl.where(earlier > r, has, 0)
    first = (repeats == 0) & (mine >= 0)
    rank = tl.zeros([ENTRIES], tl.int32)
    # An entry's place: how many blocks, each counted at its first row, come before it.
    for r in range(ROWS):
        other = chosen_blocks(
            indices_ptr, positions_ptr, request, row_tile, kv_head, n, r * BUDGET_PAD + column,
            KV_HEADS, BUDGET, BUDGET_PAD, ROWS,
        )  # fmt: skip
        same = mine[:, None] == other[None, :]
        counted = (tl.sum((same & (earlier < r)[:, None]).to(tl.int32), axis=0) == 0) & (other >= 0)
        before = other[None, :] < mine[:, None]
        rank += tl.sum((before & counted[None, :]).to(tl.int32), axis=1)
    page = tl.load(table_ptr + request * table_stride + mine // (BLOCK_SIZE // UNIT), mask=first, other=0).to(tl.int32)
    to = pid.to(tl.int64) * ENTRIES + rank
    tl.store(block_ptr + to, mine, mask=first)
    tl.store(page_ptr + to, page, mask=first)
    tl.store(rows_ptr + to, rows, mask=first)
    tl.store(count_ptr + pid, tl.sum(first.to(tl.int32)))
