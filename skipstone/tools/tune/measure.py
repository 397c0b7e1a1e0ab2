"""Step costs and acceptance, taken from real engine steps: what `skipstone tune` knows about this machine and model.

The time of a step with k drafts a request does not depend on what becomes of them. So an engine whose drafts are
dummies gives the target's cost alone; a proposer's own share is the time between the end of verification and the end of
the step's drafting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.config import EngineConfig
from skipstone.core.observer import EmittedRun, Observer, Phase
from skipstone.core.request import Request, SamplingParams
from skipstone.errors import ConfigError
from skipstone.llm import LLM
from skipstone.spec.ngram import NgramProposer
from skipstone.spec.proposer import DraftStep
from skipstone.tools.tune.planner import OFF, Acceptance, Grid
from skipstone.tools.workload import Job, encode_jobs, run_on, with_spec

TURNS = 3  # of each k with the others; a turn has SETTLE steps and two that are measured
SETTLE = 2  # steps until all drafts of another k are verified, where each step is planned before the last one's results
STEPS_PER_CELL = (SETTLE + 2) * TURNS
REPEATS = 2  # of rows that do not fit their neighbours
DUMMY_DRAFTS = 3
BETWEEN_YARDSTICKS = 6  # steps
Tick = Callable[[], None]


class DummyProposer(NgramProposer):
    """Drafts of no worth that cost nothing to make: tokens that the request has written a while ago."""

    def propose(self, step: DraftStep) -> Tensor | None:
        """See the class."""
        if not step.k:
            return None
        place = step.newest[:, None] - 2 * step.k + torch.arange(step.k, device=step.newest.device)
        return step.table.tokens[step.draft_slots[:, None], place.clamp(min=0)].long()


class Meter(Observer):
    """Times the parts of each step; counts drafts by position while `counting`, where the length limit cuts none."""

    def __init__(self, most: int) -> None:
        self.ends: dict[Phase, float] = {}
        self.counting = False
        self.steps = 0
        self.drafted, self.accepted = [0] * most, [0] * most

    def on_phase(self, phase: Phase) -> None:
        """Remember when it ended."""
        self.ends[phase] = time.perf_counter()

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """Count them."""
        if not self.counting:
            return
        for run in runs:
            cut = run.start + len(self.drafted) >= run.request.max_total_tokens
            if run.start == run.request.num_prompt_tokens or cut:
                continue
            self.steps += 1
            for i in range(len(run.drafts)):
                self.drafted[i] += 1
                self.accepted[i] += i < run.num_accepted

    @property
    def acceptance(self) -> Acceptance:
        """What was counted, as shares of all decoding steps."""
        shares = [[count / max(self.steps, 1) for count in counts] for counts in (self.drafted, self.accepted)]
        return Acceptance(drafted=shares[0], accepted=shares[1], steps=self.steps)


class Bench:
    """Requests of one engine at a given context, stepped by hand."""

    def __init__(self, llm: LLM, texts: Sequence[list[int]]) -> None:
        self.llm = llm
        self.texts = texts
        self.requests: list[Request] = []

    def start(self, batch: int) -> None:
        """Start requests, until `batch` of them decode."""
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for number in range(batch):
            session = self.llm.add(self.texts[number % len(self.texts)], params)
            self.requests.append(session.choices[0].request)
        while any(request.num_output_tokens == 0 for request in self.requests):
            self.llm.step()
        self.llm.step()

    def plain_step(self, k: int) -> float:
        """Seconds of a step that verifies k drafts of every request, once `SETTLE` have passed."""
        self.llm.engine.scheduler.most_drafts = lambda num_requests: k
        started = time.perf_counter()
        self.llm.step()
        return time.perf_counter() - started

    def draft_step(self, k: int, meter: Meter) -> float:
        """Seconds that the proposer adds to a step; once `SETTLE` have passed, it follows k drafts and makes k."""
        self.llm.engine.scheduler.most_drafts = lambda num_requests: k
        self.llm.step()
        return meter.ends["draft"] - meter.ends["verify"]

    def seconds(self, ks: Sequence[int], once: Callable[[int], float], turns: int) -> list[float]:
        """Of each k, the lower quartile of several steps: what disturbs a step only makes it longer."""
        times: dict[int, list[float]] = {k: [] for k in ks}
        for _ in range(turns):
            for k in ks:
                times[k] += [once(k) for _ in range(SETTLE + 2)][SETTLE:]
        return [sorted(times[k])[len(times[k]) // 4] for k in ks]


def measure_steps(
    config: EngineConfig, texts: dict[int, list[list[int]]], batches: Sequence[int], ks: Sequence[int], tick: Tick
) -> Grid:
    """Cost of the target's steps. `texts`: token ids for each context length."""
    with with_dummies(config, max(*ks, 1)) as llm:
        return target_grid(llm, texts, batches, ks, tick)


def target_grid(
    llm: LLM,
    texts: dict[int, list[list[int]]],
    batches: Sequence[int],
    ks: Sequence[int],
    tick: Tick,
    turns: int = TURNS,
) -> Grid:
    """The same on an open engine of `with_dummies`."""
    return _grid(llm, texts, batches, ks, tick, lambda bench: bench.plain_step, turns)


def with_dummies(config: EngineConfig, k: int) -> LLM:
    """An engine that makes up to k dummy drafts, none until `most_drafts` says otherwise."""
    llm = LLM(config=with_spec(config, "ngram", k))
    llm.engine.runner.step.proposer = DummyProposer(1, 1)
    llm.engine.scheduler.most_drafts = lambda num_requests: 0
    return llm


