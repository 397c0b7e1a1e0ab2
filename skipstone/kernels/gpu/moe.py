"""Mixture of experts in Triton.

Few rows: two launches that read every touched expert's weights once. Many rows: (row, slot) pairs sorted by expert and
products over tiles of one expert's rows, see `moe_prefill`. The sums over K go in the same order in both, and a row's
experts are added in slot order, so a row's bits depend on nothing but the row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.kernels.gpu.gemm import DECODE_ROWS, compile_options, counters, dot, is_hip
from skipstone.kernels.gpu.moe_prefill import experts_prefill
from skipstone.kernels.gpu.moe_tiles import combine, gate, gate_up_columns
from skipstone.kernels.gpu.route import route
from skipstone.kernels.reference.pointwise import GatedActivation

__all__ = ["experts_forward", "route"]

CHUNK = 128  # pairs that a program looks through at once


class ExpertTiles(NamedTuple):
    """Tiles of one of the two products."""

    n: int
    k: int
    warps: int
    stages: int


def up_tiles(rows: int, dtype: torch.dtype, hip: bool) -> ExpertTiles:
    """Columns of the gate (and as many of the up) projection per program; K tile, which decides no bits."""
    if dtype == torch.float32:
        return ExpertTiles(32, 32, 4, 2)
    if hip:
        return ExpertTiles(64, 64, 4, 2)
    return ExpertTiles(64, 128, 4, 3) if rows <= 16 else ExpertTiles(64, 64, 4, 4)


def down_tiles(dtype: torch.dtype, hip: bool) -> ExpertTiles:
    """Columns per program; K tile."""
    if dtype == torch.float32:
        return ExpertTiles(32, 32, 4, 2)
    return ExpertTiles(128, 64, 4, 2 if hip else 6)


@triton.jit
def _pairs_of_expert(
    experts_ptr,  # [pairs]
    pairs,
    slot,
    first,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The slot-th of the touched experts, how many pairs it has, and its pairs number first..first+BLOCK_M-1.

    Count 0: fewer experts are touched. BLOCK_E > EXPERTS: the last bin takes what is no pair.
    """
    counts = tl.zeros([BLOCK_E], tl.int32)
    place = tl.arange(0, CHUNK)
    for chunk in range(CHUNKS):
        pair = chunk * CHUNK + place
        ids = tl.load(experts_ptr + pair, mask=pair < pairs, other=BLOCK_E - 1).to(tl.int32)
        counts += tl.histogram(ids, BLOCK_E)
    bins = tl.arange(0, BLOCK_E)
    touched = ((counts > 0) & (bins < EXPERTS)).to(tl.int32)
    is_it = (touched == 1) & (tl.cumsum(touched, axis=0) == slot + 1)
    expert = tl.sum(tl.where(is_it, bins, 0), axis=0)
    count = tl.sum(tl.where(is_it, counts, 0), axis=0)

    wanted = first + tl.arange(0, BLOCK_M)
    found = tl.zeros([BLOCK_M], tl.int32)
    before = 0
    for chunk in range(CHUNKS):
        pair = chunk * CHUNK + place
        ids = tl.load(experts_ptr + pair, mask=pair < pairs, other=BLOCK_E - 1).to(tl.int32)
        is_its = (ids == expert).to(tl.int32)
        rank = before + tl.cumsum(is_its, axis=0) - 1
        hits = (is_its == 1)[None, :] & (rank[None, :] == wanted[:, None])
        found += tl.sum(tl.where(hits, pair[None, :], 0), axis=1)
        before += tl.sum(is_its, axis=0)
    return expert.to(tl.int64), count, found, wanted < count


