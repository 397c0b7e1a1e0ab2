"""One step of any plan, without the host: run the rows, sample, accept, move requests on, draft.

`forward` ends with logits and `finish` begins with them, so that a grammar's masks can be made while the first runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups, Kept
from skipstone.core.batch import PAD, Batch, SamplingRows, make_spans
from skipstone.core.sampling_rows import Features, RowFeatures
from skipstone.core.sequence_table import START, SequenceTable, SlotRows, table_columns
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import Accepted
from skipstone.models.base import CausalLM, HiddenStates
from skipstone.runtime.layout import Layout
from skipstone.spec.draft_sampler import DraftMasks, DraftSampler, DraftSampling
from skipstone.spec.proposer import DraftStep, Proposer
from skipstone.spec.verify import Drafted, Verifier


class Forward(NamedTuple):
    """What the model made of a layout's rows."""

    layout: Layout
    at: SlotRows
    batch: Batch
    end: Tensor  # [R] int64, position behind the last row of each
    hidden: HiddenStates
    logits: Tensor  # [L + prompt rows, V]


class Outcome(NamedTuple):
    """What became of the sampled rows, of D requests."""

    packed: Tensor  # [D, 1 + K + 1] int64: number of drafts kept; tokens, of which those behind the next do not count
    rows: SamplingRows  # how they were chosen
    accepted: Accepted
    slots: Tensor  # [D] int64
    known: Tensor  # [R] int64, the last position whose token is known
    width: int  # tokens of a request that sampling may look at


