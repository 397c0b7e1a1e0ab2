"""Write keys, values, latents and index keys to their cache slots, in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.kv_cache import movable

TILE = 1024  # elements that a program moves at once


@triton.jit
def _store_kernel(
    rows_ptr,  # [T, HEADS, WIDTH]
    cache_ptr,  # [num_blocks, HEADS, BLOCK_SIZE, WIDTH]
    slot_block_ptr,  # [T]
    slot_offset_ptr,  # [T]
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_WIDTH)
    inside = (head < HEADS)[:, None] & (dim < WIDTH)[None, :]
    block = tl.load(slot_block_ptr + row).to(tl.int64)
    offset = tl.load(slot_offset_ptr + row).to(tl.int64)
    values = tl.load(rows_ptr + row * row_stride + head[:, None] * head_stride + dim[None, :], mask=inside)
    place = ((block * HEADS + head) * BLOCK_SIZE + offset) * WIDTH
    tl.store(cache_ptr + place[:, None] + dim[None, :], values.to(cache_ptr.dtype.element_ty), mask=inside)


def store(rows: Tensor, cache: Tensor, slot_block: Tensor, slot_offset: Tensor) -> None:
    """rows [T, heads, width] into cache [num_blocks, heads, block_size, width] at (slot_block, slot_offset), both [T].

    Padding rows have SPARE_BLOCK, which nothing reads.
    """
    count, heads, width = rows.shape
    if not count:
        return
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    if rows.dtype == cache.dtype:
        rows, cache = movable(rows), movable(cache)
    block_width = triton.next_power_of_2(width)
    block_heads = max(min(triton.next_power_of_2(heads), TILE // block_width), 1)
    _store_kernel[(count, triton.cdiv(heads, block_heads))](
        rows, cache, slot_block, slot_offset, rows.stride(0), rows.stride(1), HEADS=heads, BLOCK_SIZE=cache.shape[2],
        WIDTH=width, BLOCK_HEADS=block_heads, BLOCK_WIDTH=block_width,
    )  # fmt: skip
