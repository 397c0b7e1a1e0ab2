"""What one HTTP request has asked of the engine, as its handler sees it: new text whenever there is some.

Lives on the event loop. The engine's thread only makes the deltas, and hands them over through the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from skipstone.core.request import SamplingParams, TokenLogprobs
from skipstone.core.speculation import SpeculationStats

Origin = Literal["accepted", "recovered", "bonus", "target"]


class Timing(msgspec.Struct, kw_only=True):
    """Clock readings of one job, time.perf_counter()."""

    arrival: float = 0.0
    started: float | None = None
    first_token: float | None = None
    end: float | None = None


class Job(msgspec.Struct, kw_only=True):
    """Prompts that share their parameters. `prediction`: tokens that the answers are expected to contain.

    `owner`: which of the server's keys the request carried, None where none is asked for. `stream`: a delta for every
    step of a choice, else one at its end. `origins`: say where each token came from. `names`: what the API calls the
    engine's parameters, for messages. `trace`: tell what was read for the only token. `grammar`: held so that the
    engine's thread need not make it.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    prediction: list[int] = []
    cache_salt: str = ""
    owner: int | None = None
    stream: bool = False
    origins: bool = False
    names: dict[str, str] = {}
    trace: bool = False
    grammar: object = None
    timing: Timing = msgspec.field(default_factory=Timing)

    @property
    def num_choices(self) -> int:
        """Texts that will be written."""
        return len(self.prompts) * self.params.n


class Delta(msgspec.Struct, kw_only=True):
    """What is new of one choice; choice i of prompt p has the index p * n + i.

    `origins`: for each token, an accepted draft, the target's choice instead of a rejected draft, the bonus after
    drafts that were all accepted, or the target's in a step without drafts. `drafted` and `accepted`: drafts in each of
    its verify steps. A prompt's first delta has `num_cached_tokens` and `prompt_logprobs`, a choice's last has
    `finish_reason`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    origins: list[Origin] = []
    drafted: list[int] = []
    accepted: list[int] = []
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    speculation: SpeculationStats | None = None
    reads: list[LayerRead] = []


class LayerRead(msgspec.Struct, kw_only=True):
    """What one sparse layer chose for a row: ids of units of so many tokens, a list per group of heads."""

    layer: int
    unit: int
    selected: list[list[int]]


class Generation:
    """The deltas of one job. Whoever iterates must `close` it, which aborts what has not ended."""

    def __init__(self, job: Job, on_close: Callable[[Generation], None]) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self.timing = job.timing
        self.timing.arrival = time.perf_counter()
        self.closed = False
        self._on_close = on_close
        self._unfinished = job.num_choices
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def take(self, delta: Delta) -> None:
        """Called on the loop when a step has brought something."""
        self._deltas.append(delta)
        self._unfinished -= delta.finish_reason is not None
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Called on the loop: iteration raises `error` once what came before was taken. The first error counts."""
        if self._error is None:
            self._error = error
            self._wake.set()

    @property
    def finished(self) -> bool:
        """Whether every choice has come to its end."""
        return self._unfinished == 0

    async def ready(self, patience: float | None) -> AsyncIterator[list[Delta]]:
        """All that has come since the last turn, a list at a time; an empty one after so many seconds without news.

        Raises what `fail` was given.
        """
        while self._deltas or not self.finished:
            if not self._deltas:
                if self._error is not None:
                    raise self._error
                self._wake.clear()
                try:
                    async with asyncio.timeout(patience):
                        await self._wake.wait()
                except TimeoutError:
                    yield []
                continue
            ready = list(self._deltas)
            self._deltas.clear()
            yield ready

    def close(self) -> None:
        """Give up what has not ended; nobody listens any longer."""
        if not self.closed:
            self.closed = True
            self._on_close(self)