class Step:
    """The parts of an engine that a step runs. The sequence table moves on with every step."""

    def __init__(
        self,
        model: CausalLM,
        groups: AttentionGroups,
        table: SequenceTable,
        ops: Ops,
        block_size: int,
        proposer: Proposer | None,
        verifier: Verifier,
        draft_sampling: DraftSampling,
        most_drafts: int,
    ) -> None:
        self.model, self.groups, self.table, self.ops, self.block_size = model, groups, table, ops, block_size
        self.proposer, self.verifier, self.draft_sampling = proposer, verifier, draft_sampling
        self.taps = proposer.needs.taps if proposer else ()
        self.probs: Tensor | None = None  # [S, k, V], what drafts were drawn from
        self.most_drafts = most_drafts

    @property
    def needs_every_row(self) -> bool:
        """Whether the proposer looks at the last layer's rows that have no logits."""
        if self.proposer is None:
            return False
        return self.proposer.needs.final_states or self.model.config.num_layers in self.taps

    def forward(self, layout: Layout) -> Forward:
        """Run the model over the layout's rows."""
        at = self.table.read(layout.slots)
        end = torch.minimum(at.limit, at.start + layout.num_rows)
        blocks = at.blocks[:, : table_columns(layout.end, self.block_size)]
        rows = self.ops.step_rows(
            self.table.tokens, layout.slots, at.start, end, blocks, layout.row_item, layout.row_offset, self.block_size
        )
        batch = rows.batch(blocks, make_spans(layout.counts, rows.seen, blocks), layout.end)
        kept = None
        if layout.kept is not None:
            chosen, items, counts = layout.kept
            spans = make_spans(counts, rows.seen[chosen], blocks[items])
            kept = Kept(chosen, batch.take(chosen, items, spans))
        hidden = self.model(batch, self.groups.plan(batch, kept), self.taps)
        final = hidden.final if layout.logit_rows is None else hidden.final[layout.logit_rows]
        return Forward(layout, at, batch, end, hidden, self.model.compact_logits(final))

    def finish(self, forward: Forward, features: list[Features], allowed: Tensor | None, most: int) -> Outcome:
        """Sample, accept, and move the requests on.

        `features` [D]; `allowed` [L, V] bool of grammars; `most`: bound of positions, closer than that of a graph.
        """
        layout, at = forward.layout, forward.at
        chosen = layout.sampling
        slots, own, end = layout.slots, at, forward.end
        if chosen is not None:
            slots, own, end = slots[chosen], at.take(chosen), end[chosen]
        newest = own.start if layout.lead is None else torch.where(own.start >= 0, own.start + layout.lead, PAD)
        width = min(most + layout.k + 1, self.table.tokens.shape[1])
        rows = self._sampling(layout, own, slots, newest, features, width, allowed)
        column = torch.arange(layout.most_drafts + 1, device=slots.device)
        place = newest[:, None] + column
        drafted = Drafted(
            self.table.tokens[slots[:, None], place].long(),
            newest,
            end,
            own.seed,
            None if layout.uniform else layout.place,
            self._draft_probs(forward, slots),
        )
        accepted = self.verifier.verify(forward.logits[: layout.num_sampled], rows, drafted, self.ops)
        self.table.tokens[slots[:, None], place + 1] = accepted.following.int()
        packed = torch.cat([accepted.num_accepted[:, None], accepted.emitted], dim=1)
        known = self._advance(layout, at, accepted)
        return Outcome(packed, rows, accepted, slots, known, width)

    def _sampling(
        self,
        layout: Layout,
        own: SlotRows,
        slots: Tensor,
        newest: Tensor,
        features: list[Features],
        width: int,
        allowed: Tensor | None,
    ) -> SamplingRows:
        """How the L sampled rows choose."""
        per_row = RowFeatures(self.table, layout.sampled_items, features, width)
        item, before = layout.place
        if layout.most_drafts == 0:  # a row each
            return per_row.rows(own, slots, newest + 1, allowed)
        return per_row.rows(own.take(item), slots[item], newest[item] + 1 + before, allowed)

    def _draft_probs(self, forward: Forward, slots: Tensor) -> Tensor | None:
        """What the step's drafts were drawn from, [D, K, V]; kept for rules that look at it."""
        if not self.verifier.needs_probs:
            return None
        if self.probs is None:
            shape = (len(self.table.values), self.most_drafts, forward.logits.shape[1])
            self.probs = torch.zeros(shape, dtype=torch.float32, device=slots.device)
        probs = self.probs[slots, : forward.layout.most_drafts]
        self.probs[slots] = 0
        return probs

    def _advance(self, layout: Layout, at: SlotRows, accepted: Accepted) -> Tensor:
        """Move the requests on. The last position of each whose token is known, [R]."""
        if layout.sampling is None:
            self.table.values[layout.slots, START] = accepted.start
            return accepted.start
        start = torch.where(at.start >= 0, at.start + layout.num_rows, PAD)
        start[layout.sampling] = accepted.start
        self.table.values[layout.slots, START] = start
        known = torch.full_like(start, self.table.tokens.shape[1] - 1)
        known[layout.sampling] = accepted.start
        return known

    def draft(
        self, forward: Forward, outcome: Outcome, features: list[Features], allowed: DraftMasks | None = None
    ) -> Tensor | None:
        """The next drafts [D, k], PAD where there is none; they stand behind the committed tokens then."""
        assert self.proposer is not None
        proposer, slots, accepted = self.proposer, outcome.slots, outcome.accepted
        layout, at, newest, chosen = forward.layout, forward.at, accepted.start, forward.layout.sampling
        draft_at = at if chosen is None else SlotRows(at.settings[chosen], at.blocks[chosen])
        most = proposer.needs.max_position
        limit = draft_at.limit if most is None else draft_at.limit.clamp(max=most - 1)
        per_draft = RowFeatures(self.table, np.arange(len(features)), features, outcome.width)
        sampler = DraftSampler(self.draft_sampling, per_draft, newest + 1, self.ops, self.probs, allowed)
        step = DraftStep(
            table=self.table,
            at=at,
            slots=layout.slots,
            row_item=layout.row_item,
            batch=forward.batch,
            hidden=forward.hidden,
            known=outcome.known,
            drafting=chosen,
            draft_slots=slots,
            draft_at=draft_at,
            limit=limit,
            newest=newest,
            last_rows=layout.first_rows + accepted.num_accepted,
            wanted=layout.wanted,
            counts=layout.counts.tolist(),
            chunks=layout.chunks,
            k=layout.k,
            max_seq_len=min(
                layout.end + max(layout.k + 1, proposer.needs.least_lookahead), at.blocks.shape[1] * self.block_size
            ),
            block_size=self.block_size,
            ops=self.ops,
            sampler=sampler,
        )
        drafts = proposer.propose(step)
        if drafts is None:
            return None
        depth = torch.arange(layout.k, device=newest.device)
        place = newest[:, None] + 1 + depth
        real = (depth < layout.wanted[:, None]) & (place < limit[:, None]) & (newest >= 0)[:, None]
        drafts = torch.where(real, drafts, PAD)
        self.table.tokens[slots[:, None], place] = drafts.int()
        return drafts
