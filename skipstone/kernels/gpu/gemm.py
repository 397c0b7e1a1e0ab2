"""Matrix products in Triton whose rows do not depend on how many other rows are in the call.

K is cut into segments that follow from the weight's shape alone. Up to DECODE_ROWS rows every segment has a program of
its own, and the last program of a tile adds the segments in ascending order; above, one program walks all segments of
its tile and adds them in the same order. So one row, k + 1 rows and a prompt's chunk get the same bits.

Products are computed transposed, weight^T x^T: the weight's columns fill the tall side of the matrix instruction, and
few rows its narrow side. On Hopper that is WGMMA at any number of rows; its sums have the same bits for every shape of
tile, and those of `mma.sync` as well (measured), so tiles may follow the number of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.kernels.gpu import gemm_persistent
from skipstone.kernels.gpu.dot import dot, is_hip

__all__ = ["bmm", "compile_options", "counters", "dot", "is_hip", "linear"]

DECODE_ROWS = 64  # up to here a product is bound by reading the weight
FREE_ROWS = 32  # up to here our own products are as fast as torch's (H200), and they cast x on the way
FREE_COLUMNS = 64  # and of a weight that x must be cast for, as a router's, at any number of rows
WHOLE = 96  # tiles of 64 columns from which on K is not cut
COUNTERS = 1 << 16
SPREAD = 1 << 24  # sums of segments up to which a float32 weight's segments are spread: it is narrow, its tiles few


class GemmTiles(NamedTuple):
    """How one weight shape is cut, and how its kernel is compiled."""

    n: int
    k: int
    splits: int
    warps: int
    stages: int


def decode_tiles(n: int, k: int, dtype: torch.dtype, hip: bool) -> GemmTiles:
    """The cut of a [K, N] weight. What decides bits (k * blocks per split) depends on n, k and dtype only.

    On an H200 one split serves from 96 tiles of columns on (otherwise two programs per processor), and matrices as
    wide as a vocabulary want the larger tile. A router is small and bound by latency, so it is cut as finely as pays.
    The fewer programs a processor has, the more stages each needs under way.
    """
    if dtype == torch.float32:
        block_n, block_k, programs, most, stages = 32, 32, 132, 32, 4
    elif n > 1 << 16 and not hip:
        block_n, block_k, programs, most, stages = 128, 128, 264, 1, 3
    else:
        columns = triton.cdiv(n, 64)
        whole = columns >= WHOLE and not hip
        stages = (8 if columns <= 132 else 6 if columns <= 264 else 4) if whole else 6
        block_n, block_k, programs, most = 64, 64, 264, 1 if whole else 8
    tiles, blocks = triton.cdiv(n, block_n), triton.cdiv(k, block_k)
    splits = max(1, min(programs // tiles, blocks // 4, most))
    splits = triton.cdiv(blocks, triton.cdiv(blocks, splits))  # no empty segment
    return GemmTiles(block_n, block_k, splits, 4, 2 if hip else stages)


def prefill_tiles(segment: int, dtype: torch.dtype, hip: bool) -> tuple[int, GemmTiles]:
    """Rows and columns per program for many rows, whose segments have `segment` values of K."""
    if dtype == torch.float32:
        return 64, GemmTiles(32, math.gcd(segment, 32), 1, 4, 2)
    return 128, GemmTiles(128, math.gcd(segment, 64), 1, 8, 2 if hip else 4)


def compile_options(hip: bool) -> dict[str, int]:
    """Options that pin the matrix instruction where the compiler would choose it by tile size."""
    return {"matrix_instr_nonkdim": 16} if hip else {}


@cache
def counters(device: torch.device) -> Tensor:
    """Zeroed counters, one per output tile of a call.

    Kernels set them back to zero, so no call needs a launch that clears them. Calls on one device must therefore not
    overlap: one compute stream.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _segment(
    x_ptrs,  # [BLOCK_M, BLOCK_K], at the segment's first tile
    w_ptrs,  # [BLOCK_K, BLOCK_N]
    row_mask,
    n_mask,
    first,
    x_stride_k,
    w_stride_k,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """weight^T x^T [BLOCK_N, BLOCK_M] over BLOCKS tiles of K from `first` on. `EVEN`: no tile reaches past K or N."""
    k = tl.arange(0, BLOCK_K)
    # Products of float32 run on the vector units, which read operands best as they are.
    WIDE: tl.constexpr = w_ptrs.dtype.element_ty == tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_N] if WIDE else [BLOCK_N, BLOCK_M], tl.float32)
    for block in range(BLOCKS):
        if EVEN:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            k_mask = (first + block) * BLOCK_K + k < K
            x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        x = x.to(w.dtype)
        acc = dot(x, w, acc) if WIDE else dot(tl.trans(w), tl.trans(x), acc)
        x_ptrs += BLOCK_K * x_stride_k
        w_ptrs += BLOCK_K * w_stride_k
    return tl.trans(acc) if WIDE else acc


