"""k chosen in every step: the text does not depend on it, what pays is found, and a proposer that rests costs nothing.

The oracle of texts is the engine without speculation. The oracle of choices is a machine with made-up times and
acceptance, on which every fixed k has been tried.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.adaptive import NEEDS, GivenK, Load, Machine, RandomK
from oracles.speculation import LEAN, WAYS, Folders, Job, check_batch, load, tiny_jobs, tokens
from oracles.verifiers import RandomVerifier
from test_draft_caches import Fresh, request, snapshot
from test_scheduler import FakeModel, Shape, Simulation, Slot, next_token
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.core.batch import FIRST_BLOCK, Batch
from skipstone.core.plan import PlanItem, StepPlan, StepResult
from skipstone.runtime.adaptive import AdaptiveK
from skipstone.runtime.runner import StepHandle
from skipstone.runtime.scheduler import Scheduler
from skipstone.session import Session
from skipstone.spec.proposer import DraftStep, ProposerNeeds

MOST = 3
NAN = float("nan")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("adaptive"))


# The text.


def told(session: Session) -> tuple:
    """All that is said of a request's texts."""
    out = session.output()
    choices = [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in out.outputs]
    return choices, out.prompt_logprobs


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Callable[[str], list[tuple]]:
    """What is said of every job without speculation."""

    def run(target: str) -> list[tuple]:
        llm = load(folders.target(target), max_num_seqs=8)
        sessions = [llm.add(*job) for job in tiny_jobs()]
        while llm.engine.has_work:
            llm.step()
        return [told(session) for session in sessions]

    return cache(run)


class Watch:
    """Fills caches with NaN, and looks at what is run: known tokens only, and NaN only where drafts are for nothing."""

    def __init__(self, llm: LLM) -> None:
        self.runner = runner = llm.engine.runner
        self.plan, self.asked = StepPlan([]), False
        self.drafts, self.blind = 0, 0  # drafts of requests that the proposer follows, and of others
        groups = [runner.groups]
        runner.cache.fill(NAN)
        if hasattr(runner.proposer, "cache"):
            runner.proposer.cache.fill(NAN)
            groups.append(runner.proposer.groups)
        for part in groups:
            part.plan = self._checked(part.plan, llm.engine.vocab_size)
        self.finish, runner.finish = runner.finish, self._finish
        self.propose, runner.proposer.propose = runner.proposer.propose, self._propose

    def _checked(self, plan: Callable, vocab: int) -> Callable:
        def checked(batch: Batch, kept: Any = None) -> Any:
            check_batch(batch, vocab)
            return plan(batch, kept)

        return checked

    def _finish(self, handle: StepHandle, masks: Any) -> None:
        self.plan, self.asked = handle.plan, False
        self.finish(handle, masks)
        assert self.asked == any(item.follows or item.num_next_drafts for item in handle.plan.items)

    def _propose(self, step: DraftStep) -> Any:
        self.asked = True
        sample = step.sampler.sample
        follows = {item.slot: item.follows for item in self.plan.items}
        whole = torch.tensor([follows[slot] for slot in step.draft_slots.tolist()])

        def looked_at(logits: Tensor, *rest: Any) -> Tensor:
            wanted = step.wanted > 0
            assert not logits[wanted & whole].isnan().any(), "drafts depend on a cache slot that nobody wrote"
            self.drafts += int((wanted & whole).sum())
            self.blind += int((wanted & ~whole).sum())
            return sample(logits, *rest)

        object.__setattr__(step.sampler, "sample", looked_at)
        return self.propose(step)


