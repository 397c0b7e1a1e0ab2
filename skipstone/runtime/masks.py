"""What grammars allow in a step: masks over the vocabulary, made on the host while the device runs the model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from skipstone.core.plan import StepPlan
from skipstone.core.request import Request


class Mask(NamedTuple):
    """What a plan's item may choose in its row behind `num_drafts` drafts, [V] bool."""

    place: int  # of the item, among those that sample
    num_drafts: int
    allowed: Tensor


def make_masks(plan: StepPlan, owners: list[Request | None]) -> list[Mask]:
    """Of every sampled row whose request has a grammar; `owners` are the requests of the plan's items.

    A row behind an illegal draft is never emitted, so it may choose anything.
    """
    masks = []
    sampling = [pair for pair in zip(plan.items, owners, strict=True) if pair[0].samples]
    for place, (item, request) in enumerate(sampling):
        if request is None or request.grammar is None:
            continue
        for count in range(min(item.num_drafts, len(request.drafts)) + 1):
            allowed = request.grammar.allowed(request.drafts[:count])
            if allowed is None:
                break
            masks.append(Mask(place, count, _going_on(allowed, request)))
    return masks


def _going_on(allowed: Tensor, request: Request) -> Tensor:
    """With `ignore_eos`, a text that can go on does."""
    if not request.params.ignore_eos:
        return allowed
    going_on = allowed.clone()
    going_on[sorted(request.eos_token_ids)] = False
    return going_on if going_on.any() else allowed
