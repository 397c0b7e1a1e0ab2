"""What surrounds the model in a step: where its rows stand, and how many drafts survive."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
from torch import Tensor

from skipstone.core.batch import PAD, SPARE_BLOCK, ZERO_BLOCK
from skipstone.kernels.cpu.jit import array, kernel, result
from skipstone.kernels.reference.decode import Accepted, PlacedRows
from skipstone.kernels.reference.decode import accept as reference_accept

NONE = np.empty(0, np.int64)


@kernel(
    *(
        f"({tokens}[:, :], int64[:], int64[:], int64[:], int64[:, :], int64[:], int64[:], int64,"
        " int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])"
        for tokens in ("int32", "int64")
    )
)
def _step_rows(
    tokens, slots, start, end, table, row_item, row_offset, block_size, ids, places, seen, blocks, offsets, seq_lens
):
    """Without slots, tokens [R, n] are those of the rows."""
    n, own = tokens.shape[1], len(slots) == 0
    for t in range(len(ids)):
        item, offset = (t // n, t % n) if own else (row_item[t], row_offset[t])
        position = start[item] + offset
        real = start[item] >= 0 and position < end[item]
        place = position if real else 0
        block = table[item, place // block_size]
        token = tokens[item, offset] if own else tokens[slots[item], place]
        ids[t] = max(token, 0) if real or own else 0
        places[t] = place
        seen[t] = position if real else PAD
        blocks[t] = block if real and block != ZERO_BLOCK else SPARE_BLOCK
        offsets[t] = place % block_size
    for r in range(len(seq_lens)):
        last = end[r] if not own else min(end[r], start[r] + n) if end[r] > start[r] else 0
        seq_lens[r] = last if start[r] >= 0 else 0


def step_rows(
    tokens: Tensor,
    slots: Tensor | None,
    start: Tensor,
    end: Tensor,
    table: Tensor,
    row_item: Tensor | None,
    row_offset: Tensor | None,
    block_size: int,
) -> PlacedRows:
    """See the plain-torch twin."""
    rows = tokens.numel() if row_item is None else len(row_item)
    parts = [result(size, dtype=np.int64) for size in (*[rows] * 5, len(start))]
    chosen, item, offset = (NONE if each is None else array(each) for each in (slots, row_item, row_offset))
    inputs = (array(tokens), chosen, array(start), array(end), array(table), item, offset)
    _step_rows(*inputs, block_size, *(values for _, values in parts))
    return PlacedRows(*(tensor for tensor, _ in parts))


@kernel("(int64[:, :], int64[:, :], int64[:], int64[:], int64[::1], int64[:, ::1], int64[::1])")
def _accept(tokens, token_ids, start, limit, count, following, next_start):
    """Keep drafts while they equal the samples."""
    requests, n = tokens.shape
    for r in range(requests):
        kept = 0
        while kept + 1 < n and start[r] + kept + 1 < limit[r] and tokens[r, kept] == token_ids[r, kept + 1]:
            kept += 1
        count[r] = kept
        for i in range(n):
            following[r, i] = tokens[r, min(i, kept)]
        next_start[r] = start[r] + kept + 1 if start[r] >= 0 else PAD


def accept(
    tokens: Tensor, token_ids: Tensor, start: Tensor, limit: Tensor, seed: Tensor, rates: Tensor | None
) -> Accepted:
    """See the plain-torch twin, which also flips coins."""
    if rates is not None:
        return reference_accept(tokens, token_ids, start, limit, seed, rates)
    count, kept = result(len(start), dtype=np.int64)
    following, behind = result(*tokens.shape, dtype=np.int64)
    next_start, moved = result(len(start), dtype=np.int64)
    _accept(array(tokens), array(token_ids), array(start), array(limit), kept, behind, moved)
    return Accepted(count, tokens, following, next_start)
