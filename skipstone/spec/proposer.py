"""The contract between the engine and whatever guesses tokens: what a proposer needs, is given, and gives back.

Scheduler, prefix cache and allocator read `ProposerNeeds` only. Proposers know neither the acceptance rule nor the
scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups, Kept, SparseSettings
from skipstone.core.batch import PAD, Batch, Span
from skipstone.core.kv_cache import CacheMemory, CacheSpec, KVCache
from skipstone.core.sequence_table import SequenceTable, SlotRows, table_columns
from skipstone.kernels.ops import Ops
from skipstone.models.base import HiddenStates
from skipstone.spec.draft_sampler import DraftSampler


class ProposerNeeds(NamedTuple):
    """What a proposer declares.

    `next_tokens` L: its caches at position p depend on the tokens up to p + L, so that a cached block can only be
    shared by requests whose next L tokens agree. A step that its caches miss cannot be made up. `block_unit`: cache
    blocks must be a multiple of this many tokens. `default_k`: drafts a step when the user names no number.
    `least_lookahead`: slots that a draft pass takes however few drafts are wanted. `final_states`: it reads every row's
    state after the last layer, so that none can be left out; taps of the last output say the same. `graphs`: whether
    its work can be captured. `remarks`: what a user should know of it, see `describe`.
    """

    name: str
    taps: tuple[int, ...] = ()
    next_tokens: int = 0
    uses_caches: bool = False
    max_k: int | None = None
    max_position: int | None = None
    block_unit: int = 1
    default_k: int | None = None
    least_lookahead: int = 0
    final_states: bool = False
    graphs: bool = True
    remarks: tuple[str, ...] = ()

    def describe(self, longest: int) -> str:
        """What no option says of it, for a target with contexts of up to `longest` tokens; may be empty."""
        parts = [f"reads the input of layers {', '.join(map(str, self.taps))}"] if self.taps else []
        parts += self.remarks
        if self.max_position is not None and self.max_position < longest:
            parts.append(f"drafts end at position {self.max_position:,} of {longest:,}, its max_position_embeddings")
        return "; ".join(parts)

    def lookahead(self, k: int) -> int:
        """Slots beyond the committed tokens that drafting k tokens may write."""
        return max(k + 1, self.least_lookahead) if self.uses_caches and k else 0

    def num_computed(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Positions that its caches cover for good, once the target's cover `num_computed_tokens` of `num_tokens`."""
        return min(num_computed_tokens, max(num_tokens - self.next_tokens, 0)) if self.uses_caches else 0


