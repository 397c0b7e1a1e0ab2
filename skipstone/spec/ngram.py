"""Prompt lookup: drafts are what followed the last few tokens when they stood in the context before."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.core.batch import PAD
from skipstone.core.kv_cache import CacheMemory, CacheSpec
from skipstone.core.sequence_table import NUM_PROMPT
from skipstone.kernels.ops import Ops
from skipstone.spec.proposer import DraftStep, ProposerNeeds
from skipstone.spec_config import SpecConfig


def find_drafts(tokens: Tensor, length: Tensor, k: int, min_match: int, max_match: int) -> Tensor:
    """Up to k tokens that followed the earliest other occurrence of the longest matching suffix, then PAD.

    tokens [D, W] integers, of which the first `length` [D] count; PAD among them matches nothing and ends the drafts.
    The suffix has min_match to max_match tokens; occurrences may overlap it. -> [D, k] int64.
    """
    width = tokens.shape[1]
    column = torch.arange(width, device=tokens.device)
    going = column < length[:, None] - 1  # [D, W] whether all compared so far agreed, for a suffix that ends there
    matched = torch.zeros(tokens.shape, dtype=torch.int16, device=tokens.device)
    for back in range(min(max_match, width)):
        suffix = tokens.gather(1, (length[:, None] - 1 - back).clamp(min=0))  # [D, 1]
        going[:, :back] = False
        going[:, back:] &= (tokens[:, : width - back] == suffix) & (suffix >= 0)
        matched += going
    best, place = matched.max(dim=1, keepdim=True)  # the first of equal ones
    follows = place + 1 + torch.arange(k, device=tokens.device)
    drafts = tokens.gather(1, follows.clamp(max=width - 1)).long()
    real = (best >= min_match) & (follows < length[:, None]) & (drafts >= 0)
    return torch.where(real.long().cumprod(dim=1) > 0, drafts, PAD)


class NgramProposer:
    """Drafts by prompt lookup; no weights, no caches."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match, self.max_match = min_match, max_match
        self.needs = ProposerNeeds("ngram", graphs=False)  # a graph would search all positions that there could be

    def cache_specs(self) -> list[CacheSpec]:
        """None."""
        return []

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Nothing to make."""

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Nothing to copy."""

    def propose(self, step: DraftStep) -> Tensor | None:
        """Look up each request's own tokens, and what its caller has predicted."""
        if not step.k:
            return None
        slots, length = step.draft_slots, step.newest + 1
        tokens = step.table.tokens[:, : step.max_seq_len][slots]  # [D, W]
        if step.table.predictions is None:
            return find_drafts(tokens, length, step.k, self.min_match, self.max_match)
        predicted = step.table.predictions[slots]  # [D, P]
        gap = torch.full_like(predicted[:, :1], PAD)
        both, behind = torch.cat([predicted, gap, tokens], dim=1), predicted.shape[1] + 1
        found = find_drafts(both, length + behind, step.k, self.min_match, self.max_match)
        written = length - step.draft_at.integers(NUM_PROMPT)
        column = torch.arange(predicted.shape[1], device=length.device)
        output = tokens.gather(1, (column + (length - written)[:, None]).clamp(max=tokens.shape[1] - 1))
        agrees = ((output == predicted) | (column >= written[:, None])).all(dim=1, keepdim=True)
        agrees &= (written <= (predicted >= 0).sum(dim=1))[:, None] & (predicted[:, :1] >= 0)
        ahead = written[:, None] + torch.arange(step.k, device=length.device)
        going_on = predicted.gather(1, ahead.clamp(max=predicted.shape[1] - 1)).long()
        going_on = torch.where(ahead < predicted.shape[1], going_on, PAD)
        return torch.where(agrees, going_on, found)


def make_ngram(spec: SpecConfig, around: object) -> NgramProposer:
    """Prompt lookup as asked for."""
    return NgramProposer(spec.min_match, spec.max_match)
