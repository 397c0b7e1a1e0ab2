"""Attention that reads keys and values where they lie in the cache: no copies, no masked work.

Each row and KV head takes its scores block by block, then the softmax, then the weighted sum of values, with all
query heads that share the KV head. Nothing here depends on other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.cpu.jit import F32, array, exp, kept, kernel, result

LOWEST = F32(np.finfo(np.float32).min)


@kernel("(float32[:, ::1], int64)", reassociate=True)
def _softmax(scores, count):
    """The first `count` of every row, in place."""
    for g in range(len(scores)):
        best = LOWEST
        for i in range(count):
            best = max(best, scores[g, i])
        total = F32(0)
        for i in range(count):
            weight = exp(scores[g, i] - best)
            scores[g, i] = weight
            total += weight
        inverse = F32(1) / total
        for i in range(count):
            scores[g, i] *= inverse


@kernel(
    "(float32[:, :, :], float32[:, :, :, ::1], float32[:, :, :, ::1], int32[:, :, :], int64, int64[:, :],"
    " int64[:, :], float32, float32[:, :, ::1])",
    reassociate=True,
)
def _attend(q, k_cache, v_cache, indices, unit, positions, table, scale, out):
    """Rows over the units of `unit` tokens named by indices [T, Hkv, S], or over all that they see where S is 0."""
    rows, heads, width = q.shape
    kv_heads, block_size, value_width = k_cache.shape[1], k_cache.shape[2], out.shape[2]
    group, budget, n = heads // kv_heads, indices.shape[2], positions.shape[1]
    longest = budget * unit if budget else table.shape[1] * block_size
    query = np.empty((group, width), np.float32)
    scores = np.empty((group, longest), np.float32)
    total = np.empty((group, value_width), np.float32)
    for t in range(rows):
        request = t // n
        position = positions[request, t - request * n]
        units = budget if budget else (position + unit) // unit
        for head in range(kv_heads):
            for g in range(group):
                for d in range(width):
                    query[g, d] = q[t, head * group + g, d] * scale
            count = 0
            for s in range(units):
                first = (indices[t, head, s] if budget else s) * unit
                if first < 0:
                    break
                block, offset = table[request, first // block_size], first % block_size
                for j in range(min(unit, position + 1 - first)):
                    for g in range(group):
                        score = F32(0)
                        for d in range(width):
                            score += query[g, d] * k_cache[block, head, offset + j, d]
                        scores[g, count] = score
                    count += 1
            total[:] = F32(0)
            if count:
                _softmax(scores, count)
            count = 0
            for s in range(units):
                first = (indices[t, head, s] if budget else s) * unit
                if first < 0:
                    break
                block, offset = table[request, first // block_size], first % block_size
                for j in range(min(unit, position + 1 - first)):
                    for g in range(group):
                        weight = scores[g, count]
                        for d in range(value_width):
                            total[g, d] += weight * v_cache[block, head, offset + j, d]
                    count += 1
            for g in range(group):
                for d in range(value_width):
                    out[t, head * group + g, d] = total[g, d]


def _attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, unit: int, span: Span, value_width: int, scale: float
) -> Tensor:
    out, values = result(*q.shape[:2], value_width)
    tables = (array(span.positions), array(span.block_table))
    _attend(array(q), kept(k_cache), kept(v_cache), array(indices), unit, *tables, scale, values)
    return out


def sparse_gqa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, unit: int, span: Span, scale: float, exact: bool
) -> Tensor:
    """See the plain-torch twin."""
    return _attention(q, k_cache, v_cache, indices, unit, span, v_cache.shape[3], scale)


def sparse_mla(
    q: Tensor, latent_cache: Tensor, indices: Tensor, span: Span, value_width: int, scale: float, exact: bool
) -> Tensor:
    """See the plain-torch twin."""
    return _attention(q, latent_cache, latent_cache, indices, 1, span, value_width, scale)


def dense_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, scale: float, exact: bool) -> Tensor:
    """See the plain-torch twin."""
    everything = torch.empty(0, 0, 0, dtype=torch.int32)
    return _attention(q, k_cache, v_cache, everything, k_cache.shape[2], span, v_cache.shape[3], scale)
