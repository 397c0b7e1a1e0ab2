"""Drafting from the target's hidden states, one token after the other: one MTP module applied k times, or EAGLE-3.

The first pass runs the head over the rows that the target just ran, rejected ones included: ids shifted left by one
against states and positions. Its row at the last valid position gives the first draft. Each further step runs one row
per request, fed the draft and the head's own state. Whatever a step writes for drafts is overwritten by the next first
pass, so nothing is rolled back (Li et al., EAGLE-3, 2025; DeepSeek-V3 report, 2.2).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups, check_groups
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheMemory, CacheSpec, KVCache
from skipstone.core.rows import QueryRows, build_batch
from skipstone.kernels.ops import Ops
from skipstone.models.base import DraftHead, DraftOutput
from skipstone.spec.chain import draft_chain
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep, ProposerNeeds


class HiddenStateProposer:
    """Runs a draft head with one module, over its own caches."""

    cache: KVCache
    groups: AttentionGroups

    def __init__(self, name: str, head: DraftHead) -> None:
        """Raises UnsupportedError when a cache group of the head cannot follow the draft steps."""
        self.head = head
        self.needs = ProposerNeeds(
            name,
            head.taps,
            next_tokens=1,
            uses_caches=True,
            follows_target=True,
            max_position=head.max_position,
            final_states=not head.taps,
            remarks=head.remarks,
        )
        check_groups(head.cache_specs(), "advance", name)

    def cache_specs(self) -> list[CacheSpec]:
        """Those of the head."""
        return self.head.cache_specs()

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make the caches."""
        specs = self.cache_specs()
        self.cache = KVCache(specs, memory)
        self.groups = AttentionGroups(
            specs, self.cache, self.head.attention_scale, self.head.sparse, exact=False, ops=ops
        )

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks."""
        self.cache.copy_blocks(sources, destinations)

    def propose(self, step: DraftStep) -> list[Drafts]:
        """First pass over the target's rows, then one row per request and draft."""
        batch, hidden, ends = self._first_rows(step)
        states = self.head(hidden, batch, self.groups.plan(batch))
        last = {i: states[ends[i]] for i, request in enumerate(step.requests) if request.wanted}
        drafts = draft_chain(self, step, last, first=-1, block_size=self.cache.block_size)
        return [Drafts(ids, request.num_valid) for ids, request in zip(drafts, step.requests, strict=True)]

    def _first_rows(self, step: DraftStep) -> tuple[Batch, Tensor, list[int]]:
        """The rows of the first pass, the states they are fed, and the last valid row of each request."""
        hidden = self.head.first_hidden(step.hidden)
        ids = [_shifted_ids(request) for request in step.requests]
        starts = [request.rows.start for request in step.requests]
        if sum(map(len, ids)) == len(step.batch.input_ids):
            flat = torch.tensor([token for part in ids for token in part], dtype=torch.int64)
            batch = replace(step.batch, input_ids=flat)
        else:  # some requests of the step do not draft
            rows = [QueryRows(part, r.start, r.request.block_ids) for part, r in zip(ids, step.requests, strict=True)]
            batch = build_batch(rows, self.cache.block_size)
            hidden = torch.cat([hidden[request.rows] for request in step.requests])
            starts = [sum(map(len, ids[:i])) for i in range(len(ids))]
        ends = [start + r.num_valid - 1 - r.start for start, r in zip(starts, step.requests, strict=True)]
        return batch, hidden, ends

    def outputs(self, states: Tensor) -> DraftOutput:
        """Those of the head."""
        return self.head.outputs(states)

    def run(self, recycled: Tensor, batch: Batch) -> Tensor:
        """The head's states after one draft step."""
        return self.head(recycled, batch, self.groups.plan(batch))


def _shifted_ids(request: DraftRequest) -> list[int]:
    """The token after each of the request's rows; rows of rejected drafts repeat the last known one."""
    count = request.rows.stop - request.rows.start
    ids = request.tokens(request.start + 1, request.start + 1 + count)
    return ids + [ids[-1]] * (count - len(ids))
