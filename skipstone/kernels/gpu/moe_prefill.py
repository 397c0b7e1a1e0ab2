"""Mixture of experts for many rows: (row, slot) pairs sorted by expert, products over tiles of one expert's rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.kernels.gpu import moe_persistent
from skipstone.kernels.gpu.descriptors import Tiles
from skipstone.kernels.gpu.gemm import compile_options, dot, is_hip
from skipstone.kernels.gpu.moe_tiles import combine, gate, gate_up_columns
from skipstone.kernels.reference.pointwise import GatedActivation

GROUP = 8  # row tiles that run side by side and share columns of a weight through the L2


def up_tiles(dtype: torch.dtype, hip: bool) -> Tiles:
    """Rows, and columns of the gate (and as many of the up) projection, per program."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2)
    return Tiles(128, 64, 64, 4, 2) if hip else Tiles(128, 128, 64, 8, 4)


def down_tiles(dtype: torch.dtype, hip: bool) -> Tiles:
    """Rows and columns per program."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2)
    return Tiles(128, 128, 64, 4, 2) if hip else Tiles(128, 256, 64, 8, 4)


@triton.jit
def _tile(
    start_ptr,
    EXPERTS: tl.constexpr,
    N_TILES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """This program's expert, BLOCK_M places in the sorted order, which of them are the expert's, and column tile."""
    group = tl.program_id(0) // (GROUP * N_TILES)
    in_group = tl.program_id(0) % (GROUP * N_TILES)
    tile = group * GROUP + in_group % GROUP
    bins = tl.arange(0, BLOCK_E)
    starts = tl.load(start_ptr + bins, mask=bins < EXPERTS, other=0).to(tl.int32)
    ends = tl.load(start_ptr + bins + 1, mask=bins < EXPERTS, other=0).to(tl.int32)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, axis=0)  # the first tile of the next expert
    is_it = (last > tile) & (last - tiles <= tile)
    expert = tl.sum(tl.where(is_it, bins, 0), axis=0)
    first = tl.sum(tl.where(is_it, starts + (tile - (last - tiles)) * BLOCK_M, 0), axis=0)
    end = tl.sum(tl.where(is_it, ends, 0), axis=0)
    place = first + tl.arange(0, BLOCK_M)
    return expert.to(tl.int64), place, place < end, end > first, in_group // GROUP


@triton.jit
def _up_kernel(
    x_ptr,  # [T, K]
    order_ptr,  # [pairs] (row, slot) pairs by expert
    start_ptr,  # [EXPERTS + 1] where each expert's pairs begin in the order
    weight_ptr,  # [EXPERTS, K, 2N] = [gate | up]
    inner_ptr,  # [pairs, N], sorted
    x_stride,
    w_stride_e,
    w_stride_k,
    w_stride_n,
    alpha,
    limit,
    shift,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program per (tile of an expert's rows, column tile)."""
    expert, place, row_mask, any_rows, column = _tile(
        start_ptr, EXPERTS, (N + BLOCK_N - 1) // BLOCK_N, BLOCK_E, BLOCK_M, GROUP
    )
    if any_rows:
        columns, column_mask = gate_up_columns(column, N, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        row = tl.load(order_ptr + place, mask=row_mask, other=0) // TOP_K
        x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        w_ptrs = weight_ptr + expert * w_stride_e + k.to(tl.int64)[:, None] * w_stride_k + columns[None, :] * w_stride_n
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for block in range((K + BLOCK_K - 1) // BLOCK_K):
            if EVEN:  # rows that are not the expert's hold another row's sums, and are not stored
                x = tl.load(x_ptrs)
                w = tl.load(w_ptrs)
            else:
                k_mask = block * BLOCK_K + k < K
                x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
            acc = dot(x.to(w.dtype), w, acc)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * w_stride_k
        rounded = acc.to(inner_ptr.dtype.element_ty).to(tl.float32)
        gates, ups = tl.split(tl.permute(tl.reshape(rounded, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        inner = gate(gates, ups, alpha, limit, shift)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inner_ptrs = inner_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=row_mask[:, None] & (n < N)[None, :])


@triton.jit
def _down_kernel(
    inner_ptr,  # [pairs, K], sorted
    order_ptr,  # [pairs]
    start_ptr,  # [EXPERTS + 1]
    weight_ptr,  # [EXPERTS, K, N]
    partial_ptr,  # [pairs, N], in (row, slot) order
    w_stride_e,
    w_stride_k,
    w_stride_n,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As `_up_kernel`."""
    expert, place, row_mask, any_rows, column = _tile(
        start_ptr, EXPERTS, (N + BLOCK_N - 1) // BLOCK_N, BLOCK_E, BLOCK_M, GROUP
    )
    if any_rows:
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n < N
        k = tl.arange(0, BLOCK_K)
        x_ptrs = inner_ptr + tl.where(row_mask, place, 0).to(tl.int64)[:, None] * K + k[None, :]
        w_ptrs = weight_ptr + expert * w_stride_e + k.to(tl.int64)[:, None] * w_stride_k + n[None, :] * w_stride_n
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range((K + BLOCK_K - 1) // BLOCK_K):
            if EVEN:
                x = tl.load(x_ptrs)
                w = tl.load(w_ptrs)
            else:
                k_mask = block * BLOCK_K + k < K
                x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
            acc = dot(x, w, acc)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * w_stride_k
        pair = tl.load(order_ptr + place, mask=row_mask, other=0).to(tl.int64)
        partial_ptrs = partial_ptr + pair[:, None] * N + n[None, :]
        tl.store(partial_ptrs, acc.to(partial_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _invert_kernel(order_ptr, place_ptr, pairs, BLOCK: tl.constexpr):
    """place[order[i]] = i."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order_ptr + at, mask=at < pairs, other=0)
    tl.store(place_ptr + pair, at, mask=at < pairs)


@triton.jit
def _spread_kernel(
    x_ptr,  # [T, WIDTH]
    place_ptr,  # [T * TOP_K]
    sorted_ptr,  # [T * TOP_K, WIDTH] out
    x_stride,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy each row to the places of its pairs. One program per row, so that a row is read once."""
    row = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, WIDTH, BLOCK):
        dim = start + tl.arange(0, BLOCK)
        values = tl.load(x_ptr + row * x_stride + dim, mask=dim < WIDTH)
        for slot in tl.static_range(TOP_K):
            place = tl.load(place_ptr + row * TOP_K + slot).to(tl.int64)
            tl.store(sorted_ptr + place * WIDTH + dim, values, mask=dim < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    partial_ptr,
    place_ptr,
    weights_ptr,
    out_ptr,
    rows,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SORTED: tl.constexpr,
):
    """One program per (row tile, column tile)."""
    first = tl.program_id(0) * BLOCK_M
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    combine(partial_ptr, place_ptr, weights_ptr, out_ptr, first, rows, n, n < N, TOP_K, N, BLOCK_M, BLOCK_N, 1, SORTED)


def _combine(partial: Tensor, place: Tensor | None, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Weighted sums [T, N] of partial [pairs, N], in (row, slot) order or at the places given."""
    (rows, top_k), n = weights.shape, partial.shape[1]
    out = torch.empty(rows, n, dtype=out_dtype, device=partial.device)
    _combine_kernel[(triton.cdiv(rows, 4), triton.cdiv(n, 1024))](
        partial, partial if place is None else place, weights, out, rows,
        TOP_K=top_k, N=n, BLOCK_M=4, BLOCK_N=1024, SORTED=place is not None, num_warps=8,
    )  # fmt: skip
    return out


def _by_expert(experts: Tensor, stored: int) -> tuple[Tensor, Tensor]:
    """(row, slot) pairs by expert [pairs], and where each expert's pairs begin [stored + 1] int32. No host sync."""
    by_expert, order = experts.flatten().to(torch.int32).sort(stable=True)
    bounds = torch.arange(stored + 1, dtype=torch.int32, device=experts.device)
    return order, torch.searchsorted(by_expert, bounds, out_int32=True)


def _sorted_rows(x: Tensor, order: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Each pair's row of x, in the order given [pairs, H], and where each pair stands in it [pairs] int32."""
    pairs, hidden = order.shape[0], x.shape[1]
    x_sorted = x.new_empty(pairs, hidden)
    place = torch.empty(pairs, dtype=torch.int32, device=x.device)
    _invert_kernel[(triton.cdiv(pairs, 512),)](order, place, pairs, BLOCK=512)
    _spread_kernel[(x.shape[0],)](x, place, x_sorted, x.stride(0), TOP_K=top_k, WIDTH=hidden, BLOCK=2048)
    return x_sorted, place


def _triton_parts(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation) -> Tensor:
    """Every pair's result in (row, slot) order. The kernels launch as many programs as could be needed."""
    hidden, (stored, inner_size), top_k, hip = x.shape[1], down.shape[:2], experts.shape[1], is_hip()
    order, starts = _by_expert(experts, stored)
    pairs = order.shape[0]
    inner = torch.empty(pairs, inner_size, dtype=gate_up.dtype, device=x.device)
    partial = torch.empty(pairs, hidden, dtype=gate_up.dtype, device=x.device)
    common = {"EXPERTS": stored, "BLOCK_E": triton.next_power_of_2(stored), "GROUP": GROUP, **compile_options(hip)}

    def launch(tiles: Tiles, k: int, n: int) -> tuple[tuple[int], dict[str, int]]:
        row_tiles = triton.cdiv(pairs, tiles.m) + min(stored, pairs)
        even = k % tiles.k == 0 and n % tiles.n == 0
        options = {"K": k, "N": n, "BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "EVEN": even}
        options |= {"num_warps": tiles.warps, "num_stages": tiles.stages, **common}
        return (triton.cdiv(row_tiles, GROUP) * GROUP * triton.cdiv(n, tiles.n),), options

    grid, options = launch(up_tiles(gate_up.dtype, hip), hidden, inner_size)
    _up_kernel[grid](
        x, order, starts, gate_up, inner, x.stride(0), *gate_up.stride(), *activation, TOP_K=top_k, **options
    )
    grid, options = launch(down_tiles(down.dtype, hip), inner_size, hidden)
    _down_kernel[grid](inner, order, starts, down, partial, *down.stride(), **options)
    return partial


def experts_prefill(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: GatedActivation,
    exact: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """`moe.experts_forward` for many rows. Exact and free form are the same kernels."""
    if moe_persistent.products_fit(x, gate_up, down):
        order, starts = _by_expert(experts, down.shape[0])
        x_sorted, place = _sorted_rows(x, order, experts.shape[1])
        return _combine(moe_persistent.products(x_sorted, starts, gate_up, down, activation), place, weights, out_dtype)
    return _combine(_triton_parts(x, experts, gate_up, down, activation), None, weights, out_dtype)
