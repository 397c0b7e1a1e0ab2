"""What the device knows of running requests between decode steps, so that a step needs nothing from the host.

Every running request has a slot, a row of these tensors. One more slot belongs to padding: its position is negative, so
its rows read and write nothing that counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, SPARE_BLOCK, ZERO_BLOCK, Batch, Span


class SlotValues(NamedTuple):
    """One request as the device must know it."""

    tokens: list[int]  # the newest committed token, then its drafts
    start: int  # position of the newest committed token; KV is valid below
    limit: int  # rows at this position and behind have no slot, or could never be kept
    most_drafts: int
    seed: int
    temperature: float
    blocks: list[int]


@dataclass(frozen=True)
class DeviceState:
    """S slots for requests and one for padding, the last; k is the largest number of drafts."""

    tokens: Tensor  # [S + 1, k + 1] int64, PAD where there is no draft
    start: Tensor  # [S + 1] int64
    limit: Tensor  # [S + 1] int64
    most_drafts: Tensor  # [S + 1] int64
    seed: Tensor  # [S + 1] int64
    temperature: Tensor  # [S + 1] float32
    blocks: Tensor  # [S + 1, max_blocks] int64

    @staticmethod
    def make(slots: int, k: int, max_blocks: int, device: torch.device) -> DeviceState:
        """A state of padding only."""
        number = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        return DeviceState(
            tokens=torch.full((slots + 1, k + 1), PAD, dtype=torch.int64, device=device),
            start=torch.full_like(number, PAD),
            limit=number.clone(),
            most_drafts=number.clone(),
            seed=number.clone(),
            temperature=torch.zeros(slots + 1, dtype=torch.float32, device=device),
            blocks=torch.full((slots + 1, max_blocks), ZERO_BLOCK, dtype=torch.int64, device=device),
        )

    @property
    def padding_slot(self) -> int:
        """The slot of padding requests."""
        return self.start.shape[0] - 1

    def upload(self, values: dict[int, SlotValues]) -> None:
        """Overwrite some slots, with one copy to the device."""
        k1, blocks = self.tokens.shape[1], self.blocks.shape[1]
        rows = []
        for slot, v in values.items():
            tokens = v.tokens + [PAD] * (k1 - len(v.tokens))
            table = v.blocks[:blocks] + [ZERO_BLOCK] * (blocks - len(v.blocks))
            rows.append([slot, v.start, v.limit, v.most_drafts, v.seed, *tokens, *table])
        packed = _to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.start.device)
        place = packed[:, 0]
        for column, field in enumerate((self.start, self.limit, self.most_drafts, self.seed), start=1):
            field[place] = packed[:, column]
        self.tokens[place] = packed[:, 5 : 5 + k1]
        self.blocks[place] = packed[:, 5 + k1 :]
        warm = torch.tensor([v.temperature for v in values.values()], dtype=torch.float32, device="cpu")
        self.temperature[place] = _to_device(warm, self.start.device)

    def upload_blocks(self, values: dict[int, SlotValues]) -> None:
        """Overwrite the block tables and limits of some slots, while the rest of them may be ahead of the host."""
        width = self.blocks.shape[1]
        rows = [
            [slot, v.limit, *v.blocks[:width], *[ZERO_BLOCK] * (width - len(v.blocks))] for slot, v in values.items()
        ]
        packed = _to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.start.device)
        self.limit[packed[:, 0]] = packed[:, 1]
        self.blocks[packed[:, 0]] = packed[:, 2:]


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def decode_batch(token_ids: Tensor, positions: Tensor, limit: Tensor, table: Tensor, block_size: int) -> Batch:
    """The batch of R requests with n rows each, made on the device. Nothing is read back.

    token_ids, positions [R, n], limit [R], table [R, blocks]. Rows at negative positions or from `limit` on are
    padding.
    """
    requests, n = token_ids.shape
    counts = (positions >= 0) & (positions < limit[:, None])
    place = torch.where(counts, positions, 0)
    block = table.gather(1, place // block_size)
    rows = requests * n
    seen = torch.where(counts, positions, PAD)
    slots = torch.where(counts & (block != ZERO_BLOCK), block, SPARE_BLOCK)
    longest = table.shape[1] * block_size
    return Batch(
        input_ids=token_ids.clamp(min=0).flatten(),
        positions=place.flatten(),
        seq_lens=seen.amax(dim=1) + 1,
        slot_block=slots.flatten(),
        slot_offset=(place % block_size).flatten(),
        row_block_table=table if n == 1 else table[:, None].expand(requests, n, -1).reshape(rows, -1),
        logits_indices=torch.arange(rows, device=table.device),
        spans=[Span(slice(0, requests), slice(0, rows), n, seen, table)],
        max_seq_len=longest,
    )
