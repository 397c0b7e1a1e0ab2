"""Drafting with several MTP modules, one per draft, each with its own caches (DeepSeek-V3 report, 2.2).

Module m's entry at position p depends on the token at p + m + 1, so after a step the entries of the last m committed
positions may come from rejected drafts. Every step therefore runs the last M - 1 positions again, from the target's
states that are kept for each request; nothing goes stale and nothing is rolled back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from skipstone.core.request import Request
from skipstone.core.rows import QueryRows, build_batch
from skipstone.core.sampling_rows import SampledRow
from skipstone.models.base import DraftHead
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep


class _Tail(NamedTuple):
    """The target's states at the positions before `end`, [n, H]."""

    end: int
    states: Tensor


class SeveralModulesProposer(HiddenStateProposer):
    """Module m gives draft m + 1; k is at most the number of modules."""

    def __init__(self, name: str, head: DraftHead) -> None:
        super().__init__(name, head)
        modules = head.num_modules
        self.needs = self.needs._replace(next_tokens=modules, max_k=modules)
        self._tails: WeakKeyDictionary[Request, _Tail] = WeakKeyDictionary()

    def propose(self, step: DraftStep) -> list[Drafts]:
        """All modules over the window of every request; the row at the last valid position gives each draft."""
        head, requests = self.head, step.requests
        hidden = head.first_hidden(step.hidden)
        leads = [self._lead(request, hidden) for request in requests]
        windows = [torch.cat([lead, hidden[r.rows]]) for lead, r in zip(leads, requests, strict=True)]
        starts = [request.start - len(lead) for request, lead in zip(requests, leads, strict=True)]
        drafts: list[list[int]] = [[] for _ in requests]
        batch = None
        states = torch.cat(windows)
        counts = [len(window) for window in windows]
        for module in range(head.num_modules):
            ids = [
                _module_ids(r, start + module + 1, count, own)
                for r, start, count, own in zip(requests, starts, counts, drafts, strict=True)
            ]
            if batch is None:
                rows = zip(ids, starts, requests, strict=True)
                batch = build_batch(
                    [QueryRows(part, start, r.request.block_ids) for part, start, r in rows], self.cache.block_size
                )
                attention = self.groups.plan(batch)
            flat = torch.tensor([token for part in ids for token in part], dtype=torch.int64)
            out = head(states, replace(batch, input_ids=flat), attention, module)
            self._choose(step, out, module, starts, counts, drafts)
            states = head.recycled(out, module)
        for request, start, window in zip(requests, starts, windows, strict=True):
            self._keep_tail(request, start, window)
        valid = [max(min(r.num_valid, r.length - head.num_modules), 0) for r in requests]
        return [Drafts(ids, count) for ids, count in zip(drafts, valid, strict=True)]

    def _lead(self, request: DraftRequest, hidden: Tensor) -> Tensor:
        """The kept states right before the request's rows; none after a prefix hit or a preemption."""
        tail = self._tails.get(request.request)
        return tail.states if tail is not None and tail.end == request.start else hidden[:0]

    def _choose(
        self, step: DraftStep, out: Tensor, module: int, starts: list[int], counts: list[int], drafts: list[list[int]]
    ) -> None:
        """Append this module's draft for every request that wants it."""
        active = [i for i, request in enumerate(step.requests) if request.wanted > module]
        if not active:
            return
        firsts = [sum(counts[:i]) for i in active]
        ends = [first + step.requests[i].num_valid - 1 - starts[i] for first, i in zip(firsts, active, strict=True)]
        rows = [SampledRow(step.requests[i].request, step.requests[i].emitted + drafts[i]) for i in active]
        tokens = step.choose(self.head.outputs(out[ends], module).logits, rows)
        for i, token in zip(active, tokens, strict=True):
            drafts[i].append(token)

    def _keep_tail(self, request: DraftRequest, start: int, window: Tensor) -> None:
        valid = window[: request.num_valid - start]
        size = self.head.num_modules - 1
        self._tails[request.request] = _Tail(request.num_valid, valid[max(len(valid) - size, 0) :].clone())


def _module_ids(request: DraftRequest, first: int, count: int, drafts: list[int]) -> list[int]:
    """`count` tokens from position `first` on, drafts after the committed ones; what is not known repeats the last."""
    ids = (request.tokens(first, first + count) + drafts[max(first - request.length, 0) :])[:count]
    return ids + [ids[-1] if ids else 0] * (count - len(ids))
