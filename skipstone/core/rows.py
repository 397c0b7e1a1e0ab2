"""From ranges of tokens to a batch: the one place where positions become block tables and slots."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import SPARE_BLOCK, ZERO_BLOCK, Batch, Span


class QueryRows(NamedTuple):
    """Rows of one request: these tokens, at positions from `start` on. Blocks it does not own yet may be missing."""

    token_ids: list[int]
    start: int
    block_ids: list[int]


def build_batch(rows: list[QueryRows], block_size: int, lookahead: int = 0, see_ahead: bool = False) -> Batch:
    """The batch of these rows; requests with equally many rows should stand next to each other.

    The block tables reach `lookahead` tokens past the last row, for `Batch.advanced`. With `see_ahead` every row sees
    all rows of its request, also later ones. Rows without a block of their own are padding: nothing reads what they
    write. No row has logits.
    """
    lengths = np.array([len(item.token_ids) for item in rows])
    seq_lens = np.array([item.start + len(item.token_ids) for item in rows])
    input_ids = np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in rows])
    positions = np.concatenate([np.arange(item.start, item.start + len(item.token_ids)) for item in rows])
    max_seq_len = int(seq_lens.max())
    table = np.full((len(rows), -(-(max_seq_len + lookahead) // block_size)), ZERO_BLOCK, dtype=np.int64)
    for i, item in enumerate(rows):
        blocks = item.block_ids[: -(-(int(seq_lens[i]) + lookahead) // block_size)]
        table[i, : len(blocks)] = blocks
    row_table = table.repeat(lengths, axis=0)  # [T, max_blocks]
    slot_block = row_table[np.arange(len(positions)), positions // block_size]
    seen = (seq_lens - 1).repeat(lengths) if see_ahead else positions
    return Batch(
        input_ids=torch.as_tensor(input_ids),
        positions=torch.as_tensor(positions),
        seq_lens=torch.as_tensor(seq_lens),
        slot_block=torch.as_tensor(np.where(slot_block == ZERO_BLOCK, SPARE_BLOCK, slot_block)),
        slot_offset=torch.as_tensor(positions % block_size),
        row_block_table=torch.as_tensor(row_table),
        logits_indices=torch.zeros(0, dtype=torch.int64),
        spans=_spans(lengths, seq_lens + lookahead, torch.as_tensor(seen), torch.as_tensor(table), block_size),
        max_seq_len=max_seq_len,
    )


def _spans(lengths: np.ndarray, reach: np.ndarray, seen: Tensor, table: Tensor, block_size: int) -> list[Span]:
    """Neighbouring requests of equal length; `reach` [R] is how far each block table goes, in tokens."""
    starts = np.concatenate([[0], lengths.cumsum()])
    spans = []
    for query_len, group in itertools.groupby(range(len(lengths)), key=lambda i: int(lengths[i])):
        members = list(group)
        requests = slice(members[0], members[-1] + 1)
        rows = slice(int(starts[requests.start]), int(starts[requests.stop]))
        blocks = table[requests, : -(-int(reach[requests].max()) // block_size)]
        spans.append(Span(requests, rows, query_len, seen[rows].view(len(members), query_len), blocks))
    return spans
