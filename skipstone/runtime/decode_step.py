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
from skipstone.models.base import CausalLM, DraftHead, HiddenStates
from skipstone.runtime.device_state import DeviceState, decode_batch
from skipstone.spec.verify import accept_by_coins


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

    def run(self, slots: Tensor, k: int) -> Tensor:
        """Run the requests in `slots` [R] with k drafts each; advances their state.

        Returns [R, 2k + 2] int64: the number of accepted drafts, k + 1 emitted tokens (what follows the recovered or
        bonus token is not emitted), k next drafts.
        """
        state = self.state
        token_ids, start, limit = state.tokens[slots][:, : k + 1], state.start[slots], state.limit[slots]
        table = state.blocks[slots]
        positions = torch.where(start[:, None] >= 0, start[:, None] + torch.arange(k + 1, device=start.device), PAD)
        batch = decode_batch(token_ids, positions, limit, table, self.block_size)
        taps = self.drafter.head.taps if self.drafter else ()
        hidden = self.model(batch, self.groups.plan(batch), taps)
        logits = self.model.compact_logits(hidden.final)
        law = _Law(state.seed[slots], state.temperature[slots])
        tokens = self.ops.sample(logits, law.rows(positions + 1)).view(-1, k + 1)
        drafts = torch.where(positions[:, 1:] < limit[:, None], token_ids[:, 1:], PAD)
        accepted, emitted = self._accept(tokens, drafts, law.seed, positions)
        newest = emitted.gather(1, accepted[:, None])
        next_start = torch.where(start >= 0, start + accepted + 1, PAD)
        state.start[slots] = next_start
        state.tokens[slots, 0] = newest[:, 0]
        result = [accepted[:, None], emitted]
        if k and self.drafter is not None:
            ids = emitted.gather(1, torch.minimum(torch.arange(k + 1, device=start.device), accepted[:, None]))
            first = _FirstRows(batch, hidden, ids, accepted)
            new = self._draft(self.drafter, first, _Chain(next_start, limit, table, k), law)
            column = torch.arange(k, device=start.device)
            new = torch.where(column < state.most_drafts[slots][:, None], new, PAD)
            state.tokens[slots, 1 : k + 1] = new
            result.append(new)
        elif k:
            state.tokens[slots, 1 : k + 1] = PAD
        return torch.cat(result, dim=1)

    def _accept(self, tokens: Tensor, drafts: Tensor, seed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafts [R] survive, and what is emitted [R, k + 1]."""
        k = drafts.shape[1]
        if k == 0:
            return torch.zeros_like(seed), tokens
        if self.rates is None:
            matches = tokens[:, :k] == drafts
            return matches.long().cumprod(dim=1).sum(dim=1), tokens
        matches = accept_by_coins(seed, positions[:, 1:], self.rates) & (drafts >= 0)
        accepted = matches.long().cumprod(dim=1).sum(dim=1)
        kept = torch.arange(k, device=seed.device) < accepted[:, None]
        return accepted, torch.cat([torch.where(kept, drafts, tokens[:, :k]), tokens[:, k:]], dim=1)

    def _draft(self, drafter: Drafter, first: _FirstRows, chain: _Chain, law: _Law) -> Tensor:
        """The next drafts [R, k]: the head over the rows that were verified, then one row per request and draft."""
        head, groups = drafter.head, drafter.groups
        batch = replace(first.batch, input_ids=first.ids.clamp(min=0).flatten())
        states = head(head.first_hidden(first.hidden), batch, groups.plan(batch))
        request = torch.arange(len(first.ids), device=law.seed.device)
        current = states.view(*first.ids.shape, -1)[request, first.accepted]
        drafts: list[Tensor] = []
        for step in range(chain.k):
            output = head.outputs(current)
            position = torch.where(chain.start >= 0, chain.start + step, PAD)[:, None]
            drafts.append(self.ops.sample(output.logits, law.rows(position + 1, drafter.greedy)))
            if step < chain.k - 1:
                row = decode_batch(drafts[-1][:, None], position, chain.limit, chain.table, self.block_size)
                current = head(output.recycled, row, groups.plan(row))
        return torch.stack(drafts, dim=1)


class _FirstRows(NamedTuple):
    """The rows that were verified, the token after each, and which of them was the last valid one."""

    batch: Batch
    hidden: HiddenStates
    ids: Tensor  # [R, k + 1]
    accepted: Tensor  # [R]


class _Chain(NamedTuple):
    """Where the draft steps stand: `start` [R] is the position of the newest committed token."""

    start: Tensor
    limit: Tensor
    table: Tensor
    k: int


class _Law(NamedTuple):
    """How each request samples."""

    seed: Tensor  # [R]
    temperature: Tensor  # [R]

    def rows(self, position: Tensor, greedy: bool = False) -> SamplingRows:
        """The rows that choose the tokens at `position` [R, n]."""
        n = position.shape[1]
        temperature = torch.zeros_like(self.temperature) if greedy else self.temperature
        seeds, warm = self.seed.repeat_interleave(n), temperature.repeat_interleave(n)
        return SamplingRows(seeds, position.flatten(), warm, None, None, None, None, None, all_greedy=greedy)
