"""The contract between the engine and whatever guesses tokens: what a proposer needs, is given, and gives back.

Scheduler, prefix cache and allocator read `ProposerNeeds` only. Proposers know neither the acceptance rule nor the
scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheMemory, CacheSpec
from skipstone.core.request import Request
from skipstone.core.sampling_rows import SampledRow
from skipstone.kernels.ops import Ops
from skipstone.models.base import HiddenStates

Chooser = Callable[[Tensor, list[SampledRow]], list[int]]


class ProposerNeeds(NamedTuple):
    """What a proposer declares.

    `next_tokens` L: its caches at position p depend on the tokens up to p + L, so that a cached block can only be
    shared by requests whose next L tokens agree. `follows_target`: its caches are filled from the target's hidden
    states, so a step that it misses cannot be made up. `block_unit`: cache blocks must be a multiple of this many
    tokens. `default_k`: drafts a step when the user names no number. `least_lookahead`: slots that a draft pass takes
    however few drafts are wanted. `final_states`: it reads every row's state after the last layer, so that none can be
    left out; taps of the last output say the same. `remarks`: what a user should know of it, see `describe`.
    """

    name: str
    taps: tuple[int, ...] = ()
    next_tokens: int = 0
    uses_caches: bool = False
    follows_target: bool = False
    max_k: int | None = None
    max_position: int | None = None
    block_unit: int = 1
    default_k: int | None = None
    least_lookahead: int = 0
    final_states: bool = False
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


class DraftRequest(NamedTuple):
    """One request after verification. Its committed tokens are request.token_ids, then `emitted`."""

    request: Request
    rows: slice  # its rows in the target's batch
    start: int  # position of the first of them
    emitted: list[int]  # this step's tokens; empty for a chunk that ends inside the prompt
    wanted: int  # drafts to make; 0: only keep the caches up to date

    @property
    def length(self) -> int:
        """N, committed tokens; the target's caches are valid below N - 1, or up to the chunk's end."""
        return len(self.request.token_ids) + len(self.emitted)

    @property
    def num_valid(self) -> int:
        """Positions at which the target's caches hold committed tokens after the step."""
        end = self.start + self.rows.stop - self.rows.start
        return min(end, self.length - 1) if self.emitted else end

    def tokens(self, start: int, end: int) -> list[int]:
        """Committed tokens at positions start to end - 1, as far as there are any."""
        known = len(self.request.token_ids)
        part = self.request.token_ids[start:end]
        return part + self.emitted[max(start - known, 0) : max(end - known, 0)]


class DraftStep(NamedTuple):
    """What a proposer is given after verification."""

    batch: Batch
    hidden: HiddenStates
    requests: list[DraftRequest]
    choose: Chooser  # logits [R, V] and how each row samples -> a token each


class Drafts(NamedTuple):
    """Of one request: its drafts, and how many positions its draft caches now cover."""

    token_ids: list[int]
    num_computed: int = 0


class Proposer(Protocol):
    """Yields drafts. One object serves all requests."""

    needs: ProposerNeeds

    def cache_specs(self) -> list[CacheSpec]:
        """Its own cache groups; empty if it has none."""

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Make its caches, once memory is sized. Block ids are those of the target's caches."""

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks of its caches."""

    def propose(self, step: DraftStep) -> list[Drafts]:
        """Bring the caches up to date and draft; one result per request, in order."""
