"""What grammars allow in a step: masks over the vocabulary, made on the host while the device runs the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.plan import StepPlan
from skipstone.core.request import Request


class Mask(NamedTuple):
    """What a plan's item may choose in its row behind `num_drafts` drafts, [V] bool."""

    place: int  # of the item, among those that sample
    num_drafts: int
    allowed: Tensor


class GrammarMasks:
    """The masks of one step; `owners` are the requests of the plan's items."""

    def __init__(self, plan: StepPlan, owners: list[Request | None]) -> None:
        sampling = [pair for pair in zip(plan.items, owners, strict=True) if pair[0].samples]
        self._owners = [request for _, request in sampling]
        self.verified: list[Mask] = []
        """Of every sampled row whose request has a grammar. A row behind an illegal draft is never emitted."""
        for place, (item, request) in enumerate(sampling):
            if request is None or request.grammar is None:
                continue
            for count in range(min(item.num_drafts, len(request.drafts)) + 1):
                allowed = request.grammar.allowed(request.drafts[:count])
                if allowed is None:
                    break
                self.verified.append(Mask(place, count, _going_on(allowed, request)))

    def of_drafts(self, emitted: list[list[int]], drawn: list[Tensor]) -> Tensor | None:
        """What the next draft of each sampling request may be, [D, V] bool: behind its step's tokens and its drafts."""
        rows: list[Tensor | None] = []
        for place, request in enumerate(self._owners):
            allowed = None
            if request is not None and request.grammar is not None:
                allowed = request.grammar.allowed(emitted[place] + [int(tokens[place]) for tokens in drawn])
            rows.append(None if request is None or allowed is None else _going_on(allowed, request))
        size = next((len(row) for row in rows if row is not None), None)
        if size is None:
            return None
        anything = torch.ones(size, dtype=torch.bool)
        return torch.stack([anything if row is None else row for row in rows])


def _going_on(allowed: Tensor, request: Request) -> Tensor:
    """With `ignore_eos`, a text that can go on does."""
    if not request.params.ignore_eos:
        return allowed
    going_on = allowed.clone()
    going_on[sorted(request.eos_token_ids)] = False
    return going_on if going_on.any() else allowed
