"""Draft steps one after the other: every request's newest draft is run to get the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from skipstone.core.batch import Batch
from skipstone.core.rows import QueryRows, build_batch
from skipstone.core.sampling_rows import SampledRow
from skipstone.models.base import DraftOutput
from skipstone.spec.proposer import DraftStep


class ChainModel(Protocol):
    """What drafts the chain."""

    def outputs(self, states: Tensor) -> DraftOutput:
        """Logits and recycled states of rows [R, H]."""

    def run(self, recycled: Tensor, batch: Batch) -> Tensor:
        """States [R, H] of one row per request, whose tokens are the newest drafts."""


def draft_chain(
    model: ChainModel, step: DraftStep, states: dict[int, Tensor], first: int, block_size: int
) -> list[list[int]]:
    """Drafts of every request of the step.

    `states` [H]: of the requests that draft, by their place in the step; the first draft comes from them. The row of
    draft 1 stands at position `first` relative to the committed tokens.
    """
    requests = step.requests
    drafts: list[list[int]] = [[] for _ in requests]
    active = list(states)
    if not active:
        return drafts
    batch: Batch | None = None
    current = torch.stack([states[i] for i in active])
    longest = max(requests[i].wanted for i in active)
    for done in range(1, longest + 1):
        logits, recycled = model.outputs(current)
        rows = [SampledRow(requests[i].request, requests[i].emitted + drafts[i]) for i in active]
        for i, token in zip(active, step.choose(logits, rows), strict=True):
            drafts[i].append(token)
        kept = [place for place, i in enumerate(active) if requests[i].wanted > done]
        if not kept:
            break
        if batch is None or len(kept) < len(active):
            active, recycled = [active[place] for place in kept], recycled[kept]
            position = first + done - 1
            newest = [
                QueryRows(drafts[i][-1:], requests[i].length + position, requests[i].request.block_ids) for i in active
            ]
            batch = build_batch(newest, block_size, lookahead=longest - done - 1)
        else:
            batch = replace(batch.advanced(block_size), input_ids=torch.tensor([drafts[i][-1] for i in active]))
        current = model.run(recycled, batch)
    return drafts
