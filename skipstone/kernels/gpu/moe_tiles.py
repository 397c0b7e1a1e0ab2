"""What the kernels for few and for many rows share: the activation and the weighted sum of a row's experts."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_up_columns(column, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a column tile's 2 * BLOCK_N columns are in [gate | up]: BLOCK_N gates, then their ups. And which exist."""
    place = tl.arange(0, 2 * BLOCK_N)
    n = column * BLOCK_N + place % BLOCK_N
    return (place // BLOCK_N) * N + n, n < N


@triton.jit
def gate(gates, ups, alpha, limit, shift):
    """`GatedActivation` of float32 gates and ups."""
    gates = tl.minimum(gates, limit)
    ups = tl.maximum(tl.minimum(ups, limit), -limit)
    return gates / (1.0 + tl.exp(-(gates * alpha))) * (ups + shift)


@triton.jit
def combine(
    partial_ptr,  # [rows * TOP_K, N]
    place_ptr,  # [rows * TOP_K] where a (row, slot) pair's part is, if SORTED
    weights_ptr,  # [rows * TOP_K] float32
    out_ptr,  # [rows, N]
    first,
    rows,
    n,
    n_mask,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Columns n of the weighted sums of ROW_TILES tiles of rows from `first` on, in slot order.

    A fused multiply-add is asked for, so that no compiler's choice decides the bits.
    """
    for tile in range(ROW_TILES):
        m = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = m < rows
        mask = row_mask[:, None] & n_mask[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for slot in range(TOP_K):
            pair = m.to(tl.int64) * TOP_K + slot
            weight = tl.load(weights_ptr + pair, mask=row_mask, other=0.0)
            if SORTED:
                pair = tl.load(place_ptr + pair, mask=row_mask, other=0).to(tl.int64)
            # Past the L1, which may hold another use of this memory.
            part = tl.load(partial_ptr + pair[:, None] * N + n[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            total = tl.fma(part.to(tl.float32), tl.broadcast_to(weight[:, None], [BLOCK_M, BLOCK_N]), total)
        tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
