"""Mixture of experts for many rows: (row, slot) pairs sorted by expert, products over tiles of one expert's rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from skipstone.kernels.gemm import compile_options, dot, is_hip
from skipstone.kernels.moe_tiles import combine, gate
from skipstone.kernels.reference.pointwise import GatedActivation

GROUP = 8  # row tiles that run side by side and share columns of a weight through the L2


class Tiles(NamedTuple):
    """Tiles of one of the two products."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def up_tiles(dtype: torch.dtype, exact: bool, hip: bool) -> Tiles:
    """Rows, and columns of the gate (and as many of the up) projection, per program."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2)
    if exact:
        return Tiles(32, 64, 64, 4, 2 if hip else 4)
    return Tiles(128, 64, 64, 4, 2) if hip else Tiles(128, 128, 64, 8, 3)


def down_tiles(dtype: torch.dtype, exact: bool, hip: bool) -> Tiles:
    """Rows and columns per program."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2)
    if exact:
        return Tiles(32, 128, 64, 4, 2 if hip else 4)
    return Tiles(128, 128, 64, 4, 2) if hip else Tiles(128, 256, 64, 8, 3)


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


@triton.jit(do_not_specialize=["x_stride"])
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
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n < N
        k = tl.arange(0, BLOCK_K)
        row = tl.load(order_ptr + place, mask=row_mask, other=0) // TOP_K
        x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        gate_ptrs = weight_ptr + expert * w_stride_e + k.to(tl.int64)[:, None] * w_stride_k + n[None, :] * w_stride_n
        up_offset = N * w_stride_n
        gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range((K + BLOCK_K - 1) // BLOCK_K):
            if EVEN:  # rows that are not the expert's hold another row's sums, and are not stored
                x = tl.load(x_ptrs)
                w_gate = tl.load(gate_ptrs)
                w_up = tl.load(gate_ptrs + up_offset)
            else:
                k_mask = block * BLOCK_K + k < K
                x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
                w_gate = tl.load(gate_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
                w_up = tl.load(gate_ptrs + up_offset, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
            x = x.to(w_gate.dtype)
            gates = dot(x, w_gate, gates)
            ups = dot(x, w_up, ups)
            x_ptrs += BLOCK_K
            gate_ptrs += BLOCK_K * w_stride_k
        inner = gate(gates, ups, alpha, limit, shift)
        inner_ptrs = inner_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


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


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    partial_ptr,
    weights_ptr,
    out_ptr,
    rows,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    combine(
        partial_ptr, weights_ptr, out_ptr, tl.program_id(0) * BLOCK_M, rows, n, n < N, TOP_K, N, BLOCK_M, BLOCK_N, 1
    )


def _starts(experts: Tensor, stored: int) -> tuple[Tensor, Tensor]:
    """(row, slot) pairs by expert [pairs], and where each expert's pairs begin [stored + 1]. No host sync."""
    by_expert, order = experts.flatten().to(torch.int32).sort(stable=True)
    bounds = torch.arange(stored + 1, dtype=torch.int32, device=experts.device)
    return order, torch.searchsorted(by_expert, bounds, out_int32=True)


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
    """`moe.experts_forward` for many rows. Its own kernels launch as many programs as rows could need tiles."""
    (rows, hidden), (stored, inner_size), hip = x.shape, down.shape[:2], is_hip()
    top_k = experts.shape[1]
    pairs = rows * top_k
    order, starts = _starts(experts, stored)
    inner = torch.empty(pairs, inner_size, dtype=gate_up.dtype, device=x.device)
    partial = torch.empty(pairs, hidden, dtype=gate_up.dtype, device=x.device)
    out = torch.empty(rows, hidden, dtype=out_dtype, device=x.device)
    common = {"EXPERTS": stored, "BLOCK_E": triton.next_power_of_2(stored), "GROUP": GROUP, **compile_options(hip)}

    def launch(tiles: Tiles, k: int, n: int) -> tuple[tuple[int], dict[str, int]]:
        block_m = 16 if exact and knobs.runtime.interpret else tiles.m
        row_tiles = triton.cdiv(pairs, block_m) + min(stored, pairs)
        even = k % tiles.k == 0 and n % tiles.n == 0
        options = {"K": k, "N": n, "BLOCK_M": block_m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "EVEN": even}
        options |= {"num_warps": tiles.warps, "num_stages": tiles.stages, **common}
        return (triton.cdiv(row_tiles, GROUP) * GROUP * triton.cdiv(n, tiles.n),), options

    grid, options = launch(up_tiles(gate_up.dtype, exact, hip), hidden, inner_size)
    _up_kernel[grid](
        x, order, starts, gate_up, inner, x.stride(0), *gate_up.stride(), *activation, TOP_K=top_k, **options
    )
    grid, options = launch(down_tiles(down.dtype, exact, hip), inner_size, hidden)
    _down_kernel[grid](inner, order, starts, down, partial, *down.stride(), **options)
    _combine_kernel[(triton.cdiv(rows, 4), triton.cdiv(hidden, 1024))](
        partial, weights, out, rows, TOP_K=top_k, N=hidden, BLOCK_M=4, BLOCK_N=1024, num_warps=8
    )
    return out
