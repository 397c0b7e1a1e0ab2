"""Matrix products of many rows by a persistent kernel, with tiles loaded by TMA.

For NVIDIA GPUs from Hopper on. Sums over K go in the order of `gemm`, segment by segment, so the bits are the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from skipstone.kernels.gpu.descriptors import Tiles, capability, describable, multiprocessors, place_of
from skipstone.kernels.gpu.dot import dot

GROUP = 8
ROWS = 2048  # from which on this pays: a launch takes longer, and few rows have too few tiles
WIDEST = 256


def tiles_of(splits: int) -> Tiles:
    """For sums of `splits` segments: registers hold a tile of 256 columns, but not beside the sums that waited."""
    return Tiles(128, WIDEST, 64, 8, 3) if splits == 1 else Tiles(128, WIDEST // 2, 64, 8, 4)


@triton.jit(do_not_specialize=["rows"])
def _persistent_kernel(
    x_rows,  # descriptor of x [rows, K]
    w_rows,  # descriptor of the weight [K, N]
    out_ptr,  # [rows, N]
    scratch_ptr,  # [programs, BLOCK_M, BLOCK_N] float32, where there are several segments
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program takes every so many-th tile. Sums of a tile's earlier segments wait in memory, not in registers."""
    m_tiles, n_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    cells = scratch_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N) + m[:, None] * BLOCK_N + n[None, :]
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=SPLITS == 1):
        row_tile, column = place_of(tile, m_tiles, n_tiles, GROUP)
        for split in tl.static_range(SPLITS):
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(split * SEGMENT, min((split + 1) * SEGMENT, K), BLOCK_K):
                x = x_rows.load([row_tile * BLOCK_M, k])
                w = w_rows.load([k, column * BLOCK_N])
                acc = dot(x, w, acc)
            if split > 0:
                acc += tl.load(cells)
            if split + 1 < SPLITS:
                tl.store(cells, acc)
            else:
                row = row_tile * BLOCK_M + m
                mask = (row < rows)[:, None] & (column * BLOCK_N + n < N)[None, :]
                out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + (column * BLOCK_N + n)[None, :]
                tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
            if SPLITS > 1:
                tl.debug_barrier()  # a cell need not be read by the thread that wrote it


def product_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` takes x [rows, K] and weight [K, N], and pays."""
    same = x.dtype == weight.dtype and capability() >= 90 and x.shape[0] >= ROWS and weight.shape[1] >= WIDEST
    return same and describable(x) and describable(weight)


def product(x: Tensor, weight: Tensor, segment: int, splits: int, tiles: Tiles | None = None) -> Tensor:
    """x [rows, K] times weight [K, N]: [rows, N], the sums over `splits` segments of K added in ascending order."""
    (rows, k), n = x.shape, weight.shape[1]
    tiles = tiles or tiles_of(splits)
    out = torch.empty(rows, n, dtype=weight.dtype, device=x.device)
    programs = min(multiprocessors(x.device), triton.cdiv(rows, tiles.m) * triton.cdiv(n, tiles.n))
    scratch = torch.empty(programs * (splits > 1), tiles.m, tiles.n, dtype=torch.float32, device=x.device)
    _persistent_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiles.m, tiles.k]), TensorDescriptor.from_tensor(weight, [tiles.k, tiles.n]),
        out, scratch, rows, N=n, K=k, SPLITS=splits, SEGMENT=segment, BLOCK_M=tiles.m, BLOCK_N=tiles.n,
        BLOCK_K=tiles.k, GROUP=GROUP, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