@dataclass(frozen=True)
class DraftStep:
    """What a proposer is given after verification: R requests with T rows, D of which draft k tokens.

    Host integers are known before the step runs; everything else stays on the device.
    """

    table: SequenceTable
    at: SlotRows  # of the R requests, as before the step
    slots: Tensor  # [R] int64
    row_item: Tensor  # [T] int64, the request of each row
    batch: Batch
    hidden: HiddenStates
    known: Tensor  # [R] int64, the last position whose token is committed, or lies in the prompt
    drafting: Tensor | None  # [D] int64 into R; None: all
    draft_slots: Tensor  # [D] int64
    draft_at: SlotRows  # of the D requests
    limit: Tensor  # [D] int64, rows at this position and behind are padding, drafts there are not made
    newest: Tensor  # [D] int64, position of the newest committed token; PAD for padding
    last_rows: Tensor  # [D] int64, the row before it: its state predicts the newest token
    wanted: Tensor  # [D] int64, drafts to make, at most k
    counts: list[int]  # [R] rows of each request
    chunks: bool  # whether any of them is a chunk of a prompt
    k: int
    max_seq_len: int  # bound of positions that a draft may reach
    block_size: int
    ops: Ops
    sampler: DraftSampler

    def tokens_at(self, position: Tensor) -> Tensor:
        """The tokens [T] at these positions of the rows' requests; the last known one where they are not known."""
        known = torch.minimum(position, self.known[self.row_item])
        return self.table.tokens[self.slots[self.row_item], known.clamp(min=0)].long()

    def token_before(self, position: Tensor) -> Tensor:
        """The token before a position [D] of each drafting request: [D] int64."""
        return self.table.tokens[self.draft_slots, (position - 1).clamp(min=0)].long()

    def rows(self, token_ids: Tensor, start: Tensor, end: Tensor, see_ahead: bool = False) -> Batch:
        """n rows of each drafting request: token_ids [D, n] at positions from start [D] on, padding from end [D] on.

        With `see_ahead` every row sees all rows of its request.
        """
        count, n = token_ids.shape
        table = self.draft_at.blocks[:, : table_columns(self.max_seq_len, self.block_size)]
        end = end.clamp(max=table.shape[1] * self.block_size)
        rows = self.ops.step_rows(token_ids, None, start, end, table, None, None, self.block_size)
        seen = rows.seen.view(count, n)
        if see_ahead:
            seen = torch.where(seen >= 0, seen.amax(dim=1, keepdim=True), PAD)
        span = Span(slice(0, count), slice(0, count * n), n, seen, table)
        return rows.batch(table, [span], self.max_seq_len)

    def last_rows_of(self, batch: Batch) -> Kept | None:
        """The rows that predict the newest tokens, where the batch of all rows has others; one row if nobody drafts."""
        rows, count = self.last_rows, len(self.last_rows)
        if count == len(batch.input_ids):
            return None
        if count:
            items = torch.arange(count, device=rows.device) if self.drafting is None else self.drafting
            seen = (self.newest - 1).clamp(min=PAD)
        else:
            rows = items = torch.zeros(1, dtype=torch.int64, device=rows.device)
            seen, count = torch.full_like(rows, PAD), 1
        span = Span(slice(0, count), slice(0, count), 1, seen[:, None], batch.block_table[items])
        return Kept(rows, batch.take(rows, items, [span]))

    def sample(self, logits: Tensor, depth: int) -> Tensor:
        """Draft `depth`, from 0, of every request: [D] int64, of logits [D, V]."""
        tokens = self.sampler.sample(logits, self.draft_at, self.draft_slots, self.newest + 1 + depth, depth)
        if self.sampler.features.penalized is not None:
            self.write(tokens, depth)
        return tokens

    def write(self, token_ids: Tensor, depth: int) -> None:
        """Put drafts [D] int64 of a depth behind the committed tokens, where sampling and later modules see them."""
        self.table.tokens[self.draft_slots, self.newest + 1 + depth] = token_ids.int()


class Proposer(Protocol):
    """Yields drafts. One object serves all requests."""

    needs: ProposerNeeds

    def cache_specs(self) -> list[CacheSpec]:
        """Its own cache groups; empty if it has none."""

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make its caches, once memory is sized. Block ids are those of the target's caches."""

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks of its caches."""

    def propose(self, step: DraftStep) -> Tensor | None:
        """Bring the caches up to date and draft: [D, k] int64, PAD where there is no draft; None where k is 0."""


class CachedProposer:
    """What proposers with caches of their own share."""

    cache: KVCache
    groups: AttentionGroups
    needs: ProposerNeeds

    def __init__(self, specs: list[CacheSpec], scale: float, sparse: SparseSettings | None) -> None:
        self._specs, self._scale, self._sparse = specs, scale, sparse

    def cache_specs(self) -> list[CacheSpec]:
        """Of the draft layers."""
        return self._specs

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make the caches."""
        self.cache = KVCache(self._specs, memory)
        self.groups = AttentionGroups(self._specs, self.cache, self._scale, self._sparse, exact=False, ops=ops)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks."""
        self.cache.copy_blocks(sources, destinations)

    def followed(self, step: DraftStep, shift: int) -> Batch:
        """The target's rows with the tokens `shift` further on.

        Rows behind the last position that the draft layers know belong to requests that do not draft.
        """
        batch = replace(step.batch, input_ids=step.tokens_at(step.batch.positions + shift))
        longest = self.needs.max_position
        if longest is None or step.max_seq_len <= longest:
            return batch
        return replace(batch, positions=batch.positions.clamp(max=longest - 1))
