"""Drafting a block at once: the newest token and k mask tokens in one pass, every mask's row a draft (DFlash).

The caches of the draft layers hold features of the target's states, row by row as the target computes them. A block's
own keys lie behind them, where the next step's features go. Nothing depends on tokens, so nothing is rolled back.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups, check_groups
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheMemory, CacheSpec, KVCache
from skipstone.core.rows import QueryRows, build_batch
from skipstone.core.sampling_rows import SampledRow
from skipstone.kernels.ops import Ops
from skipstone.models.base import BlockDraftHead, HiddenStates
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep, ProposerNeeds


class DflashProposer:
    """Runs a block head over its own caches."""

    cache: KVCache
    groups: AttentionGroups

    def __init__(self, head: BlockDraftHead) -> None:
        """Raises UnsupportedError when a cache group of the head cannot serve rows that see each other."""
        self.head = head
        most = head.block_size - 1
        self.needs = ProposerNeeds(
            "dflash",
            head.taps,
            uses_caches=True,
            follows_target=True,
            max_k=most,
            max_position=head.max_position,
            default_k=most,
            least_lookahead=head.block_size,
        )
        check_groups(head.cache_specs(), "in_block", self.needs.name)

    def cache_specs(self) -> list[CacheSpec]:
        """Those of the head."""
        return self.head.cache_specs()

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make the caches."""
        specs = self.cache_specs()
        self.cache = KVCache(specs, memory)
        self.groups = AttentionGroups(specs, self.cache, self.head.attention_scale, None, exact=False, ops=ops)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks."""
        self.cache.copy_blocks(sources, destinations)

    def propose(self, step: DraftStep) -> list[Drafts]:
        """Store the features of the target's rows, then run one block per request that drafts."""
        batch, hidden = _rows_of(step)
        self.head.store_context(hidden, batch, self.groups.plan(batch))
        drafts: list[list[int]] = [[] for _ in step.requests]
        active = [i for i, r in enumerate(step.requests) if r.wanted]
        if active:
            self._draft(step, active, drafts)
        return [Drafts(ids, request.num_valid) for ids, request in zip(drafts, step.requests, strict=True)]

    def _draft(self, step: DraftStep, active: list[int], drafts: list[list[int]]) -> None:
        """Fill `drafts` of the active requests."""
        requests = [step.requests[i] for i in active]
        mask = self.head.mask_token_id
        masks = [self._num_masks(request) for request in requests]
        blocks = [
            QueryRows([*r.tokens(r.length - 1, r.length), *[mask] * masks[place]], r.length - 1, r.request.block_ids)
            for place, r in enumerate(requests)
        ]
        batch = build_batch(blocks, self.cache.block_size, see_ahead=True)
        states = self.head(batch, self.groups.plan(batch))
        firsts, row = [], 0  # the row of each block's first mask
        for block in blocks:
            firsts.append(row + 1)
            row += len(block.token_ids)
        masked = torch.tensor([first + i for first, r in zip(firsts, requests, strict=True) for i in range(r.wanted)])
        logits = self.head.logits(states[masked])
        starts = [sum(r.wanted for r in requests[:place]) for place in range(len(requests))]  # rows of `logits`
        depths = list(range(max(r.wanted for r in requests)))
        # Penalties and grammars look at the earlier drafts, which must then be known; else only their number matters.
        stepwise = any(_counts_tokens(r) for r in requests)
        for part in [[depth] for depth in depths] if stepwise else [depths]:
            chosen = [(place, depth) for place, r in enumerate(requests) for depth in part if depth < r.wanted]
            rows = [_row(requests[place], drafts[active[place]], depth, mask) for place, depth in chosen]
            tokens = step.choose(logits[[starts[place] + depth for place, depth in chosen]], rows)
            for (place, _), token in zip(chosen, tokens, strict=True):
                drafts[active[place]].append(token)

    def _num_masks(self, request: DraftRequest) -> int:
        """A whole block, as the head was trained on: its first drafts are better among all of them.

        Fewer where positions or cache blocks end.
        """
        owned = len(request.request.block_ids) * self.cache.block_size
        return min(self.head.block_size - 1, self.head.max_position - request.length, owned - request.length)


def _counts_tokens(request: DraftRequest) -> bool:
    params = request.request.params
    counts = params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
    return counts or request.request.grammar is not None


def _row(request: DraftRequest, drafts: list[int], depth: int, unknown: int) -> SampledRow:
    """How the draft after `depth` others is chosen; those that are not chosen yet are stood in for."""
    return SampledRow(request.request, [*request.emitted, *drafts, *[unknown] * (depth - len(drafts))])


def _rows_of(step: DraftStep) -> tuple[Batch, HiddenStates]:
    """The target's rows of the requests that draft: their places, and their states."""
    counts = [request.rows.stop - request.rows.start for request in step.requests]
    if sum(counts) == len(step.batch.input_ids):
        return step.batch, step.hidden
    chosen = torch.cat([torch.arange(request.rows.start, request.rows.stop) for request in step.requests])
    batch = replace(
        step.batch,
        positions=step.batch.positions[chosen],
        slot_block=step.batch.slot_block[chosen],
        slot_offset=step.batch.slot_offset[chosen],
        spans=[],
    )
    return batch, step.hidden._replace(taps=tuple(tap[chosen] for tap in step.hidden.taps))
