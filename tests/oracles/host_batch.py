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


class HostBatch(NamedTuple):
    """A batch whose integers are still on the host, as int64 arrays; the names and shapes of those that become tensors
    are Batch's."""

    lengths: np.ndarray  # [R] rows of each request
    reach: np.ndarray  # [R] how far its block table goes, in tokens
    seq_lens: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    slot_block: np.ndarray
    slot_offset: np.ndarray
    seen: np.ndarray  # [T] the last position that each row sees
    block_table: np.ndarray
    logits_indices: np.ndarray

    def last_rows(self, counts: np.ndarray) -> tuple[np.ndarray, HostBatch]:
        """The last `counts` [R] rows of each request: which of the T rows they are, and the batch of them alone.

        Requests that keep none are left out. No row has logits.
        """
        (chosen,) = counts.nonzero()
        ends = self.lengths.cumsum()
        rows = np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in chosen])
        return rows, HostBatch(
            lengths=counts[chosen],
            reach=self.reach[chosen],
            seq_lens=self.seq_lens[chosen],
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
            slot_block=self.slot_block[rows],
            slot_offset=self.slot_offset[rows],
            seen=self.seen[rows],
            block_table=self.block_table[chosen],
            logits_indices=rows[:0],
        )


def build_batch(rows: list[QueryRows], block_size: int, lookahead: int = 0, see_ahead: bool = False) -> Batch:
    """The batch of these rows; see `host_batch`."""
    return to_device([host_batch(rows, block_size, lookahead, see_ahead)], block_size)[0][0]


def host_batch(rows: list[QueryRows], block_size: int, lookahead: int = 0, see_ahead: bool = False) -> HostBatch:
    """The batch of these rows; requests with equally many rows should stand next to each other.

    The block tables reach `lookahead` tokens past the last row, for `Batch.advanced`. With `see_ahead` every row sees
    all rows of its request, also later ones. Rows without a block of their own are padding: nothing reads what they
    write. No row has logits.
    """
    lengths = np.array([len(item.token_ids) for item in rows])
    seq_lens = np.array([item.start + len(item.token_ids) for item in rows])
    input_ids = np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in rows])
    positions = np.concatenate([np.arange(item.start, item.start + len(item.token_ids)) for item in rows])
    reach = seq_lens + lookahead
    table = np.full((len(rows), -(-int(reach.max()) // block_size)), ZERO_BLOCK, dtype=np.int64)
    for i, item in enumerate(rows):
        blocks = item.block_ids[: -(-int(reach[i]) // block_size)]
        table[i, : len(blocks)] = blocks
    request = np.arange(len(rows)).repeat(lengths)  # [T]
    slot_block = table[request, positions // block_size]
    slot_block = np.where(slot_block == ZERO_BLOCK, SPARE_BLOCK, slot_block)
    seen = (seq_lens - 1).repeat(lengths) if see_ahead else positions
    of_row = (input_ids, positions, slot_block, positions % block_size, seen)
    return HostBatch(lengths, reach, seq_lens, *of_row, table, lengths[:0])


def to_device(
    batches: Sequence[HostBatch], block_size: int, others: Sequence[np.ndarray] = ()
) -> tuple[list[Batch], list[Tensor]]:
    """Batches, and other arrays of int64, on the device that tensors are made on. One copy moves all of them."""
    tensors = iter(_tensors([*(array for batch in batches for array in batch[2:]), *others]))
    made = [_batch(host, [next(tensors) for _ in host[2:]], block_size) for host in batches]
    return made, list(tensors)


def _batch(host: HostBatch, tensors: list[Tensor], block_size: int) -> Batch:
    seq_lens, input_ids, positions, slot_block, slot_offset, seen, table, logits_indices = tensors
    return Batch(
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
        slot_block=slot_block,
        slot_offset=slot_offset,
        block_table=table,
        logits_indices=logits_indices,
        spans=_spans(host.lengths, host.reach, seen, table, block_size),
        max_seq_len=int(host.seq_lens.max()),
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
