"""Causal grouped-query attention over paged caches in Triton, for one row, a few rows to verify, or a prompt's chunk.

Keys are cut into parts of equal size, counted from the start of the request. Every part is reduced from scratch, and
parts are combined first to last, so a row's bits depend neither on how parts are spread over programs, nor on the rows
that share its tile, nor on the longest sequence of the step. With few rows the parts of one row run on several programs
that leave partial results for a second launch; with many, one program walks all parts and combines them in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from skipstone.core.batch import Span
from skipstone.kernels.gpu.descriptors import capability, describable
from skipstone.kernels.gpu.gemm import compile_options, dot, is_hip
from skipstone.kernels.gpu.partial_sums import LOG2_E, LOWEST, ONES, Parts, combine, combine_parts, empty_parts

SPLIT_ROWS = 8  # rows per request up to which parts may be spread over programs
WHOLE_GRID = 128  # programs that keep an H200 busy without spreading parts
SPLIT_GRID = 1024  # programs to aim for otherwise: many, as a device that is out of step waits for the last of them
MOST_SCRATCH = 1 << 28  # bytes of partial results beyond which parts are not spread


class DenseTiles(NamedTuple):
    """How a call is cut. No bit of a result depends on `m`, `warps` and `stages`."""

    m: int  # query rows times heads of a group
    keys: int  # of a part
    warps: int
    stages: int


def dense_tiles(rows: int, dtype: torch.dtype, hip: bool) -> DenseTiles:
    """`rows`: query rows times heads of a group that share keys. `keys` depends on the target and the dtype alone."""
    if dtype == torch.float32:
        return DenseTiles(16, 64, 4, 1)
    m = min(max(triton.next_power_of_2(rows), 16), 64 if hip else 128)
    if hip:
        return DenseTiles(m, 64, 4, 2)
    return DenseTiles(m, 128, 8 if m == 128 else 4, 3)


@triton.jit
def _reduce(q, k, v, ones, limit, key, scale, MASKED: tl.constexpr):
    """Maximum, sum of weights and weighted values of one part; keys past `limit` are hidden if MASKED."""
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if MASKED:
        scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
    # The maximum also keeps the compiler from fusing this product into the differences that `combine` takes.
    m_i = tl.maximum(tl.max(scores, axis=1) * scale, LOWEST)
    weights = tl.exp2(tl.fma(scores, scale, -m_i[:, None])).to(v.dtype)
    l_i = dot(weights, ones, tl.zeros([q.shape[0], ones.shape[1]], tl.float32))
    return m_i, l_i, dot(weights, v, tl.zeros(q.shape, tl.float32))


@triton.jit(do_not_specialize=["rows_per_request", "table_stride", "parts", "splits"])
def _attend_kernel(
    q_ptr,  # [R * n, KV_HEADS * GROUP, D]
    k_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE, D]
    v_ptr,  # as k
    k_rows,  # the caches as descriptors of [rows, D] with DESCRIPTORS, which take whole parts of a block
    v_rows,
    positions_ptr,  # [R, n]
    table_ptr,  # [R, blocks]
    out_ptr,  # [R * n, KV_HEADS * GROUP, D]; SPLIT: partial outputs [R * n, KV_HEADS * GROUP, parts, D] float32
    part_m_ptr,  # [R * n, KV_HEADS * GROUP, parts] float32
    part_l_ptr,  # as part_m
    q_row_stride,
    q_head_stride,
    table_stride,
    rows_per_request,
    parts,
    splits,
    scale,  # of scores as powers of two
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
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

    ones = tl.full([BLOCK_N, ONES], 1.0, tl.float32).to(q.dtype)
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M, ONES], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = split
    if DESCRIPTORS:  # parts that every row of the tile sees to their end
        whole = (tl.min(tl.where(inside, position, 2147483647), axis=0) + 1) // BLOCK_N
        for part in range(whole):
            block = tl.load(table_ptr + request * table_stride + part * BLOCK_N // BLOCK_SIZE).to(tl.int32)
            place = (block * KV_HEADS + kv_head) * BLOCK_SIZE + part * BLOCK_N % BLOCK_SIZE
            k = k_rows.load([place, 0])
            v = v_rows.load([place, 0])
            part_m, part_l, part_acc = _reduce(q, k, v, ones, position, position, scale, False)
            m_i, l_i, acc = combine(m_i, l_i, acc, part_m, part_l, part_acc)
    for part in range(whole, tl.cdiv(length, BLOCK_N), splits):
        start = part * BLOCK_N
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
            slot = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * D
            k_ptrs = k_ptr + slot[:, None] + dim[None, :]
            v_ptrs = v_ptr + slot[:, None] + dim[None, :]
        if BLOCK_D == D:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(dim < D)[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=(dim < D)[None, :], other=0.0)
        part_m, part_l, part_acc = _reduce(q, k, v, ones, position, key, scale, True)
        if SPLIT:
            place = (row * (KV_HEADS * GROUP) + head) * parts + part
            tl.store(out_ptr + place[:, None] * D + dim[None, :], part_acc, mask=in_row)
            tl.store(part_m_ptr + place, part_m, mask=inside)
            tl.store(part_l_ptr + place, tl.max(part_l, axis=1), mask=inside)
        else:
            m_i, l_i, acc = combine(m_i, l_i, acc, part_m, part_l, part_acc)
    if not SPLIT:
        divisor = tl.max(l_i, axis=1)[:, None]
        out = tl.where(divisor > 0, acc / divisor, 0.0)
        place_out = (row * (KV_HEADS * GROUP) + head)[:, None] * D + dim[None, :]
        tl.store(out_ptr + place_out, out.to(out_ptr.dtype.element_ty), mask=in_row)


def dense_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, scale: float, exact: bool) -> Tensor:
    """Causal attention of each row over all keys of its request up to its own position.

    q [R * n, H, D] for the R requests of `span`; caches [num_blocks, Hkv, block_size, D]. Returns [R * n, H, D]; rows
    at position -1 are padding and give zeros. Always exact: no way that is not was found to be faster.
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
    hip = is_hip()
    # Spread parts are stored in float32, by way of shared memory that the tallest tile leaves no room for.
    cut = dense_tiles(min(n * group, 64) if n <= SPLIT_ROWS else n * group, q.dtype, hip)
    row_tiles = triton.cdiv(n * group, cut.m)
    programs = requests * kv_heads * row_tiles
    most = triton.cdiv(table.shape[1] * block_size, cut.keys)
    splits = 1
    if n <= SPLIT_ROWS and programs < WHOLE_GRID and out.numel() * most * 4 <= MOST_SCRATCH:
        splits = max(min(most, triton.cdiv(SPLIT_GRID, programs)), 1)
    parts = Parts(out, out, out)
    if splits > 1:
        parts = empty_parts(requests * n, heads, most, width, q.device)
    block_d = max(triton.next_power_of_2(width), 16)
    described = splits == 1 and n > SPLIT_ROWS and width == block_d and block_size % cut.keys == 0
    described = described and capability() >= 90 and describable(k_cache) and describable(v_cache)
    caches: tuple[Any, ...] = (k_cache, v_cache)
    if described:
        caches = tuple(TensorDescriptor.from_tensor(c.view(-1, width), [cut.keys, width]) for c in caches)
    _attend_kernel[(row_tiles * splits, kv_heads, requests)](
        q, k_cache, v_cache, *caches, positions, table, parts.acc, parts.m_i, parts.l_i, q.stride(0), q.stride(1),
        table.stride(0), n, most, splits, scale * LOG2_E, KV_HEADS=kv_heads, GROUP=group, D=width,
        BLOCK_SIZE=block_size, BLOCK_M=cut.m, BLOCK_N=cut.keys, BLOCK_D=block_d, SPLIT=splits > 1,
        DESCRIPTORS=described, num_warps=cut.warps, num_stages=cut.stages, **compile_options(hip),
    )  # fmt: skip
    if splits > 1:
        combine_parts(parts, positions, 1, cut.keys, out)
    return out
