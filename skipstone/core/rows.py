"""From ranges of tokens to a batch: the one place where positions become block tables and slots."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import SPARE_BLOCK, ZERO_BLOCK, Batch, Span

ALIGNED = 2  # int64 values: kernels are compiled once more for tensors that do not start at 16 bytes


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
    request = np.arange(len(rows)).repeat(lengths)  # [T]
    slot_block = table[request, positions // block_size]
    slot_block = np.where(slot_block == ZERO_BLOCK, SPARE_BLOCK, slot_block)
    seen = (seq_lens - 1).repeat(lengths) if see_ahead else positions
    on_device = _tensors((input_ids, positions, seq_lens, slot_block, positions % block_size, seen, table))
    return Batch(
        input_ids=on_device[0],
        positions=on_device[1],
        seq_lens=on_device[2],
        slot_block=on_device[3],
        slot_offset=on_device[4],
        block_table=on_device[6],
        logits_indices=torch.zeros(0, dtype=torch.int64),
        spans=_spans(lengths, seq_lens + lookahead, on_device[5], on_device[6], block_size),
        max_seq_len=max_seq_len,
    )


def _tensors(arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Integer arrays as int64 tensors, by one copy to the device that tensors are made on."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + array.size + array.size % ALIGNED)
    packed = np.zeros(starts[-1], dtype=np.int64)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.ravel()
    whole = torch.as_tensor(packed)
    parts = zip(starts, arrays, strict=False)
    return [whole[start : start + array.size].view(array.shape) for start, array in parts]


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
