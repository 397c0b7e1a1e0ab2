"""Causal grouped-query attention over paged caches in Triton, for one row, a few rows to verify, or a prompt's chunk.

Keys are cut into spans of SPAN, counted from the start of the request. Every span is reduced from scratch, and spans
are combined first to last, so a row's bits depend neither on how spans are spread over programs, nor on the rows that
share its tile, nor on the longest sequence of the step. With few rows the spans of one row run on several programs that
leave partial results for a second launch; with many, one program walks all spans and combines them in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.gemm import dot
from skipstone.kernels.partial_sums import LOG2_E, LOWEST, ONES, Parts, combine, combine_parts, empty_parts

SPAN = 256
KEY_TILE = 64
SPLIT_ROWS = 8  # rows per request up to which spans may be spread over programs
FULL_GRID = 264  # programs that keep the device busy: two per multiprocessor of an H200
MOST_SCRATCH = 1 << 28  # bytes of partial results beyond which spans are not spread


class Tiles(NamedTuple):
    """How a call is cut, which no bit of an exact result may depend on."""

    m: int
    warps: int
    stages: int


def tiles(rows: int, dtype: torch.dtype, exact: bool, hip: bool) -> Tiles:
    """`rows`: query rows times heads of a group that share keys."""
    stages = 2 if hip else 3
    if dtype == torch.float32:
        return Tiles(16, 4, 1)
    if exact or rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 4, stages)
    if rows <= 64 or hip:
        return Tiles(64, 4, stages)
    return Tiles(128, 8, stages)


@triton.jit(do_not_specialize=["rows_per_request", "table_stride", "max_spans", "splits"])
def _attend_kernel(
    q_ptr,  # [R * n, KV_HEADS * GROUP, D]
    k_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE, D]
    v_ptr,  # as k
    positions_ptr,  # [R, n]
    table_ptr,  # [R, blocks]
    out_ptr,  # [R * n, KV_HEADS * GROUP, D]; SPLIT: partial outputs [R * n, KV_HEADS * GROUP, max_spans, D] float32
    part_peak_ptr,  # [R * n, KV_HEADS * GROUP, max_spans] float32
    part_total_ptr,  # as part_peak
    q_row_stride,
    q_head_stride,
    table_stride,
    rows_per_request,
    max_spans,
    splits,
    scale,  # of scores as powers of two
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,  # one span of any length, combined with nothing
):
    # The last rows see the most keys: they start first.
    row_tile = tl.num_programs(0) // splits - 1 - tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    member = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # row of the request and head of the group
    inside = member < rows_per_request * GROUP
    row = request * rows_per_request + member // GROUP
    head = kv_head * GROUP + member % GROUP
    position = tl.load(positions_ptr + row, mask=inside, other=-1).to(tl.int32)
    length = tl.max(position, axis=0) + 1
    dim = tl.arange(0, BLOCK_D)
    in_row = inside[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_row_stride + head[:, None] * q_head_stride + dim[None, :], in_row, other=0.0)

    per_span: tl.constexpr = SPAN // BLOCK_N
    spans = tl.cdiv(length, SPAN)
    mine = tl.maximum((spans - split + splits - 1) // splits, 0)
    last_span = split + (mine - 1) * splits
    steps = (mine - 1) * per_span + tl.minimum(tl.cdiv(length, BLOCK_N) - last_span * per_span, per_span)
    if mine == 0:
        steps = 0
    ones = tl.full([BLOCK_N, ONES], 1.0, tl.float32).to(q.dtype)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M, ONES], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    span_peak, span_total, span_acc = peak, total, acc
    for step in range(steps):
        span = split + (step // per_span) * splits
        start = span * SPAN + (step % per_span) * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        # Places past the last key read that one again: what was never written may be NaN, and weight zero keeps NaN.
        near = tl.minimum(tl.arange(0, BLOCK_N), length - 1 - start)
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table_ptr + request * table_stride + start // BLOCK_SIZE).to(tl.int64)
            first = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE) * D
            k_ptrs = k_ptr + first + (near[:, None] * D + dim[None, :])
            v_ptrs = v_ptr + first + (near[:, None] * D + dim[None, :])
        else:
            token = start + near
            block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE).to(tl.int64)
            place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * D
            k_ptrs = k_ptr + place[:, None] + dim[None, :]
            v_ptrs = v_ptr + place[:, None] + dim[None, :]
        if BLOCK_D == D:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(dim < D)[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=(dim < D)[None, :], other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        next_peak = tl.maximum(span_peak, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -next_peak[:, None])).to(v.dtype)
        if WHOLE or per_span > 1:
            keep = tl.exp2(span_peak - next_peak)[:, None]
            span_total = span_total * keep
            span_acc = span_acc * keep
        span_total = dot(weights, ones, span_total)
        span_acc = dot(weights, v, span_acc)
        span_peak = next_peak
        if not WHOLE and (step % per_span == per_span - 1 or step == steps - 1):
            if SPLIT:
                part = (row * (KV_HEADS * GROUP) + head) * max_spans + span
                tl.store(out_ptr + part[:, None] * D + dim[None, :], span_acc, mask=in_row)
                tl.store(part_peak_ptr + part, span_peak, mask=inside)
                tl.store(part_total_ptr + part, tl.max(span_total, axis=1), mask=inside)
            else:
                peak, total, acc = combine(peak, total, acc, span_peak, span_total, span_acc)
            span_peak = tl.full([BLOCK_M], LOWEST, tl.float32)
            span_total = tl.zeros([BLOCK_M, ONES], tl.float32)
            span_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if not SPLIT:
        if WHOLE:
            total, acc = span_total, span_acc
        divisor = tl.max(total, axis=1)[:, None]
        out = tl.where(divisor > 0, acc / divisor, 0.0)
        place_out = (row * (KV_HEADS * GROUP) + head)[:, None] * D + dim[None, :]
        tl.store(out_ptr + place_out, out.to(out_ptr.dtype.element_ty), mask=in_row)


def dense_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, scale: float, exact: bool) -> Tensor:
    """Causal attention of each row over all keys of its request up to its own position.

    q [R * n, H, D] for the R requests of `span`; caches [num_blocks, Hkv, block_size, D]. Returns [R * n, H, D]; rows
    at position -1 are padding and give zeros.
    """
    requests, n = span.positions.shape
    heads, width = q.shape[1], q.shape[2]
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    q = q if q.stride(2) == 1 else q.contiguous()
    positions, table = span.positions.contiguous(), span.block_table
    out = torch.empty(requests * n, heads, width, dtype=q.dtype, device=q.device)
    if not requests * n:
        return out
    cut = tiles(n * group, q.dtype, exact, torch.version.hip is not None)
    row_tiles = triton.cdiv(n * group, cut.m)
    max_spans = triton.cdiv(table.shape[1] * block_size, SPAN)
    splits = 1
    if n <= SPLIT_ROWS and out.numel() * max_spans * 4 <= MOST_SCRATCH:
        splits = max(min(max_spans, triton.cdiv(FULL_GRID, requests * kv_heads * row_tiles)), 1)
    parts = Parts(out, out, out)
    if splits > 1:
        parts = empty_parts(requests * n, heads, max_spans, width, q.device)
    block_d = max(triton.next_power_of_2(width), 16)
    _attend_kernel[(row_tiles * splits, kv_heads, requests)](
        q,
        k_cache,
        v_cache,
        positions,
        table,
        parts.acc,
        parts.peak,
        parts.total,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        n,
        max_spans,
        splits,
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=width,
        BLOCK_SIZE=block_size,
        BLOCK_M=cut.m,
        BLOCK_N=KEY_TILE,
        BLOCK_D=block_d,
        SPAN=SPAN,
        SPLIT=splits > 1,
        WHOLE=not exact and splits == 1,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if splits > 1:
        combine_parts(parts, positions, 1, SPAN, out)
    return out
