"""Drafting from the target's hidden states, one token after the other: one MTP module applied k times, or EAGLE-3.

The first pass runs the head over the rows that the target just ran, rejected ones included: ids shifted left by one
against states and positions. Its row at the last valid position gives the first draft. Each further step runs one row
per request, fed the draft and the head's own state. Whatever a step writes for drafts is overwritten by the next first
pass, so nothing is rolled back (Li et al., EAGLE-3, 2025; DeepSeek-V3 report, 2.2).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from skipstone.attention.backend import check_groups
from skipstone.core.batch import Batch
from skipstone.models.base import DraftHead, DraftOutput
from skipstone.spec.proposer import CachedProposer, DraftStep, ProposerNeeds


class ChainModel(Protocol):
    """What drafts one token after the other."""

    def outputs(self, states: Tensor) -> DraftOutput:
        """Logits and recycled states of rows [D, H]."""

    def run(self, recycled: Tensor, batch: Batch) -> Tensor:
        """States [D, H] of one row per request, whose tokens are the newest drafts."""


def draft_chain(model: ChainModel, step: DraftStep, current: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Drafts [D, k] of every request.

    The first draft comes from `current` [D, H]. The row of draft 1 stands at position `first` [D], and rows from `end`
    [D] on are padding.
    """
    drafts: list[Tensor] = []
    for depth in range(step.k):
        logits, recycled = model.outputs(current)
        drafts.append(step.sample(logits, depth))
        if depth < step.k - 1:
            position = torch.where(step.newest >= 0, first + depth, step.newest)
            current = model.run(recycled, step.rows(drafts[-1][:, None], position, end))
    return torch.stack(drafts, dim=1)


class HiddenStateProposer(CachedProposer):
    """Runs a draft head with one module, over its own caches."""

    def __init__(self, name: str, head: DraftHead) -> None:
        """Raises UnsupportedError when a cache group of the head cannot follow the draft steps."""
        super().__init__(head.cache_specs(), head.attention_scale, head.sparse)
        self.head = head
        self.needs = ProposerNeeds(
            name,
            head.taps,
            next_tokens=1,
            uses_caches=True,
            max_position=head.max_position,
            final_states=not head.taps,
            remarks=head.remarks,
        )
        check_groups(self.cache_specs(), "advance", name)

    def propose(self, step: DraftStep) -> Tensor | None:
        """First pass over the target's rows, then one row per request and draft."""
        batch = self.followed(step, 1)
        kept = step.last_rows_of(batch)
        states = self.head(self.head.first_hidden(step.hidden), batch, self.groups.plan(batch, kept))
        if not step.k:
            return None
        current = states[step.last_rows] if kept is None else states
        return draft_chain(self, step, current, step.newest, step.limit)

    def outputs(self, states: Tensor) -> DraftOutput:
        """Those of the head."""
        return self.head.outputs(states)

    def run(self, recycled: Tensor, batch: Batch) -> Tensor:
        """The head's states after one draft step."""
        return self.head(recycled, batch, self.groups.plan(batch))