def run_staggered(llm: LLM, jobs: list[Job], seed: int) -> list[tuple]:
    """A new request every few steps, and one that is aborted now and then; books are checked after every step."""
    draw, engine = random.Random(seed), llm.engine
    waiting, sessions, noise = list(jobs), [], []
    while waiting or engine.has_work:
        while waiting and draw.random() < 0.35:
            sessions.append(llm.add(*waiting.pop(0)))
        if waiting and draw.random() < 0.05:
            noise.append(llm.add([9] * draw.randint(1, 40), SamplingParams(temperature=0, max_tokens=40)))
        if noise and draw.random() < 0.1:
            llm.abort(noise.pop().session_id)
        if engine.has_work:
            llm.step()
        engine.scheduler.check()
        check_places(engine.scheduler)
    assert engine.pool.num_used == 0
    assert not engine.scheduler.places and len(engine.scheduler._free_slots) == engine.scheduler.max_requests
    return [told(session) for session in sessions]


def check_places(scheduler: Scheduler) -> None:
    """Every running request has a slot of its own; nobody counts on draft caches of rows that the proposer missed."""
    assert scheduler.places.keys() == set(scheduler.running)
    slots = {place.slot for place in scheduler.places.values()}
    assert len(slots) + len(scheduler._free_slots) == scheduler.max_requests
    assert slots.isdisjoint(scheduler._free_slots)
    if (
        scheduler.needs is not None and scheduler.needs.max_position is None
    ):  # else it may be a step that was planned and not run
        for one, place in scheduler.places.items():
            assert place.follows or place.under_way or not one.num_draft_computed


def at_random(llm: LLM, seed: int, calm: float) -> RandomK:
    """Let an engine choose at random."""
    chooser = RandomK(llm.engine.speculation.k, seed, calm)
    llm.engine.adaptive = llm.engine.scheduler.adaptive = chooser
    return chooser


USUAL = {*(("m3", way) for way in WAYS if way != "eagle3_wide"), ("dsa", "mtp"), ("dsa", "mtp3"), ("dsa", "dflash")}
POINTS = [(target, way) for target in ("m3", "dsa") for way in WAYS]


@pytest.mark.parametrize(
    ("target", "way"), [pytest.param(*p, marks=() if p in USUAL else pytest.mark.long) for p in POINTS]
)
def test_no_text_depends_on_k(target: str, way: str, folders: Folders, plain: Callable) -> None:
    """Whatever k and whenever the proposer rests: chunks, shared beginnings, preemption, all sampling, early steps."""
    files = folders.target(target, WAYS[way].modules)
    llm = load(files, folders.spec(WAYS[way], target, MOST), num_blocks=24, max_model_len=96,
               max_num_batched_tokens=40, max_num_seqs=6, prefix_caching=True)  # fmt: skip
    watch, expected = Watch(llm), plain(target)
    for turn, (early, pauses, calm) in enumerate([(False, False, 0.97), (True, False, 0.9), (True, True, 0.5)]):
        llm.engine.overlap, llm.engine.scheduler.pauses_beside_prompts = early, pauses
        at_random(llm, turn, calm)
        part = slice((POINTS.index((target, way)) + turn) % 3, None, 3)
        found = run_staggered(llm, tiny_jobs()[part], turn)
        for (_, params), mine, own in zip(tiny_jobs()[part], found, expected[part], strict=True):
            assert mine == own, params
    stats = llm.engine.scheduler.stats
    assert stats.preemptions > 0 < stats.prefix_hit_tokens
    assert 0 < stats.speculation.accepted < stats.speculation.drafted
    assert way == "ngram" or watch.drafts > 50 < watch.blind


class RestingModel(FakeModel):
    """Its proposer also drafts for requests whose rows it missed; whatever it writes for them is wrong."""

    def _read(self, item: PlanItem) -> Any:
        slot = self.slots[item.slot]
        begin = slot.start
        done = super()._read(item)
        if not item.follows and self.needs is not None and self.needs.uses_caches and done.start >= 0:
            drafts = item.num_next_drafts + 1 if item.num_next_drafts else 0
            for position in range(begin, max(min(slot.start + drafts, slot.limit), slot.start)):
                self.draft_cache[self.place(slot, position)] = -2
        return done

    def _draft(self, item: PlanItem, slot: Slot) -> list[int]:
        if item.follows or not item.num_next_drafts:
            return super()._draft(item, slot)
        slot.follows = False
        right = next_token(slot.prefix(len(slot.tokens) - 1))
        drafts = [right, *(self.random.randrange(39) for _ in range(item.num_next_drafts - 1))]
        return drafts[: max(slot.limit - len(slot.tokens), 0)]


