"""What the device knows of running requests between decode steps, so that a step needs nothing from the host.

Every running request has a slot, a row of one matrix, so that one gather brings all of it. One more slot belongs to
padding: its position is negative, so its rows read and write nothing that counts.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, ZERO_BLOCK, Batch, Span
from skipstone.kernels.ops import Ops

# Columns; those of the three fractions hold the bits of float64 numbers.
START, LIMIT, MOST_DRAFTS, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P, TOKENS = range(9)


class SlotValues(NamedTuple):
    """One request as the device must know it."""

    tokens: list[int]  # the newest committed token, then its drafts
    start: int  # position of the newest committed token; KV is valid below
    limit: int  # rows at this position and behind have no slot, or could never be kept
    most_drafts: int
    seed: int
    top_k: int
    temperature: float
    top_p: float
    min_p: float
    blocks: list[int]


class SlotRows(NamedTuple):
    """The state of R requests, read at once."""

    start: Tensor  # [R] int64, PAD for padding
    limit: Tensor  # [R] int64
    most_drafts: Tensor  # [R] int64
    seed: Tensor  # [R] int64
    top_k: Tensor  # [R] int64
    temperature: Tensor  # [R] float32
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    tokens: Tensor  # [R, k + 1] int64, PAD where there is no draft
    blocks: Tensor  # [R, max_blocks] int64


class DeviceState:
    """S slots for requests and one for padding, the last. k is the largest number of drafts."""

    def __init__(self, slots: int, k: int, max_blocks: int, device: torch.device) -> None:
        self.most_k = k
        self.table = TOKENS + k + 1  # first column of the block table
        self.values = torch.full((slots + 1, self.table + max_blocks), PAD, dtype=torch.int64, device=device)
        self.values[:, self.table :] = ZERO_BLOCK
        self.values[:, TOP_K:TOKENS] = 0

    @property
    def padding_slot(self) -> int:
        """The slot of padding requests."""
        return self.values.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """Where the state lies."""
        return self.values.device

    def read(self, slots: Tensor, k: int) -> SlotRows:
        """The state of the requests in `slots` [R], with up to k drafts."""
        rows = self.values[slots]
        start, limit, most, seed, top_k = rows[:, START:TEMPERATURE].unbind(1)
        temperature, top_p, min_p = rows[:, TEMPERATURE:TOKENS].view(torch.float64).float().unbind(1)
        tokens, blocks = rows[:, TOKENS : TOKENS + k + 1], rows[:, self.table :]
        return SlotRows(start, limit, most, seed, top_k, temperature, top_p, min_p, tokens, blocks)

    def advance(self, slots: Tensor, start: Tensor, tokens: Tensor) -> None:
        """Move requests to `start` [R] (PAD for padding), with their newest token and its drafts [R, k + 1]."""
        self.values[slots, START] = start
        self.values[slots[:, None], torch.arange(TOKENS, TOKENS + tokens.shape[1], device=slots.device)] = tokens

    def upload(self, values: dict[int, SlotValues]) -> None:
        """Overwrite some slots, with one copy to the device."""
        width = self.values.shape[1] - self.table
        rows = []
        for slot, v in values.items():
            tokens = v.tokens + [PAD] * (self.most_k + 1 - len(v.tokens))
            bits = struct.unpack("3q", struct.pack("3d", v.temperature, v.top_p, v.min_p))
            table = v.blocks[:width] + [ZERO_BLOCK] * (width - len(v.blocks))
            rows.append([slot, v.start, v.limit, v.most_drafts, v.seed, v.top_k, *bits, *tokens, *table])
        packed = self._to_device(rows)
        self.values[packed[:, 0]] = packed[:, 1:]

    def upload_blocks(self, values: dict[int, SlotValues]) -> None:
        """Overwrite the block tables and limits of some slots, while the rest of them may be ahead of the host."""
        width = self.values.shape[1] - self.table
        rows = []
        for slot, v in values.items():
            rows.append([slot, v.limit, *v.blocks[:width], *[ZERO_BLOCK] * (width - len(v.blocks))])
        packed = self._to_device(rows)
        self.values[packed[:, 0], LIMIT] = packed[:, 1]
        self.values[packed[:, 0], self.table :] = packed[:, 2:]

    def _to_device(self, rows: list[list[int]]) -> Tensor:
        packed = torch.tensor(rows, dtype=torch.int64, device="cpu")
        if self.device.type == "cpu":
            return packed
        return packed.pin_memory().to(self.device, non_blocking=True)


def decode_batch(ops: Ops, token_ids: Tensor, start: Tensor, limit: Tensor, table: Tensor, block_size: int) -> Batch:
    """The batch of R requests with n rows each from `start` on, made on the device; see `ops.decode_rows`."""
    requests, n = token_ids.shape
    rows = ops.decode_rows(token_ids, start, limit, table, block_size)
    count = requests * n
    return Batch(
        input_ids=rows.input_ids,
        positions=rows.positions,
        seq_lens=rows.seq_lens,
        slot_block=rows.slot_block,
        slot_offset=rows.slot_offset,
        block_table=table,
        logits_indices=rows.positions,  # unused: every row has logits
        spans=[Span(slice(0, requests), slice(0, count), n, rows.seen, table)],
        max_seq_len=table.shape[1] * block_size,
    )
