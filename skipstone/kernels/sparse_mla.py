"""Absorbed latent attention of each row over its selected tokens (DeepSeek-V3.2) in Triton.

The selected tokens of a row are cut into parts of KEYS. Every part is reduced from scratch and parts are combined first
to last, so bits depend neither on the number of rows nor on how parts are spread over programs. With few rows each
program takes a few parts and leaves them for a second launch; with many, it walks all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.gemm import dot
from skipstone.kernels.partial_sums import LOG2_E, LOWEST, ONES, Parts, combine, combine_parts, empty_parts

KEYS = 64
VALUE_CHUNK = 128  # values are summed by chunks, so that a part and the sum so far fit the registers
FULL_GRID = 132


class Tiles(NamedTuple):
    """Heads of a program, and how its kernel is compiled."""

    heads: int
    warps: int
    stages: int


def tiles(rows: int, heads: int, dtype: torch.dtype, exact: bool, hip: bool) -> Tiles:
    """How `rows` rows of `heads` heads are cut."""
    if dtype == torch.float32:
        return Tiles(16, 4, 1)
    if heads <= 16 or hip:
        return Tiles(16, 4, 2)
    if exact or rows * triton.cdiv(heads, 64) < FULL_GRID // 2:
        return Tiles(32, 8, 2)
    return Tiles(64, 8, 2)


@triton.jit(do_not_specialize=["rows_per_request", "table_stride", "splits"])
def _attend_kernel(
    q_ptr,  # [T, HEADS, WIDTH]
    cache_ptr,  # [num_blocks, 1, BLOCK_SIZE, WIDTH]
    indices_ptr,  # [T, 1, BUDGET] int32, then PAD
    table_ptr,  # [R, blocks]
    out_ptr,  # [T, HEADS, VALUES]; SPLIT: partial outputs [T, HEADS, parts, VALUES] float32
    part_peak_ptr,  # [T, HEADS, parts] float32
    part_total_ptr,  # as part_peak
    counts_ptr,  # [T] int32 selected tokens; written when SPLIT
    q_row_stride,
    q_head_stride,
    indices_stride,
    table_stride,
    rows_per_request,
    splits,
    scale,  # of scores as powers of two
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BUDGET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BUDGET: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # dims behind the values
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,  # one part of any length, combined with nothing
):
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    table_ptr += row // rows_per_request * table_stride
    indices_ptr += row * indices_stride
    places = tl.arange(0, BLOCK_BUDGET)
    chosen = tl.load(indices_ptr + places, mask=places < BUDGET, other=-1)
    count = tl.sum((chosen >= 0).to(tl.int32), axis=0)
    parts: tl.constexpr = (BUDGET + BLOCK_N - 1) // BLOCK_N
    if SPLIT:
        tl.store(counts_ptr + row, count)

    dim = tl.arange(0, CHUNK)
    rest = VALUES + tl.arange(0, BLOCK_REST)
    inside = (head < HEADS)[:, None]
    q_ptrs = q_ptr + row * q_row_stride + head[:, None] * q_head_stride
    q_rest = tl.load(q_ptrs + rest[None, :], mask=inside & (rest < WIDTH)[None, :], other=0.0)
    q = ()
    acc = ()
    for c in tl.static_range(CHUNKS):
        in_value = (c * CHUNK + dim < VALUES)[None, :]
        q = q + (tl.load(q_ptrs + c * CHUNK + dim[None, :], mask=inside & in_value, other=0.0),)  # noqa: RUF005
        acc = acc + (tl.zeros([BLOCK_M, CHUNK], tl.float32),)  # noqa: RUF005
    ones = tl.full([BLOCK_N, ONES], 1.0, tl.float32).to(q_rest.dtype)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M, ONES], tl.float32)

    for part in range(split, tl.cdiv(count, BLOCK_N), splits):
        entry = part * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = entry < count
        token = tl.load(indices_ptr + entry, mask=exists, other=0)
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        latent_ptrs = cache_ptr + (block * BLOCK_SIZE + token % BLOCK_SIZE)[:, None] * WIDTH
        written = exists[:, None]
        k_rest = tl.load(latent_ptrs + rest[None, :], mask=written & (rest < WIDTH)[None, :], other=0.0)
        scores = dot(q_rest, tl.trans(k_rest), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        latent = ()
        for c in tl.static_range(CHUNKS):
            in_value = (c * CHUNK + dim < VALUES)[None, :]
            k = tl.load(latent_ptrs + c * CHUNK + dim[None, :], mask=written & in_value, other=0.0)
            scores = dot(q[c], tl.trans(k), scores)
            latent = latent + (k,)  # noqa: RUF005
        scores = tl.where(exists[None, :], scores, float("-inf"))
        part_peak = tl.max(scores, axis=1) * scale
        if WHOLE:
            part_peak = tl.maximum(peak, part_peak)
        weights = tl.exp2(tl.fma(scores, scale, -part_peak[:, None])).to(q_rest.dtype)
        next_acc = ()
        if WHOLE:
            keep = tl.exp2(peak - part_peak)[:, None]
            peak = part_peak
            total = dot(weights, ones, total * keep)
            for c in tl.static_range(CHUNKS):
                next_acc = next_acc + (dot(weights, latent[c], acc[c] * keep),)  # noqa: RUF005
        else:
            next_peak = peak
            next_total = total
            part_total = dot(weights, ones, tl.zeros([BLOCK_M, ONES], tl.float32))
            place = (row * HEADS + head) * parts + part
            for c in tl.static_range(CHUNKS):
                part_acc = dot(weights, latent[c], tl.zeros([BLOCK_M, CHUNK], tl.float32))
                if SPLIT:
                    value = c * CHUNK + dim
                    part_ptrs = out_ptr + place[:, None] * VALUES + value[None, :]
                    tl.store(part_ptrs, part_acc, mask=inside & (value < VALUES)[None, :])
                    next_acc = next_acc + (acc[c],)  # noqa: RUF005
                else:
                    next_peak, next_total, combined = combine(peak, total, acc[c], part_peak, part_total, part_acc)
                    next_acc = next_acc + (combined,)  # noqa: RUF005
            if SPLIT:
                tl.store(part_peak_ptr + place, part_peak, mask=head < HEADS)
                tl.store(part_total_ptr + place, tl.max(part_total, axis=1), mask=head < HEADS)
            peak = next_peak
            total = next_total
        acc = next_acc
    if not SPLIT:
        divisor = tl.max(total, axis=1)[:, None]
        out_ptrs = out_ptr + (row * HEADS + head)[:, None] * VALUES
        for c in tl.static_range(CHUNKS):
            value = c * CHUNK + dim
            out = tl.where(divisor > 0, acc[c] / divisor, 0.0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptrs + value[None, :], out, mask=inside & (value < VALUES)[None, :])


def sparse_mla(
    q: Tensor, latent_cache: Tensor, indices: Tensor, span: Span, value_width: int, scale: float, exact: bool
) -> Tensor:
    """Absorbed MLA of each row of a span over its selected tokens.

    q [R * n, H, D_latent], latent_cache [num_blocks, 1, block_size, D_latent], indices [R * n, 1, S] int32 then PAD.
    Values are the first `value_width` dims of the latents. Returns [R * n, H, value_width]; a row without any token
    gives zeros.
    """
    rows, heads, width = q.shape
    budget = indices.shape[2]
    q = q if q.stride(2) == 1 else q.contiguous()
    indices = indices if indices.stride(2) == 1 else indices.contiguous()
    out = torch.empty(rows, heads, value_width, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    cut = tiles(rows, heads, q.dtype, exact, torch.version.hip is not None)
    head_tiles = triton.cdiv(heads, cut.heads)
    most = triton.cdiv(budget, KEYS)
    splits = max(min(most, FULL_GRID // (rows * head_tiles)), 1)
    parts, counts = Parts(out, out, out), out
    if splits > 1:
        parts = empty_parts(rows, heads, most, value_width, q.device)
        counts = torch.empty(rows, dtype=torch.int32, device=q.device)
    chunk = min(max(triton.next_power_of_2(value_width), 16), VALUE_CHUNK)
    _attend_kernel[(head_tiles, splits, rows)](
        q,
        latent_cache,
        indices,
        span.block_table,
        parts.acc,
        parts.peak,
        parts.total,
        counts,
        q.stride(0),
        q.stride(1),
        indices.stride(0),
        span.block_table.stride(0),
        span.positions.shape[1],
        splits,
        scale * LOG2_E,
        HEADS=heads,
        WIDTH=width,
        VALUES=value_width,
        BUDGET=budget,
        BLOCK_SIZE=latent_cache.shape[2],
        BLOCK_M=cut.heads,
        BLOCK_N=KEYS,
        BLOCK_BUDGET=triton.next_power_of_2(budget),
        CHUNK=chunk,
        CHUNKS=triton.cdiv(value_width, chunk),
        BLOCK_REST=max(triton.next_power_of_2(width - value_width), 16),
        SPLIT=splits > 1,
        WHOLE=not exact and splits == 1,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if splits > 1:
        combine_parts(parts, counts, 0, KEYS, out)
    return out
