"""Which requests run how many rows in the next step, and what becomes of them afterwards.

Running requests come first, oldest first; waiting ones get what is left of the row budget. A prompt runs in chunks.
When blocks run out the youngest running request is preempted: its blocks are freed and it is computed again later,
which yields the same text because noise depends on seed and position only.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from skipstone.core.plan import Admission, PlanItem, StepPlan, StepResult
from skipstone.core.request import FinishReason, Request
from skipstone.core.speculation import SpeculationStats
from skipstone.runtime.adaptive import AdaptiveK
from skipstone.runtime.block_pool import BlockPool
from skipstone.runtime.chunk_limit import ChunkLimit, is_chunk
from skipstone.runtime.prefix_cache import PrefixCache
from skipstone.spec.proposer import ProposerNeeds


@dataclass
class SchedulerStats:
    """Counts since the start."""

    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass
class SlotState:
    """Where a running request is on the device, and what is on its way there."""

    slot: int
    admission: int
    follows: bool = False  # whether the proposer's caches take its rows
    scouting: int = 0  # steps in which it drafts although the proposer rests
    num_blocks: int = 0  # that the device knows of
    under_way: list[PlanItem] = field(default_factory=list)  # at most two: started, and being planned


class Scheduler:
    """Continuous batching with chunked prefill, prefix cache and preemption by recompute."""

    def __init__(
        self,
        pool: BlockPool,
        max_rows: int,
        max_requests: int,
        prefix_caching: bool,
        needs: ProposerNeeds | None = None,
        most_drafts: Callable[[int], int] | None = None,
        adaptive: AdaptiveK | None = None,
        chunk_limit: ChunkLimit | None = None,
    ) -> None:
        """`needs`: the proposer's; `most_drafts`: drafts per request at a given number of running ones, if fixed."""
        self.pool = pool
        self.max_rows = max_rows
        self.max_requests = max_requests
        self.prefixes = PrefixCache(pool, needs, prefix_caching)
        self.needs = needs
        self.most_drafts = None if adaptive else most_drafts  # whose prior it is then
        self.adaptive, self.chunk_limit = adaptive, chunk_limit
        self.pauses_beside_prompts = False
        """Whether no drafts are made that would be verified beside rows of prompts."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self.places: dict[Request, SlotState] = {}  # of running requests
        self._admitted: dict[int, Request] = {}  # by number of admission
        self._numbers = itertools.count()
        self._free_slots = list(reversed(range(max_requests)))
        self._chunk_rows = max_rows  # of prompts that the plan in the making has left
        self._copies: list[tuple[int, int]] = []
        self._admissions: list[Admission] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.waiting.append(request)

    def owner(self, item: PlanItem) -> Request | None:
        """The request of an item; None once it has ended or was preempted."""
        return self._admitted.get(item.admission)

    def schedule(self, ahead: bool = False) -> StepPlan | None:
        """The rows of the next step. Reserves blocks for them; may preempt.

        `ahead`: the step before is under way, so what it yields is not known. None where a step must wait for that,
        as it would have to preempt.
        """
        items: list[PlanItem] = []
        self._copies, self._admissions = [], []
        budget, self._chunk_rows = self.max_rows, self.max_rows
        if self.chunk_limit is not None and any(len(r.token_ids) - r.num_computed_tokens == 1 for r in self.running):
            self._chunk_rows = self.chunk_limit.rows
        preempted = self.stats.preemptions
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            item = self._plan_rows(request, budget)
            if item is None or self._reserve(request, item.end):
                index += 1
                if item is not None:
                    items.append(item)
                    budget -= item.num_rows
                    self._chunk_rows -= item.num_rows * is_chunk(item)
            elif ahead:
                return None
            elif item.num_drafts:
                request.drafts.clear()  # cheaper to lose than another request's computed tokens
            elif self._preempt_youngest() is request:
                break
        if self.stats.preemptions == preempted:
            self._admit(items, budget)
        if ahead and not items:
            return None
        may_start = bool(self.waiting) and len(self.running) < self.max_requests
        read_on = may_start or not all(item.samples for item in items)
        if not (read_on and self.pauses_beside_prompts):
            items = [self._plan_drafts(item, len(items)) for item in items]
        items.sort(key=lambda item: item.num_rows)
        for item in items:
            self.places[self._admitted[item.admission]].under_way.append(item)
        return StepPlan(items, self._admissions, self._new_blocks(), self._copies)

    def _new_blocks(self) -> list[tuple[int, int, int]]:
        """Blocks that the device does not know of."""
        found = []
        for request in self.running:
            place = self.places[request]
            known, place.num_blocks = place.num_blocks, len(request.block_ids)
            found += [(place.slot, i, request.block_ids[i]) for i in range(known, place.num_blocks)]
        return found

    def _admit(self, items: list[PlanItem], budget: int) -> None:
        """Start waiting requests while rows, places and blocks last."""
        while self.waiting and budget > 0 and len(self.running) < self.max_requests:
            request = self.waiting[0]
            self.places[request] = place = SlotState(self._free_slots[-1], next(self._numbers))
            place.follows = request.max_drafts > 0 and self.needs is not None
            soon = min(len(self.running) + len(self.waiting), self.max_requests)
            adaptive = self._adaptive(request)
            if place.follows and adaptive is not None and adaptive.rests(soon):
                place.scouting = adaptive.scouted_steps()
                place.follows = place.scouting > 0
            self._copies += self.prefixes.match(request, place.follows)
            item = self._plan_rows(request, budget)
            if item is None or not self._reserve(request, item.end):
                self._copies = [copy for copy in self._copies if copy[1] not in request.block_ids]
                del self.places[request]
                self._free(request)
                return
            self._free_slots.pop()
            self._admitted[place.admission] = request
            self.running.append(self.waiting.popleft())
            self._admissions.append(self._admission(request, place))
            self.stats.prefix_query_tokens += len(request.token_ids)
            self.stats.prefix_hit_tokens += item.start
            if request.num_preemptions == 0:
                request.num_cached_tokens = item.start
            items.append(item)
            budget -= item.num_rows
            self._chunk_rows -= item.num_rows * is_chunk(item)

    def _admission(self, request: Request, place: SlotState) -> Admission:
        return Admission(
            slot=place.slot,
            number=place.admission,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            start=request.num_computed_tokens,
            max_total_tokens=request.max_total_tokens,
            seed=request.seed,
            params=request.params,
            end_token_ids=request.banned_token_ids,
            prediction=request.prediction,
        )

    def _plan_rows(self, request: Request, budget: int) -> PlanItem | None:
        """The next rows of a request, none where the step under way surely ends it or no rows of prompts are left.

        While a step is under way its drafts all count as kept, and those that it makes as made.
        """
        place = self.places[request]
        start, length, drafts = request.num_computed_tokens, len(request.token_ids), len(request.drafts)
        for before in place.under_way:
            if before.samples:
                start, length, drafts = before.end, max(length, before.end) + 1, before.num_next_drafts
            else:
                start, drafts = before.end, 0
        least = len(request.token_ids) + sum(before.samples for before in place.under_way)
        # A draft past the length limit could never be kept, and its blocks may not exist.
        drafts = min(drafts, max(request.max_total_tokens - least - 1, 0))
        if least >= request.max_total_tokens:
            return None
        if not place.under_way:
            del request.drafts[drafts:]
        if length - start > 1:
            budget = min(budget, self._chunk_rows)
        if budget < 1:
            return None
        num_rows = min(length - start + drafts, budget)
        num_drafts = max(num_rows - (length - start), 0)
        samples = start + num_rows - num_drafts >= length
        if self.needs is not None and self.needs.max_position is not None:
            place.follows = place.follows and start + num_rows < self.needs.max_position
        return PlanItem(
            admission=place.admission,
            slot=place.slot,
            start=start,
            num_rows=num_rows,
            num_drafts=num_drafts,
            samples=samples,
            follows=place.follows,
            prompt_rows=self._prompt_rows(request, start, num_rows),
        )

    def _prompt_rows(self, request: Request, start: int, num_rows: int) -> tuple[int, int]:
        """From and to which of its rows a request wants log-probabilities of the prompt."""
        if request.params.prompt_logprobs is None:
            return (0, 0)
        first = max(start, len(request.prompt_logprobs))  # recomputed rows are not reported twice
        last = min(start + num_rows, request.num_prompt_tokens - 1)
        return (first - start, last - start) if first < last else (0, 0)

    def _adaptive(self, request: Request) -> AdaptiveK | None:
        """What chooses the request's k, unless its caller did."""
        return self.adaptive if request.params.num_speculative_tokens is None else None

    def _plan_drafts(self, item: PlanItem, num_requests: int) -> PlanItem:
        """How many drafts to make after the step, with slots for them. Drafts take free blocks only."""
        request = self._admitted[item.admission]
        place, most, adaptive = self.places[request], request.max_drafts, self._adaptive(request)
        rests = adaptive is not None and adaptive.rests(num_requests)
        if not item.samples or not most or self.needs is None or not (item.follows or rests):
            return item
        wanted = min(most, adaptive.choose(num_requests)) if adaptive else most
        if self.most_drafts is not None:
            wanted = min(most, self.most_drafts(num_requests))
        if rests and not wanted:
            if item.follows and place.scouting:
                place.scouting, wanted = place.scouting - 1, most
            elif item.num_rows == 1:
                place.follows = False
                return item._replace(follows=False)
        if not self._reserve(request, item.end, self.needs.lookahead(wanted)):
            return item
        return item._replace(num_next_drafts=wanted)

    def _reserve(self, request: Request, end: int, lookahead: int = 0) -> bool:
        """Own enough blocks for positions below `end` and `lookahead` more; False when there are not enough."""
        blocks = request.block_ids
        tokens = min(end + lookahead, max(request.max_total_tokens, len(request.token_ids)))
        needed = -(-tokens // self.pool.block_size) - len(blocks)
        if needed <= 0:
            return True
        new = self.pool.allocate(needed)
        if new is not None:
            blocks.extend(new)
        return new is not None

    def _preempt_youngest(self) -> Request:
        victim = self.running.pop()
        self._leave(victim)
        self._free(victim)
        victim.drafts.clear()
        victim.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def preempt_all(self) -> None:
        """Have everything computed again: nobody knows what the device has done."""
        while self.running:
            self._preempt_youngest()

    def _leave(self, request: Request) -> None:
        """Give up a slot. What runs in it yet, or was admitted by a plan that is being made, counts no more."""
        place = self.places.pop(request)
        del self._admitted[place.admission]
        self._free_slots.append(place.slot)
        self._admissions = [new for new in self._admissions if new.number != place.admission]

    def _free(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids, request.block_hashes = [], []
        request.num_computed_tokens = request.num_draft_computed = 0

    def commit(self, plan: StepPlan, results: list[StepResult]) -> list[tuple[Request, list[int]]]:
        """Take over a step's results; returns each request that got tokens or ended, with the tokens it keeps.

        Results of requests that were preempted or aborted since the plan was made are dropped.
        """
        committed = []
        for item, result in zip(plan.items, results, strict=True):
            request = self.owner(item)
            if request is None:
                continue
            self.places[request].under_way.remove(item)
            num_drafts = min(item.num_drafts, len(request.drafts))
            request.num_computed_tokens += item.num_rows - item.num_drafts + result.num_accepted
            request.drafts = result.drafts
            request.prompt_logprobs.extend(result.prompt_logprobs)
            kept = request.commit(result.token_ids)
            request.num_accepted = min(result.num_accepted, len(kept))
            computed = (request.num_computed_tokens, len(request.token_ids))
            request.num_draft_computed = self.needs.num_computed(*computed) if item.follows and self.needs else 0
            request.speculation.record(num_drafts, request.num_accepted)
            self.stats.speculation.record(num_drafts, request.num_accepted)
            request.logprobs.extend(result.logprobs[: len(kept)])
            if request.grammar is not None and request.drafts:
                # From the first that the grammar forbids on they could only cost rows.
                del request.drafts[request.grammar.legal(request.drafts) :]
            self.prefixes.register(request)
            if request.finished:
                self._retire(request)
            if kept or request.finished:
                committed.append((request, kept))
        return committed

    def stop(self, request: Request, emitted: int, surplus: int) -> None:
        """End a request because of a stop string in its latest run of `emitted` tokens, `surplus` of which lie behind.

        They are taken back, with all that was counted for them; it does not matter what else they would have ended.
        """
        if surplus:
            for stats in (request.speculation, self.stats.speculation):
                stats.retract(request.num_accepted, emitted - surplus)
            del request.token_ids[-surplus:]
            del request.logprobs[request.num_output_tokens :]
        self.finish(request, FinishReason.STOP)
        request.finish_reason, request.stop_token_id = FinishReason.STOP, None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request now: an abort, or a stop string found in its text. Its blocks are free at once."""
        if request.finished:
            return
        request.finish_reason = reason
        self._retire(request)

    def _retire(self, request: Request) -> None:
        if request in self.places:
            self.running.remove(request)
            self._leave(request)
        else:
            self.waiting.remove(request)
        self._free(request)

    def check(self) -> None:
        """Compare the pool's books with the requests. Raises BlockAccountingError."""
        self.pool.check(request.block_ids for request in (*self.running, *self.waiting))
