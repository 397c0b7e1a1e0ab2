"""Selections as compact tables of 16-token pages, one row at a time in plain Python.

A row's table lists the pages of its whole selected blocks in the order of the selection, then those of the block that
it stands in. The context length says how many tokens of these pages count; it alone hides what comes after the row.
Attention is not computed from tables here, but from the tokens that the selection names.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 16


def page_row(ids: list[int], blocks: list[int], position: int, unit: int, stride: int) -> tuple[list[int], int]:
    """Pages and context length of one row and group; `blocks` is its request's block table."""
    per_block = unit // PAGE
    width = len(ids) * per_block
    if position < 0:
        return [0] * width, 0
    own = position // unit
    valid = [block for block in ids if 0 <= block <= own and block < len(blocks)]
    full = [block for block in valid if block < own]
    tail = [own] if own in valid else []
    pages = [blocks[block] * stride + j for block in full + tail for j in range(per_block)]
    context = unit * len(full) + (position + 1 - unit * own if tail else 0)
    return pages + [0] * (width - len(pages)), context


def page_rows(
    indices: list[list[list[int]]], blocks: list[list[int]], positions: list[int], unit: int, stride: int
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """`page_row` for indices [T][G][S], with the block table and the position of each row."""
    rows = [
        [page_row(ids, table, position, unit, stride) for ids in groups]
        for groups, table, position in zip(indices, blocks, positions, strict=True)
    ]
    return [[pages for pages, _ in row] for row in rows], [[context for _, context in row] for row in rows]


def verify_rows(seq_lens: list[int], query_len: int) -> list[tuple[int, int]]:
    """The request and the position of each row, where every request has `query_len` rows, its last tokens."""
    return [(request, n - query_len + i) for request, n in enumerate(seq_lens) for i in range(query_len)]


def selected_tokens(ids: list[int], position: int, unit: int) -> list[int]:
    """The tokens that a row reads: those of its selected blocks, up to itself."""
    return [token for token in range(position + 1) if token // unit in ids]


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Softmax attention in float64 of q [H, D] over keys and values [S, D]; zeros without keys."""
    if len(keys) == 0:
        return torch.zeros(q.shape, dtype=torch.float64)
    scores = q.double() @ keys.double().T * scale
    return torch.softmax(scores, dim=1) @ values.double()
