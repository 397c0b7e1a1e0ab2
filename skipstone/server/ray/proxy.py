"""What stands before the replicas: passes requests to one of them, and to another one when it dies before it answers.

An ASGI application within a Ray Serve deployment of its own. Reads of a body only what routing needs: the prompt, so
that Ray's router can prefer the replica that has seen its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from ray.exceptions import RayError
from starlette.types import Receive, Scope, Send

from skipstone.server.api.decode import MOST_VALUES, num_values
from skipstone.server.api.errors import SLOWEST, too_slow, unavailable

LOG = logging.getLogger("skipstone.front")
ATTEMPTS = 4
PAUSE_S = 0.2  # before the next attempt, times the number of attempts made
STALE_S = 10.0  # after which a replica that has sent no page is gone
LARGE = 20_000  # bytes of a body from which on it is read beside the event loop
LONGEST_PROMPT = 4000  # characters that the router looks at


class ForwardedRequest(msgspec.Struct):
    """One HTTP request, as it travels to a replica. The router reads `prompt`."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str


class Reports:
    """The latest metrics page of every replica. An actor; counters of a replica that has gone go with it."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[float, bytes]] = {}

    def put(self, replica: str, page: bytes) -> None:
        """A replica's page."""
        self._pages[replica] = (time.monotonic(), page)

    def pages(self) -> list[bytes]:
        """Those of the replicas that are alive."""
        now = time.monotonic()
        self._pages = {name: entry for name, entry in self._pages.items() if now - entry[0] < STALE_S}
        return [page for _, (_, page) in sorted(self._pages.items())]


class ReplicaProxy:
    """The application that stands before the replicas."""

    def __init__(self, replicas: Any, reports: Any, max_body_bytes: int, patience: float | None = None) -> None:
        """`replicas`: the deployment's handle. `reports`: the actor that gathers metrics.

        `patience`: seconds that a body may take, and longer at SLOWEST bytes per second; None: for ever.
        """
        self._replicas = replicas.options(stream=True)
        self._reports = reports
        self._most = max_body_bytes
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the beginning and the end of the process."""
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
        elif scope["type"] == "http":
            try:
                body = await self._body(receive)
            except TimeoutError:
                await too_slow().response()(scope, receive, send)
                return
            if body is not None:
                prompt = _prompt(body) if len(body) < LARGE else await asyncio.to_thread(_prompt, body)
                headers = list(scope["headers"])
                asked = ForwardedRequest(scope["method"], scope["path"], scope["query_string"], headers, body, prompt)
                await self._answer(asked, scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, or more of it than is allowed, for a replica to refuse; None when the client has left."""
        body, more = bytearray(), True
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(self._patience) as limit:
            while more and len(body) <= self._most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if self._patience is not None:
                    limit.reschedule(begun + self._patience + len(body) / SLOWEST)
        return bytes(body)

    async def _answer(self, asked: ForwardedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            begun = ended = False
            stream = self._replicas.remote(asked)
            watch = asyncio.create_task(_cancel_when_left(receive, stream))
            try:
                async for message in stream:
                    begun, ended = True, message["type"] == "http.response.body" and not message.get("more_body")
                    if ended:  # from here on a disconnect is the usual end
                        watch.cancel()
                    await send(await self._prepared(asked, message))
                return
            except asyncio.CancelledError:
                if not watch.done():  # it was not us who cancelled
                    raise
                return
            except RayError as error:
                if ended or watch.done():
                    return
                LOG.warning(
                    "a replica was lost", extra={"attempt": attempt, "begun": begun, "reason": str(error)[:200]}
                )
                if begun:
                    gone = unavailable("the replica that wrote this has died", "replica_lost")
                    await send({"type": "http.response.body", "body": b"data: " + gone.encode() + b"\n\n"})
                    return
            finally:
                watch.cancel()
            await asyncio.sleep(PAUSE_S * attempt)
        gone = unavailable("no replica answers; try again later", "replica_lost")
        await gone.response()(scope, receive, send)

    async def _prepared(self, asked: ForwardedRequest, message: Any) -> Any:
        """A replica's message as it goes out: one request id, and the metrics of all replicas."""
        metrics = asked.path == "/metrics"
        if message["type"] == "http.response.start":
            # Ray's proxy has given the request its id, which the replica repeats.
            left_out = {b"x-request-id"} | ({b"content-length"} if metrics else set())
            return message | {"headers": [(name, value) for name, value in message["headers"] if name not in left_out]}
        pages = await self._reports.pages.remote() if metrics and message["body"].startswith(b"#") else []
        return message | {"body": merge_pages(pages)} if pages else message


class _PromptFields(msgspec.Struct):
    prompt: Any = None
    messages: Any = None


def _prompt(body: bytes) -> str:
    """What the router compares; never empty."""
    if num_values(body) > MOST_VALUES:  # a replica refuses it
        return "-"
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        fields = msgspec.json.decode(body, type=_PromptFields)
        found = fields.prompt if fields.prompt is not None else fields.messages
        text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
        return text[:LONGEST_PROMPT] or "-"
    return "-"


async def _cancel_when_left(receive: Receive, stream: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """Prometheus pages of several replicas as one: the samples of each metric stand together, under its description."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> description, samples
    for page in pages:
        description: list[str] = []
        samples: list[str] = []
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                description, samples = families.setdefault(line.split(" ", 3)[2], ([line], []))
            elif not line.startswith("#"):
                samples.append(line)
            elif len(description) == 1:
                description.append(line)
    lines = [line for description, samples in families.values() for line in (*description, *samples)]
    return "".join(line + "\n" for line in lines).encode()
