"""Norms, rotary embedding, cache inserts and gated activations in Triton: what a decode step launches in every layer.

Every reduction runs over one row in one program of a width that depends on the row's own length only, so the bits of a
row do not depend on the other rows. Arithmetic is float32, cast once at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.errors import ShapeError
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import GatedActivation, Rotary

TILE = 1024  # elements that a program holds at once, unless one row is longer
MAX_STORES = 3
FULL_GRID = 4096  # programs beyond which each takes several rows, to load the gains once for all of them
ROWS_PER_PROGRAM = 4


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, HEADS, D]
    residual_ptr,  # as x; read when ADD
    gain_ptr,  # [HEADS or 1, D] float32
    total_ptr,  # [T, HEADS, D]; written when ADD
    out_ptr,  # [T, HEADS, D]
    row_stride,
    head_stride,
    residual_stride,
    gain_stride,
    added,  # eps * D
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < D)
    place = (row * HEADS + head) * D + dim
    gain = tl.load(gain_ptr + head * gain_stride + dim, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * row_stride + head * head_stride + dim, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + dim, mask=inside, other=0.0)
        rounded = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) + added)
    out = x * inverse[:, None] * gain
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    x_ptr,  # [T, HEADS, D]
    cos_ptr,  # [T, 1, D] float32
    sin_ptr,  # [T, 1, D] float32
    partner_ptr,  # [D]
    out_ptr,  # [T, HEADS, D]
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < D)
    partner = tl.load(partner_ptr + dim, mask=dim < D, other=0)
    cos = tl.load(cos_ptr + row * D + dim, mask=dim < D, other=0.0)
    sin = tl.load(sin_ptr + row * D + dim, mask=dim < D, other=0.0)
    start = x_ptr + row * row_stride + head * head_stride
    x = tl.load(start + dim, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + partner, mask=inside, other=0.0).to(tl.float32)
    out = x * cos + other * sin
    tl.store(out_ptr + (row * HEADS + head) * D + dim, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _put(
    values,  # [BLOCK_HEADS, BLOCK_D]
    cache_ptr,  # [num_blocks, COUNT, BLOCK_SIZE, D]
    block,
    offset,
    head,  # [BLOCK_HEADS, 1]
    dim,  # [1, BLOCK_D]
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
):
    place = ((block * COUNT + head - FIRST) * BLOCK_SIZE + offset) * D + dim
    mine = (head >= FIRST) & (head < FIRST + COUNT) & (dim < D)
    tl.store(cache_ptr + place, values.to(cache_ptr.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _norm_rotate_store_kernel(
    projected_ptr,  # [T, HEADS, D]
    gain_ptr,  # [NORMED, D] float32
    cos_ptr,  # [T, 1, D] float32
    sin_ptr,  # [T, 1, D] float32
    partner_ptr,  # [D]
    out_ptr,  # [T, NORMED, D]
    slot_block_ptr,  # [T]
    slot_offset_ptr,  # [T]
    cache_0_ptr,
    cache_1_ptr,
    cache_2_ptr,
    rows,
    rows_per_program,
    row_stride,
    head_stride,
    added,  # eps * D
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST_0: tl.constexpr,
    COUNT_0: tl.constexpr,
    FIRST_1: tl.constexpr,
    COUNT_1: tl.constexpr,
    FIRST_2: tl.constexpr,
    COUNT_2: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first_head = tl.program_id(1) * BLOCK_HEADS
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < D)
    normed = (head < NORMED) & (dim < D)
    stored = ((head >= FIRST_0) & (head < FIRST_0 + COUNT_0)) | ((head >= FIRST_1) & (head < FIRST_1 + COUNT_1))
    stored = stored | ((head >= FIRST_2) & (head < FIRST_2 + COUNT_2))
    gain = tl.load(gain_ptr + head * D + dim, mask=normed, other=0.0)
    partner = tl.load(partner_ptr + dim, mask=dim < D, other=0).to(tl.int32)
    first_row = tl.program_id(0) * rows_per_program
    # The loop stays when a program has one row: unrolled code could be contracted differently and change bits.
    for index in range(first_row, min(first_row + rows_per_program, rows)):
        row = tl.cast(index, tl.int64)
        block = tl.load(slot_block_ptr + row).to(tl.int64)
        offset = tl.load(slot_offset_ptr + row).to(tl.int64)
        cos = tl.load(cos_ptr + row * D + dim, mask=dim < D, other=0.0)
        sin = tl.load(sin_ptr + row * D + dim, mask=dim < D, other=0.0)
        source = projected_ptr + row * row_stride + head * head_stride + dim
        raw = tl.load(source, mask=inside, other=0.0)
        x = raw.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) + added)
        x = (x * inverse[:, None] * gain).to(raw.dtype).to(tl.float32)
        other = tl.gather(x, tl.broadcast_to(partner, (BLOCK_HEADS, BLOCK_D)), axis=1)
        values = tl.where(normed, (x * cos + other * sin).to(raw.dtype), raw)
        tl.store(out_ptr + (row * NORMED + head) * D + dim, values, mask=normed & (stored == 0))
        if (first_head < FIRST_0 + COUNT_0) & (first_head + BLOCK_HEADS > FIRST_0):
            _put(values, cache_0_ptr, block, offset, head, dim, FIRST_0, COUNT_0, BLOCK_SIZE, D)
        if (first_head < FIRST_1 + COUNT_1) & (first_head + BLOCK_HEADS > FIRST_1):
            _put(values, cache_1_ptr, block, offset, head, dim, FIRST_1, COUNT_1, BLOCK_SIZE, D)
        if (first_head < FIRST_2 + COUNT_2) & (first_head + BLOCK_HEADS > FIRST_2):
            _put(values, cache_2_ptr, block, offset, head, dim, FIRST_2, COUNT_2, BLOCK_SIZE, D)


@triton.jit
def _gated_kernel(
    gate_up_ptr,  # [T, 2 * WIDTH]
    out_ptr,  # [T, WIDTH]
    row_stride,
    alpha,
    limit,
    shift,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = gate_up_ptr + row * row_stride
    gate = tl.load(start + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    # Comparisons rather than minimum and maximum, which may drop a NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + shift)
    tl.store(out_ptr + row * WIDTH + dim, out.to(out_ptr.dtype.element_ty), mask=dim < WIDTH)


def rms_norm(x: Tensor, scaled_gain: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times `scaled_gain` float32 [D] or [heads, D]: gain * sqrt(D)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = _as_heads(x)
    _launch_rms_norm(rows, rows, scaled_gain, eps, out, out, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, scaled_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, D] plus residual [T, D], rounded to x's dtype, and the `rms_norm` of that sum. Both in x's dtype."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total)
    _launch_rms_norm(_as_heads(x), _as_heads(residual), scaled_gain, eps, total, out, add=True)
    return total, out


def _launch_rms_norm(
    x: Tensor, residual: Tensor, scaled_gain: Tensor, eps: float, total: Tensor, out: Tensor, add: bool
) -> None:
    """x and residual [T, heads, D]; the residual and `total` are used with `add` only, which takes one head."""
    rows, heads, width = x.shape
    if not rows:
        return
    block_heads, block_width, warps = _tile(heads, width)
    _rms_norm_kernel[(rows, triton.cdiv(heads, block_heads))](
        x, residual, scaled_gain, total, out, x.stride(0), x.stride(1), residual.stride(0),
        width if scaled_gain.dim() > 1 else 0, eps * width, HEADS=heads, D=width, ADD=add, BLOCK_HEADS=block_heads,
        BLOCK_D=block_width, num_warps=warps,
    )  # fmt: skip


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of x [T, heads, D]: every dim times its cosine plus its partner times its signed sine."""
    rows, heads, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block_heads, block_width, warps = _tile(heads, width)
        _rotate_kernel[(rows, triton.cdiv(heads, block_heads))](
            x, rotary.cos, rotary.sin, rotary.partner, out, x.stride(0), x.stride(1), HEADS=heads, D=width,
            BLOCK_HEADS=block_heads, BLOCK_D=block_width, num_warps=warps,
        )  # fmt: skip
    return out


