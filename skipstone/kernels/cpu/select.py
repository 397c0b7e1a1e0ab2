"""The choice of blocks or tokens: scores and the best of them, row by row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
from torch import Tensor

from skipstone.core.batch import PAD, Span
from skipstone.kernels.cpu.jit import F32, array, kept, kernel, result
from skipstone.kernels.reference.select import token_select as reference_token_select

LOWEST, HIGHEST = F32(np.finfo(np.float32).min), F32(np.finfo(np.float32).max)


@kernel("(float32[::1], float32[:, :, :, ::1], int64[:], int64, int64, float32[::1])", reassociate=True)
def _block_scores(query, cache, table, position, unit, scores):
    """The largest product of query [D] with the visible keys of each block; NaN counts as the least."""
    width, block_size = len(query), cache.shape[2]
    for first in range(0, position + 1, unit):
        block, offset = table[first // block_size], first % block_size
        best = -F32(np.inf)
        for j in range(min(unit, position + 1 - first)):
            score = F32(0)
            for d in range(width):
                score += query[d] * cache[block, 0, offset + j, d]
            if score != score:
                best = LOWEST
                break
            best = max(best, score)
        scores[first // unit] = min(max(best, LOWEST), HIGHEST)


@kernel("(float32[:, :, :], float32[:, :, :, ::1], int64[:, :], int64[:, :], int64, int64, int64, int32[:, :, ::1])")
def _block_select(q, cache, positions, table, unit, init, local, out):
    """Ascending ids of the best blocks, PAD behind them: out [T, G, budget]; init + local <= budget."""
    rows, groups, width = q.shape
    budget, n = out.shape[2], positions.shape[1]
    scores = np.empty(table.shape[1] * cache.shape[2] // unit + 1, np.float32)
    query, chosen = np.empty(width, np.float32), np.empty(len(scores), np.bool_)
    for t in range(rows):
        request = t // n
        position = positions[request, t - request * n]
        visible = (position + unit) // unit
        for group in range(groups):
            if visible <= budget:
                for s in range(budget):
                    out[t, group, s] = s if s < visible else PAD
                continue
            for d in range(width):
                query[d] = q[t, group, d]
            _block_scores(query, cache, table[request], position, unit, scores)
            room = budget
            for block in range(visible):
                chosen[block] = block < init or block >= visible - local
                room -= chosen[block]
            for _ in range(room):
                best = -1
                for block in range(visible):
                    if not chosen[block] and (best < 0 or scores[block] > scores[best]):
                        best = block
                chosen[best] = True
            place = 0
            for block in range(visible):
                if chosen[block] and place < budget:
                    out[t, group, place] = block
                    place += 1


@kernel("(float32[:, ::1], float32[::1], float32[:, :, :, ::1], int64[:], int64, float32[::1])", reassociate=True)
def _token_scores(queries, weights, cache, table, position, scores):
    """The sum over heads of weight * relu(query . key) for every visible token; NaN counts as the least."""
    heads, width = queries.shape
    block_size = cache.shape[2]
    for token in range(position + 1):
        block, offset = table[token // block_size], token % block_size
        total = F32(0)
        for head in range(heads):
            score = F32(0)
            for d in range(width):
                score += queries[head, d] * cache[block, 0, offset, d]
            # Not max(), which would hide a NaN.
            total += weights[head] * (F32(0) if score < F32(0) else score)
        scores[token] = LOWEST if total != total else min(max(total, LOWEST), HIGHEST)


@kernel("int64(float32[::1], int32[::1], int64, int64)")
def _rank(scores, keys, count, budget):
    """Write keys that sort like the first `count` scores, and return the `budget`-th largest of them.

    It is found bit by bit: how many keys are at least as large as a middle one is a sum that runs over all at once.
    """
    for i in range(count):
        bits = F32(scores[i]).view(np.int32)
        if bits == np.int32(-(1 << 31)):
            bits = np.int32(0)  # -0 equals 0
        keys[i] = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    low, high = -(1 << 31), (1 << 31) - 1
    while low < high:
        middle = (low + high + 1) >> 1
        narrow = np.int32(middle)  # so that many compare at once
        reached = 0
        for i in range(count):
            reached += keys[i] >= narrow
        if reached >= budget:
            low = middle
        else:
            high = middle - 1
    return low


@kernel(
    "(float32[:, :, :], float32[:, :], float32[:, :, :, ::1], int64[:, :], int64[:, :], int32[:, :, ::1])",
)
def _token_select(q, weights, cache, positions, table, out):
    """Ascending ids of the best tokens, PAD behind them: out [T, 1, budget]."""
    rows, heads, width = q.shape
    budget, n = out.shape[2], positions.shape[1]
    scores = np.empty(table.shape[1] * cache.shape[2], np.float32)
    keys = np.empty(len(scores), np.int32)
    queries, factors = np.empty((heads, width), np.float32), np.empty(heads, np.float32)
    for t in range(rows):
        request = t // n
        visible = positions[request, t - request * n] + 1
        if visible <= budget:
            for s in range(budget):
                out[t, 0, s] = s if s < visible else PAD
            continue
        for head in range(heads):
            factors[head] = weights[t, head]
            for d in range(width):
                queries[head, d] = q[t, head, d]
        _token_scores(queries, factors, cache, table[request], visible - 1, scores)
        least = _rank(scores, keys, visible, budget)
        room = budget  # for tokens that are just as good as the last one that fits
        for token in range(visible):
            room -= keys[token] > least
        place = 0
        for token in range(visible):
            equal = keys[token] == least and room > 0
            if keys[token] > least or equal:
                out[t, 0, place] = token
                place += 1
                room -= equal


def block_select(
    index_q: Tensor, index_k_cache: Tensor, span: Span, unit: int, budget: int, init: int, local: int, exact: bool
) -> Tensor:
    """See the plain-torch twin."""
    out, chosen = result(*index_q.shape[:2], budget, dtype=np.int32)
    tables = (array(span.positions), array(span.block_table))
    _block_select(array(index_q), kept(index_k_cache), *tables, unit, init, local, chosen)
    return out


def token_select(
    index_q: Tensor,
    head_weights: Tensor,
    index_k_cache: Tensor,
    index_k_scale: Tensor | None,
    span: Span,
    budget: int,
    exact: bool,
) -> Tensor:
    """See the plain-torch twin, which also does it for FP8 keys."""
    if index_k_scale is not None:
        return reference_token_select(index_q, head_weights, index_k_cache, index_k_scale, span, budget, exact)
    out, chosen = result(index_q.shape[0], 1, budget, dtype=np.int32)
    tables = (array(span.positions), array(span.block_table))
    _token_select(array(index_q), array(head_weights), kept(index_k_cache), *tables, chosen)
    return out