@triton.jit(do_not_specialize=["pairs"])
def _up_kernel(
    x_ptr,  # [T, K]
    experts_ptr,  # [pairs]
    weight_ptr,  # [EXPERTS, K, 2N] = [gate | up]
    inner_ptr,  # [pairs, N]
    pairs,
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
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One program per (tile of an expert's rows, column tile, touched expert); untouched ones exit at once."""
    expert, count, pair, row_mask = _pairs_of_expert(
        experts_ptr, pairs, tl.program_id(2), tl.program_id(0) * BLOCK_M, EXPERTS, BLOCK_E, BLOCK_M, CHUNK, CHUNKS
    )
    if tl.program_id(0) * BLOCK_M < count:
        columns, column_mask = gate_up_columns(tl.program_id(1), N, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
        w_ptrs = weight_ptr + expert * w_stride_e + k.to(tl.int64)[:, None] * w_stride_k + columns[None, :] * w_stride_n
        acc = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
        for block in range((K + BLOCK_K - 1) // BLOCK_K):
            if EVEN:
                x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
                w = tl.load(w_ptrs)
            else:
                k_mask = block * BLOCK_K + k < K
                x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
            acc = dot(tl.trans(w), tl.trans(x.to(w.dtype)), acc)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * w_stride_k
        rounded = acc.to(inner_ptr.dtype.element_ty).to(tl.float32)
        gates, ups = tl.split(tl.permute(tl.reshape(rounded, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
        inner = gate(gates, ups, alpha, limit, shift)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner_ptrs = inner_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=(n < N)[:, None] & row_mask[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    inner_ptr,  # [pairs, K]
    experts_ptr,  # [pairs]
    weights_ptr,  # [pairs] float32
    weight_ptr,  # [EXPERTS, K, N]
    partial_ptr,  # [pairs, N]
    out_ptr,  # [T, N]
    counter_ptr,  # [column tiles] int32, zero before and after
    pairs,
    w_stride_e,
    w_stride_k,
    w_stride_n,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """As `_up_kernel`. The last program of a column tile adds up every row's experts."""
    expert, count, pair, row_mask = _pairs_of_expert(
        experts_ptr, pairs, tl.program_id(2), tl.program_id(0) * BLOCK_M, EXPERTS, BLOCK_E, BLOCK_M, CHUNK, CHUNKS
    )
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    if tl.program_id(0) * BLOCK_M < count:
        k = tl.arange(0, BLOCK_K)
        x_ptrs = inner_ptr + pair.to(tl.int64)[:, None] * K + k[None, :]
        w_ptrs = weight_ptr + expert * w_stride_e + k.to(tl.int64)[:, None] * w_stride_k + n[None, :] * w_stride_n
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in range((K + BLOCK_K - 1) // BLOCK_K):
            if EVEN:
                x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
                w = tl.load(w_ptrs)
            else:
                k_mask = block * BLOCK_K + k < K
                x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
            acc = dot(tl.trans(w), tl.trans(x), acc)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * w_stride_k
        partial_ptrs = partial_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(partial_ptrs, acc.to(partial_ptr.dtype.element_ty), mask=n_mask[:, None] & row_mask[None, :])
    tl.debug_barrier()  # all threads' stores come before the one thread's count
    arrived = tl.atomic_add(counter_ptr + tl.program_id(1), 1, sem="acq_rel")
    if arrived == tl.num_programs(0) * tl.num_programs(2) - 1:
        rows = pairs // TOP_K
        combine(
            partial_ptr, partial_ptr, weights_ptr, out_ptr, 0, rows, n, n_mask, TOP_K, N, 16, BLOCK_N, ROW_TILES, False
        )
        tl.store(counter_ptr + tl.program_id(1), 0)


def _experts_decode(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: GatedActivation,
    out_dtype: torch.dtype,
) -> Tensor:
    """`experts_forward` for at most DECODE_ROWS rows."""
    (rows, hidden), (stored, inner_size), hip = x.shape, down.shape[:2], is_hip()
    top_k = experts.shape[1]
    pairs = rows * top_k
    inner = torch.empty(pairs, inner_size, dtype=gate_up.dtype, device=x.device)
    partial = torch.empty(pairs, hidden, dtype=gate_up.dtype, device=x.device)
    out = torch.empty(rows, hidden, dtype=out_dtype, device=x.device)
    block_m = max(16, triton.next_power_of_2(rows))
    chunk = min(CHUNK, max(16, triton.next_power_of_2(pairs)))
    common = {"TOP_K": top_k, "EXPERTS": stored, "BLOCK_E": triton.next_power_of_2(stored + 1), "BLOCK_M": block_m}
    common |= {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(triton.cdiv(pairs, chunk)), **compile_options(hip)}
    row_tiles, slots = triton.cdiv(rows, block_m), min(pairs, stored)
    tiles = up_tiles(rows, gate_up.dtype, hip)
    even = hidden % tiles.k == 0 and inner_size % tiles.n == 0
    _up_kernel[(row_tiles, triton.cdiv(inner_size, tiles.n), slots)](
        x, experts, gate_up, inner, pairs, x.stride(0), *gate_up.stride(), *activation,
        K=hidden, N=inner_size, BLOCK_N=tiles.n, BLOCK_K=tiles.k, EVEN=even,
        num_warps=tiles.warps, num_stages=tiles.stages, **common,
    )  # fmt: skip
    tiles = down_tiles(down.dtype, hip)
    even = inner_size % tiles.k == 0 and hidden % tiles.n == 0
    _down_kernel[(row_tiles, triton.cdiv(hidden, tiles.n), slots)](
        inner, experts, weights, down, partial, out, counters(x.device), pairs, *down.stride(),
        K=inner_size, N=hidden, ROW_TILES=block_m // 16, BLOCK_N=tiles.n, BLOCK_K=tiles.k, EVEN=even,
        num_warps=tiles.warps, num_stages=tiles.stages, **common,
    )  # fmt: skip
    return out


def experts_forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: GatedActivation,
    exact: bool,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weighted sum of each row's experts.

    x [T, H], experts [T, K] int32 or int64, weights [T, K] float32, gate_up [E, H, 2I], down [E, I, H]. Each
    expert's result is rounded to the weights' dtype, and the sum goes in float32. Returns [T, H] in `out_dtype`.
    """
    if x.shape[0] == 0:
        return torch.zeros(x.shape, dtype=out_dtype, device=x.device)
    experts, weights = experts.contiguous(), weights.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.shape[0] <= DECODE_ROWS:
        return _experts_decode(x, experts, weights, gate_up, down, activation, out_dtype)
    return experts_prefill(x, experts, weights, gate_up, down, activation, exact, out_dtype)