NEEDS_OF_ALL = [
    ProposerNeeds("from the text"),
    ProposerNeeds("draft model", uses_caches=True),
    NEEDS,
    ProposerNeeds("head of a short reach", next_tokens=1, uses_caches=True, max_position=30),
    ProposerNeeds("three modules", next_tokens=3, uses_caches=True),
    ProposerNeeds("block of drafts", uses_caches=True, least_lookahead=7),
]


@pytest.mark.parametrize("calm", [0.5, 0.99])
@pytest.mark.parametrize("needs", NEEDS_OF_ALL, ids=lambda needs: needs.name)
def test_the_scheduler_under_any_choice(needs: ProposerNeeds, calm: float) -> None:
    """Arrivals, aborts, stops, preemption, shared blocks, early plans: no cache is read that holds something else."""
    simulation = Simulation(3, Shape(needs=needs))
    simulation.model = RestingModel(4, needs, 3)
    scheduler = simulation.scheduler
    scheduler.most_drafts, scheduler.adaptive = None, RandomK(4, 5, calm)
    for _ in range(1500):
        simulation.step()
        check_places(scheduler)
    simulation.finish()
    stats = scheduler.stats
    assert stats.preemptions > 20 < simulation.hits
    assert min(stats.speculation.accepted, stats.speculation.drafted - stats.speculation.accepted) > 150


# What a proposer that rests does, and what it leaves behind.


def given(llm: LLM, k: int, resting: bool = False, scouted: int = 0) -> GivenK:
    """Let an engine choose as told."""
    chooser = GivenK(llm.engine.speculation.k, k, resting, scouted)
    llm.engine.adaptive = llm.engine.scheduler.adaptive = chooser
    return chooser


def made(folders: Folders, target: str, way: str, **options: Any) -> LLM:
    """An engine in which the proposer has its caches poisoned, and what it drafts from is looked at."""
    llm = load(folders.target(target, WAYS[way].modules), folders.spec(WAYS[way], target, MOST), **options)
    Watch(llm)
    return llm


DRAFTERS = [("m3", "mtp"), ("dsa", "mtp3"), ("m3", "eagle3"), ("dsa", "dflash"), ("m3", "draft")]

JOBS = [
    (tokens(length, length), SamplingParams(temperature=i % 3, seed=i, max_tokens=12, ignore_eos=True, logprobs=1))
    for i, length in enumerate((1, 30, 22, 20, 10))
]


@pytest.mark.parametrize("tight", [{}, {"num_blocks": 9, "max_model_len": 64, "max_num_batched_tokens": 9}])
@pytest.mark.parametrize(("target", "way"), [*DRAFTERS, ("m3", "ngram")])
def test_a_proposer_that_rests_does_nothing(target: str, way: str, tight: dict[str, int], folders: Folders) -> None:
    """Never called, nothing written; as many rows in as many steps as without it, in chunks and preempted as well."""
    off = load(folders.target(target, WAYS[way].modules), prefix_caching=True, **tight)
    llm = made(folders, target, way, prefix_caching=True, **tight)
    given(llm, 0, resting=True)
    llm.engine.runner.proposer.propose = lambda _: pytest.fail("the proposer ran")
    assert [run_staggered(one, JOBS, 1) for one in (llm, llm)] == [run_staggered(one, JOBS, 1) for one in (off, off)]
    assert (llm.engine.stats.steps, llm.engine.stats.rows) == (off.engine.stats.steps, off.engine.stats.rows)
    mine, theirs = (one.engine.scheduler.stats for one in (llm, off))
    assert (mine.preemptions, mine.prefix_hit_tokens) == (theirs.preemptions, theirs.prefix_hit_tokens)
    assert (mine.preemptions > 0) == bool(tight) and mine.prefix_hit_tokens > 0
    for tensors in getattr(llm.engine.runner.proposer, "cache", SimpleNamespace(layers={})).layers.values():
        assert all(tensor[FIRST_BLOCK:].isnan().all() for tensor in tensors.values())


