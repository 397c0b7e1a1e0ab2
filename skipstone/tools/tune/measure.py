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
from skipstone.core.speculation import SpeculationStats
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
TimedStep = Callable[[LLM, int], float]  # runs a step with k drafts a request; seconds that count


class Axes(NamedTuple):
    """What is measured: token ids of some texts for each context length, numbers of requests, numbers of drafts."""

    texts: dict[int, list[list[int]]]
    batches: list[int]
    ks: list[int]


class DummyProposer(NgramProposer):
    """Drafts of no worth that cost nothing to make: tokens that the request has written a while ago."""

    def propose(self, step: DraftStep) -> Tensor | None:
        """The tokens from 2k places back on."""
        if not step.k:
            return None
        place = step.newest[:, None] - 2 * step.k + torch.arange(step.k, device=step.newest.device)
        return step.table.tokens[step.draft_slots[:, None], place.clamp(min=0)].long()


class Meter(Observer):
    """Times the parts of each step; counts drafts by position while `counting`, where the length limit cuts none."""

    def __init__(self) -> None:
        self.ends: dict[Phase, float] = {}
        self.counting = False
        self.most = 0  # drafts of a step
        self.steps, self.drafts = 0, SpeculationStats()

    def on_phase(self, phase: Phase) -> None:
        """Note when a part of the step has ended."""
        self.ends[phase] = time.perf_counter()

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """Count their drafts. The first token of an answer had none to verify."""
        for run in runs if self.counting else ():
            if run.request.num_prompt_tokens < run.start < run.request.max_total_tokens - self.most:
                self.steps += 1
                self.drafts.record(len(run.drafts), run.num_accepted)

    @property
    def acceptance(self) -> Acceptance:
        """What was counted, as shares of all decoding steps."""

        def shares(counts: list[int]) -> list[float]:
            return [count / max(self.steps, 1) for count in counts + [0] * (self.most - len(counts))]

        drafted, accepted = self.drafts.drafted_per_position, self.drafts.accepted_per_position
        return Acceptance(drafted=shares(drafted), accepted=shares(accepted), steps=self.steps)


def with_dummies(config: EngineConfig, k: int) -> LLM:
    """An engine that makes up to k dummy drafts, none until `limit_drafts` says otherwise."""
    llm = LLM(config=with_spec(config, "ngram", max(k, 1)))
    llm.engine.runner.step.proposer = DummyProposer(1, 1)
    limit_drafts(llm, 0)
    return llm


def limit_drafts(llm: LLM, k: int) -> None:
    """Have the next steps plan k drafts a request, whatever their number."""
    llm.engine.scheduler.most_drafts = lambda num_requests: k


def plain_step(llm: LLM, k: int) -> float:
    """Seconds of a step that verifies k drafts of every request, once `SETTLE` have passed."""
    limit_drafts(llm, k)
    started = time.perf_counter()
    llm.step()
    return time.perf_counter() - started


def measure_grid(llm: LLM, axes: Axes, timed_step: TimedStep, tick: Tick, turns: int = TURNS) -> Grid:
    """Seconds at every size; rows that do not fit their neighbours are measured again unless there is one turn only.

    Of each cell it is the lower quartile of several steps: what disturbs a step only makes it longer.
    """

    def row(context: int, batch: int) -> list[float]:
        texts, params = axes.texts[context], SamplingParams(temperature=0.0, ignore_eos=True)
        sessions = [llm.add(texts[number % len(texts)], params) for number in range(batch)]
        _reach_decoding(llm, [session.choices[0].request for session in sessions])
        llm.step()
        times: dict[int, list[float]] = {k: [] for k in axes.ks}
        for _ in range(turns):
            for k in axes.ks:
                times[k] += [timed_step(llm, k) for _ in range(SETTLE + 2)][SETTLE:]
        llm.close()
        return [sorted(own)[len(own) // 4] for own in times.values()]

    grid = Grid(contexts=list(axes.texts), batches=axes.batches, ks=axes.ks, values=[])
    for context in axes.texts:
        grid.values.append([])
        for batch in axes.batches:
            grid.values[-1].append(row(context, batch))
            tick()
    for _ in range(REPEATS if turns > 1 else 0):
        for c, b in grid.doubtful():
            again = row(grid.contexts[c], grid.batches[b])
            grid.values[c][b] = [min(pair) for pair in zip(grid.values[c][b], again, strict=True)]
    return grid


def _reach_decoding(llm: LLM, requests: Sequence[Request]) -> None:
    while any(request.num_output_tokens == 0 for request in requests):
        llm.step()


def measure_steps(config: EngineConfig, axes: Axes, tick: Tick) -> Grid:
    """Cost of the target's steps."""
    with with_dummies(config, axes.ks[-1]) as llm:
        return measure_grid(llm, axes, plain_step, tick)


def measure_proposer(
    config: EngineConfig, spec: str, axes: Axes, jobs: Sequence[Job], tick: Tick
) -> tuple[Grid, Acceptance]:
    """What a proposer adds to a step, and how many of its drafts are kept on the jobs (none: not measured)."""
    meter = Meter()

    def draft_step(llm: LLM, k: int) -> float:
        """Once `SETTLE` steps have passed, it follows k drafts and makes k."""
        plain_step(llm, k)
        return meter.ends["draft"] - meter.ends["verify"]

    with _open(config, spec, axes.ks[-1], meter) as llm:
        meter.most = llm.engine.speculation.k
        meter.counting = True
        run_on(llm, jobs, lambda: None)
        meter.counting = False
        tick()
        ks = sorted({min(k, meter.most) for k in axes.ks} | {0})
        return measure_grid(llm, axes._replace(ks=ks), draft_step, tick), meter.acceptance


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
            _reach_decoding(llm, requests)
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
    needed = (2 * SETTLE + 3) * (DUMMY_DRAFTS + 1)
    return len(request.token_ids) + needed < request.max_total_tokens and not request.finished


def _yardstick(llm: LLM, requests: Sequence[Request], spec: str) -> list[float]:
    """Seconds of two steps of `yardstick_k` drafts, once they have settled; none where a request ended."""
    scheduler, times = llm.engine.scheduler, []
    usual = scheduler.most_drafts
    for _ in range(SETTLE + 2):
        times.append(plain_step(llm, yardstick_k(spec)))
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
    starts = [number * len(tape) // (count + 1) for number in range(count)]
    return {context: [(tape[start:] + tape)[:context] for start in starts] for context in contexts}
