"""Which requests run how many rows in the next step, and what becomes of them afterwards.

Running requests come first, oldest first; waiting ones get what is left of the row budget. A prompt runs in chunks.
When blocks run out the youngest running request is preempted: its blocks are freed and it is computed again later,
which yields the same text because noise depends on seed and position only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from skipstone.core.plan import ScheduledRequest, StepOutput, StepPlan
from skipstone.core.request import FinishReason, Request
from skipstone.core.speculation import SpeculationStats
from skipstone.runtime.block_pool import BlockPool, Following, hash_block
from skipstone.spec.proposer import ProposerNeeds


@dataclass
class SchedulerStats:
    """Counts since the start."""

    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


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
    ) -> None:
        """`needs`: the proposer's; `most_drafts`: drafts per request at a given number of running requests."""
        self.pool = pool
        self.max_rows = max_rows
        self.max_requests = max_requests
        self.prefix_caching = prefix_caching
        self.needs = needs
        self.most_drafts = most_drafts
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._copies: list[tuple[int, int]] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """The rows of the next step. Reserves blocks for them; may preempt."""
        scheduled: list[ScheduledRequest] = []
        self._copies = []
        budget = self.max_rows
        preempted = self.stats.preemptions
        index = 0
        while index < len(self.running) and budget > 0:
            item = self._plan_rows(self.running[index], budget)
            if self._reserve(item):
                scheduled.append(item)
                budget -= item.query_len
                index += 1
            elif item.num_drafts:
                item.request.drafts.clear()  # cheaper to lose than another request's computed tokens
            elif self._preempt_youngest() is item.request:
                break
        if self.stats.preemptions == preempted:
            self._admit(scheduled, budget)
        scheduled = [self._plan_drafts(item, len(scheduled)) for item in scheduled]
        scheduled.sort(key=lambda item: item.query_len)
        return StepPlan(scheduled, self._copies)

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Start waiting requests while rows, places and blocks last."""
        while self.waiting and budget > 0 and len(self.running) < self.max_requests:
            request = self.waiting[0]
            self._match_prefix(request)
            item = self._plan_rows(request, budget)
            if not self._reserve(item):
                self._copies = [copy for copy in self._copies if copy[1] not in request.block_ids]
                self._free(request)
                return
            self.running.append(self.waiting.popleft())
            self.stats.prefix_query_tokens += len(request.token_ids)
            self.stats.prefix_hit_tokens += item.start
            if request.num_preemptions == 0:
                request.num_cached_tokens = item.start
            scheduled.append(item)
            budget -= item.query_len

    def _plan_rows(self, request: Request, budget: int) -> ScheduledRequest:
        committed = len(request.token_ids) - request.num_computed_tokens
        # A draft past the length limit could never be kept, and its blocks may not exist.
        del request.drafts[max(request.max_total_tokens - len(request.token_ids) - 1, 0) :]
        query_len = min(committed + len(request.drafts), budget)
        drafts = max(query_len - committed, 0)
        return ScheduledRequest(request, request.epoch, request.num_computed_tokens, query_len, drafts)

    def _plan_drafts(self, item: ScheduledRequest, num_requests: int) -> ScheduledRequest:
        """How many drafts to make after the step, with slots for them. Drafts take free blocks only."""
        most = item.request.max_drafts
        if not item.samples or not most or self.needs is None:
            return item
        if self.most_drafts is not None:
            most = min(most, self.most_drafts(num_requests))
        if not self._reserve(item, self.needs.lookahead(most)):
            return item
        return replace(item, num_next_drafts=most)

    def _reserve(self, item: ScheduledRequest, lookahead: int = 0) -> bool:
        """Own enough blocks for the item's rows and `lookahead` more; False when there are not enough."""
        blocks = item.request.block_ids
        tokens = item.start + item.query_len
        tokens = max(min(tokens + lookahead, item.request.max_total_tokens), tokens)
        needed = -(-tokens // self.pool.block_size) - len(blocks)
        if needed <= 0:
            return True
        new = self.pool.allocate(needed)
        if new is not None:
            blocks.extend(new)
        return new is not None

    def reserve_ahead(self, plan: StepPlan, k: int) -> bool:
        """Own blocks for the step after a plan that only decodes, whatever it accepts; False when there are too few."""
        lookahead = self.needs.lookahead(k) if self.needs else 0
        for item in plan.scheduled:
            request = item.request
            if request.max_total_tokens - len(request.token_ids) <= 1:
                return False  # this step ends it
            if not self._reserve(replace(item, query_len=2 * (k + 1)), lookahead):
                return False
        return True

    def plan_committed(self, requests: list[Request]) -> StepPlan:
        """The plan of a step that was started before the last one was committed, as it is known now."""
        scheduled = []
        for request in requests:
            if not request.finished and request in self.running:
                scheduled.append(replace(self._plan_rows(request, self.max_rows), num_next_drafts=request.max_drafts))
        return StepPlan(scheduled)

    def _match_prefix(self, request: Request) -> None:
        """Take over cached blocks. The last token is always computed, as its logits are wanted."""
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return
        size = self.pool.block_size
        most = (len(request.token_ids) - 1) // size
        drafts = request.max_drafts > 0 and self.needs is not None and self.needs.uses_caches
        next_tokens = self.needs.next_tokens if drafts and self.needs is not None else None
        match = self.pool.acquire_prefix(request.token_ids, most, next_tokens, request.first_parent)
        request.block_ids, request.block_hashes = match.blocks, match.hashes
        request.num_computed_tokens = len(match.blocks) * size
        if match.partial:
            self._copy_last_block(request, next_tokens or 0)
        request.num_draft_computed = request.num_computed_tokens if drafts else 0

    def _copy_last_block(self, request: Request, rows: int) -> None:
        """Exchange the last block for a copy of it, of which the last `rows` positions are computed again."""
        source = request.block_ids.pop()
        copy = self.pool.allocate(1)
        if copy is None:
            request.num_computed_tokens -= self.pool.block_size
        else:
            self._copies.append((source, copy[0]))
            request.block_ids += copy
            request.num_computed_tokens -= rows
        self.pool.release([source])

    def _preempt_youngest(self) -> Request:
        victim = self.running.pop()
        self._free(victim)
        victim.drafts.clear()
        victim.epoch += 1
        victim.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _free(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids, request.block_hashes = [], []
        request.num_computed_tokens = request.num_draft_computed = 0

    def commit(self, plan: StepPlan, output: StepOutput) -> list[tuple[Request, list[int]]]:
        """Take over a step's results; returns each request that got tokens or ended, with the tokens it keeps.

        Results of an older epoch (preempted or aborted since the plan was made) are dropped.
        """
        committed = []
        for item, result in zip(plan.scheduled, output.results, strict=True):
            request = item.request
            if request.epoch != item.epoch or request.finished:
                continue
            request.num_computed_tokens = item.start + item.query_len - item.num_drafts + result.num_accepted
            request.num_draft_computed = result.num_draft_computed
            request.drafts = result.drafts
            request.prompt_logprobs.extend(result.prompt_logprobs)
            kept = request.commit(result.token_ids)
            request.num_accepted = min(result.num_accepted, len(kept))
            request.speculation.record(item.num_drafts, request.num_accepted)
            self.stats.speculation.record(item.num_drafts, request.num_accepted)
            request.logprobs.extend(result.logprobs[: len(kept)])
            self._register_full_blocks(request)
            if request.finished:
                self._retire(request)
            if kept or request.finished:
                committed.append((request, kept))
        return committed

    def _register_full_blocks(self, request: Request) -> None:
        """Hash blocks that hold committed tokens only, so that others can reuse them."""
        if not self.prefix_caching:
            return
        size = self.pool.block_size
        full = min(request.num_computed_tokens, len(request.token_ids))
        if request.num_draft_computed:  # until its draft caches are filled as well, a block is of less use to others
            full = min(full, request.num_draft_computed)
        full //= size
        for i in range(len(request.block_hashes), full):
            parent = request.block_hashes[-1] if request.block_hashes else request.first_parent
            block_hash = hash_block(parent, request.token_ids[i * size : (i + 1) * size])
            request.block_hashes.append(block_hash)
            self.pool.register(request.block_ids[i], block_hash, self._following(request, (i + 1) * size))

    def _following(self, request: Request, end: int) -> Following:
        """The tokens behind a block that its draft caches depend on; None when they are not filled up to `end`."""
        if self.needs is None or not self.needs.uses_caches:
            return ()
        if request.num_draft_computed < end:
            return None
        return tuple(request.token_ids[end : end + self.needs.next_tokens])

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
        request.epoch += 1
        self._retire(request)

    def _retire(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free(request)

    def check(self) -> None:
        """Compare the pool's books with the requests. Raises BlockAccountingError."""
        self.pool.check(request.block_ids for request in (*self.running, *self.waiting))