def steps_of(llm: LLM, prompt: list[int], asked: int | None = None) -> tuple[list[tuple[bool, int]], Session]:
    """Run a request alone: of each step whether the proposer follows it, and its drafts; and what became of it."""
    plans, start = [], llm.engine.runner.start
    llm.engine.runner.start = lambda plan: plans.extend(plan.items) or start(plan)  # type: ignore[func-returns-value]
    params = SamplingParams(temperature=5, logit_bias=LEAN, seed=3, max_tokens=24, ignore_eos=True, logprobs=2,
                            num_speculative_tokens=asked)  # fmt: skip
    session = llm.add(prompt, params)
    while llm.engine.has_work:
        llm.step()
    llm.engine.runner.start = start
    return [(item.follows, item.num_next_drafts) for item in plans], session


@pytest.mark.parametrize(("target", "way"), DRAFTERS)
def test_scouts_and_who_asks_for_drafts(target: str, way: str, folders: Folders) -> None:
    """A scout's prompt is followed, and it drafts for as long as was said; then nothing of the proposer runs.

    Who asks for a number of drafts gets it, whether the proposer rests or not.
    """
    llm = made(folders, target, way)
    given(llm, 0, resting=True, scouted=4)
    steps, session = steps_of(llm, tokens(20, 1))
    assert [step for step in steps if step[1]] == [(True, MOST)] * 4 == steps[:4]
    # One step more verifies the last drafts, and none is followed behind it.
    assert [follows for follows, _ in steps[5:]] == [False] * (len(steps) - 5) and len(steps) > 8
    for resting in (True, False):
        given(llm, 0 if resting else 1, resting)
        for asked in (0, 2, 3):
            steps, again = steps_of(llm, tokens(20, 1), asked)
            assert set(steps) == {(asked > 0, asked)}
            assert told(again)[0] == told(session)[0]


@pytest.mark.parametrize(("target", "way"), DRAFTERS)
def test_blocks_that_a_rest_leaves_behind(target: str, way: str, folders: Folders) -> None:
    """Others that do not draft find them. Who drafts computes them again, and its drafts are those of a cold engine."""
    prompt = tokens(45, 3)
    cold, warm = (made(folders, target, way, prefix_caching=True) for _ in range(2))
    given(warm, 0, resting=True)
    first, second = steps_of(warm, prompt)[1].output(), steps_of(warm, prompt)[1].output()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    for llm in (cold, warm):
        given(llm, MOST)
    (_, expected), (_, found) = steps_of(cold, prompt), steps_of(warm, prompt)
    assert found.output().num_cached_tokens == 0
    assert told(found) == told(expected)
    assert found.output().outputs[0].speculation == expected.output().outputs[0].speculation
    assert found.output().outputs[0].speculation.accepted > 0
    assert steps_of(warm, [*prompt, 1])[1].output().num_cached_tokens == 40
    given(warm, 0, resting=True)
    assert steps_of(warm, [*prompt, 1])[1].output().num_cached_tokens == 40


