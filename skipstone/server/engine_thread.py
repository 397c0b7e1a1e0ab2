"""The one thread that steps the engine: takes jobs and aborts from a queue between steps, hands back what came out.

Everything of `LLM` that changes is touched here only. Answers reach their event loop in one call per step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable

from skipstone.core.request import FinishReason
from skipstone.errors import RequestError, SkipstoneError
from skipstone.llm import LLM
from skipstone.outputs import StreamEvent
from skipstone.server.api.errors import busy, engine_failed, unavailable
from skipstone.server.generation import Delta, Generation, Job, Origin
from skipstone.server.metrics import ServerMetrics
from skipstone.server.online_check import OnlineCheck
from skipstone.server.step_observer import StepObserver
from skipstone.session import Choice, Session

LOG = logging.getLogger("skipstone.engine")
MOST_FAILURES = 3  # failed steps in a row after which the engine is given up
LONGEST_STEP_S = 30.0
USUAL_SECONDS = 1.0  # a request's time before any has ended


class RunningPrompt:
    """One prompt of a job in the engine, and for each of its choices what has yet to be handed over."""

    def __init__(self, generation: Generation, session: Session, first_index: int) -> None:
        self.generation = generation
        self.session = session
        self.unfinished = len(session.choices)
        self._announced = False
        self._deltas = [Delta(index=first_index + i) for i in range(self.unfinished)]
        self._drafts_seen = [0] * self.unfinished

    def delta(self, event: StreamEvent, eos_token_ids: frozenset[int]) -> Delta | None:
        """The event as the handler wants it; None when it wants whole choices and this one goes on."""
        job, choice, delta = self.generation.job, self.session.choices[event.index], self._deltas[event.index]
        if job.origins:
            self._add_origins(delta, choice, len(event.token_ids))
        if not (job.stream or event.finished):
            return None
        self._deltas[event.index] = Delta(index=delta.index)
        new = event if job.stream else choice
        delta.text, delta.token_ids = new.text, new.token_ids
        if job.params.logprobs is not None:
            end = len(choice.token_ids)
            delta.logprobs = choice.request.logprobs[end - len(delta.token_ids) : end]
        if event.finished:
            output = choice.output()
            delta.finish_reason, delta.speculation = output.finish_reason, output.speculation
            # An ordinary end of text needs no explanation.
            ended = output.stop_reason in eos_token_ids and output.stop_reason not in job.params.stop_token_ids
            delta.stop_reason = None if ended else output.stop_reason
        if not self._announced:
            self._announced = True
            so_far = self.session.output()
            delta.num_cached_tokens, delta.prompt_logprobs = so_far.num_cached_tokens, so_far.prompt_logprobs
        return delta

    def _add_origins(self, delta: Delta, choice: Choice, num_tokens: int) -> None:
        """Where the tokens of the choice's latest step came from, of which `num_tokens` were kept."""
        drafted = choice.request.speculation.drafted - self._drafts_seen[choice.index]
        self._drafts_seen[choice.index] += drafted
        accepted = min(choice.request.num_accepted, num_tokens)
        rest: Origin = "target" if not drafted else "recovered" if accepted < drafted else "bonus"
        delta.origins += ["accepted"] * accepted
        delta.origins += [rest] * (num_tokens - accepted)
        if drafted:
            delta.drafted.append(drafted)
            delta.accepted.append(accepted)


