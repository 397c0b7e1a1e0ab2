"""Scheduler and block pool without a model: a made-up one that reads its keys from a made-up cache takes its place.

A slot of that cache holds a hash of all tokens up to its own position. A row reads the slot before it, so its hash is
right only if every earlier slot is; the next token follows from the hash. A lost, repeated or misplaced token, a block
that was handed out twice, and a cached block with other contents than promised all show in the hashes and the text.
Draft caches are made up in the same way. The model knows of requests what plans say, as a device does.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.core.batch import FIRST_BLOCK, PAD
from skipstone.core.plan import Admission, PlanItem, StepPlan, StepResult
from skipstone.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from skipstone.runtime.block_pool import BlockAccountingError, BlockPool, hash_block, hash_salt
from skipstone.runtime.scheduler import Scheduler
from skipstone.spec.proposer import ProposerNeeds

VOCAB = 40
EOS = 39
MOST_DRAFTS = 4
LONGEST_PROMPT = 40
MOST_OUTPUT = 24
ROOT = 12345


def extend(prefix: int, token: int) -> int:
    """Hash of a sequence, given the hash of all but its last token."""
    return hash((prefix, token))


def next_token(prefix: int) -> int:
    """The model: one token for each sequence, end of text now and then."""
    return (prefix >> 7) % VOCAB


def text_alone(prompt: list[int], max_total_tokens: int) -> list[int]:
    """The oracle: prompt and text, computed one token after the other."""
    tokens, prefix = list(prompt), ROOT
    for token in prompt:
        prefix = extend(prefix, token)
    while len(tokens) < max_total_tokens:
        tokens.append(next_token(prefix))
        prefix = extend(prefix, tokens[-1])
        if tokens[-1] == EOS:
            break
    return tokens


@dataclass
class Slot:
    """What the device knows of a request."""

    number: int
    tokens: list[int]
    start: int
    limit: int  # rows from here on are not run
    followed: int  # the draft caches are right below this position
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)  # right hash of each beginning of `tokens`
    marks: list[int] = field(default_factory=list)  # right contents of the draft caches
    follows: bool = True

    def prefix(self, position: int) -> int:
        """Right hash of the tokens up to a position."""
        for token in self.tokens[len(self.prefixes) : position + 1]:
            self.prefixes.append(extend(self.prefixes[-1] if self.prefixes else ROOT, token))
        return self.prefixes[position]


class Done(NamedTuple):
    """What a device made of an item."""

    result: StepResult
    start: int  # where its request goes on
    drafted: int  # drafts that were verified


class FakeModel:
    """Runs plans on a cache of hashes, and checks every slot that a row reads."""

    def __init__(self, block_size: int, needs: ProposerNeeds | None = None, seed: int = 0) -> None:
        self.block_size = block_size
        self.needs = needs
        self.random = random.Random(seed)
        self.slots: dict[int, Slot] = {}
        self.cache: dict[tuple[int, int], int] = {}
        self.draft_cache: dict[tuple[int, int], int] = {}

    def place(self, slot: Slot, position: int) -> tuple[int, int]:
        """Where a position's keys lie."""
        return slot.blocks[position // self.block_size], position % self.block_size

    def execute(self, plan: StepPlan) -> list[Done]:
        """All rows write before any row reads, as on a device."""
        for new in plan.admissions:
            self._admit(new)
        for slot, place, block in plan.new_blocks:
            assert place == len(self.slots[slot].blocks)
            self.slots[slot].blocks.append(block)
        self._copy(plan.block_copies)
        for item in plan.items:
            self._write(item)
        return [self._read(item) for item in plan.items]

    def results(self, plan: StepPlan) -> list[StepResult]:
        """What comes back of a plan."""
        return [done.result for done in self.execute(plan)]

    def _admit(self, new: Admission) -> None:
        limit = new.max_total_tokens - 1
        self.slots[new.slot] = Slot(new.number, list(new.token_ids), new.start, limit, new.start)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for cache in (self.cache, self.draft_cache):
            old = dict(cache) if copies else {}
            for (source, destination), i in itertools.product(copies, range(self.block_size)):
                cache[destination, i] = old.get((source, i), 0)

    def _rows(self, item: PlanItem) -> tuple[Slot, list[int], list[int]]:
        """The slot of an item, all its tokens up to its last row, and the positions of its rows."""
        slot = self.slots[item.slot]
        assert slot.number == item.admission
        drafts = (slot.drafts + [PAD] * item.num_drafts)[: item.num_drafts]
        newest = slot.start + item.num_rows - 1 - item.num_drafts
        assert newest == len(slot.tokens) - 1 if item.samples else newest < len(slot.tokens) - 1 and not drafts
        tokens = (slot.tokens[: newest + 1] + drafts)[: slot.limit]
        return slot, tokens, list(range(slot.start, len(tokens)))

    def _write(self, item: PlanItem) -> None:
        slot, tokens, positions = self._rows(item)
        for position in positions:
            before = self.cache[self.place(slot, position - 1)] if position else ROOT
            self.cache[self.place(slot, position)] = extend(before, tokens[position])

    def _read(self, item: PlanItem) -> Done:
        slot, tokens, positions = self._rows(item)
        if not positions:  # its text is complete, which nobody knew when the plan was made
            return Done(StepResult([EOS]), -1, 0)
        known = min(len(tokens), len(slot.tokens))
        expected = [slot.prefix(position) for position in range(known)]
        for draft in tokens[known:]:
            expected.append(extend(expected[-1], draft))
        found = [self.cache.get(self.place(slot, position)) for position in range(len(tokens))]
        assert found == expected, f"slot {item.slot} reads keys of other tokens"
        result = StepResult()
        drafts = tokens[known:] if item.samples else []
        if item.samples:
            for prefix, draft in itertools.zip_longest(expected[known - 1 :], drafts, fillvalue=PAD):
                result.token_ids.append(next_token(prefix))
                if draft != result.token_ids[-1]:
                    break
                result.num_accepted += 1
            slot.tokens += result.token_ids
            slot.start = len(slot.tokens) - 1
        else:
            slot.start += item.num_rows
        for position in range(item.start + item.prompt_rows[0], item.start + item.prompt_rows[1]):
            assert position in positions
            result.prompt_logprobs.append(TokenLogprobs(slot.tokens[position + 1], 0.0, position, [], []))
        slot.drafts = self._draft(item, slot)
        result.drafts = [draft for draft in slot.drafts if draft != PAD]
        return Done(result, slot.start, sum(draft != PAD for draft in drafts))

    def _draft(self, item: PlanItem, slot: Slot) -> list[int]:
        """Bring the draft caches up to date, and guess the next tokens, some of them wrongly."""
        assert slot.follows or not item.follows, "the draft caches missed a step"
        slot.follows = item.follows
        if self.needs is None or not item.follows:
            assert not item.follows and not item.num_next_drafts
            return []
        if self.needs.uses_caches:
            self._follow(slot, self.needs.next_tokens, item.num_next_drafts)
        if self.needs.max_position is not None:
            assert slot.start < self.needs.max_position
        drafts, prefix = [], slot.prefix(len(slot.tokens) - 1)
        most = min(item.num_next_drafts, max(slot.limit - len(slot.tokens), 0))
        for _ in range(self.random.choice([most, most, most, most // 2])):
            right = self.random.random() < 0.75
            drafts.append(next_token(prefix) if right else self.random.randrange(VOCAB))
            prefix = extend(prefix, drafts[-1])
        return drafts

    def _follow(self, slot: Slot, ahead: int, drafts: int) -> None:
        """A draft cache knows `ahead` tokens more than the target's; the last ones are not there yet."""
        final = min(slot.start, len(slot.tokens) - ahead)
        for position in range(slot.followed, slot.start):
            tokens = tuple(slot.tokens[position + 1 : position + 1 + ahead]) if position < final else PAD
            self.draft_cache[self.place(slot, position)] = hash((slot.prefix(position), tokens))
        slot.followed = max(slot.followed, final)
        for position in range(len(slot.marks), slot.followed):
            tokens = tuple(slot.tokens[position + 1 : position + 1 + ahead])
            slot.marks.append(hash((slot.prefix(position), tokens)))
        found = [self.draft_cache.get(self.place(slot, position)) for position in range(slot.followed)]
        assert found == slot.marks, "draft caches hold what belongs to other tokens"
        for position in range(slot.start, min(slot.start + drafts + 1, slot.limit) if drafts else 0):
            self.draft_cache[self.place(slot, position)] = PAD


@dataclass
class Shape:
    """Sizes of a simulated engine."""

    block_size: int = 4
    num_blocks: int = FIRST_BLOCK + 30
    max_rows: int = 24
    max_requests: int = 6
    prefix_caching: bool = True
    needs: ProposerNeeds | None = None
    ahead: float = 0.8  # share of steps that are planned before the step before is over


class Started(NamedTuple):
    """A step under way: its requests when it was planned, and what will come back."""

    plan: StepPlan
    requests: list[Request]
    done: list[Done]


class Simulation:
    """Random arrivals, drafts, aborts and stops around a scheduler; every step is checked."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks, shape.block_size)
        most_drafts: Callable[[int], int] | None = None
        if self.random.random() < 0.5:
            most_drafts = lambda num_requests: max(MOST_DRAFTS + 1 - num_requests, 0)  # noqa: E731
        sizes = (shape.max_rows, shape.max_requests, shape.prefix_caching)
        self.scheduler = Scheduler(self.pool, *sizes, shape.needs, most_drafts)
        self.model = FakeModel(shape.block_size, shape.needs, seed)
        self.under_way: Started | None = None
        self.requests: list[Request] = []
        self.begun: set[Request] = set()
        self.stopped: set[Request] = set()
        self.handed_out: dict[Request, list[int]] = {}
        self.counts: dict[Request, list[int]] = {}  # drafts, and those that were emitted
        self.texts = [self.tokens(LONGEST_PROMPT) for _ in range(5)]  # what prompts begin with
        self.aborts = {"waiting": 0, "running": 0, "in flight": 0}
        self.ahead = {"planned": 0, "declined": 0, "ended meanwhile": 0, "copies": 0}
        self.hits = 0

    def tokens(self, count: int) -> list[int]:
        """Random tokens, without the end of text."""
        return [self.random.randrange(EOS) for _ in range(count)]

    def arrive(self) -> None:
        """A request that begins as an earlier prompt or text did."""
        begin = self.random.choice(self.texts)
        if self.random.random() < 0.3:  # or with a later part of it: equal blocks after other beginnings
            begin = begin[self.random.randrange(4) * self.shape.block_size :]
        prompt = begin[: self.random.randint(0, LONGEST_PROMPT - 8)] + self.tokens(self.random.randint(0, 8))
        prompt = prompt or self.tokens(1)
        params = SamplingParams(prompt_logprobs=0 if self.random.random() < 0.05 else None)
        limit = len(prompt) + self.random.randint(1, MOST_OUTPUT)
        request = Request(f"r{len(self.requests)}", prompt, params, 0, limit, frozenset([EOS]))
        request.max_drafts = self.random.choice([0, 1, MOST_DRAFTS, MOST_DRAFTS])
        self.requests.append(request)
        self.handed_out[request], self.counts[request] = [], [0, 0]
        self.scheduler.add(request)

    def abort(self, kind: str, requests: list[Request]) -> None:
        """End a random one of the requests."""
        if requests:
            request = self.random.choice(requests)
            self.scheduler.finish(request, FinishReason.ABORT)
            self.aborts[kind] += 1
            assert request.finish_reason is FinishReason.ABORT
            assert request.block_ids == []
            self.scheduler.check()

    def step(self, busy: bool = True) -> None:
        """Arrivals, aborts and stops around one step of the engine. Not busy: nothing arrives, nobody aborts."""
        scheduler, chance = self.scheduler, self.random.random
        if busy:
            while len(scheduler.waiting) < 6 and chance() < 0.4:
                self.arrive()
            if chance() < 0.02:
                self.abort("waiting", list(scheduler.waiting))
            if chance() < 0.02:
                self.abort("running", scheduler.running)
        step = self.under_way or self.start(ahead=False)
        self.under_way = self.start(ahead=True) if step is not None and chance() < self.shape.ahead else None
        if step is None:
            return
        if busy and chance() < 0.05:
            later = self.under_way.requests if self.under_way is not None else []
            running = [r for r in dict.fromkeys((*step.requests, *later)) if not r.finished]
            self.abort("in flight", running)
        self.take(step, busy)
        scheduler.check()

    def start(self, ahead: bool) -> Started | None:
        """Plan a step and run it; what comes back is kept until it is asked for."""
        scheduler = self.scheduler
        if not ahead and not scheduler.has_work:
            return None
        before = (list(scheduler.running), scheduler.stats.preemptions)
        plan = scheduler.schedule(ahead)
        scheduler.check()
        if plan is None:
            assert ahead and (scheduler.running, scheduler.stats.preemptions) == before
            self.ahead["declined"] += 1
            return None
        if ahead:
            assert scheduler.stats.preemptions == before[1]
            self.ahead["planned"] += 1
        self.ahead["copies"] += len(plan.block_copies)
        if scheduler.stats.preemptions > before[1]:
            assert not plan.admissions
        self.check_plan(plan, ahead)
        owners = [scheduler.owner(item) for item in plan.items]
        requests = [owner for owner in owners if owner is not None]
        assert len(requests) == len(plan.items)
        return Started(plan, requests, self.model.execute(plan))

    def check_plan(self, plan: StepPlan, ahead: bool) -> None:
        """What holds for every plan."""
        items, scheduler = plan.items, self.scheduler
        assert items, "a step without rows"
        assert plan.num_rows <= self.shape.max_rows
        assert len(items) <= len(scheduler.running) <= self.shape.max_requests
        assert len({item.slot for item in items}) == len({item.admission for item in items}) == len(items)
        assert len({scheduler.places[request].slot for request in scheduler.running}) == len(scheduler.running)
        assert scheduler.places.keys() == set(scheduler.running)
        lengths = [length for length, _ in itertools.groupby(item.num_rows for item in items)]
        assert len(set(lengths)) == len(lengths)
        new = {admission.number: admission for admission in plan.admissions}
        assert new.keys() <= {item.admission for item in items}
        owned = {block for request in scheduler.running for block in request.block_ids}
        assert owned >= {destination for _, destination in plan.block_copies}
        for item in items:
            self.check_item(item, new.get(item.admission), ahead)
        assert all(not request.block_ids and not request.num_computed_tokens for request in scheduler.waiting)

    def check_item(self, item: PlanItem, new: Admission | None, ahead: bool) -> None:
        """What holds for every item; positions are exact unless the step before is under way."""
        request = self.scheduler.owner(item)
        assert request is not None and request in self.scheduler.running
        start = self.model.slots[item.slot].start if new is None else new.start
        assert item.start >= start if ahead else item.start == start == request.num_computed_tokens
        assert item.num_rows >= 1
        assert 0 <= item.num_drafts <= item.num_rows - item.samples
        assert item.num_next_drafts <= request.max_drafts
        if not ahead:
            assert item.num_drafts <= len(request.drafts)
            assert item.start < len(request.token_ids)
        assert len(request.block_ids) * self.shape.block_size >= min(item.end, request.max_total_tokens)
        assert len(set(request.block_ids)) == len(request.block_ids)
        assert min(request.block_ids) >= FIRST_BLOCK
        if request.params.prompt_logprobs is not None:
            assert request.num_cached_tokens == 0
        if request not in self.begun:
            assert new is not None
            self.begun.add(request)
            assert item.start == request.num_cached_tokens
            assert item.start % self.shape.block_size == 0 or plan_copies(self.shape)
            self.hits += item.start > 0

    def take(self, step: Started, busy: bool) -> None:
        """Keep what each request got; `committed` must name each request once, and all that got something."""
        ended = [request.finished for request in step.requests]
        for item, request, over in zip(step.plan.items, step.requests, ended, strict=True):
            assert self.scheduler.owner(item) is (None if over else request)
        self.ahead["ended meanwhile"] += sum(ended)
        committed = self.scheduler.commit(step.plan, [done.result for done in step.done])
        got = dict(committed)
        assert len(got) == len(committed)
        for request, done, over in zip(step.requests, step.done, ended, strict=True):
            if over:
                assert request not in got
                continue
            result, kept = done.result, got.pop(request, [])
            assert kept == result.token_ids[: len(kept)]
            assert len(kept) == len(result.token_ids) or request.finished
            assert request.finished or request.drafts == result.drafts
            assert request.finished or request.num_computed_tokens == done.start
            self.handed_out[request] += kept
            accepted = min(result.num_accepted, len(kept))
            if busy and kept and self.random.random() < 0.02:
                accepted = min(accepted, self.stop(request, len(kept)))
            self.counts[request][0] += done.drafted
            self.counts[request][1] += accepted
            if request.finished and len(request.token_ids) > 12:
                self.texts[self.random.randrange(len(self.texts))] = list(request.token_ids)
        assert not got

    def stop(self, request: Request, emitted: int) -> int:
        """A stop string turns up in the text of a request; returns how many of its new tokens stay."""
        surplus = self.random.randint(0, emitted)
        self.scheduler.stop(request, emitted, surplus)
        self.stopped.add(request)
        del self.handed_out[request][len(self.handed_out[request]) - surplus :]
        assert request.block_ids == []
        return emitted - surplus

    def finish(self) -> None:
        """Run until nothing is left, and check every text."""
        for _ in range(2000):
            if not self.scheduler.has_work and self.under_way is None:
                break
            self.step(busy=False)
        assert not self.scheduler.has_work
        assert self.pool.num_used == 0
        self.scheduler.check()
        for request in self.requests:
            assert request.output_token_ids == self.handed_out[request]
            expected = text_alone(request.token_ids[: request.num_prompt_tokens], request.max_total_tokens)
            assert [request.speculation.drafted, request.speculation.accepted] == self.counts[request]
            self.check_prompt_logprobs(request)
            if request.finish_reason is FinishReason.ABORT:
                assert request.token_ids == expected[: len(request.token_ids)]
                assert len(request.token_ids) < len(expected)
            elif request in self.stopped:
                assert request.token_ids == expected[: len(request.token_ids)]
                assert request.finish_reason is FinishReason.STOP
            else:
                assert request.token_ids == expected
                reason = FinishReason.STOP if request.token_ids[-1] == EOS else FinishReason.LENGTH
                assert request.finish_reason is reason
        stats = self.scheduler.stats.speculation
        assert [stats.drafted, stats.accepted] == [sum(column) for column in zip(*self.counts.values(), strict=True)]

    @staticmethod
    def check_prompt_logprobs(request: Request) -> None:
        """Each of the prompt's tokens but the first is reported once, if that is asked for."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        wanted = list(enumerate(prompt[1:])) if request.params.prompt_logprobs is not None else []
        found = [(entry.rank, entry.token_id) for entry in request.prompt_logprobs if entry is not None]
        assert found == wanted[: len(found)]
        assert found == wanted or request.finish_reason is FinishReason.ABORT


def plan_copies(shape: Shape) -> bool:
    """Whether requests may begin inside a block, in a copy of it."""
    return shape.needs is not None and shape.needs.next_tokens > 0


@pytest.mark.parametrize("ahead", [0.0, 0.8])
def test_ten_thousand_steps(ahead: float) -> None:
    simulation = Simulation(1, Shape(needs=ProposerNeeds("head", next_tokens=1, uses_caches=True), ahead=ahead))
    for _ in range(10_000 if ahead else 4_000):
        simulation.step()
    simulation.finish()
    stats = simulation.scheduler.stats
    assert stats.preemptions > 100
    assert sum(request.num_preemptions for request in simulation.requests) == stats.preemptions
    assert simulation.hits > 100
    assert min(simulation.aborts.values()) > 50
    assert stats.speculation.drafted - stats.speculation.accepted > 1000 < stats.speculation.accepted
    assert {request.finish_reason for request in simulation.requests} == set(FinishReason)
    assert sum(request.num_preemptions > 1 for request in simulation.requests) > 10
    assert len(simulation.stopped) > 50
    if ahead:
        assert min(simulation.ahead.values()) > 100


NEEDS = [
    None,
    ProposerNeeds("from the text"),
    ProposerNeeds("draft model", uses_caches=True),
    ProposerNeeds("head", next_tokens=1, uses_caches=True),
    ProposerNeeds("head of a short reach", next_tokens=1, uses_caches=True, max_position=30),
    ProposerNeeds("three modules", next_tokens=3, uses_caches=True),
    ProposerNeeds("block of drafts", uses_caches=True, least_lookahead=7),
]


@given(data=st.data())
@settings(max_examples=100)
def test_any_shape(data: st.DataObject) -> None:
    """Block sizes, pools, budgets and limits of all kinds, down to one row a step and one request at a time."""
    needs = data.draw(st.sampled_from(NEEDS))
    caching = data.draw(st.booleans())
    block_size = data.draw(st.integers(needs.next_tokens if needs is not None and needs.next_tokens else 1, 9))
    smallest = -(-(LONGEST_PROMPT + MOST_OUTPUT) // block_size)
    shape = Shape(
        block_size=block_size,
        num_blocks=FIRST_BLOCK + smallest + data.draw(st.integers(0, smallest)),
        max_rows=data.draw(st.integers(1, 80)),
        max_requests=data.draw(st.integers(1, 8)),
        prefix_caching=caching,
        needs=needs,
        ahead=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    simulation = Simulation(data.draw(st.integers(0, 10**6)), shape)
    for _ in range(60):
        simulation.step()
    simulation.finish()
    if not shape.prefix_caching:
        assert simulation.hits == 0


def run(scheduler: Scheduler, model: FakeModel) -> None:
    """Step until nothing is left."""
    while scheduler.has_work:
        plan = planned(scheduler)
        scheduler.commit(plan, model.results(plan))
        scheduler.check()


def planned(scheduler: Scheduler) -> StepPlan:
    """The next plan, while no step is under way."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def owners(scheduler: Scheduler, plan: StepPlan) -> list[Request | None]:
    """The requests of a plan's items."""
    return [scheduler.owner(item) for item in plan.items]


def small(num_blocks: int = 20) -> tuple[Scheduler, FakeModel]:
    """A scheduler with blocks of four tokens, and its model."""
    return Scheduler(BlockPool(FIRST_BLOCK + num_blocks, 4), 32, 4, True), FakeModel(4)


def ask(scheduler: Scheduler, prompt: list[int], count: int = 6) -> Request:
    """Queue a request for `count` tokens that nothing ends early."""
    request = Request("r", list(prompt), SamplingParams(), 0, len(prompt) + count)
    scheduler.add(request)
    return request


class TestStaleResults:
    """A result that comes back after its request was preempted or aborted changes nothing."""

    def test_aborted(self) -> None:
        scheduler, model = small()
        request, other = ask(scheduler, [1, 2, 3, 4, 5]), ask(scheduler, [6, 7])
        plan = planned(scheduler)
        results = model.results(plan)
        scheduler.finish(request, FinishReason.ABORT)
        assert [r for r, _ in scheduler.commit(plan, results)] == [other]
        assert request.token_ids == [1, 2, 3, 4, 5]
        assert (request.num_computed_tokens, request.block_ids, request.block_hashes) == (0, [], [])
        scheduler.check()
        run(scheduler, model)
        assert request.finish_reason is FinishReason.ABORT
        assert scheduler.pool.num_used == 0

    def test_ending_twice_is_ending_once(self) -> None:
        scheduler, model = small()
        request = ask(scheduler, [1, 2, 3])
        run(scheduler, model)
        scheduler.finish(request, FinishReason.ABORT)
        assert request.finish_reason is FinishReason.LENGTH
        assert len(scheduler._free_slots) == scheduler.max_requests

    @pytest.mark.parametrize("scheduled_again", [False, True])
    def test_preempted(self, scheduled_again: bool) -> None:
        """Whether the request waits, or runs again when the old result arrives."""
        scheduler, model = small()
        prompt = list(range(9))
        first, second = ask(scheduler, [30, 31]), ask(scheduler, prompt)
        plan = planned(scheduler)
        results = model.results(plan)
        assert scheduler._preempt_youngest() is second
        later = scheduler.schedule(ahead=True) if scheduled_again else None
        assert [request for request, _ in scheduler.commit(plan, results)] == [first]
        assert second.token_ids == prompt
        assert second.num_computed_tokens == 0
        assert second.block_hashes == []
        scheduler.check()
        if later is not None:
            scheduler.commit(later, model.results(later))
            assert len(second.token_ids) == len(prompt) + 1
        run(scheduler, model)
        for request in (first, second):
            start = request.token_ids[: request.num_prompt_tokens]
            assert request.token_ids == [*start, *continuation(start, 6)]

    def test_drafts_are_forgotten(self) -> None:
        scheduler, model = small()
        request = ask(scheduler, [1, 2, 3])
        plan = planned(scheduler)
        scheduler.commit(plan, model.results(plan))
        request.drafts = [7, 8]
        scheduler._preempt_youngest()
        assert request.drafts == []
        assert scheduler.owner(plan.items[0]) is None
        assert (request.num_preemptions, scheduler.stats.preemptions) == (1, 1)
        again = planned(scheduler)
        assert scheduler.owner(again.items[0]) is request
        assert again.items[0].admission != plan.items[0].admission


class TestAhead:
    """Plans that are made while the step before is under way."""

    def test_positions_are_bounds_while_drafts_are_open(self) -> None:
        scheduler, _ = small()
        scheduler.needs = ProposerNeeds("made up")
        request = ask(scheduler, [1, 2, 3], 20)
        request.max_drafts = 3
        first = planned(scheduler)
        second = scheduler.schedule(ahead=True)
        assert second is not None
        assert second.items[0][2:6] == (3, 4, 3, True)
        wrong = (continuation([1, 2, 3], 2)[1] + 1) % VOCAB
        scheduler.commit(first, [StepResult(continuation([1, 2, 3], 1), 0, [wrong])])
        third = scheduler.schedule(ahead=True)
        assert third is not None
        assert third.items[0][2:6] == (7, 4, 3, True)
        scheduler.commit(second, [StepResult([continuation([1, 2, 3], 2)[1]], 0, [])])
        assert (request.num_computed_tokens, len(request.token_ids)) == (4, 5)
        assert (request.speculation.drafted, request.speculation.accepted) == (1, 0)

    def test_what_surely_ends_has_no_further_step(self) -> None:
        scheduler, model = small()
        request = ask(scheduler, [1, 2, 3], 1)
        plan = planned(scheduler)
        assert scheduler.schedule(ahead=True) is None
        scheduler.commit(plan, model.results(plan))
        assert request.finish_reason is FinishReason.LENGTH

    def test_nobody_is_preempted(self) -> None:
        """The step waits for the one before, which may yet free blocks."""
        scheduler, model = small(num_blocks=4)
        requests = [ask(scheduler, [n] * 8) for n in (1, 2)]
        plan = planned(scheduler)
        assert scheduler.schedule(ahead=True) is None
        assert scheduler.running == requests and scheduler.stats.preemptions == 0
        scheduler.commit(plan, model.results(plan))
        assert owners(scheduler, planned(scheduler)) == requests[:1]
        assert scheduler.stats.preemptions == 1


def continuation(tokens: list[int], count: int) -> list[int]:
    """The model's next tokens, whatever they are."""
    prefix, out = ROOT, []
    for token in tokens:
        prefix = extend(prefix, token)
    for _ in range(count):
        out.append(next_token(prefix))
        prefix = extend(prefix, out[-1])
    return out


class TestOrder:
    """Who runs, and who has to give way."""

    def test_the_youngest_gives_way_and_comes_back_first(self) -> None:
        scheduler, model = small(num_blocks=6)
        oldest, middle, youngest = (ask(scheduler, [n] * 7, 8) for n in (1, 2, 3))
        queued = ask(scheduler, [4] * 7, 8)
        plan = planned(scheduler)
        assert owners(scheduler, plan) == [oldest, middle, youngest]
        scheduler.commit(plan, model.results(plan))
        while not scheduler.stats.preemptions:
            plan = planned(scheduler)
            scheduler.commit(plan, model.results(plan))
        assert scheduler.running == [oldest, middle]
        assert list(scheduler.waiting) == [youngest, queued]
        run(scheduler, model)
        assert oldest.num_preemptions == 0

    def test_no_rows_are_left_over_while_a_prompt_waits(self) -> None:
        scheduler, model = small()
        long, short = ask(scheduler, list(range(39))), ask(scheduler, [1, 2, 3])
        plan = planned(scheduler)
        assert [(scheduler.owner(item), item.num_rows, item.samples) for item in plan.items] == [(long, 32, False)]
        scheduler.commit(plan, model.results(plan))
        plan = planned(scheduler)
        rows = [(scheduler.owner(item), item.num_rows, item.samples) for item in plan.items]
        assert rows == [(short, 3, True), (long, 7, True)]

    def test_a_cached_prompt_still_computes_its_last_token(self) -> None:
        scheduler, model = small()
        prompt = list(range(8))
        for cached in (0, 4, 4):
            request = ask(scheduler, prompt)
            run(scheduler, model)
            assert request.num_cached_tokens == cached
        request = ask(scheduler, [*prompt, 9])
        run(scheduler, model)
        assert request.num_cached_tokens == 8
        assert scheduler.stats.prefix_hit_tokens == 16
        assert scheduler.stats.prefix_query_tokens == 33

    def test_rejected_drafts_do_not_reach_the_prefix_cache(self) -> None:
        """The first draft fills the block and is wrong; a prompt that contains it must not find the block."""
        scheduler, model = small()
        prompt = [1, 2]
        request = ask(scheduler, prompt, 20)
        plan = planned(scheduler)
        scheduler.commit(plan, model.results(plan))
        wrong = (continuation(request.token_ids, 1)[0] + 1) % VOCAB
        request.drafts = model.slots[0].drafts = [wrong, 5, 6]
        plan = planned(scheduler)
        assert [(item.num_rows, item.num_drafts) for item in plan.items] == [(4, 3)]
        assert scheduler.commit(plan, model.results(plan)) == [(request, continuation(request.token_ids[:3], 1))]
        assert request.block_hashes == []
        other = ask(scheduler, [*request.token_ids[:3], wrong, 5, 6])
        run(scheduler, model)
        assert other.num_cached_tokens == 0


class TestBlockPool:
    """Owners, the order of reuse, and what is remembered of free blocks."""

    def test_all_or_nothing(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 5, 4)
        assert pool.num_ownable == pool.num_free == 5
        blocks = pool.allocate(3)
        assert blocks == [FIRST_BLOCK, FIRST_BLOCK + 1, FIRST_BLOCK + 2]
        assert pool.allocate(3) is None
        assert (pool.num_free, pool.num_used) == (2, 3)
        assert pool.allocate(0) == []
        assert len(pool.allocate(2) or []) == 2
        assert pool.num_free == 0

    def test_release_twice(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 5, 4)
        blocks = pool.allocate(2)
        assert blocks is not None
        pool.release(blocks)
        with pytest.raises(BlockAccountingError, match=f"block {blocks[1]} was released more often"):
            pool.release(blocks)

    def test_least_recently_freed_first(self) -> None:
        """Never used blocks first, then in the order of release; of one sequence its end before its beginning."""
        pool = BlockPool(FIRST_BLOCK + 7, 4)
        a, b = pool.allocate(3), pool.allocate(2)
        assert a is not None
        assert b is not None
        for block in (*a, *b):
            pool.register(block, hash_block(b"", [block]))
        unused = [FIRST_BLOCK + 5, FIRST_BLOCK + 6]
        pool.release(b)
        pool.release(a)
        assert pool.allocate(7) == [*unused, *reversed(b), *reversed(a)]

    def test_what_nobody_can_find_goes_first(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 4, 4)
        blocks = pool.allocate(4)
        assert blocks is not None
        for block in (blocks[0], blocks[2]):
            pool.register(block, hash_block(b"", [block]))
        pool.release(blocks[2:])
        pool.release(blocks[:2])
        taken = pool.allocate(4)
        assert taken is not None
        assert set(taken[:2]) == {blocks[1], blocks[3]}
        assert taken[2:] == [blocks[2], blocks[0]]

    def test_draft_caches_decide_who_may_share(self) -> None:
        """The tokens behind a block belong to its key, as its draft caches depend on them."""
        pool = BlockPool(FIRST_BLOCK + 4, 2)
        blocks = pool.allocate(3)
        assert blocks is not None
        known = hash_block(b"", [1, 2])
        pool.register(blocks[0], known, None)  # draft caches never filled
        assert pool.acquire_prefix([1, 2, 3], 1, next_tokens=1) == ([], [], False)
        assert pool.acquire_prefix([1, 2, 3], 1) == ([blocks[0]], [known], False)
        pool.register(blocks[1], known, (3,))
        assert pool.acquire_prefix([1, 2, 3], 1, next_tokens=1) == ([blocks[1]], [known], False)
        assert pool.acquire_prefix([1, 2, 4], 1, next_tokens=1) == ([blocks[1]], [], True)
        pool.register(blocks[2], known, (4,))
        assert pool.acquire_prefix([1, 2, 4], 1, next_tokens=1) == ([blocks[2]], [known], False)
        pool.check([blocks, blocks[:1], blocks[1:2], blocks[1:2], blocks[2:]])

    def test_a_salt_parts_equal_beginnings(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 4, 2)
        blocks = pool.allocate(3)
        assert blocks is not None
        first, second = hash_block(b"", [1, 2]), hash_block(hash_block(b"", [1, 2]), [3, 4])
        pool.register(blocks[0], first)
        pool.register(blocks[1], second)
        assert pool.acquire_prefix([1, 2, 3, 4], 2, parent=hash_salt("a")).blocks == []
        pool.register(blocks[2], hash_block(hash_salt("a"), [1, 2]))
        assert pool.acquire_prefix([1, 2, 3, 4], 2, parent=hash_salt("a")).blocks == [blocks[2]]
        assert pool.acquire_prefix([1, 2, 3, 4], 2).blocks == blocks[:2]
        assert hash_salt("") == b"" and hash_salt("a") != hash_salt("b")
        # A salt that spells a block must not stand for that block: its successor holds keys of other positions.
        spelled = array("q", [1, 2]).tobytes().decode()
        assert pool.acquire_prefix([3, 4], 1, parent=hash_salt(spelled)).blocks == []
        pool.check([blocks, blocks[2:], blocks[:2]])

    def test_finding_a_block_makes_it_recent(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 3, 2)
        blocks = pool.allocate(3)
        assert blocks is not None
        for block, tokens in zip(blocks, ([3, 4], [5, 6], [1, 2]), strict=True):
            pool.register(block, hash_block(b"", tokens))
        pool.release(blocks)
        found = pool.acquire_prefix([1, 2], 1).blocks
        assert found == [blocks[2]]
        pool.release(found)
        assert pool.allocate(3) == [blocks[1], blocks[0], blocks[2]]

    def test_a_freed_beginning_is_found_until_overwritten(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 4, 2)
        tokens = [1, 2, 3, 4, 5, 6]
        blocks = pool.allocate(3)
        assert blocks is not None
        hashes = [hash_block(b"", tokens[:2])]
        hashes.append(hash_block(hashes[0], tokens[2:4]))
        hashes.append(hash_block(hashes[1], tokens[4:]))
        for block, known in zip(blocks, hashes, strict=True):
            pool.register(block, known)
        pool.release(blocks)
        assert pool.acquire_prefix(tokens, 2) == (blocks[:2], hashes[:2], False)
        pool.release(blocks[:2])
        assert pool.acquire_prefix(tokens, 3) == (blocks, hashes, False)
        assert pool.num_used == 3
        pool.release(blocks)
        taken = pool.allocate(2)  # the unused block, and the end of the sequence
        assert taken == [FIRST_BLOCK + 3, blocks[2]]
        assert pool.acquire_prefix(tokens, 3) == (blocks[:2], hashes[:2], False)
        pool.check([taken, blocks[:2]])
        pool.release(blocks[:2])
        assert pool.allocate(2) == [blocks[1], blocks[0]]
        assert pool.acquire_prefix(tokens, 3) == ([], [], False)

    def test_sharing(self) -> None:
        """Blocks of a running request are shared, and stay owned until the last owner gives them up."""
        pool = BlockPool(FIRST_BLOCK + 3, 2)
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.register(blocks[0], hash_block(b"", [1, 2]))
        assert pool.acquire_prefix([1, 2, 3], 1)[0] == blocks
        pool.check([blocks, blocks])
        pool.release(blocks)
        assert pool.num_used == 1
        pool.check([blocks])
        pool.release(blocks)
        assert pool.num_used == 0

    def test_a_second_copy_stays_anonymous(self) -> None:
        pool = BlockPool(FIRST_BLOCK + 3, 2)
        blocks = pool.allocate(2)
        assert blocks is not None
        known = hash_block(b"", [1, 2])
        for block in blocks:
            pool.register(block, known)
        assert pool.acquire_prefix([1, 2], 1) == ([blocks[0]], [known], False)
        pool.check([blocks, blocks[:1]])

    def test_hash_depends_on_everything_before(self) -> None:
        first, other = hash_block(b"", [1, 2]), hash_block(b"", [2, 1])
        assert len({first, other, hash_block(first, [1, 2]), hash_block(other, [1, 2]), hash_block(b"", [1])}) == 5
        assert hash_block(b"", [1, 2, 3, 4]) != hash_block(first, [3, 4])
        assert hash_block(first, [1, 2]) == hash_block(hash_block(b"", [1, 2]), [1, 2])

    @pytest.mark.parametrize("planted", ["owners", "lost", "free", "hash", "special"])
    def test_check_finds_an_error(self, planted: str) -> None:
        pool = BlockPool(FIRST_BLOCK + 4, 2)
        blocks = pool.allocate(2)
        assert blocks is not None
        pool.register(blocks[0], hash_block(b"", [1, 2]))
        pool.check([blocks])
        owned = [blocks]
        match planted:
            case "owners":
                pool._owners[blocks[0]] += 1
            case "lost":
                owned = [blocks[:1]]
            case "free":
                pool._free[blocks[1]] = None
            case "hash":
                pool._blocks_of.clear()
            case "special":
                owned = [blocks, [FIRST_BLOCK - 1]]
        with pytest.raises(BlockAccountingError):
            pool.check(owned)
