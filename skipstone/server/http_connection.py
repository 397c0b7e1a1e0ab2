"""A client's connection: how long it may take, how much it may send before a request, and how many there may be."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from skipstone.server.api.errors import SLOWEST, ApiError, too_slow, unavailable

LOG = logging.getLogger("skipstone.http")
LONGEST_HEAD = 65_536  # bytes of a request line and its headers, or of what else is no body
MOST_CONNECTIONS = 4096  # more where more requests may be under way
FOR_HEALTH = 16  # beyond those, for whoever asks whether the server lives
SPARE_FILES = 48  # descriptors for anything but connections
BETWEEN_WARNINGS_S = 10.0


def room_for_connections(capacity: int) -> int:
    """How many connections to keep, with the descriptors that are left."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = most_files - len(os.listdir("/proc/self/fd")) - SPARE_FILES
    return max(min(max(MOST_CONNECTIONS, 2 * capacity), free), 1)


class LimitedWarnings:
    """A line in the log for what may happen a thousand times: at most one in a while, with their number."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def add(self, event: str, **fields: Any) -> None:
        """Count the event; log it unless that was done in the last seconds."""
        self._counts[event] = self._counts.get(event, 0) + 1
        now = time.monotonic()
        if now - self._last.get(event, -BETWEEN_WARNINGS_S) >= BETWEEN_WARNINGS_S:
            LOG.warning(event, extra={"times": self._counts.pop(event)} | fields)
            self._last[event] = now


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits. `most`: connections to keep; `patience`: seconds that a client may take, None: for ever.

    The clock runs from the first byte of a request, or from the beginning of the connection, to the request's end, and
    while the client takes nothing of its answer.
    """

    def __init__(
        self, *arguments: Any, most: int, patience: float | None, warnings: LimitedWarnings, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._most = most
        self._patience = patience
        self._warnings = warnings
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._begun = self._heard = self.loop.time()
        self._received = 0  # bytes since the last request was there as a whole
        self._unread = 0  # bytes since the last that had a meaning

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come. If there are too many, one must go that is silent, and has been for the longest time."""
        super().connection_made(transport)
        self._start_clock()
        if len(self.connections) <= self._most:
            return
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.waits]
        silent = min(others, key=lambda other: (other._served, other._heard), default=self)
        if silent is not self or len(self.connections) > self._most + FOR_HEALTH:
            self.connections.discard(silent)  # it is lost for sure, but only later
            self._warnings.add("too many connections: the one that was silent longest was closed", most=self._most)
            silent._give_up(unavailable("there are too many connections; try again later", "too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was sent away."""
        self._stop_clock()
        self.resume_writing()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: no request is there as a whole that has not been answered."""
        if self.pipeline or self.transport.is_closing():
            return False
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    @property
    def _served(self) -> bool:
        """Whether its last request was answered: such clients are the last to be sent away."""
        return self.cycle is not None and self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client; close when they are too many without being a request."""
        self._heard = self.loop.time()
        self._received += len(data)
        self._unread += len(data)
        if self._clock is None:
            self._start_clock()  # even what begins no request must not last for ever
        super().data_received(data)
        if self._unread > LONGEST_HEAD and not self.transport.is_closing():
            message = f"the headers are longer than {LONGEST_HEAD} bytes; shorten them"
            self._give_up(ApiError(431, message, code="headers_too_large"))

    def on_message_begin(self) -> None:
        """Start the clock of a request."""
        super().on_message_begin()
        self._start_clock()

    def on_headers_complete(self) -> None:
        """Note in the request's scope whether there are too many connections."""
        self._unread = 0
        self.scope["crowded"] = len(self.connections) > self._most  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body is there."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is there as a whole."""
        self._received = self._unread = 0
        self._stop_clock()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads nothing of its answer: it has so much time until it must."""
        super().pause_writing()
        if self._patience is not None and self._stall is None:
            self._stall = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP request."""
        self._give_up(ApiError(400, msg, code="invalid_http"))

    def _start_clock(self) -> None:
        self._stop_clock()
        if self._patience is not None:
            self._begun = self.loop.time()
            self._clock = self.loop.call_later(self._patience, self._look_at_clock)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _look_at_clock(self) -> None:
        """Give up a client that is too slow, unless it is we who read nothing."""
        assert self._patience is not None
        if self.flow.read_paused or not self.waits:
            self._start_clock()
            return
        left = self._begun + self._patience + self._received / SLOWEST - self.loop.time()
        if left > 0:
            self._clock = self.loop.call_later(left, self._look_at_clock)
            return
        if self._received:
            self._warnings.add("a request was not sent in time", seconds=self._patience)
        self._give_up(too_slow())

    def _give_up(self, error: ApiError) -> None:
        """Close, and say why where a request has begun that has no answer yet."""
        cycle = self.cycle
        between = cycle is None or (cycle.response_complete and not cycle.more_body)
        if self._received if between else not cycle.response_started:
            body = error.encode()
            head = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
            self.transport.write(STATUS_LINE[error.status] + b"\r\n".join([*head, b"", body]))
        self.transport.close()
