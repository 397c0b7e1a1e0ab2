"""How drafts are drawn from a head's logits: with the target's own noise, greedily, or independently.

Coupled drafts take the arg max of the draft's processed logits plus the very noise that the target's sample will use,
so that both pick the same token with probability of at least (1 - TV) / (1 + TV); greedy drafts only reach the target's
probability of the draft's favourite (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024). The emitted text is the target's own sample in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from skipstone.core.sampling_rows import RowFeatures
from skipstone.core.sequence_table import SlotRows
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.sampling import process_logits

DraftSampling = Literal["coupled", "greedy", "independent"]
DraftMasks = Callable[[list[Tensor]], Tensor | None]  # drafts so far -> what grammars permit next, [D, V] bool
STEP_STRIDE = 0x1B873593CC9E2D51  # any large odd number


def fresh_seeds(seeds: Tensor, committed: Tensor) -> Tensor:
    """Seeds [R] that differ from step to step: a position may be drafted and verified in several of them."""
    return seeds + committed * STEP_STRIDE


@dataclass(frozen=True)
class DraftSampler:
    """Draws the drafts of one step. `probs` [S, k, V] float32: where to keep the distribution each was drawn from."""

    mode: DraftSampling
    features: RowFeatures
    committed: Tensor  # [D] int64, tokens of each request
    ops: Ops
    probs: Tensor | None = None
    allowed: DraftMasks | None = None
    drawn: list[Tensor] = field(default_factory=list)

    def sample(self, logits: Tensor, at: SlotRows, slots: Tensor, position: Tensor, depth: int) -> Tensor:
        """One draft per row of logits [D, V] for `position` [D]: [D] int64."""
        allowed = self.allowed(self.drawn) if self.allowed is not None else None
        rows = self.features.rows(at, slots, position, allowed, greedy=self.mode == "greedy")
        if self.mode == "independent":
            rows = rows._replace(seed=fresh_seeds(rows.seed, self.committed))
        tokens = self.ops.sample(logits, rows)
        self.drawn.append(tokens)
        if self.probs is not None:
            probs = process_logits(logits.float(), rows).softmax(dim=1)
            # A head with a smaller vocabulary may have nothing left, all its tokens forbidden; its draft is token 0.
            certain = (rows.temperature == 0) | probs.isnan().any(dim=1)
            one_hot = torch.zeros_like(probs).scatter_(1, tokens[:, None], 1.0)
            self.probs[slots, depth] = torch.where(certain[:, None], one_hot, probs)
        return tokens