class EngineThread:
    """Between the event loop, where `submit` is called, and the engine."""

    def __init__(
        self, llm: LLM, max_queue: int, metrics: ServerMetrics, observer: StepObserver, online: OnlineCheck
    ) -> None:
        self.llm = llm
        self.capacity = llm.config.max_num_seqs + max_queue
        self.dead: str | None = None
        """Why the engine was given up."""
        self.on_death: Callable[[str], object] = lambda reason: None
        """Told so, on the engine's thread."""
        self.num_choices = 0
        """Choices that have not ended."""
        self._usual_seconds = USUAL_SECONDS
        self._metrics = metrics
        self._observer = observer
        self._online = online
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._runs: dict[str, RunningPrompt] = {}
        self._failures = 0
        self._open: set[Generation] = set()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs, end the thread, and wait for it."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(LONGEST_STEP_S)

    # On the event loop.

    def submit(self, job: Job) -> Generation:
        """Queue a job. Raises ApiError when too much waits already, or the engine is gone."""
        if self.dead is not None:
            raise unavailable(f"the engine has stopped: {self.dead}", "engine_dead")
        if self.num_choices + job.num_choices > self.capacity:
            raise busy(
                f"{self.num_choices} texts are being written or wait, and the server takes {self.capacity} at a time; "
                "try again later",
                self._usual_seconds,
            )
        self.num_choices += job.num_choices
        generation = Generation(job, self._closed)
        self._open.add(generation)
        self._commands.put(functools.partial(self._add, generation))
        return generation

    def open(self, owner: int | None) -> list[Generation]:
        """What has not ended of one owner's, the oldest first."""
        own = [generation for generation in self._open if generation.job.owner == owner]
        return sorted(own, key=lambda generation: generation.timing.arrival)

    def abort(self, request_id: str, owner: int | None, error: Exception) -> int:
        """End the owner's jobs of this name with this error; returns how many there were."""
        found = [generation for generation in self.open(owner) if generation.job.request_id == request_id]
        for generation in found:
            generation.fail(error)
        return len(found)

    def abort_all(self, error: Exception) -> None:
        """End every job with this error."""
        for generation in self._open:
            generation.fail(error)

    def _closed(self, generation: Generation) -> None:
        self._open.discard(generation)
        self.num_choices -= generation.job.num_choices
        if generation.finished:
            seconds = time.perf_counter() - generation.timing.arrival
            self._usual_seconds += 0.1 * (seconds - self._usual_seconds)
        else:
            self._commands.put(functools.partial(self._abort, generation))

    # On the engine's thread.

    def _work(self) -> None:
        while self._take_commands():
            if self.llm.engine.has_work:
                self._step()
        self.llm.close()

    def _take_commands(self) -> bool:
        """Do what was asked for; wait for something if the engine is idle. False: the thread shall end."""
        wait = not self.llm.engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            try:
                command()
            except Exception as error:
                self._failed(error)
            wait = False

    def _add(self, generation: Generation) -> None:
        if generation.closed:
            return
        job, runs = generation.job, list[RunningPrompt]()
        if self.dead is not None:
            _fail(generation, engine_failed(job.request_id))
            return
        try:
            for i, prompt in enumerate(job.prompts):
                session = self.llm.add(prompt, job.params, job.prediction, job.cache_salt)
                if job.trace:
                    self._observer.begin_trace(session.choices[0].request)
                runs.append(RunningPrompt(generation, session, i * job.params.n))
        except Exception as error:
            for run in runs:
                self._drop(run)
            if not isinstance(error, SkipstoneError):
                LOG.exception("request could not be added", extra={"request_id": job.request_id})
                error = engine_failed(job.request_id)
            _fail(generation, error)
        else:
            self._runs |= {run.session.session_id: run for run in runs}

    def _drop(self, run: RunningPrompt) -> None:
        self.llm.abort(run.session.session_id)
        for choice in run.session.choices:
            self._observer.end_trace(choice.request)
            self._online.forget(choice.request)

    def _abort(self, generation: Generation) -> None:
        runs = [run for run in self._runs.values() if run.generation is generation]
        for run in runs:
            running = [choice for choice in run.session.choices if not choice.request.finished]
            self._drop(run)
            del self._runs[run.session.session_id]
            for choice in running:
                self._metrics.on_end(generation, choice)

    def _step(self) -> None:
        self._observer.begin_step()
        begun = time.perf_counter()
        try:
            events = self.llm.step()
            self._note_starts(begun)
            self._hand_back(events)
        except Exception as error:
            self._failed(error)
        else:
            self._failures = 0
            self._metrics.on_step()

    def _note_starts(self, begun: float) -> None:
        """For the first step that has worked on a request."""
        for run in self._runs.values():
            requests, timing = [choice.request for choice in run.session.choices], run.generation.timing
            if timing.started is None and any(one.finished or one.num_computed_tokens for one in requests):
                timing.started = begun

    def _hand_back(self, events: list[StreamEvent]) -> None:
        now = time.perf_counter()
        outgoing: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for event in events:
            if self._online.take(event):
                continue
            run = self._runs[event.request_id]
            generation, choice = run.generation, run.session.choices[event.index]
            timing = generation.timing
            timing.first_token = timing.first_token or now
            self._metrics.on_tokens(generation, choice, len(event.token_ids))
            self._online.on_tokens(choice.request, len(event.token_ids), generation.job.request_id)
            if event.finished:
                timing.end = now
                run.unfinished -= 1
                self._metrics.on_end(generation, choice)
            delta = run.delta(event, self.llm.eos_token_ids)
            if delta is not None and generation.job.trace:
                delta.reads = self._observer.end_trace(choice.request)
            calls = outgoing.setdefault(generation.loop, [])
            if choice.request.error is not None:
                calls.append(functools.partial(generation.fail, RequestError(choice.request.error)))
            elif delta is not None:
                calls.append(functools.partial(generation.take, delta))
            if run.unfinished == 0:
                del self._runs[event.request_id]
        for loop, calls in outgoing.items():
            _post(loop, calls)

    def _failed(self, error: Exception) -> None:
        """A step has raised: what ran is lost, the engine goes on unless it fails again and again."""
        LOG.error("a step failed; the requests that ran are ended", exc_info=error)
        runs, self._runs = self._runs, {}
        self._failures += 1
        try:
            self.llm.close()
            self.llm.engine.scheduler.check()
        except Exception as broken:
            LOG.error("the engine's books are wrong after a failed step", exc_info=broken)
            self._failures = MOST_FAILURES
        self._online.reset()
        for run in runs.values():
            self._drop(run)
            _fail(run.generation, engine_failed(run.generation.job.request_id))
            for choice in run.session.choices:
                if choice.request.finish_reason is FinishReason.ABORT:
                    self._metrics.on_end(run.generation, choice)
        if self._failures >= MOST_FAILURES and self.dead is None:
            self.dead = f"{type(error).__name__} in {self._failures} steps in a row; the log has the tracebacks"
            self.on_death(self.dead)


def _fail(generation: Generation, error: Exception) -> None:
    _post(generation.loop, [functools.partial(generation.fail, error)])


def _post(loop: asyncio.AbstractEventLoop, calls: list[Callable[[], None]]) -> None:
    """Make the calls on the loop; a loop that has ended has nobody who waits."""

    def make_calls() -> None:
        for call in calls:
            call()

    try:
        loop.call_soon_threadsafe(make_calls)
    except RuntimeError:
        LOG.debug("an event loop ended before its requests")