@pytest.mark.parametrize(("target", "way"), DRAFTERS)
def test_a_drafter_made_for_fewer_positions(target: str, way: str, folders: Folders, plain: Callable) -> None:
    """It is not run at positions that it does not know, whoever drafts; the text goes on without drafts."""
    llm, most = made(folders, target, way, max_num_batched_tokens=24), 37
    drafter = llm.engine.runner.proposer
    drafter.needs = llm.engine.scheduler.needs = drafter.needs._replace(max_position=most)
    if way != "draft":
        drafter.head.max_position = most
    plan, highest = drafter.groups.plan, [0]

    def checked(batch: Batch, kept: Any = None) -> Any:
        highest[0] = max(highest[0], int(batch.positions.max()))
        return plan(batch, kept)

    drafter.groups.plan = checked
    at_random(llm, 6, 0.97)
    assert run_staggered(llm, tiny_jobs()[10:28:3], 2) == plain(target)[10:28:3]
    assert most - 5 < highest[0] < most


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("target", "way"), DRAFTERS)
def test_draft_caches_under_any_choice(target: str, way: str, overlap: bool, folders: Folders) -> None:
    """What counts as valid equals what a new engine computes, however many drafts were made and kept before."""
    llm = made(folders, target, way, num_blocks=13, max_model_len=80, max_num_batched_tokens=20, prefix_caching=True)
    llm.engine.overlap = overlap
    llm.engine.runner.step.verifier = RandomVerifier(2)
    at_random(llm, 4, 0.99)
    shared = tokens(30, 4)
    prompts = [[*shared[:24], 7], tokens(9, 1), shared, tokens(16, 2), shared[:17], [*shared[:24], 8]] * 2
    for i, prompt in enumerate(prompts):
        llm.engine.add(request(prompt, i, drafts={2: 0, 3: 2}.get(i)))
    taken, draw = [], random.Random(1)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.scheduler.check()
        for one in llm.engine.scheduler.running:
            if one.num_draft_computed > 0 and draw.random() < 0.12:
                taken.append(snapshot(llm, one))
    assert len(taken) > 5
    assert llm.engine.scheduler.stats.preemptions > 0 < llm.engine.scheduler.stats.prefix_hit_tokens
    fresh = Fresh(folders, target, way, MOST)
    for part in taken:
        fresh.check(part)


# What is chosen.


def best_of(machine: Machine, count: int) -> list[float]:
    """Throughput of every fixed k; 0 is without the proposer."""
    return [Load(machine, count, None, k).run(800) for k in range(MOST + 1)]


def worth(seed: int, learning: int, steps: int) -> tuple[float, float]:
    """On a random machine, after learning: throughput as a share of the best fixed k's, and of that without drafts."""
    count = (1, 2, 4, 8)[seed % 4]
    machine = Machine.random(seed, MOST)
    fixed, mine = best_of(machine, count), Load(machine, count, AdaptiveK(MOST))
    mine.run(learning)
    found = mine.run(steps)
    assert mine.answers <= {(None, k) for k in range(MOST + 1)}
    return found / max(fixed), found / fixed[0]


@pytest.mark.parametrize("seed", range(12))
def test_nearly_as_good_as_the_best_k(seed: int) -> None:
    of_best, of_none = worth(seed, 1500, 3000)
    assert of_best > 0.95 and of_none > 0.97


