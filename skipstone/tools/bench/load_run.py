"""An open loop: requests are sent when they are due, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from skipstone.cli.prompts import Prompt
from skipstone.errors import ConfigError
from skipstone.tools.bench.load_client import Sample, ask


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
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
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


def due_times(rate: float, count: int, seed: int) -> list[float]:
    """A Poisson process of `rate` arrivals a second that begins with an arrival; all at once at an infinite rate."""
    draw, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + (draw.expovariate(rate) if rate < float("inf") else 0.0))
    return times


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
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=timeout)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"url={url} cannot be used: {error}; start a server, or pass --url") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"url={url}/v1/models names no model; pass --model, or another --url") from None


def spread(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """`count` prompts from all over the list; all when there are no more than that."""
    if count is None or len(prompts) <= count:
        return list(prompts)
    return [prompts[i * len(prompts) // count] for i in range(count)]
