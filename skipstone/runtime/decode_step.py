"""One decode step without the host: verify, accept, advance the state, draft again. What a GPU captures as one graph.

Does what the plain loop of `runtime.runner` does for requests that only decode and sample without penalties, masks or
log-probabilities; that loop is its oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups
from skipstone.core.batch import PAD, Batch, SamplingRows
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import Accepted
from skipstone.models.base import CausalLM, DraftHead, HiddenStates
from skipstone.runtime.device_state import DeviceState, SlotRows, decode_batch


class Drafter(NamedTuple):
    """A head with one module that drafts one token after the other."""

    head: DraftHead
    groups: AttentionGroups
    greedy: bool


class DecodeStep(NamedTuple):
    """The parts of an engine that a step runs."""

    model: CausalLM
    groups: AttentionGroups
    drafter: Drafter | None
    state: DeviceState
    ops: Ops
    block_size: int
    rates: Tensor | None  # [N] float64, simulated acceptance

    def run(self, slots: Tensor, k: int, truncated: bool = False) -> Tensor:
        """Run the requests in `slots` [R] with k drafts each; advances their state.

        `truncated`: some of them use top-k, top-p or min-p.

        Returns [R, 2k + 2] int64: the number of accepted drafts, k + 1 emitted tokens (what follows the recovered or
        bonus token is not emitted), k next drafts.
        """
        at = self.state.read(slots, k)
        batch = decode_batch(self.ops, at.tokens, at.start, at.limit, at.blocks, self.block_size)
        taps = self.drafter.head.taps if self.drafter else ()
        hidden = self.model(batch, self.groups.plan(batch), taps)
        logits = self.model.compact_logits(hidden.final)
        tokens = self.ops.sample(logits, _law(at, batch.positions + 1, k + 1, truncated)).view(-1, k + 1)
        accepted = self.ops.accept(tokens, at.tokens, at.start, at.limit, at.seed, self.rates)
        result = [accepted.num_accepted[:, None], accepted.emitted]
        state = [accepted.following[:, -1:]]
        if k and self.drafter is not None:
            drafts = self._draft(self.drafter, _Verified(at, batch, hidden, accepted), k, truncated)
            result.append(drafts)
            state.append(drafts)
        elif k:
            state.append(torch.full_like(at.tokens[:, 1:], PAD))
        self.state.advance(slots, accepted.start, torch.cat(state, dim=1) if k else state[0])
        return torch.cat(result, dim=1)

    def _draft(self, drafter: Drafter, verified: _Verified, k: int, truncated: bool) -> Tensor:
        """The next drafts [R, k]: the head over the rows that were verified, then one row per request and draft."""
        head, groups, at = drafter.head, drafter.groups, verified.at
        following, start = verified.accepted.following, verified.accepted.start
        batch = replace(verified.batch, input_ids=following.flatten())
        states = head(head.first_hidden(verified.hidden), batch, groups.plan(batch))
        first = torch.arange(0, len(states), k + 1, device=states.device)
        current = states[first + verified.accepted.num_accepted]
        drafts: list[Tensor] = []
        for step in range(k):
            output = head.outputs(current)
            position = start + step
            law = _law(at, position + 1, 1, truncated and not drafter.greedy, drafter.greedy)
            drafts.append(self.ops.sample(output.logits, law))
            if step < k - 1:
                position = torch.where(start >= 0, position, PAD) if step else start
                row = decode_batch(self.ops, drafts[-1][:, None], position, at.limit, at.blocks, self.block_size)
                current = head(output.recycled, row, groups.plan(row))
        together = torch.stack(drafts, dim=1)
        return torch.where(torch.arange(k, device=start.device) < at.most_drafts[:, None], together, PAD)


class _Verified(NamedTuple):
    """The rows that were verified, and what became of them."""

    at: SlotRows
    batch: Batch
    hidden: HiddenStates
    accepted: Accepted


def _law(at: SlotRows, position: Tensor, n: int, truncated: bool, greedy: bool = False) -> SamplingRows:
    """How the n rows of each request sample the tokens at `position` [R * n]."""

    def rows(values: Tensor) -> Tensor:
        return values.repeat_interleave(n) if n > 1 else values.contiguous()

    temperature = torch.zeros_like(at.temperature) if greedy else at.temperature
    law = SamplingRows(rows(at.seed), position, rows(temperature), None, None, None, None, None, all_greedy=greedy)
    if not truncated:
        return law
    return law._replace(top_k=rows(at.top_k), top_p=rows(at.top_p), min_p=rows(at.min_p))
