"""Runs a job for a client: at once or as a stream of events, given up when the client leaves or time is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
from starlette.types import Receive, Scope, Send

from skipstone.errors import SkipstoneError
from skipstone.server.api.errors import ApiError, ClientLeft, from_engine
from skipstone.server.api.writers import Writer
from skipstone.server.generation import Delta, Generation
from skipstone.server.service import Service

JSON = (b"content-type", b"application/json")
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall pass events on at once
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"  # clients pass over it; proxies see that the connection is alive


class Answer:
    """An ASGI application that answers one request. Errors before the first byte are raised, later ones are events."""

    def __init__(self, service: Service, writer: Writer) -> None:
        self._service = service
        self._writer = writer
        self._job = writer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do the work."""
        try:
            self._job.grammar = await self._service.make_grammar(self._job.params)
        except SkipstoneError as error:
            raise from_engine(error, self._job.names) from None
        generation = self._service.engine.submit(self._job)
        log, writer = scope["log"], self._writer
        try:
            with _watched(generation, receive, self._service.config.request_timeout):
                await (self._stream if self._job.stream else self._whole)(generation, send)
        except ClientLeft:
            log["finish"] = "client left"
        finally:
            generation.close()
            log["prompt_tokens"], log["completion_tokens"] = writer.prompt_tokens, writer.completion_tokens
            if writer.finish_reasons:
                log.setdefault("finish", "+".join(sorted(set(writer.finish_reasons))))

    async def _whole(self, generation: Generation, send: Send) -> None:
        deltas = [delta async for ready in _translated(generation) for delta in ready]
        body = msgspec.json.encode(self._writer.whole(deltas))
        headers = [JSON, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, generation: Generation, send: Send) -> None:
        begun = False
        try:
            async for ready in _translated(generation, self._service.config.keep_alive):
                events = b"".join([_event(self._writer.event(delta)) for delta in ready]) or KEEP_ALIVE
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                    begun = True
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except ApiError as error:
            if not begun:
                raise
            await send({"type": "http.response.body", "body": b"data: " + error.encode() + b"\n\n"})
            return
        closing = self._writer.closing()
        await send({"type": "http.response.body", "body": (_event(closing) if closing else b"") + DONE})


class PeriodicEvents:
    """An ASGI application: an event every so many seconds, until the client leaves or the server ends."""

    def __init__(self, service: Service, make: Callable[[], msgspec.Struct], seconds: float) -> None:
        self._service = service
        self._make = make
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        leaving = asyncio.create_task(_left(receive))
        try:
            while not leaving.done() and not self._service.draining:
                await send({"type": "http.response.body", "body": _event(self._make()), "more_body": True})
                await asyncio.wait([leaving], timeout=self._seconds)
            if not leaving.done():
                await send({"type": "http.response.body", "body": DONE})
        finally:
            leaving.cancel()


async def _left(receive: Receive) -> None:
    """Returns when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(struct: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(struct) + b"\n\n"


async def _translated(generation: Generation, patience: float | None = None) -> AsyncIterator[list[Delta]]:
    """The generation's deltas, with the engine's errors as the API words them."""
    try:
        async for ready in generation.ready(patience):
            yield ready
    except SkipstoneError as error:
        raise from_engine(error, generation.job.names) from None


@contextlib.contextmanager
def _watched(generation: Generation, receive: Receive, timeout: float | None) -> Iterator[None]:
    """Fail the generation when the client leaves or time is over."""

    async def wait_for_leave() -> None:
        await _left(receive)
        generation.fail(ClientLeft())

    watch: list[asyncio.Task[None] | asyncio.TimerHandle] = [asyncio.create_task(wait_for_leave())]
    if timeout is not None:
        message = f"the request took longer than {timeout:g} seconds and was given up"
        error = ApiError(408, message, code="request_timeout")
        watch.append(generation.loop.call_later(timeout, generation.fail, error))
    try:
        yield
    finally:
        for one in watch:
            one.cancel()
