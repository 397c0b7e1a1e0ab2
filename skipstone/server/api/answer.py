"""Runs a job for a client: at once or as a stream of events, given up when the client leaves or time is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from skipstone.errors import SkipstoneError
from skipstone.server.api.errors import ApiError, ClientLeft, from_engine
from skipstone.server.api.writers import TextWriter, Writer
from skipstone.server.generation import Delta, Generation
from skipstone.server.service import Service

EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies shall pass events on at once
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"  # clients pass over it; proxies see that the connection is alive


class Answer:
    """An ASGI application that answers one request. Errors before the first byte are raised, later ones are events."""

    def __init__(self, service: Service, writer: Writer) -> None:
        self._service = service
        self._writer = writer
        self._job = writer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send what comes of it."""
        try:
            self._job.grammar = await self._service.make_grammar(self._job.params)
        except SkipstoneError as error:
            raise from_engine(error, self._job.names) from None
        generation = self._service.engine.submit(self._job)
        log, writer = scope["log"], self._writer
        try:
            with _watched(generation, receive, self._service.config.request_timeout):
                if isinstance(writer, TextWriter) and self._job.stream:
                    await self._stream(generation, writer, send)
                else:
                    deltas = [delta async for ready in _translated(generation) for delta in ready]
                    body = msgspec.json.encode(writer.whole(deltas))
                    await Response(body, media_type="application/json")(scope, receive, send)
        except ClientLeft:
            log["finish"] = "client left"
        finally:
            generation.close()
            log["prompt_tokens"], log["completion_tokens"] = writer.prompt_tokens, writer.completion_tokens
            if writer.finish_reasons:
                log.setdefault("finish", "+".join(sorted(set(writer.finish_reasons))))

    async def _stream(self, generation: Generation, writer: TextWriter, send: Send) -> None:
        begun = False
        try:
            async for ready in _translated(generation, self._service.config.keep_alive):
                events = b"".join([_event(writer.event(delta)) for delta in ready]) or KEEP_ALIVE
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": Headers(EVENTS).raw})
                    begun = True
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except ApiError as error:
            if not begun:
                raise
            await send({"type": "http.response.body", "body": b"data: " + error.encode() + b"\n\n"})
            return
        closing = writer.closing()
        await send({"type": "http.response.body", "body": (_event(closing) if closing else b"") + DONE})


def periodic_events(service: Service, make: Callable[[], msgspec.Struct], seconds: float) -> StreamingResponse:
    """An event every so many seconds, until the client leaves or the server ends."""

    async def events() -> AsyncIterator[bytes]:
        while not service.draining:
            yield _event(make())
            await asyncio.sleep(seconds)
        yield DONE

    return StreamingResponse(events(), headers=EVENTS)


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
        while (await receive())["type"] != "http.disconnect":
            pass
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
