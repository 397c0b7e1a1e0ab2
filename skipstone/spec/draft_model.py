"""Drafting with an independent, smaller language model over caches of its own (Leviathan et al., 2023).

Row p is fed token p and predicts p + 1, nothing is shifted. Chunks of prompts run through it as through the target.
After verification its entries are right up to two before the newest token: the last draft was never run, nor was the
token behind it. So every step runs these two positions, then one row per further draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import check_groups
from skipstone.core.batch import Batch
from skipstone.models.base import CausalLM, DraftOutput
from skipstone.spec.hidden_state import draft_chain
from skipstone.spec.proposer import CachedProposer, DraftStep, ProposerNeeds


class DraftModelProposer(CachedProposer):
    """Runs any language model with the target's vocabulary."""

    def __init__(self, model: CausalLM, max_position: int) -> None:
        """Raises UnsupportedError when a cache group of the model cannot follow the draft steps."""
        super().__init__(model.cache_specs(), model.config.softmax_scale, model.config.sparse)
        self.model = model
        self.needs = ProposerNeeds(
            "draft", uses_caches=True, max_position=max_position, block_unit=model.config.block_unit
        )
        check_groups(self.cache_specs(), "advance", self.needs.name)

    def propose(self, step: DraftStep) -> Tensor | None:
        """Follow the target, then draft."""
        if step.chunks:
            self.run(step.hidden.final, self.followed(step, 0))
        if not len(step.newest):
            return None
        tokens = torch.stack([step.token_before(step.newest), step.token_before(step.newest + 1)], dim=1)
        states = self.run(tokens, step.rows(tokens, step.newest - 1, torch.minimum(step.limit, step.newest + 1)))
        if not step.k:
            return None
        return draft_chain(self, step, states[1::2], step.newest + 1, step.limit)

    def outputs(self, states: Tensor) -> DraftOutput:
        """Logits; no state is handed on."""
        return DraftOutput(self.model.logits(states), states)

    def run(self, recycled: Tensor, batch: Batch) -> Tensor:
        """States of a batch's rows."""
        return self.model(batch, self.groups.plan(batch)).final