def norm_rotate_store(
    projected: Tensor,
    scaled_gain: Tensor,
    eps: float,
    rotary: Rotary,
    stores: tuple[HeadStore, ...],
    slot_block: Tensor,
    slot_offset: Tensor,
) -> Tensor:
    """Norm and rotate the first heads of projected [T, N, D], as many as scaled_gain [normed, D] has, and fill caches.

    Each of `stores` takes its heads, after norm and rotation where they get it, to the slots [T] of its cache. Returns
    [T, normed, D]; what it holds at heads that were stored is not specified. Caches have one block size.
    """
    rows, heads, width = projected.shape
    normed = scaled_gain.shape[0]
    sizes = {store.cache.shape[2] for store in stores}
    if len(stores) > MAX_STORES or len(sizes) > 1:
        raise ShapeError(
            f"norm_rotate_store got {len(stores)} stores with block sizes {sorted(sizes)}; pass at most {MAX_STORES}"
            " caches of one block size"
        )
    projected = projected if projected.stride(2) == 1 else projected.contiguous()
    out = torch.empty(rows, normed, width, dtype=projected.dtype, device=projected.device)
    if not rows:
        return out
    used = [*stores, *[HeadStore(heads, 0, out)] * (MAX_STORES - len(stores))]
    block_heads, block_width, warps = _tile(heads, width)
    tiles = triton.cdiv(heads, block_heads)
    rows_per_program = ROWS_PER_PROGRAM if rows * tiles > FULL_GRID else 1
    _norm_rotate_store_kernel[(triton.cdiv(rows, rows_per_program), tiles)](
        projected, scaled_gain, rotary.cos, rotary.sin, rotary.partner, out, slot_block, slot_offset,
        *[store.cache for store in used], rows, rows_per_program, projected.stride(0), projected.stride(1), eps * width,
        HEADS=heads, NORMED=normed, D=width, BLOCK_SIZE=sizes.pop() if sizes else 1, FIRST_0=used[0].first,
        COUNT_0=used[0].heads, FIRST_1=used[1].first, COUNT_1=used[1].heads, FIRST_2=used[2].first,
        COUNT_2=used[2].heads, BLOCK_HEADS=block_heads, BLOCK_D=block_width, num_warps=warps,
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """gate_up [T, 2I] = [gate | up] through the activation: [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(triton.next_power_of_2(width), TILE)
        _gated_kernel[(rows, triton.cdiv(width, block))](
            gate_up, out, gate_up.stride(0), activation.alpha, activation.limit, activation.shift, WIDTH=width,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _as_heads(x: Tensor) -> Tensor:
    """x [..., D] as [T, heads, D] with neighbouring values in the last dim; only 3 dims keep their heads."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x[:, None] if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def _tile(heads: int, width: int) -> tuple[int, int, int]:
    """Heads and dims of a tile, and warps: a function of the row's shape alone, as they decide the order of sums."""
    block_width = triton.next_power_of_2(width)
    block_heads = max(min(triton.next_power_of_2(heads), TILE // block_width), 1)
    return block_heads, block_width, 4 if block_heads * block_width <= 2 * TILE else 8
