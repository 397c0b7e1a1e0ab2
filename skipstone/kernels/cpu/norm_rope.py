"""Norms, rotary embedding, cache writes and gated activations; see the plain-torch twins for what they mean."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipstone.kernels.cpu.jit import F32, array, exp, kept, kernel, result
from skipstone.kernels.reference.index_rows import IndexCache, KeyNorm
from skipstone.kernels.reference.index_rows import index_rows as reference_index_rows
from skipstone.kernels.reference.kv_store import store as reference_store
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import GatedActivation, Rotary, layer_norm


@kernel("(float32[:, ::1], float32[:, ::1], float32, float32[:, ::1])", reassociate=True)
def _rms_norm(x, gain, eps, out):
    """Row i of x [rows, D] takes row i % len(gain) of gain."""
    rows, width = x.shape
    for i in range(rows):
        square = F32(0)
        for d in range(width):
            square += x[i, d] * x[i, d]
        inverse = F32(1) / np.sqrt(square + eps * F32(width))
        own = i % len(gain)
        for d in range(width):
            out[i, d] = x[i, d] * inverse * gain[own, d]


@kernel("(float32[:, ::1], float32[:, ::1], float32[::1], float32, float32[:, ::1], float32[:, ::1])", reassociate=True)
def _add_rms_norm(x, residual, gain, eps, total, out):
    """x + residual [rows, D], and the norm of it."""
    rows, width = x.shape
    for i in range(rows):
        square = F32(0)
        for d in range(width):
            value = x[i, d] + residual[i, d]
            total[i, d] = value
            square += value * value
        inverse = F32(1) / np.sqrt(square + eps * F32(width))
        for d in range(width):
            out[i, d] = total[i, d] * inverse * gain[d]


@kernel(
    "(float32[:, :, ::1], float32[:, ::1], float32, float32[:, :, ::1], float32[:, :, ::1], int64[::1],"
    " float32[:, :, ::1])",
    reassociate=True,
)
def _norm_rotate(projected, gain, eps, cos, sin, partner, out):
    """The first len(gain) heads of projected [T, N, D], normed and rotated: out [T, len(gain), D]."""
    width = projected.shape[2]
    normed = np.empty(width, np.float32)
    for t in range(len(projected)):
        for head in range(len(gain)):
            square = F32(0)
            for d in range(width):
                square += projected[t, head, d] * projected[t, head, d]
            inverse = F32(1) / np.sqrt(square + eps * F32(width))
            for d in range(width):
                normed[d] = projected[t, head, d] * inverse * gain[head, d]
            for d in range(width):
                out[t, head, d] = normed[d] * cos[t, 0, d] + normed[partner[d]] * sin[t, 0, d]


@kernel("(float32[:, :, :], float32[:, :, ::1], float32[:, :, ::1], int64[::1], float32[:, :, ::1])")
def _rotate(x, cos, sin, partner, out):
    """x [T, heads, D], rotated."""
    rows, heads, width = x.shape
    for t in range(rows):
        for head in range(heads):
            for d in range(width):
                out[t, head, d] = x[t, head, d] * cos[t, 0, d] + x[t, head, partner[d]] * sin[t, 0, d]


@kernel("(float32[:, :, :], float32[:, :, :, ::1], int64[::1], int64[::1])")
def _store(rows, cache, slot_block, slot_offset):
    """rows [T, heads, width] into cache [num_blocks, heads, block_size, width]."""
    count, heads, width = rows.shape
    for t in range(count):
        for head in range(heads):
            for d in range(width):
                cache[slot_block[t], head, slot_offset[t], d] = rows[t, head, d]


@kernel("(float32[:, ::1], float32, float32, float32, float32[:, ::1])")
def gate(gate_up, alpha, limit, shift, out):
    """[rows, 2I] -> [rows, I]."""
    rows, width = out.shape
    for i in range(rows):
        for d in range(width):
            value = min(gate_up[i, d], limit)
            up = min(max(gate_up[i, width + d], -limit), limit) + shift
            out[i, d] = value / (F32(1) + exp(-alpha * value)) * up


def rms_norm(x: Tensor, scaled_gain: Tensor, eps: float) -> Tensor:
    """See the plain-torch twin."""
    shape = (-1, x.shape[-1])
    out, values = result(*x.shape)
    _rms_norm(array(x.contiguous()).reshape(shape), kept(scaled_gain).reshape(shape), eps, values.reshape(shape))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, scaled_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See the plain-torch twin."""
    (total, sums), (out, values) = result(*x.shape), result(*x.shape)
    _add_rms_norm(array(x), array(residual), kept(scaled_gain), eps, sums, values)
    return total, out


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """See the plain-torch twin."""
    out, values = result(*x.shape)
    _rotate(array(x), array(rotary.cos), array(rotary.sin), kept(rotary.partner), values)
    return out


def store(rows: Tensor, cache: Tensor, slot_block: Tensor, slot_offset: Tensor) -> None:
    """See the plain-torch twin, which also does it for other types."""
    if rows.dtype != torch.float32 or cache.dtype != torch.float32:
        return reference_store(rows, cache, slot_block, slot_offset)
    _store(array(rows), kept(cache), array(slot_block), array(slot_offset))
    return None


def norm_rotate_store(
    projected: Tensor,
    scaled_gain: Tensor,
    eps: float,
    rotary: Rotary,
    stores: tuple[HeadStore, ...],
    slot_block: Tensor,
    slot_offset: Tensor,
) -> Tensor:
    """See the plain-torch twin."""
    rows, _, width = projected.shape
    gain = kept(scaled_gain)
    out, normed = result(rows, len(gain), width)
    source = array(projected)
    _norm_rotate(source, gain, eps, array(rotary.cos), array(rotary.sin), kept(rotary.partner), normed)
    slots = (array(slot_block), array(slot_offset))
    for first, heads, cache in stores:
        ready = normed if first < len(gain) else source
        _store(ready[:, first : first + heads], kept(cache), *slots)
    return out


def gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """See the plain-torch twin."""
    out, values = result(gate_up.shape[0], gate_up.shape[1] // 2)
    gate(array(gate_up), *activation, values)
    return out


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
    """See the plain-torch twin, which also does it for FP8 keys."""
    if cache.scales is not None:
        slots = (slot_block, slot_offset)
        return reference_index_rows(projected_q, projected_k, head_weights, weight_scale, norm, rotary, cache, *slots)
    key = rotate(layer_norm(projected_k, *norm)[:, None], rotary)
    store(key, cache.keys, slot_block, slot_offset)
    return rotate(projected_q, rotary), head_weights * weight_scale
