"""Load on an OpenAI server: streamed requests, sent when they are due whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from skipstone.cli.prompts import Prompt
from skipstone.errors import ConfigError

EVENT = "data: "
END = "[DONE]"


class Drafts(msgspec.Struct, kw_only=True):
    """What speculation did for a request, under vLLM's names."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = []


class Sample(msgspec.Struct, kw_only=True):
    """One request as the client saw it. Times in seconds: `due` and `sent` from the start, the others from sending."""

    prompt: str
    due: float
    sent: float = 0.0
    arrivals: list[float] = []  # of events with new tokens
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafts: Drafts | None = None
    error: str | None = None

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def per_token(self) -> float | None:
        """Time per further token; None when there was only one."""
        return (self.seconds - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Times between events; with speculation an event brings several tokens."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]


# Events of a stream, as far as they matter here.


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether it stands for tokens. Their text may be held back; an event that only names the role has none."""
        return self.delta is None or bool(self.delta.content) or self.delta.role is None or bool(self.finish_reason)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Metrics(msgspec.Struct):
    speculative_decoding: Drafts | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


async def ask(client: httpx.AsyncClient, path: str, body: bytes, sample: Sample) -> None:
    """Send a body that asks for a stream and note in `sample` what comes; errors are noted, not raised."""
    started = time.perf_counter()
    try:
        async with client.stream("POST", path, content=body) as answer:
            if answer.status_code != httpx.codes.OK:
                sample.error = f"HTTP {answer.status_code}: {_message(await answer.aread())}"
                return
            ended = False
            async for line in answer.aiter_lines():
                if line.startswith(EVENT):
                    ended = line.endswith(END)
                    if not ended:
                        _take(_DECODER.decode(line.removeprefix(EVENT)), time.perf_counter() - started, sample)
            if sample.error is None and not (ended and sample.arrivals):
                sample.error = "the stream was cut off" if not ended else "no tokens came"
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        sample.seconds = time.perf_counter() - started if sample.error else sample.arrivals[-1]
    sample.output_tokens = sample.output_tokens or len(sample.arrivals)


def _take(event: _Event, now: float, sample: Sample) -> None:
    if event.error is not None:
        sample.error = f"error in the stream: {event.error!s:.200}"
    if any(choice.has_token for choice in event.choices):
        sample.arrivals.append(now)
    if event.usage is not None:
        sample.prompt_tokens, sample.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    if event.metrics is not None:
        sample.drafts = event.metrics.speculative_decoding


def _message(content: bytes) -> str:
    """The server's own words, cut short."""
    try:
        error = msgspec.json.decode(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


class Load(msgspec.Struct, kw_only=True, frozen=True):
    """What is sent to which server."""

    url: str
    key: str | None
    model: str
    prompts: list[Prompt]
    requests: int
    seed: int
    most_at_once: int | None  # requests on their way; those that are due wait until one has ended
    timeout: float
    fields: dict[str, Any]  # of every request's body

    def client(self) -> httpx.AsyncClient:
        """A connection pool without a limit of its own."""
        headers = {"content-type": "application/json", **_authorization(self.key)}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=self.timeout, limits=limits)

    def request(self, number: int) -> tuple[str, str, bytes]:
        """Name, path and body of one request; prompts come in a random order, each before any comes again."""
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed} {number // len(order)}").shuffle(order)
        prompt = self.prompts[order[number % len(order)]]
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"seed": self.seed + number} | prompt.overrides | self.fields
        if prompt.messages is not None:
            return prompt.name, "/v1/chat/completions", msgspec.json.encode(body | {"messages": prompt.messages})
        text = prompt.text if prompt.text is not None else prompt.token_ids
        return prompt.name, "/v1/completions", msgspec.json.encode(body | {"prompt": text})


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def due_times(rate: float, count: int, seed: int) -> list[float]:
    """A Poisson process of `rate` arrivals a second that begins with an arrival; all at once at an infinite rate."""
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) if rate < float("inf") else 0.0 for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


async def run_load(load: Load, rate: float, turn: int, tick: Callable[[], None]) -> tuple[list[Sample], float]:
    """Send everything and wait for all answers; returns them in the order of sending, with the seconds it took.

    A further `turn` goes on where the one before has ended, so that it finds as little of its prompts in a cache.
    """
    requests = [load.request(turn * load.requests + number) for number in range(load.requests)]
    due = due_times(rate, load.requests, load.seed)
    samples = [Sample(prompt=name, due=time) for (name, _, _), time in zip(requests, due, strict=True)]
    places = asyncio.Semaphore(load.most_at_once or load.requests)

    async with load.client() as client:
        started = time.perf_counter()

        async def send(sample: Sample, path: str, body: bytes) -> None:
            async with places:
                sample.sent = time.perf_counter() - started
                await ask(client, path, body, sample)
            tick()

        async with asyncio.TaskGroup() as group:
            for sample, (_, path, body) in zip(samples, requests, strict=True):
                wait = sample.due - (time.perf_counter() - started)
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(sample, path, body))
        return samples, time.perf_counter() - started


async def warm_up(load: Load, count: int, turns: int) -> None:
    """Requests that are not counted, one after the other, from behind the last turn.

    Raises ConfigError when the server does not answer one.
    """
    async with load.client() as client:
        for number in range(count):
            name, path, body = load.request(turns * load.requests + number)
            sample = Sample(prompt=name, due=0.0)
            await ask(client, path, body, sample)
            if sample.error is not None:
                raise ConfigError(f"url={load.url}: a first request was not answered: {sample.error}")


def served_model(url: str, key: str | None, timeout: float) -> str:
    """The first model that the server names. Raises ConfigError when it does not answer."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=_authorization(key), timeout=timeout)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"url={url} cannot be used: {error}; start a server, or pass --url") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"url={url}/v1/models names no model; pass --model, or another --url") from None
