"""Compact page tables of selected blocks, and attention through them, in Triton: see the twins in `reference`.

Attention cuts the keys of a table into parts of equal size. Every part is reduced from scratch and parts are combined
first to last, so bits depend neither on the number of rows nor on how parts are spread over programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.kernels.gpu.gemm import dot, is_hip
from skipstone.kernels.gpu.partial_sums import LOG2_E, LOWEST, ONES, Parts, combine, combine_parts, empty_parts
from skipstone.kernels.reference.block_table import (
    PAGE_SIZE,
    PageTable,
    check_groups,
    check_prefill_rows,
    check_verify_rows,
    pages_per_unit,
)

FULL_GRID = 528  # programs that keep the device busy: four per multiprocessor of an H200


def keys_per_part(hip: bool) -> int:
    """Both tiles of a part have to fit the 64 KiB of local memory of CDNA 3."""
    return 64 if hip else 128


@triton.jit(do_not_specialize=["requests", "blocks", "table_stride", "query_len"])
def _page_table_kernel(
    indices_ptr,  # [T, GROUPS, BUDGET] int32, of any strides
    table_ptr,  # [requests, blocks]
    request_ids_ptr,  # [T]; not read when VERIFY
    positions_ptr,  # [T]; VERIFY: seq_lens [requests]
    pages_ptr,  # [T, GROUPS, BUDGET * PER_UNIT] int32
    context_lens_ptr,  # [T, GROUPS] int32
    row_stride,
    group_stride,
    entry_stride,
    table_stride,
    requests,
    blocks,
    query_len,
    page_stride,
    GROUPS: tl.constexpr,
    BUDGET: tl.constexpr,
    UNIT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BLOCK_BUDGET: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    VERIFY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if VERIFY:
        request = row // query_len
        position = tl.load(positions_ptr + request).to(tl.int32) - query_len + (row % query_len).to(tl.int32)
    else:
        request = tl.load(request_ids_ptr + row).to(tl.int64)
        position = tl.load(positions_ptr + row).to(tl.int32)
    own = position // UNIT
    if position < 0:
        own = -1
    entry = tl.arange(0, BLOCK_BUDGET)
    id_ptrs = indices_ptr + row * row_stride + group * group_stride + entry * entry_stride
    ids = tl.load(id_ptrs, mask=entry < BUDGET, other=-1).to(tl.int32)
    known = (ids >= 0) & (ids < blocks) & (request >= 0) & (request < requests)
    full = known & (ids < own)
    tail = known & (ids == own)
    num_full = tl.sum(full.to(tl.int32), axis=0)
    num_tail = tl.max(tail.to(tl.int32), axis=0)
    place = tl.where(full, tl.cumsum(full.to(tl.int32), axis=0) - 1, num_full)
    used = full | tail
    block = tl.load(table_ptr + request * table_stride + ids, mask=used, other=0).to(tl.int64)

    out_ptr = pages_ptr + (row * GROUPS + group) * (BUDGET * PER_UNIT)
    page = tl.arange(0, BLOCK_PAGES)[None, :]
    pages = (block[:, None] * page_stride + page).to(tl.int32)
    tl.store(out_ptr + place[:, None] * PER_UNIT + page, pages, mask=used[:, None] & (page < PER_UNIT))
    unused = (entry >= num_full + num_tail) & (entry < BUDGET)
    zeros = tl.zeros([BLOCK_BUDGET, BLOCK_PAGES], tl.int32)
    tl.store(out_ptr + entry[:, None] * PER_UNIT + page, zeros, mask=unused[:, None] & (page < PER_UNIT))
    length = position + 1
    context_len = tl.minimum(num_full * UNIT, tl.maximum(length, 0))
    if num_tail > 0:
        context_len = num_full * UNIT + length - own * UNIT
    tl.store(context_lens_ptr + row * GROUPS + group, context_len)


@triton.jit(do_not_specialize=["splits"])
def _attend_kernel(
    q_ptr,  # [T, KV_HEADS * GROUP, D]
    k_ptr,  # [num_pages, KV_HEADS, PAGE, D], of any strides
    v_ptr,
    pages_ptr,  # [T, KV_HEADS, PAGES] int32
    context_lens_ptr,  # [T, KV_HEADS] int32
    out_ptr,  # [T, KV_HEADS * GROUP, D]; SPLIT: partial outputs [T, KV_HEADS * GROUP, parts, D] float32
    part_m_ptr,  # [T, KV_HEADS * GROUP, parts] float32
    part_l_ptr,  # as part_m
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_head_stride,
    k_key_stride,
    v_page_stride,
    v_head_stride,
    v_key_stride,
    splits,
    scale,  # of scores as powers of two
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    member = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_D)
    in_dim = (dim < D)[None, :]
    in_row = (member < GROUP)[:, None] & in_dim
    q = tl.load(q_ptr + row * q_row_stride + head[:, None] * q_head_stride + dim[None, :], mask=in_row, other=0.0)
    count = tl.load(context_lens_ptr + row * KV_HEADS + kv_head)
    pages_ptr += (row * KV_HEADS + kv_head) * PAGES
    parts: tl.constexpr = (PAGES * PAGE + BLOCK_N - 1) // BLOCK_N
    ones = tl.full([BLOCK_N, ONES], 1.0, tl.float32).to(q.dtype)
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M, ONES], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(split, tl.cdiv(count, BLOCK_N), splits):
        key = part * BLOCK_N + tl.arange(0, BLOCK_N)
        # Places past the last key read that one again: what was never written may be NaN, and weight zero keeps NaN.
        near = tl.minimum(key, count - 1)
        page = tl.load(pages_ptr + near // PAGE).to(tl.int64)
        k_ptrs = k_ptr + page * k_page_stride + kv_head * k_head_stride + near % PAGE * k_key_stride
        v_ptrs = v_ptr + page * v_page_stride + kv_head * v_head_stride + near % PAGE * v_key_stride
        k = tl.load(k_ptrs[:, None] + dim[None, :], mask=in_dim, other=0.0)
        v = tl.load(v_ptrs[:, None] + dim[None, :], mask=in_dim, other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = tl.where((key < count)[None, :], scores, float("-inf"))
        # The maximum also keeps the compiler from fusing this product into the differences that `combine` takes.
        part_m = tl.maximum(tl.max(scores, axis=1) * scale, LOWEST)
        weights = tl.exp2(tl.fma(scores, scale, -part_m[:, None])).to(v.dtype)
        part_l = dot(weights, ones, tl.zeros([BLOCK_M, ONES], tl.float32))
        part_acc = dot(weights, v, tl.zeros([BLOCK_M, BLOCK_D], tl.float32))
        if SPLIT:
            place = (row * (KV_HEADS * GROUP) + head) * parts + part
            tl.store(out_ptr + place[:, None] * D + dim[None, :], part_acc, mask=in_row)
            tl.store(part_m_ptr + place, part_m, mask=member < GROUP)
            tl.store(part_l_ptr + place, tl.max(part_l, axis=1), mask=member < GROUP)
        else:
            m_i, l_i, acc = combine(m_i, l_i, acc, part_m, part_l, part_acc)
    if not SPLIT:
        divisor = tl.max(l_i, axis=1)[:, None]
        out = tl.where(divisor > 0, acc / divisor, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * (KV_HEADS * GROUP) + head)[:, None] * D + dim[None, :], out, mask=in_row)


def verify_page_table(
    indices: Tensor, block_table: Tensor, seq_lens: Tensor, query_len: int, unit: int, page_stride: int
) -> PageTable:
    """Tables of requests with `query_len` rows each, the last tokens of their sequences. See the twin."""
    check_verify_rows(indices, block_table, seq_lens, query_len)
    return _page_table(indices, block_table, seq_lens, seq_lens, query_len, unit, page_stride)


def prefill_page_table(
    indices: Tensor, block_table: Tensor, request_ids: Tensor, positions: Tensor, unit: int, page_stride: int
) -> PageTable:
    """Tables of rows at absolute `positions` [T] of `request_ids` [T]. See the twin."""
    check_prefill_rows(indices, request_ids, positions)
    return _page_table(indices, block_table, request_ids, positions, 0, unit, page_stride)


def _page_table(
    indices: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    query_len: int,
    unit: int,
    page_stride: int,
) -> PageTable:
    """One launch. With a `query_len`, `positions` are the requests' lengths; 0: those of rows."""
    rows, groups, budget = indices.shape
    per_unit = pages_per_unit(unit)
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    pages = torch.empty(rows, groups, budget * per_unit, dtype=torch.int32, device=indices.device)
    context_lens = torch.empty(rows, groups, dtype=torch.int32, device=indices.device)
    if rows:
        _page_table_kernel[(rows, groups)](
            indices, block_table, request_ids.contiguous(), positions.contiguous(), pages, context_lens,
            *indices.stride(), block_table.stride(0), *block_table.shape, query_len, page_stride, GROUPS=groups,
            BUDGET=budget, UNIT=unit, PER_UNIT=per_unit, BLOCK_BUDGET=triton.next_power_of_2(budget),
            BLOCK_PAGES=triton.next_power_of_2(per_unit), VERIFY=query_len > 0, num_warps=1,
        )  # fmt: skip
    return PageTable(pages, context_lens)


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, scale: float, exact: bool) -> Tensor:
    """Attention of each row and KV head over the first `context_lens` keys of its pages, one table per KV head.

    q [T, H, D], pages [num_pages, Hkv, 16, D] of any strides, overlapping ones included. Returns [T, H, D]; a row
    without keys gives zeros. Always exact: there is no faster way that is not.
    """
    rows, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    check_groups(table, rows, kv_heads)
    q = q if q.stride(2) == 1 else q.contiguous()
    k_pages = k_pages if k_pages.stride(3) == 1 else k_pages.contiguous()
    v_pages = v_pages if v_pages.stride(3) == 1 else v_pages.contiguous()
    out = torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    hip = is_hip()
    keys = keys_per_part(hip)
    places = triton.cdiv(table.pages.shape[2] * PAGE_SIZE, keys)
    splits = max(min(places, triton.cdiv(FULL_GRID, rows * kv_heads)), 1)
    parts = Parts(out, out, out)
    if splits > 1:
        parts = empty_parts(rows, heads, places, width, q.device)
    _attend_kernel[(splits, kv_heads, rows)](
        q, k_pages, v_pages, table.pages, table.context_lens, parts.acc, parts.m_i, parts.l_i, q.stride(0), q.stride(1),
        *k_pages.stride()[:3], *v_pages.stride()[:3], splits, scale * LOG2_E, KV_HEADS=kv_heads,
        GROUP=heads // kv_heads, D=width, PAGE=PAGE_SIZE, PAGES=table.pages.shape[2],
        BLOCK_M=max(triton.next_power_of_2(heads // kv_heads), 16), BLOCK_N=keys,
        BLOCK_D=max(triton.next_power_of_2(width), 16), SPLIT=splits > 1, num_warps=4,
        num_stages=1 if hip or q.dtype == torch.float32 else 3,
    )  # fmt: skip
    if splits > 1:
        combine_parts(parts, table.context_lens, 0, keys, out)
    return out