@pytest.mark.long
def test_on_many_machines() -> None:
    """A few that two k suit nearly alike are a little below, for some thousand steps."""
    found = [worth(seed, 3000, 4000) for seed in range(12, 120)]
    for shares, least, usual in zip(zip(*found, strict=True), (0.95, 0.97), (0.97, 0.98), strict=True):
        assert min(shares) > least - 0.02
        assert sorted(shares)[len(shares) // 50] > least - 0.01
        assert sorted(shares)[len(shares) // 10] > usual - 0.01


@pytest.mark.parametrize("seed", range(6))
def test_learning_costs_little(seed: int) -> None:
    """Of the first 500 steps at least 0.85 of the tokens that come out without drafts."""
    machine, count = Machine.random(seed, MOST), (1, 2, 4, 8)[seed % 4]
    assert Load(machine, count, AdaptiveK(MOST)).run(500) > 0.85 * best_of(machine, count)[0]


RIGHT, WRONG = [0.9, 0.85, 0.8], [0.1, 0.05, 0.0]
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "drafts become wrong": ({"rates": RIGHT}, {"rates": WRONG}, 3000),
    "drafts become right": ({"rates": WRONG}, {"rates": RIGHT}, 6000),
    "rows become dear": ({"rates": RIGHT, "row": 0.2}, {"row": 8.0}, 2000),
    "rows become cheap": ({"rates": RIGHT, "row": 8.0}, {"row": 0.2}, 6000),
}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_it_follows(change: str, count: int) -> None:
    """After so many steps it is as good as it would be if nothing had ever been otherwise."""
    before, after, steps = CHANGES[change]
    load = Load(Machine(**before), count, AdaptiveK(MOST))
    load.run(3000)
    load.change(**after)
    load.run(steps)
    assert load.run(1000) > 0.95 * max(best_of(load.machine, count))


def test_it_follows_after_a_long_time() -> None:
    """What was seen over thousands of steps of many requests does not outweigh scouts."""
    load = Load(Machine(RIGHT), 4, AdaptiveK(MOST), longest=1000)
    load.run(4000)
    for rates in (WRONG, RIGHT):
        load.change(rates=rates)
        load.run(6000)
        assert load.run(1000) > 0.95 * max(best_of(load.machine, 4))


def test_a_slower_machine_does_not_look_fast() -> None:
    """Rests are judged by what they take now, not by times from before the first one."""
    load = Load(Machine(RIGHT, row=0.2), 1, AdaptiveK(MOST))
    load.run(3000)
    load.change(row=8.0)  # drafts pay less, but still do
    load.run(2000)
    fixed = best_of(load.machine, 1)
    assert max(fixed) > 1.2 * fixed[0]
    assert load.run(2000) > 0.95 * max(fixed)


def test_a_k_between_the_ends() -> None:
    """The first draft is free and helps, the others are dear: halfway to the most it would not be worth it."""
    load = Load(Machine([0.25, 0.2, 0.1], row=0.0, follow=0.0, draft=4.0), 2, AdaptiveK(MOST))
    load.run(3000)
    fixed = best_of(load.machine, 2)
    assert fixed.index(max(fixed)) == 1
    assert load.run(1000) > 0.95 * fixed[1]


def test_how_much_a_position_is_worth() -> None:
    """A(k) counts the drafts up to the k-th, each as often as it was kept; after some steps without them as well."""
    chooser = AdaptiveK(MOST)
    load = Load(Machine([0.8, 0.5, 0.25], row=0.0, draft=0.0, follow=0.0), 8, chooser)
    load.run(1500)
    for k, expected in enumerate([1.0, 1.8, 2.2, 2.3]):
        assert chooser.tokens(k) == pytest.approx(expected, abs=0.1)


def test_only_drafts_that_were_asked_for_count() -> None:
    """Of requests that the proposer follows; those of others, made to see what they take, are wrong anyway."""
    chooser = AdaptiveK(MOST)

    def item(number: int, slot: int, follows: bool) -> PlanItem:
        return PlanItem(number, slot, 5, MOST + 1, MOST, True, MOST, follows)

    one, other = item(5, 0, True), item(6, 1, False)
    plan = StepPlan([one, other])
    for _ in range(20):
        chooser.observe(plan, [StepResult([1, 1, 1], 2), StepResult([1], 0)], 1.0)
    assert [chooser.tokens(k) for k in range(4)] == pytest.approx([1, 2, 3, 3])
    chooser.observe(StepPlan([item(7, 0, True)]), [StepResult([1], 0)], 1.0)  # the first step of the slot's next one
    assert chooser.tokens(3) == pytest.approx(3)


def test_it_begins_with_what_a_table_says() -> None:
    """At every size, but never with more drafts than there are."""
    table = lambda count: max(5 - count, 0)  # noqa: E731
    chooser = AdaptiveK(MOST, table)
    assert [chooser.choose(count) for count in range(1, 9)] == [3, 3, 2, 1, 0, 0, 0, 0]
    assert [chooser.rests(count) for count in (1, 4, 5)] == [False, False, True]
    load = Load(Machine(RIGHT), 3, AdaptiveK(MOST, table))
    load.run(20)
    assert load.answers == {(None, 2)}
    assert [AdaptiveK(MOST).choose(count) for count in (1, 7, 300)] == [MOST] * 3


@pytest.mark.parametrize("rates", [RIGHT, WRONG])
def test_who_asks_for_drafts_gets_as_many(rates: list[float]) -> None:
    """Beside others, while these draft, try and rest."""
    load = Load(Machine(rates, row=2.0), 2, AdaptiveK(MOST), asked=[None, None, 2, None, None, 0, None, None, 1])
    load.run(3000)
    assert {answer for answer in load.answers if answer[0] is not None} == {(2, 2), (0, 0), (1, 1)}
    assert (None, 0) in load.answers and (None, 3) in load.answers


@pytest.mark.parametrize("count", [1, 5])
def test_where_drafts_do_not_pay_there_are_hardly_any(count: int) -> None:
    """Trials and scouts: together less than 5 steps in 100, and of the latter there are some."""
    load = Load(Machine(WRONG, row=4.0), count, AdaptiveK(MOST))
    load.run(2000)
    load.scouts = 0
    load.run(8000)
    assert sum(load.worked[2000:]) < 0.05 * 8000
    assert 3 <= load.scouts <= 6


# When it is used.


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("auto", {}, "mtp, k from 0 to 3, as it pays (auto: "),
        ("auto", {"verification": "rejection"}, "mtp, k = 3 (auto: "),
        ("auto", {"verification": "block"}, "mtp, k = 3 (auto: "),
        ("mtp:3", {}, "mtp, k = 3 (as asked)"),
        ("mtp", {}, "mtp, k = 3 (as asked)"),
        ("ngram:2", {}, "ngram, k = 2 (as asked)"),
        ("off", {}, "off (as asked)"),
    ],
)
def test_who_adapts(spec: str, options: dict[str, str], says: str, folders: Folders) -> None:
    """Only `auto`, and only where the text does not depend on drafts."""
    llm = load(folders.target("m3"), spec, **options)
    assert dict(llm.card)["speculation"].startswith(says)
    adapts = (spec, options) == ("auto", {})
    for adaptive in (llm.engine.adaptive, llm.engine.scheduler.adaptive):
        assert isinstance(adaptive, AdaptiveK) == adapts
    assert llm.engine.adaptive is llm.engine.scheduler.adaptive


