"""Scheduler and block pool without a model: a made-up one that reads its keys from a made-up cache takes its place.

A slot of that cache holds a hash of all tokens up to its own position. A row reads the slot before it, so its hash is
right only if every earlier slot is; the next token follows from the hash. A lost, repeated or misplaced token, a block
that was handed out twice, and a cached block with other contents than promised all show in the hashes and the text.
"""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.plan import ScheduledRequest, StepOutput, StepPlan, StepResult
from skipstone.core.request import FinishReason, Request, SamplingParams
from skipstone.runtime.block_pool import BlockAccountingError, BlockPool, hash_block, hash_salt
from skipstone.runtime.scheduler import Scheduler

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


class FakeModel:
    """Runs plans on a cache of hashes, and checks every slot that a row reads."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.known: dict[Request, list[int]] = {}  # hash of each beginning of the committed tokens

    def slot(self, request: Request, position: int) -> tuple[int, int]:
        """Where a position's keys lie."""
        return request.block_ids[position // self.block_size], position % self.block_size

    def prefixes(self, item: ScheduledRequest) -> list[int]:
        """Right hash of every position up to the item's last row, from the tokens alone."""
        request = item.request
        known = self.known.setdefault(request, [])
        for token in request.token_ids[len(known) :]:
            known.append(extend(known[-1] if known else ROOT, token))
        out = known[: item.start + item.query_len]
        for token in request.drafts[: item.num_drafts]:
            out = [*out, extend(out[-1], token)]
        return out

    def execute(self, plan: StepPlan) -> StepOutput:
        """All rows write before any row reads, as on a device."""
        for item in plan.scheduled:
            self._write(item)
        return StepOutput([self._read(item) for item in plan.scheduled])

    def _write(self, item: ScheduledRequest) -> None:
        tokens = item.request.token_ids + item.request.drafts[: item.num_drafts]
        for position in range(item.start, item.start + item.query_len):
            before = self.slots[self.slot(item.request, position - 1)] if position else ROOT
            self.slots[self.slot(item.request, position)] = extend(before, tokens[position])

    def _read(self, item: ScheduledRequest) -> StepResult:
        request, result = item.request, StepResult()
        expected = self.prefixes(item)
        assert len(expected) == item.start + item.query_len
        found = [self.slots.get(self.slot(request, position)) for position in range(len(expected))]
        assert found == expected, f"{request.request_id} reads keys of other tokens"
        if not item.samples:
            assert item.num_drafts == 0
            return result
        first = len(expected) - 1 - item.num_drafts
        for draft in range(item.num_drafts + 1):
            result.token_ids.append(next_token(found[first + draft]))
            if draft == item.num_drafts or request.drafts[draft] != result.token_ids[-1]:
                break
            result.num_accepted += 1
        return result


@dataclass
class Shape:
    """Sizes of a simulated engine."""

    block_size: int = 4
    num_blocks: int = FIRST_BLOCK + 26
    max_rows: int = 24
    max_requests: int = 6
    prefix_caching: bool = True


class Simulation:
    """Random arrivals, drafts and aborts around a scheduler; every step is checked."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks, shape.block_size)
        self.scheduler = Scheduler(self.pool, shape.max_rows, shape.max_requests, shape.prefix_caching)
        self.model = FakeModel(shape.block_size)
        self.requests: list[Request] = []
        self.begun: set[Request] = set()
        self.handed_out: dict[Request, list[int]] = {}
        self.texts = [self.tokens(LONGEST_PROMPT) for _ in range(5)]  # what prompts begin with
        self.aborts = {"waiting": 0, "running": 0, "in flight": 0}
        self.hits = 0
        self.drafts = {"kept": 0, "rejected": 0}

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
        self.requests.append(request)
        self.handed_out[request] = []
        self.scheduler.add(request)

    def draft(self, request: Request) -> None:
        """Guess the next tokens, some of them wrongly."""
        prefix = ROOT
        for token in request.token_ids:
            prefix = extend(prefix, token)
        request.drafts = []
        for _ in range(self.random.randint(1, MOST_DRAFTS)):
            right = self.random.random() < 0.75
            request.drafts.append(next_token(prefix) if right else self.random.randrange(VOCAB))
            prefix = extend(prefix, request.drafts[-1])

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
        """Arrivals, aborts and drafts, then one step of the engine. Not busy: nothing new arrives, nobody aborts."""
        scheduler, chance = self.scheduler, self.random.random
        if busy:
            while len(scheduler.waiting) < 6 and chance() < 0.4:
                self.arrive()
            if chance() < 0.02:
                self.abort("waiting", list(scheduler.waiting))
            if chance() < 0.02:
                self.abort("running", scheduler.running)
        for request in (*scheduler.running, *itertools.islice(scheduler.waiting, 1)):
            if chance() < 0.3:
                self.draft(request)
        plan = scheduler.schedule()
        scheduler.check()
        self.check_plan(plan)
        output = self.model.execute(plan)
        if busy and chance() < 0.03:
            self.abort("in flight", [item.request for item in plan.scheduled])
        self.take(plan, output, scheduler.commit(plan, output))
        scheduler.check()

    def check_plan(self, plan: StepPlan) -> None:
        """What holds for every plan."""
        items, scheduler = plan.scheduled, self.scheduler
        assert bool(items) == scheduler.has_work, "a step without rows"
        assert plan.num_rows <= self.shape.max_rows
        assert len(items) <= len(scheduler.running) <= self.shape.max_requests
        assert len({item.request for item in items}) == len(items)
        lengths = [length for length, _ in itertools.groupby(item.query_len for item in items)]
        assert len(set(lengths)) == len(lengths)
        for item in items:
            request = item.request
            assert request in scheduler.running
            assert item.query_len >= 1
            assert item.start == request.num_computed_tokens < len(request.token_ids)
            assert 0 <= item.num_drafts <= len(request.drafts)
            assert len(request.block_ids) * self.shape.block_size >= item.start + item.query_len
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert min(request.block_ids) >= FIRST_BLOCK
            if request.params.prompt_logprobs is not None:
                assert request.num_cached_tokens == 0
            if request not in self.begun:
                self.begun.add(request)
                assert item.start == request.num_cached_tokens
                assert item.start % self.shape.block_size == 0
                self.hits += item.start > 0
        assert all(not request.block_ids and not request.num_computed_tokens for request in scheduler.waiting)

    def take(self, plan: StepPlan, output: StepOutput, committed: list[tuple[Request, list[int]]]) -> None:
        """Keep what each request got; `committed` must name each request once, and all that got something."""
        got = dict(committed)
        assert len(got) == len(committed)
        for item, result in zip(plan.scheduled, output.results, strict=True):
            if item.request.finish_reason is FinishReason.ABORT:
                assert item.request not in got
                continue
            kept = got.pop(item.request, [])
            assert kept == result.token_ids[: len(kept)]
            assert len(kept) == len(result.token_ids) or item.request.finished
            assert item.request.drafts == []
            if not item.request.finished:
                rows = item.query_len - item.num_drafts + result.num_accepted
                assert item.request.num_computed_tokens == item.start + rows
            self.handed_out[item.request] += kept
            self.drafts["kept"] += result.num_accepted
            self.drafts["rejected"] += item.num_drafts - result.num_accepted
            if item.request.finished and len(item.request.token_ids) > 12:
                self.texts[self.random.randrange(len(self.texts))] = list(item.request.token_ids)
        assert not got

    def finish(self) -> None:
        """Run until nothing is left, and check every text."""
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step(busy=False)
        assert not self.scheduler.has_work
        assert self.pool.num_used == 0
        self.scheduler.check()
        for request in self.requests:
            assert request.output_token_ids == self.handed_out[request]
            expected = text_alone(request.token_ids[: request.num_prompt_tokens], request.max_total_tokens)
            if request.finish_reason is FinishReason.ABORT:
                assert request.token_ids == expected[: len(request.token_ids)]
                assert len(request.token_ids) < len(expected)
            else:
                assert request.token_ids == expected
                reason = FinishReason.STOP if request.token_ids[-1] == EOS else FinishReason.LENGTH
                assert request.finish_reason is reason


def test_ten_thousand_steps() -> None:
    simulation = Simulation(1, Shape())
    for _ in range(10_000):
        simulation.step()
    simulation.finish()
    assert simulation.scheduler.stats.preemptions > 100
    assert sum(request.num_preemptions for request in simulation.requests) == simulation.scheduler.stats.preemptions
    assert simulation.hits > 100
    assert min(simulation.aborts.values()) > 100
    assert min(simulation.drafts.values()) > 100
    assert {request.finish_reason for request in simulation.requests} == set(FinishReason)
    assert sum(request.num_preemptions > 1 for request in simulation.requests) > 10


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape(data: st.DataObject) -> None:
    """Block sizes, pools, budgets and limits of all kinds, down to one row a step and one request at a time."""
    block_size = data.draw(st.integers(1, 9))
    smallest = -(-(LONGEST_PROMPT + MOST_OUTPUT + MOST_DRAFTS) // block_size)
    shape = Shape(
        block_size=block_size,
        num_blocks=FIRST_BLOCK + smallest + data.draw(st.integers(0, smallest)),
        max_rows=data.draw(st.integers(1, 80)),
        max_requests=data.draw(st.integers(1, 8)),
        prefix_caching=data.draw(st.booleans()),
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
        plan = scheduler.schedule()
        scheduler.commit(plan, model.execute(plan))
        scheduler.check()


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
        plan = scheduler.schedule()
        output = model.execute(plan)
        scheduler.finish(request, FinishReason.ABORT)
        assert [r for r, _ in scheduler.commit(plan, output)] == [other]
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
        assert request.epoch == 0

    @pytest.mark.parametrize("scheduled_again", [False, True])
    def test_preempted(self, scheduled_again: bool) -> None:
        """Whether the request waits, or runs again when the old result arrives."""
        scheduler, model = small()
        prompt = list(range(9))
        first, second = ask(scheduler, [30, 31]), ask(scheduler, prompt)
        plan = scheduler.schedule()
        output = model.execute(plan)
        assert scheduler._preempt_youngest() is second
        later = scheduler.schedule() if scheduled_again else None
        kept = scheduler.commit(plan, output)
        assert [request for request, _ in kept] == [first]
        assert second.token_ids == prompt
        assert second.num_computed_tokens == 0
        assert second.block_hashes == []
        scheduler.check()
        if later is not None:
            mine = StepPlan([item for item in later.scheduled if item.request is second])
            scheduler.commit(mine, model.execute(mine))
            assert len(second.token_ids) == len(prompt) + 1
        run(scheduler, model)
        for request in (first, second):
            start = request.token_ids[: request.num_prompt_tokens]
            assert request.token_ids == [*start, *continuation(start, 6)]

    def test_drafts_are_forgotten(self) -> None:
        scheduler, model = small()
        request = ask(scheduler, [1, 2, 3])
        plan = scheduler.schedule()
        scheduler.commit(plan, model.execute(plan))
        request.drafts = [7, 8]
        scheduler._preempt_youngest()
        assert request.drafts == []
        assert (request.epoch, request.num_preemptions, scheduler.stats.preemptions) == (1, 1, 1)


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
        plan = scheduler.schedule()
        assert [item.request for item in plan.scheduled] == [oldest, middle, youngest]
        scheduler.commit(plan, model.execute(plan))
        while not scheduler.stats.preemptions:
            plan = scheduler.schedule()
            scheduler.commit(plan, model.execute(plan))
        assert scheduler.running == [oldest, middle]
        assert list(scheduler.waiting) == [youngest, queued]
        run(scheduler, model)
        assert oldest.num_preemptions == 0

    def test_no_rows_are_left_over_while_a_prompt_waits(self) -> None:
        scheduler, model = small()
        long, short = ask(scheduler, list(range(39))), ask(scheduler, [1, 2, 3])
        plan = scheduler.schedule()
        assert [(item.request, item.query_len, item.samples) for item in plan.scheduled] == [(long, 32, False)]
        scheduler.commit(plan, model.execute(plan))
        plan = scheduler.schedule()
        rows = [(item.request, item.query_len, item.samples) for item in plan.scheduled]
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
        plan = scheduler.schedule()
        scheduler.commit(plan, model.execute(plan))
        wrong = (continuation(request.token_ids, 1)[0] + 1) % VOCAB
        request.drafts = [wrong, 5, 6]
        plan = scheduler.schedule()
        assert [(item.query_len, item.num_drafts) for item in plan.scheduled] == [(4, 3)]
        assert scheduler.commit(plan, model.execute(plan)) == [(request, continuation(request.token_ids[:3], 1))]
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
