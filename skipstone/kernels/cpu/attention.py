"""Attention that reads keys and values where they lie in the cache: no copies, no masked work.

Each row and KV head takes its scores block by block, then the softmax, then the weighted sum of values, with all
query heads that share the KV head. Nothing here depends on other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.cpu.jit import F32, array, exp, kept, kernel, result

LOWEST = F32(np.finfo(np.float32).min)


part = numba.njit(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")


@part
def _score(query, keys, scores, place):
    """scores[g, place + j] = query[g] . keys[j], four heads at a time where there are so many."""
    group, width = query.shape
    for j in range(len(keys)):
        whole = group - group % 4
        for g in range(0, whole, 4):
            a = b = c = d = F32(0)
            for i in range(width):
                key = keys[j, i]
                a += query[g, i] * key
                b += query[g + 1, i] * key
                c += query[g + 2, i] * key
                d += query[g + 3, i] * key
            scores[g, place + j], scores[g + 1, place + j] = a, b
            scores[g + 2, place + j], scores[g + 3, place + j] = c, d
        for g in range(whole, group):
            a = F32(0)
            for i in range(width):
                a += query[g, i] * keys[j, i]
            scores[g, place + j] = a


@part
def _weigh(scores, place, values, width, total):
    """Add scores[g, place + j] * values[j] to total[g], four keys at a time."""
    count = len(values)
    whole = count - count % 4
    for j in range(0, whole, 4):
        for g in range(len(total)):
            a, b, c, d = (
                scores[g, place + j],
                scores[g, place + j + 1],
                scores[g, place + j + 2],
                scores[g, place + j + 3],
            )
            for i in range(width):
                total[g, i] += a * values[j, i] + b * values[j + 1, i] + c * values[j + 2, i] + d * values[j + 3, i]
    for j in range(whole, count):
        for g in range(len(total)):
            a = scores[g, place + j]
            for i in range(width):
                total[g, i] += a * values[j, i]


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
                seen = min(unit, position + 1 - first)
                _score(query, k_cache[block, head, offset : offset + seen], scores, count)
                count += seen
            total[:] = F32(0)
            if count:
                _softmax(scores, count)
            count = 0
            for s in range(units):
                first = (indices[t, head, s] if budget else s) * unit
                if first < 0:
                    break
                block, offset = table[request, first // block_size], first % block_size
                seen = min(unit, position + 1 - first)
                _weigh(scores, count, v_cache[block, head, offset : offset + seen], value_width, total)
                count += seen
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
