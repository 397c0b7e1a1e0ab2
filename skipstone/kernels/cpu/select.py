"""The choice of blocks: scores and the best of them, row by row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import PAD, Span
from skipstone.kernels.cpu.jit import F32, kernel

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


@kernel(
    "(float32[:, :, :], float32[:, :, :, ::1], int64[:, :], int64[:, :], int64, int64, int64, int32[:, :, ::1])"
)
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
                if chosen[block]:
                    out[t, group, place] = block
                    place += 1


def block_select(
    index_q: Tensor, index_k_cache: Tensor, span: Span, unit: int, budget: int, init: int, local: int, exact: bool
) -> Tensor:
    """See the plain-torch twin."""
    out = torch.empty(len(index_q), index_q.shape[1], budget, dtype=torch.int32)
    tables = (span.positions.numpy(), span.block_table.numpy())
    _block_select(index_q.numpy(), index_k_cache.numpy(), *tables, unit, init, local, out.numpy())
    return out