def test_auto_begins_with_the_table(folders: Folders, tmp_path: Path) -> None:
    """And the scheduler asks nothing else."""
    table = {"spec": "mtp", "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 4, 1], [5, 8, 0]]}
    (tmp_path / "table.json").write_text(json.dumps(table))
    llm = load(folders.target("m3"), "auto", k_table=str(tmp_path / "table.json"))
    assert [llm.engine.scheduler.adaptive.choose(count) for count in (1, 2, 4, 5, 9)] == [2, 1, 1, 0, 0]
    assert llm.engine.scheduler.most_drafts is None
    assert "k from 0 to 2, as it pays (by " in dict(llm.card)["speculation"]


@pytest.mark.parametrize("dear", [False, True])
def test_an_engine_that_learns(dear: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch, plain: Callable) -> None:
    """With made-up times of steps: it drafts on, or rests but for trials and scouts; the texts are those without."""
    monkeypatch.setattr("skipstone.runtime.adaptive.REST", 150)
    llm = load(folders.target("m3"), "auto", max_num_seqs=3)
    watch, worked = Watch(llm), []
    observe = llm.engine.adaptive.observe

    def told_so(plan: StepPlan, results: list[StepResult], seconds: float) -> None:
        worked.append(any(item.follows or item.num_next_drafts for item in plan.items))
        asked = max(item.num_next_drafts for item in plan.items)
        observe(plan, results, 1.0 + 0.1 * worked[-1] + 2.0 * asked * dear)

    llm.engine.adaptive.observe = told_so
    part = slice(5, None, 2)
    for turn in range(5):
        for mine, own in zip(run_staggered(llm, tiny_jobs()[part], turn), plain("m3")[part], strict=True):
            assert mine == own
    late = worked[len(worked) // 2 :]
    assert watch.drafts > 50
    assert sum(late) < 0.15 * len(late) if dear else sum(late) > 0.9 * len(late)
