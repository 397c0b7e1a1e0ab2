"""Drafts of no worth, which cost nothing to make: what verification costs can be timed with them."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.spec.ngram import NgramProposer
from skipstone.spec.proposer import DraftStep


class DummyProposer(NgramProposer):
    """Drafts are tokens that the request has written a while ago."""

    def propose(self, step: DraftStep) -> Tensor | None:
        """See the class."""
        if not step.k:
            return None
        place = step.newest[:, None] - 2 * step.k + torch.arange(step.k, device=step.newest.device)
        return step.table.tokens[step.draft_slots[:, None], place.clamp(min=0)].long()
