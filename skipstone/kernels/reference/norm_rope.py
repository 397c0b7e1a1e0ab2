"""Norms together with what surrounds them: the residual sum before, rotary embedding and cache insert behind."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from skipstone.kernels.reference.kv_store import store
from skipstone.kernels.reference.pointwise import GatedActivation, Rotary, rms_norm, rotate


class HeadStore(NamedTuple):
    """Heads `first` to `first + heads - 1` of a projection go to `cache` [num_blocks, heads, block_size, D]."""

    first: int
    heads: int
    cache: Tensor


def add_rms_norm(x: Tensor, residual: Tensor, scaled_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual [T, H] in x's dtype, and its RMS norm, see `rms_norm`."""
    total = x + residual
    return total, rms_norm(total, scaled_gain, eps)


def norm_rotate_store(
    projected: Tensor,
    scaled_gain: Tensor,
    eps: float,
    rotary: Rotary,
    stores: tuple[HeadStore, ...],
    slot_block: Tensor,
    slot_offset: Tensor,
) -> Tensor:
    """Norm and rotate the first heads of a projection, and put heads into caches.

    projected [T, N, D], scaled_gain [normed, D]: the first `normed` heads are normed and rotated; `stores` names heads
    among all N. Returns [T, normed, D]; what stands there at heads that were stored is not specified.
    """
    normed = scaled_gain.shape[0]
    rotated = rotate(rms_norm(projected[:, :normed], scaled_gain, eps), rotary)
    for first, heads, cache in stores:
        source = (rotated if first < normed else projected)[:, first : first + heads]
        store(source, cache, slot_block, slot_offset)
    return rotated


def gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """The activation of [T, 2I] = [gate | up]: [T, I]."""
    return activation(gate_up)
