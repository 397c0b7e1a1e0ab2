"""Write keys, values, latents and index keys to their cache slots."""

from __future__ import annotations

import torch
from torch import Tensor


def store(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """rows [T, heads, width] into cache [num_blocks, heads, block_size, width] at slot_mapping [T].

    A PAD slot lands in block 0, the spare block which no request owns.
    """
    block_size = cache.shape[2]
    slots = slot_mapping.clamp(min=0)
    block = torch.div(slots, block_size, rounding_mode="floor")
    cache[block, :, slots - block * block_size] = rows.to(cache.dtype)
