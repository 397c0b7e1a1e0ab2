"""Write keys, values, latents and index keys to their cache slots."""

from __future__ import annotations

from torch import Tensor

from skipstone.core.kv_cache import movable


def store(rows: Tensor, cache: Tensor, slot_block: Tensor, slot_offset: Tensor) -> None:
    """rows [T, heads, width] into cache [num_blocks, heads, block_size, width] at (slot_block, slot_offset), both [T].

    Padding rows have SPARE_BLOCK, which nothing reads.
    """
    movable(cache)[slot_block, :, slot_offset] = movable(rows.to(cache.dtype))
