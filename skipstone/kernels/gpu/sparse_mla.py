"""Absorbed latent attention of each row over its selected tokens (DeepSeek-V3.2) in Triton.

The selected tokens of a row are cut into parts of PART. Every part is reduced from scratch and parts are combined first
to last, so bits depend neither on the number of rows nor on how parts are spread over programs. With few rows every
part has a program of its own and a second launch combines them. With many, one program walks all parts, and keeps the
sum so far in memory: together with a part's it would not fit the registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.gpu.gemm import dot, is_hip
from skipstone.kernels.gpu.partial_sums import LOG2_E, LOWEST, ONES, Parts, combine, combine_parts, empty_parts

PART = 512
KEYS = 64  # tokens of a tile
VALUE_CHUNK = 128  # values are summed by chunks, as one tile of all would need room twice
WHOLE_GRID = 200  # programs that keep an H200 busy without spreading parts


class LatentTiles(NamedTuple):
    """Heads of a program, and how its kernel is compiled. No bit of a result depends on it."""

    heads: int
    warps: int
    stages: int


def latent_tiles(rows: int, heads: int, dtype: torch.dtype, hip: bool) -> LatentTiles:
    """How `rows` rows of `heads` heads are cut."""
    if hip or dtype == torch.float32:
        return LatentTiles(16, 4, 1)
    if heads <= 16 or rows * heads <= 512:
        return LatentTiles(16, 4, 2)
    return LatentTiles(32, 4, 2)


@triton.jit(do_not_specialize=["rows_per_request", "table_stride"])
def _attend_kernel(
    q_ptr,  # [T, HEADS, WIDTH]
    cache_ptr,  # [num_blocks, 1, BLOCK_SIZE, WIDTH]
    indices_ptr,  # [T, 1, BUDGET] int32, then PAD
    table_ptr,  # [R, blocks]
    out_ptr,  # [T, HEADS, VALUES]; not written when SPLIT
    m_ptr,  # [T, HEADS, PARTS] float32 when SPLIT; [T, HEADS], the parts so far, when not
    l_ptr,  # as m_i
    acc_ptr,  # [T, HEADS, PARTS, VALUES] or [T, HEADS, VALUES] float32
    counts_ptr,  # [T] int32 selected tokens; written when SPLIT
    q_row_stride,
    q_head_stride,
    indices_stride,
    table_stride,
    rows_per_request,
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
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(2).to(tl.int64)
    table_ptr += row // rows_per_request * table_stride
    indices_ptr += row * indices_stride
    places = tl.arange(0, BLOCK_BUDGET)
    chosen = tl.load(indices_ptr + places, mask=places < BUDGET, other=-1)
    count = tl.sum((chosen >= 0).to(tl.int32), axis=0)
    if SPLIT:
        tl.store(counts_ptr + row, count)

    dim = tl.arange(0, CHUNK)
    rest = VALUES + tl.arange(0, BLOCK_REST)
    inside = (head < HEADS)[:, None]
    q_ptrs = q_ptr + row * q_row_stride + head[:, None] * q_head_stride
    q_rest = tl.load(q_ptrs + rest[None, :], mask=inside & (rest < WIDTH)[None, :], other=0.0)
    q = ()
    for c in tl.static_range(CHUNKS):
        in_value = (c * CHUNK + dim < VALUES)[None, :]
        q = q + (tl.load(q_ptrs + c * CHUNK + dim[None, :], mask=inside & in_value, other=0.0),)  # noqa: RUF005
    ones = tl.full([BLOCK_N, ONES], 1.0, tl.float32).to(q_rest.dtype)
    first_part = tl.program_id(1)
    end_part = first_part + 1
    if not SPLIT:
        end_part = tl.maximum(tl.cdiv(count, PART), 1)
    for part in range(first_part, end_part):
        m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M, ONES], tl.float32)
        acc = ()
        for _ in tl.static_range(CHUNKS):
            acc = acc + (tl.zeros([BLOCK_M, CHUNK], tl.float32),)  # noqa: RUF005
        end = tl.minimum(part * PART + PART, count)
        for start in range(part * PART, end, BLOCK_N):
            # Places past the last token read that one again, and hide it.
            entry = start + tl.arange(0, BLOCK_N)
            token = tl.load(indices_ptr + tl.minimum(entry, count - 1))
            block = tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)
            latent_ptrs = cache_ptr + (block * BLOCK_SIZE + token % BLOCK_SIZE)[:, None] * WIDTH
            k_rest = tl.load(latent_ptrs + rest[None, :], mask=(rest < WIDTH)[None, :], other=0.0)
            scores = dot(q_rest, tl.trans(k_rest), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            latent = ()
            for c in tl.static_range(CHUNKS):
                in_value = (c * CHUNK + dim < VALUES)[None, :]
                k = tl.load(latent_ptrs + c * CHUNK + dim[None, :], mask=in_value, other=0.0)
                scores = dot(q[c], tl.trans(k), scores)
                latent = latent + (k,)  # noqa: RUF005
            scores = tl.where((entry < count)[None, :], scores, float("-inf"))
            new_m = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
            weights = tl.exp2(tl.fma(scores, scale, -new_m[:, None])).to(q_rest.dtype)
            keep = tl.exp2(m_i - new_m)[:, None]
            m_i = new_m
            l_i = dot(weights, ones, l_i * keep)
            next_acc = ()
            for c in tl.static_range(CHUNKS):
                next_acc = next_acc + (dot(weights, latent[c], acc[c] * keep),)  # noqa: RUF005
            acc = next_acc

        place = row * HEADS + head
        if SPLIT:
            place = place * PARTS + part
        sums = tl.max(l_i, axis=1)[:, None]
        old_peak = m_i
        old_sums = sums
        if PARTS > 1 and not SPLIT and part > 0:
            old_peak = tl.load(m_ptr + place, mask=head < HEADS, other=0.0)
            old_sums = tl.load(l_ptr + place, mask=head < HEADS, other=0.0)[:, None]
        new_m = m_i
        next_sums = sums
        for c in tl.static_range(CHUNKS):
            value = c * CHUNK + dim
            mask = inside & (value < VALUES)[None, :]
            values = acc[c]
            acc_ptrs = acc_ptr + place[:, None] * VALUES + value[None, :]
            if PARTS > 1 and not SPLIT and part > 0:
                old = tl.load(acc_ptrs, mask=mask, other=0.0)
                new_m, next_sums, values = combine(old_peak, old_sums, old, m_i, sums, values)
            if SPLIT or (PARTS > 1 and part < end_part - 1):
                tl.store(acc_ptrs, values, mask=mask)
            else:
                out = tl.where(next_sums > 0, values / next_sums, 0.0).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + place[:, None] * VALUES + value[None, :], out, mask=mask)
        if SPLIT or (PARTS > 1 and part < end_part - 1):
            tl.store(m_ptr + place, new_m, mask=head < HEADS)
            tl.store(l_ptr + place, tl.max(next_sums, axis=1), mask=head < HEADS)
            tl.debug_barrier()  # other threads of this program may load what this one stored


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
    cut = latent_tiles(rows, heads, q.dtype, is_hip())
    head_tiles = triton.cdiv(heads, cut.heads)
    split = budget > PART and rows * head_tiles < WHOLE_GRID
    part = PART if exact or split else budget
    most = triton.cdiv(budget, part)
    parts, counts = Parts(out, out, out), out
    if most > 1:
        parts = empty_parts(rows, heads, most if split else 1, value_width, q.device)
        counts = torch.empty(rows, dtype=torch.int32, device=q.device)
    chunk = min(max(triton.next_power_of_2(value_width), 16), VALUE_CHUNK)
    _attend_kernel[(head_tiles, most if split else 1, rows)](
        q, latent_cache, indices, span.block_table, out, *parts, counts, *q.stride()[:2], indices.stride(0),
        span.block_table.stride(0), span.positions.shape[1], scale * LOG2_E, HEADS=heads, WIDTH=width,
        VALUES=value_width, BUDGET=budget, BLOCK_SIZE=latent_cache.shape[2], BLOCK_M=cut.heads, BLOCK_N=KEYS,
        BLOCK_BUDGET=triton.next_power_of_2(budget), CHUNK=chunk, CHUNKS=triton.cdiv(value_width, chunk),
        BLOCK_REST=max(triton.next_power_of_2(width - value_width), 16), PART=part, PARTS=most, SPLIT=split,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if split:
        combine_parts(parts, counts, 0, part, out)
    return out
