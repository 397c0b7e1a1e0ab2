"""Drafting with several MTP modules, one per draft, each with its own caches (DeepSeek-V3 report, 2.2).

Module m's entry at position p depends on the token at p + m + 1, so after a step the entries of the last m committed
positions may come from rejected drafts. Every step therefore runs the last M - 1 positions again, from the target's
states that are kept for each request; nothing goes stale and nothing is rolled back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import PAD, Batch, host_rows, make_spans
from skipstone.core.kv_cache import CacheMemory
from skipstone.core.sequence_table import ADMISSION
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import PlacedRows, placed_rows
from skipstone.models.base import DraftHead
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import DraftStep


class SeveralModulesProposer(HiddenStateProposer):
    """Module m gives draft m + 1; k is at most the number of modules."""

    def __init__(self, name: str, head: DraftHead) -> None:
        super().__init__(name, head)
        modules = head.num_modules
        self.needs = self.needs._replace(next_tokens=modules, max_k=modules, graphs=False)
        self.lead = modules - 1

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make the caches, and what is kept of each slot: the target's states before the next step's rows."""
        super().bind(memory, ops)
        self._states: Tensor | None = None  # [S, M - 1, H]
        self._kept: Tensor | None = None  # [S, 3] int64: admission, first position kept, position behind the last

    def propose(self, step: DraftStep) -> Tensor | None:
        """All modules over the window of every request; the row at the last valid position gives each draft."""
        hidden = self.head.first_hidden(step.hidden)
        if self._states is None or self._kept is None:
            slots = len(step.table.values)
            self._states = hidden.new_zeros(slots, self.lead, hidden.shape[1])
            self._kept = torch.full((slots, 3), PAD, dtype=torch.int64, device=hidden.device)
        window = _Window(step, self.lead, self._kept, self.head.max_position)
        states = window.gather(hidden, self._states)
        self._keep(step, window, states, self._states, self._kept)
        batch = window.batch(step)
        attention = self.groups.plan(batch)
        drafts: list[Tensor] = []
        known = step.known
        for module in range(self.head.num_modules):
            ids = window.tokens(step, module + 1, known)
            out = self.head(states, replace(batch, input_ids=ids), attention, module)
            if module < step.k:
                last = window.row_of(step.newest - 1, step.drafting)
                drafts.append(step.sample(self.head.outputs(out[last], module).logits, module))
                step.write(drafts[-1], module)
                known = known.clone()
                known[slice(None) if step.drafting is None else step.drafting] += 1
            states = self.head.recycled(out, module)
        return torch.stack(drafts, dim=1) if drafts else None

    def _keep(self, step: DraftStep, window: _Window, states: Tensor, kept_states: Tensor, kept: Tensor) -> None:
        """Keep the states at the last M - 1 positions that the step has made final."""
        ends = window.end.clone()
        if step.drafting is None:
            ends = step.newest
        else:
            ends[step.drafting] = step.newest
        back = torch.arange(-self.lead, 0, device=ends.device)
        rows = (window.first[:, None] + (ends - window.start)[:, None] + back).clamp(min=0, max=len(states) - 1)
        kept_states[step.slots] = states[rows]
        kept[step.slots] = torch.stack([step.at.integers(ADMISSION), window.valid_from, ends], dim=1)


class _Window:
    """The rows of each request in this step, and before them the M - 1 whose states are kept."""

    def __init__(self, step: DraftStep, lead: int, kept: Tensor, longest: int) -> None:
        counts = np.array(step.counts)
        self.counts = counts + lead
        firsts = self.counts.cumsum() - self.counts
        item, offset = host_rows(self.counts)
        row = np.maximum(offset - lead, 0) + (counts.cumsum() - counts)[item]  # of the step's batch
        moved = step.table.moved
        self.first, self.item, self.offset, self.row = (moved(a.astype(np.int64)) for a in (firsts, item, offset, row))
        self.lead = lead
        self.slots = step.slots
        true_start = step.at.start
        self.start = true_start - lead  # [R] position of a window's first row
        self.end = torch.minimum(step.at.limit, true_start + moved(counts.astype(np.int64))).clamp(max=longest)
        admission, first, last = kept[step.slots].unbind(1)
        goes_on = (admission == step.at.integers(ADMISSION)) & (last == true_start)
        self.valid_from = torch.where(goes_on, first, true_start)
        self.position = self.start[self.item] + self.offset
        real = (self.position >= self.valid_from[self.item]) & (self.position < self.end[self.item])
        self.real = real & (true_start[self.item] >= 0)

    def gather(self, hidden: Tensor, kept: Tensor) -> Tensor:
        """The target's state of every row, [T', H]."""
        before = kept[self.slots[self.item], self.offset.clamp(max=self.lead - 1)]
        return torch.where((self.offset < self.lead)[:, None], before, hidden[self.row])

    def tokens(self, step: DraftStep, shift: int, known: Tensor) -> Tensor:
        """The token `shift` behind each row, the last known one where it is not known."""
        place = torch.minimum(self.position + shift, known[self.item]).clamp(min=0)
        return step.table.tokens[self.slots[self.item], place].clamp(min=0).long()

    def row_of(self, position: Tensor, items: Tensor | None) -> Tensor:
        """The row at this position of each request."""
        first, start = (self.first, self.start) if items is None else (self.first[items], self.start[items])
        return first + (position - start).clamp(min=0)

    def batch(self, step: DraftStep) -> Batch:
        """All rows; the tokens are put in for each module."""
        table, size = step.batch.block_table, step.block_size
        place = torch.where(self.real, self.position, 0)
        rows = placed_rows(place, self.position, self.real, table[self.item, place // size], size)
        placed = PlacedRows(*rows, torch.where(step.at.start >= 0, self.end, 0))
        return placed.batch(table, make_spans(self.counts, placed.seen, table), step.max_seq_len)
