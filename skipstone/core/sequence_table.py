"""What the device knows of running requests: their tokens, how far they are, how they sample, which blocks they own.

Every running request has a slot, a row of both tensors; one more slot belongs to padding: its position is negative, so
its rows read and write nothing that counts. A request's unverified drafts stand in its row of `tokens`, behind what is
committed, so prompts, decoding and verification read their tokens in one way.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import PAD, ZERO_BLOCK
from skipstone.core.plan import Admission

# Columns of `values`; those from TEMPERATURE on hold the bits of float64 numbers.
START, LIMIT, NUM_PROMPT, ADMISSION, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(12)
TABLE = 16  # the first column of the block table
# Block tables have multiples of so many columns: kernels are compiled once more for rows that begin elsewhere.
COLUMNS = 16


def table_columns(tokens: int, block_size: int) -> int:
    """Columns of a block table that reaches so far."""
    return -(-tokens // (block_size * COLUMNS)) * COLUMNS


class SlotRows(NamedTuple):
    """The state of R requests, or of N rows that belong to them, read at once."""

    settings: Tensor  # [R, TABLE] int64
    blocks: Tensor  # [R, max_blocks] int64, ZERO_BLOCK where none is owned

    @property
    def start(self) -> Tensor:
        """num_computed_tokens, PAD for padding: [R] int64."""
        return self.settings[:, START]

    @property
    def limit(self) -> Tensor:
        """Rows at this position and behind could never be kept: [R] int64."""
        return self.settings[:, LIMIT]

    @property
    def seed(self) -> Tensor:
        """[R] int64."""
        return self.settings[:, SEED].contiguous()

    def integers(self, column: int) -> Tensor:
        """NUM_PROMPT, ADMISSION or TOP_K, [R] int64."""
        return self.settings[:, column]

    def fractions(self, column: int) -> Tensor:
        """TEMPERATURE (0: greedy) or one of the columns behind it, [R] float32."""
        return self.settings[:, column].view(torch.float64).float()

    def take(self, index: Tensor) -> SlotRows:
        """The settings at `index`; the block tables stay by request."""
        return SlotRows(self.settings[index], self.blocks)


class SequenceTable:
    """S slots for requests and one for padding, the last. `most_drafts`: of any request."""

    def __init__(self, slots: int, max_tokens: int, block_size: int, most_drafts: int, device: torch.device) -> None:
        # A step writes up to most_drafts + 1 tokens and as many drafts behind the last committed one.
        width = max_tokens + 2 * most_drafts + 2
        self.tokens = torch.zeros(slots + 1, width, dtype=torch.int32, device=device)
        self.values = torch.zeros(
            slots + 1, TABLE + table_columns(max_tokens, block_size), dtype=torch.int64, device=device
        )
        self.values[:, START] = PAD
        self.values[:, TABLE:] = ZERO_BLOCK
        self.predictions: Tensor | None = None  # [S + 1, P] int32, once a request has one
        self.padding_slot = slots

    @property
    def device(self) -> torch.device:
        """Of both tensors."""
        return self.values.device

    def read(self, slots: Tensor) -> SlotRows:
        """The state of the requests in `slots` [R]."""
        rows = self.values[slots]
        return SlotRows(rows[:, :TABLE], rows[:, TABLE:])

    def admit(self, admissions: list[Admission]) -> None:
        """Fill the slots of new requests; their blocks come as `own`."""
        rows = []
        for new in admissions:
            p = new.params
            penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            fractions = struct.pack("6d", 0.0 if p.greedy else p.temperature, p.top_p, p.min_p, *penalties)
            bits = struct.unpack("6q", fractions)
            limit, top_k = new.max_total_tokens - 1, max(p.top_k, 0)
            rows.append([new.slot, new.start, limit, new.num_prompt_tokens, new.number, new.seed, top_k, *bits])
            self.tokens[new.slot, : len(new.token_ids)] = self.moved(np.array(new.token_ids, dtype=np.int32))
            self._predict(new)
        packed = self.moved(np.array(rows, dtype=np.int64))
        self.values[packed[:, 0], : packed.shape[1] - 1] = packed[:, 1:]
        self.values[packed[:, 0], TABLE:] = ZERO_BLOCK

    def _predict(self, new: Admission) -> None:
        """Keep what its caller expects; there is room for the longest that anybody expected."""
        width = 0 if self.predictions is None else self.predictions.shape[1]
        if len(new.prediction) > width:
            wider = self.tokens.new_full((len(self.tokens), len(new.prediction)), PAD)
            if self.predictions is not None:
                wider[:, :width] = self.predictions
            self.predictions = wider
        if self.predictions is not None:
            self.predictions[new.slot] = PAD
            self.predictions[new.slot, : len(new.prediction)] = self.moved(np.array(new.prediction, dtype=np.int32))

    def own(self, blocks: list[tuple[int, int, int]]) -> None:
        """Add (slot, place, block) to the block tables."""
        slots, places, ids = self.moved(np.array(blocks, dtype=np.int64).T.copy())
        self.values[slots, places + TABLE] = ids

    def moved(self, array: np.ndarray) -> Tensor:
        """The array on the table's device, by a copy that does not wait for what runs there."""
        host = torch.from_numpy(array)
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)