def measure_proposer(
    config: EngineConfig,
    spec: str,
    texts: dict[int, list[list[int]]],
    batches: Sequence[int],
    ks: Sequence[int],
    jobs: Sequence[Job],
    tick: Tick,
) -> tuple[Grid, Acceptance]:
    """What a proposer costs, and how many of its drafts are kept on the jobs (none: not measured)."""
    meter = Meter(ks[-1])
    llm = _open(config, spec, ks[-1], meter)
    with llm:
        most = llm.engine.speculation.k
        meter.drafted, meter.accepted = [0] * most, [0] * most
        if jobs:
            meter.counting = True
            run_on(llm, jobs, lambda: None)
            meter.counting = False
        tick()
        ks = sorted({min(k, most) for k in ks} | {0})
        grid = _grid(llm, texts, batches, ks, tick, lambda bench: lambda k: bench.draft_step(k, meter))
    return grid, meter.acceptance


def _open(config: EngineConfig, spec: str, k: int, meter: Meter) -> LLM:
    """The engine with k drafts, or with as many as the proposer can make at once."""
    try:
        return LLM(config=with_spec(config, spec, k), observer=meter)
    except ConfigError:
        with LLM(config=with_spec(config, spec, 1)) as llm:
            proposer = llm.engine.speculation.proposer
            most = proposer.needs.max_k if proposer else None
        if most is None or most >= k:
            raise
        return LLM(config=with_spec(config, spec, most), observer=meter)


def _grid(
    llm: LLM,
    texts: dict[int, list[list[int]]],
    batches: Sequence[int],
    ks: Sequence[int],
    tick: Tick,
    way: Callable[[Bench], Callable[[int], float]],
    turns: int = TURNS,
) -> Grid:
    def row(context: int, batch: int) -> list[float]:
        bench = Bench(llm, texts[context])
        bench.start(batch)
        found = bench.seconds(ks, way(bench), turns)
        llm.close()
        return found

    grid = Grid(contexts=list(texts), batches=list(batches), ks=list(ks), values=[])
    for context in texts:
        grid.values.append([])
        for batch in batches:
            grid.values[-1].append(row(context, batch))
            tick()
    for _ in range(REPEATS if turns == TURNS else 0):
        for c, b in grid.doubtful():
            again = row(grid.contexts[c], grid.batches[b])
            grid.values[c][b] = [min(pair) for pair in zip(grid.values[c][b], again, strict=True)]
    return grid


class Throughput(NamedTuple):
    """Tokens per second of requests that decode side by side, and what was found beside it."""

    tokens_per_second: float
    context: float  # mean
    yardstick: float  # mean seconds of a `yardstick_k` step; 0 where no run was long enough for one


def yardstick_k(spec: str) -> int:
    """Drafts of the steps by which a run is compared with the costs taken earlier: another number than the run has."""
    return DUMMY_DRAFTS if spec == OFF else 0


def throughput(config: EngineConfig, spec: str, k: int, batch: int, jobs: Sequence[Job], tick: Tick) -> Throughput:
    """Tokens per second of `batch` requests.

    All prompts have their turn; a group's time counts from the end of its prompts to the first that ends. Between the
    steps that count, steps of another k are timed whose cost is known: machines that others use change their speed
    within seconds.
    """
    tokens = contexts = steps = 0
    seconds = 0.0
    yardstick: list[float] = []
    with with_dummies(config, DUMMY_DRAFTS) if spec == OFF else LLM(config=with_spec(config, spec, k)) as llm:
        ids = encode_jobs(llm, jobs)
        for first in range(0, len(ids), batch):
            group = [(first + i) % len(ids) for i in range(batch)]
            requests = [llm.add(ids[i], jobs[i][1]).choices[0].request for i in group]
            while any(request.num_output_tokens == 0 for request in requests):
                llm.step()
            while not any(request.finished for request in requests):
                started = time.perf_counter()
                events = llm.step()
                seconds += time.perf_counter() - started
                tokens += sum(len(event.token_ids) for event in events)
                contexts += sum(len(request.token_ids) for request in requests)
                steps += 1
                if steps % BETWEEN_YARDSTICKS == 0 and all(map(_has_room, requests)):
                    yardstick += _yardstick(llm, requests, spec)
            llm.close()
    tick()
    mean = statistics.mean(yardstick) if yardstick else 0.0
    return Throughput(tokens / max(seconds, 1e-9), contexts / max(steps * batch, 1), mean)


def _has_room(request: Request) -> bool:
    """Whether no draft of the next steps would be cut by the request's length."""
    return (
        len(request.token_ids) + (2 * SETTLE + 3) * (DUMMY_DRAFTS + 1) < request.max_total_tokens
        and not request.finished
    )


def _yardstick(llm: LLM, requests: Sequence[Request], spec: str) -> list[float]:
    """Seconds of two steps of `yardstick_k` drafts, once they have settled; none where a request ended."""
    scheduler, k, times = llm.engine.scheduler, yardstick_k(spec), []
    usual = scheduler.most_drafts
    scheduler.most_drafts = lambda num_requests: k
    for _ in range(SETTLE + 2):
        started = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - started)
        if any(request.finished for request in requests):
            times.clear()
            break
    scheduler.most_drafts = usual
    for _ in range(SETTLE if times else 0):
        llm.step()  # until the next one verifies the drafts that are usual
    return times[SETTLE:]


def cut_texts(llm_ids: Sequence[list[int]], contexts: Sequence[int], count: int) -> dict[int, list[list[int]]]:
    """`count` texts of each length, cut from all prompts laid end to end, beginning at different places."""
    tape = [token for ids in llm_ids for token in ids]
    tape *= -(-2 * max(contexts) // len(tape))
    texts = {}
    for context in contexts:
        starts = [number * len(tape) // (count + 1) for number in range(count)]
        texts[context] = [(tape[start:] + tape)[:context] for start in starts]
    return texts
