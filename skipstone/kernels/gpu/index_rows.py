"""The indexer's queries, weights and cached keys of a step's rows in one launch, in FP8 or not, in Triton.

A program has some query heads of one row, or its key, so the bits of a row do not depend on the other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.kernels.reference.fp8 import FP8, LARGEST, SMALLEST_AMAX
from skipstone.kernels.reference.index_rows import IndexCache, KeyNorm
from skipstone.kernels.reference.pointwise import Rotary

TILE = 1024  # elements that a program holds at once, unless one head is longer
LARGEST_FP8 = tl.constexpr(LARGEST)
LEAST = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def _quantised(values):
    """values [N, D] float32 -> [N, D] float8e4nv and scales [N], the bits of the plain-torch `quantise`."""
    # The bits of magnitudes sort like their values, NaN last, which a maximum of floats may drop.
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.where(largest < LEAST, LEAST, largest), LARGEST_FP8)
    # Nothing lies so far beyond the largest number that it would not be rounded to it.
    return tl.div_rn(values, scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def _index_rows_kernel(
    q_ptr,  # [T, HEADS, D]
    k_ptr,  # [T, D]
    weights_ptr,  # [T, HEADS] float32
    norm_weight_ptr,  # [D] float32
    norm_bias_ptr,  # [D] float32
    cos_ptr,  # [T, 1, D] float32
    sin_ptr,  # [T, 1, D] float32
    partner_ptr,  # [D]
    q_out_ptr,  # [T, HEADS, D]
    weights_out_ptr,  # [T, HEADS] float32
    keys_ptr,  # [num_blocks, 1, BLOCK_SIZE, D]
    scales_ptr,  # [num_blocks, 1, BLOCK_SIZE, 1] float32, if FP8
    slot_block_ptr,  # [T]
    slot_offset_ptr,  # [T]
    q_stride,
    head_stride,
    k_stride,
    weights_stride,
    weight_scale,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Query heads of one row; the first program of a row has its key, which takes longest."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = dim < D
    partner = tl.load(partner_ptr + dim, mask=inside, other=0).to(tl.int32)
    cos = tl.load(cos_ptr + row * D + dim, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * D + dim, mask=inside, other=0.0)
    if tile == 0:
        slot = tl.load(slot_block_ptr + row).to(tl.int64) * BLOCK_SIZE + tl.load(slot_offset_ptr + row).to(tl.int64)
        norm_weight = tl.load(norm_weight_ptr + dim, mask=inside, other=0.0)
        norm_bias = tl.load(norm_bias_ptr + dim, mask=inside, other=0.0)
        raw_k = tl.load(k_ptr + row * k_stride + dim, mask=inside, other=0.0)
        x = raw_k.to(tl.float32)
        centred = tl.where(inside, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
        variance = tl.sum(centred * centred, axis=1) / D
        normed = centred * tl.rsqrt(variance + eps)[:, None] * norm_weight + norm_bias
        normed = normed.to(raw_k.dtype).to(tl.float32)
        key = (normed * cos + tl.gather(normed, partner, axis=1) * sin).to(raw_k.dtype)
        if FP8:
            key, key_scale = _quantised(key.to(tl.float32))
            tl.store(scales_ptr + slot + tl.arange(0, 1), key_scale)
        tl.store(keys_ptr + slot * D + dim, key, mask=inside)
    else:
        head = (tile - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        real = (head < HEADS)[:, None] & inside
        start = q_ptr + row * q_stride + head[:, None] * head_stride
        weights = tl.load(weights_ptr + row * weights_stride + head, mask=head < HEADS, other=0.0) * weight_scale
        raw_q = tl.load(start + dim, mask=real, other=0.0)
        other = tl.load(start + partner, mask=real, other=0.0).to(tl.float32)
        q = (raw_q.to(tl.float32) * cos + other * sin).to(raw_q.dtype)
        if FP8:
            q, q_scale = _quantised(q.to(tl.float32))
            weights *= q_scale
        tl.store(q_out_ptr + (row * HEADS + head[:, None]) * D + dim, q, mask=real)
        tl.store(weights_out_ptr + row * HEADS + head, weights, mask=head < HEADS)


def index_rows(
    projected_q: Tensor,
    projected_k: Tensor,
    head_weights: Tensor,
    weight_scale: float,
    norm: KeyNorm,
    rotary: Rotary,
    cache: IndexCache,
    slot_block: Tensor,
    slot_offset: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rotate queries, norm and rotate keys, quantise both where keys are cached in FP8, and store the keys.

    projected_q [T, HI, D], projected_k [T, D], head_weights [T, HI] float32, slots [T]. Returns queries [T, HI, D] in
    the cache's dtype, and head_weights * weight_scale [T, HI] float32, which FP8 queries multiply by their scales.
    """
    rows, heads, width = projected_q.shape
    q, k, weights = (x if x.stride(-1) == 1 else x.contiguous() for x in (projected_q, projected_k, head_weights))
    q_out = torch.empty(q.shape, dtype=q.dtype if cache.scales is None else FP8, device=q.device)
    weights_out = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    if not rows:
        return q_out, weights_out
    block_width = triton.next_power_of_2(width)
    block_heads = max(min(triton.next_power_of_2(heads), TILE // block_width), 1)
    _index_rows_kernel[(rows, 1 + triton.cdiv(heads, block_heads))](
        q, k, weights, norm.weight, norm.bias, *rotary, q_out, weights_out, *cache, slot_block, slot_offset,
        q.stride(0), q.stride(1), k.stride(0), weights.stride(0), weight_scale, norm.eps, HEADS=heads, D=width,
        BLOCK_SIZE=cache.keys.shape[2], FP8=cache.scales is not None, BLOCK_HEADS=block_heads, BLOCK_D=block_width,
        num_warps=4,
    )  # fmt: skip
    return q_out, weights_out
