"""Drafting a block at once: the newest token and k mask tokens in one pass, every mask's row a draft (DFlash).

The caches of the draft layers hold features of the target's states, row by row as the target computes them. A block's
own keys lie behind them, where the next step's features go. Nothing depends on tokens, so nothing is rolled back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import check_groups
from skipstone.core.batch import ZERO_BLOCK
from skipstone.models.base import BlockDraftHead
from skipstone.spec.proposer import CachedProposer, DraftStep, ProposerNeeds


class DflashProposer(CachedProposer):
    """Runs a block head over its own caches."""

    def __init__(self, head: BlockDraftHead) -> None:
        """Raises UnsupportedError when a cache group of the head cannot serve rows that see each other."""
        super().__init__(head.cache_specs(), head.attention_scale, None)
        self.head = head
        most = head.block_size - 1
        self.needs = ProposerNeeds(
            "dflash",
            head.taps,
            uses_caches=True,
            max_k=most,
            max_position=head.max_position,
            default_k=most,
            least_lookahead=head.block_size,
        )
        check_groups(self.cache_specs(), "in_block", self.needs.name)

    def propose(self, step: DraftStep) -> Tensor | None:
        """Store the features of the target's rows, then run one block per request that drafts.

        A whole block, as the head was trained on: its first drafts are better among all of them. Fewer rows where
        positions or cache blocks end.
        """
        batch = self.followed(step, 0)
        self.head.store_context(step.hidden, batch, self.groups.plan(batch))
        if not step.k:
            return None
        count, size = len(step.newest), self.head.block_size
        tokens = torch.full((count, size), self.head.mask_token_id, dtype=torch.int64, device=step.newest.device)
        tokens[:, 0] = step.token_before(step.newest + 1)
        owned = (step.draft_at.blocks != ZERO_BLOCK).sum(dim=1) * self.cache.block_size
        block = step.rows(tokens, step.newest, owned.clamp(max=self.head.max_position), see_ahead=True)
        states = self.head(block, self.groups.plan(block)).view(count, size, -1)[:, 1 : step.k + 1]
        logits = self.head.logits(states.flatten(0, 1)).view(count, step.k, -1)
        return torch.stack([step.sample(logits[:, depth], depth) for depth in range(step.k)], dim=1)
