"""Drafting with an independent, smaller language model over caches of its own (Leviathan et al., 2023).

Row p is fed token p and predicts p + 1, nothing is shifted. Each pass first runs whatever committed tokens its caches
lack, so a step that it missed is made up for by itself; then one row per request and draft. Entries of rejected drafts
are overwritten before they are visible, as `num_draft_computed`, the number of written positions, is cut at the first
one that the target did not confirm.
"""

from __future__ import annotations

from torch import Tensor

from skipstone.attention.backend import AttentionGroups, check_groups
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheMemory, CacheSpec, KVCache
from skipstone.core.rows import QueryRows, build_batch
from skipstone.kernels.ops import Ops
from skipstone.models.base import CausalLM, DraftOutput
from skipstone.spec.chain import draft_chain
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep, ProposerNeeds


class DraftModelProposer:
    """Runs any language model with the target's vocabulary."""

    cache: KVCache
    groups: AttentionGroups

    def __init__(self, model: CausalLM, max_position: int) -> None:
        """Raises UnsupportedError when a cache group of the model cannot follow the draft steps."""
        self.model = model
        self.needs = ProposerNeeds(
            "draft", uses_caches=True, max_position=max_position, block_unit=model.config.block_unit
        )
        check_groups(model.cache_specs(), "advance", self.needs.name)

    def cache_specs(self) -> list[CacheSpec]:
        """Those of the model."""
        return self.model.cache_specs()

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make the caches."""
        specs, config = self.cache_specs(), self.model.config
        self.cache = KVCache(specs, memory)
        self.groups = AttentionGroups(specs, self.cache, config.softmax_scale, config.sparse, exact=False, ops=ops)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks."""
        self.cache.copy_blocks(sources, destinations)

    def propose(self, step: DraftStep) -> list[Drafts]:
        """Catch up with the committed tokens, then draft."""
        states = self._catch_up(step)
        drafts = draft_chain(self, step, states, first=0, block_size=self.cache.block_size)
        return [
            # The last draft is never run; the others are counted, and taken back if the target does not confirm them.
            Drafts(ids, _end(request) + max(len(ids) - 1, 0))
            for ids, request in zip(drafts, step.requests, strict=True)
        ]

    def _catch_up(self, step: DraftStep) -> dict[int, Tensor]:
        """Run the committed tokens that the caches lack; the last state [H] of every request that drafts."""
        pending = [(i, _start(request), _end(request)) for i, request in enumerate(step.requests)]
        # Requests with equally many rows stand next to each other.
        pending = sorted((item for item in pending if item[1] < item[2]), key=lambda item: item[2] - item[1])
        if not pending:
            return {}
        rows = [
            QueryRows(step.requests[i].tokens(start, end), start, step.requests[i].request.block_ids)
            for i, start, end in pending
        ]
        batch = build_batch(rows, self.cache.block_size)
        hidden = self.model(batch, self.groups.plan(batch)).final
        states, row = {}, -1
        for i, start, end in pending:
            row += end - start
            if step.requests[i].wanted:
                states[i] = hidden[row]
        return states

    def outputs(self, states: Tensor) -> DraftOutput:
        """Logits; no state is handed on."""
        return DraftOutput(self.model.logits(states), states)

    def run(self, recycled: Tensor, batch: Batch) -> Tensor:
        """States of the newest drafts."""
        return self.model(batch, self.groups.plan(batch)).final


def _start(request: DraftRequest) -> int:
    """The first position whose entry is missing or may come from a rejected draft."""
    return min(request.request.num_draft_computed, request.length - 1)


def _end(request: DraftRequest) -> int:
    """Behind the last row to run: the newest committed token when drafts follow from it, else the target's last row."""
    return request.length if request.wanted else max(request.num_valid, _start(request))
