"""What a step's rows bring to the lightning indexer: rotated queries, weights of heads, and the cached key."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from skipstone.kernels.reference.fp8 import quantise
from skipstone.kernels.reference.kv_store import store
from skipstone.kernels.reference.pointwise import Rotary, layer_norm, rotate


class KeyNorm(NamedTuple):
    """Layer norm of index keys."""

    weight: Tensor  # [D] float32
    bias: Tensor  # [D] float32
    eps: float


class IndexCache(NamedTuple):
    """One layer's index keys; FP8 keys have a scale each."""

    keys: Tensor  # [num_blocks, 1, block_size, D]
    scales: Tensor | None  # [num_blocks, 1, block_size, 1] float32


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
    the cache's dtype, and head_weights * weight_scale [T, HI] float32, which FP8 queries multiply by their scales:
    relu(a * s) = relu(a) * s, as scales are positive.
    """
    q, weights = rotate(projected_q, rotary), head_weights * weight_scale
    key = rotate(layer_norm(projected_k, *norm)[:, None], rotary)  # [T, 1, D]
    if cache.scales is None:
        store(key, cache.keys, slot_block, slot_offset)
        return q, weights
    key, key_scale = quantise(key)
    store(key, cache.keys, slot_block, slot_offset)
    store(key_scale, cache.scales, slot_block, slot_offset)
    q, q_scale = quantise(q)  # [T, HI, D], [T, HI, 1]
    return q, weights.mul_(q_scale[..., 0])