@triton.jit(do_not_specialize=["rows"])
def _decode_kernel(
    x_ptr,  # [B, rows, K]
    w_ptr,  # [B, K, N]
    out_ptr,  # [B, rows, N]
    partial_ptr,  # [B, SPLITS, rows, N] float32
    counter_ptr,  # [tiles] int32, zero before and after
    rows,
    x_stride_b,
    x_stride_m,
    x_stride_k,
    w_stride_b,
    w_stride_k,
    w_stride_n,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One program per (row tile, column tile, batch and segment); neighbours share a weight tile through the L2."""
    batch = (tl.program_id(2) // SPLITS).to(tl.int64)
    split = tl.program_id(2) % SPLITS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, n_mask = m < rows, n < N
    first = split * PER_SPLIT
    k = (first * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    x_ptrs = x_ptr + batch * x_stride_b + m.to(tl.int64)[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_ptrs = w_ptr + batch * w_stride_b + k[:, None] * w_stride_k + n.to(tl.int64)[None, :] * w_stride_n
    acc = _segment(
        x_ptrs, w_ptrs, row_mask, n_mask, first, x_stride_k, w_stride_k,
        K, PER_SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
    )  # fmt: skip
    mask = n_mask[:, None] & row_mask[None, :]
    cells = m.to(tl.int64)[None, :] * N + n[:, None]
    out_ptrs = out_ptr + batch * rows * N + cells
    if SPLITS == 1:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partial_ptrs = partial_ptr + batch * SPLITS * rows * N + cells
        tl.store(partial_ptrs + split.to(tl.int64) * rows * N, acc, mask=mask)
        tile = (tl.program_id(2) // SPLITS * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
        tile += tl.program_id(0)
        tl.debug_barrier()  # all threads' stores come before the one thread's count
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for _ in tl.static_range(SPLITS):  # unrolled, so that all loads are under way at once
                # Past the L1, which may hold another use of this memory.
                total += tl.load(partial_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
                partial_ptrs += rows.to(tl.int64) * N
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(counter_ptr + tile, 0)


@triton.jit(do_not_specialize=["rows"])
def _prefill_kernel(
    x_ptr,  # [B, rows, K]
    w_ptr,  # [B, K, N]
    out_ptr,  # [B, rows, N]
    rows,
    x_stride_b,
    x_stride_m,
    x_stride_k,
    w_stride_b,
    w_stride_k,
    w_stride_n,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program per (row and column tile, batch), which adds its segments as `_decode_kernel` does.

    Tiles go in groups of GROUP row tiles, so that programs that run together share rows and columns through the L2.
    """
    batch = tl.program_id(1).to(tl.int64)
    m_tiles, n_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * n_tiles)
    group_rows = min(m_tiles - group * GROUP, GROUP)
    in_group = tl.program_id(0) % (GROUP * n_tiles)
    m = (group * GROUP + in_group % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (in_group // group_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, n_mask = m < rows, n < N
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + batch * x_stride_b + m.to(tl.int64)[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_ptrs = w_ptr + batch * w_stride_b + k[:, None] * w_stride_k + n.to(tl.int64)[None, :] * w_stride_n
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(SPLITS):
        first = split * PER_SPLIT
        skipped = tl.cast(first * BLOCK_K, tl.int64)
        acc = _segment(
            x_ptrs + skipped * x_stride_k, w_ptrs + skipped * w_stride_k, row_mask, n_mask,
            first, x_stride_k, w_stride_k, K, PER_SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip
        if SPLITS == 1:
            total = acc
        else:
            total += acc
    out_ptrs = out_ptr + batch * rows * N + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=n_mask[:, None] & row_mask[None, :])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, M, K] times weight [B, K, N] -> [B, M, N] in the weight's dtype, by our own kernels."""
    batch, rows, k = x.shape
    n = weight.shape[2]
    out = torch.empty(batch, rows, n, dtype=weight.dtype, device=x.device)
    if out.numel() == 0:
        return out
    hip = is_hip()
    tiles = decode_tiles(n, k, weight.dtype, hip)
    segment = triton.cdiv(triton.cdiv(k, tiles.k), tiles.splits) * tiles.k
    block_m = max(16, triton.next_power_of_2(rows))
    splits = tiles.splits
    if batch == 1 and gemm_persistent.product_fits(x[0], weight[0]):
        return gemm_persistent.product(x[0], weight[0], segment, tiles.splits)[None]
    narrow = weight.dtype == torch.float32 and splits > 1 and batch * rows * n * splits <= SPREAD
    few = rows <= DECODE_ROWS or narrow
    block_m = min(block_m, DECODE_ROWS)
    decode = few and batch * triton.cdiv(rows, block_m) * triton.cdiv(n, tiles.n) <= COUNTERS
    if decode and rows > DECODE_ROWS and not hip:
        tiles = tiles._replace(warps=2)  # of a router: each thread's tile is larger, and reads fewer operands
    if not decode:
        block_m, tiles = prefill_tiles(segment, weight.dtype, hip)
    sizes = (rows, *x.stride(), *weight.stride())
    shape = {"K": k, "N": n, "SPLITS": splits, "PER_SPLIT": triton.cdiv(segment, tiles.k), **compile_options(hip)}
    shape |= {"BLOCK_M": block_m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "num_warps": tiles.warps}
    shape |= {"EVEN": n % tiles.n == 0 and k == segment * splits, "num_stages": tiles.stages}
    row_tiles, columns = triton.cdiv(rows, block_m), triton.cdiv(n, tiles.n)
    if decode:
        partial = torch.empty(batch, splits if splits > 1 else 0, rows, n, dtype=torch.float32, device=x.device)
        grid = (row_tiles, columns, batch * splits)
        _decode_kernel[grid](x, weight, out, partial, counters(x.device), *sizes, **shape)
    else:
        _prefill_kernel[(row_tiles * columns, batch)](x, weight, out, *sizes, GROUP=8, **shape)
    return out


def linear(x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """x [T, K] times weight [K, N]: [T, N] in the weight's dtype. With `exact`, a row's bits do not depend on T."""
    cast = x.dtype != weight.dtype and weight.shape[1] <= FREE_COLUMNS
    if not exact and x.shape[0] > FREE_ROWS and not cast:
        return torch.mm(x.to(weight.dtype), weight)
    return _product(x[None], weight[None])[0]


def bmm(a: Tensor, b: Tensor, exact: bool) -> Tensor:
    """a [B, M, K] times b [B, K, N]: [B, M, N]. With `exact`, a row's bits do not depend on B or M."""
    if not exact:
        return torch.bmm(a, b)
    return _product(a, b)
