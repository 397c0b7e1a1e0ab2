"""The server process: event loop, signals, the end.

The first SIGTERM or SIGINT lets requests under way end, up to a limit, while new ones get a 503; the second aborts
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
from concurrent.futures import Future
from types import FrameType
from typing import Any

import uvicorn

from skipstone.cli.output import note
from skipstone.llm import LLM
from skipstone.server.api.app import make_app
from skipstone.server.api.errors import unavailable
from skipstone.server.config import ServerConfig
from skipstone.server.http_connection import Connection, LimitedWarnings, room_for_connections
from skipstone.server.log import set_up
from skipstone.server.service import Service
from skipstone.server.step_observer import StepObserver

LOG = logging.getLogger("skipstone.server")
POLL_S = 0.05
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that it is they who close it
LAST_WORDS_S = 2  # for answers that have been aborted to reach their clients
ENGINE_DIED = 1
SIGNAL_BASE = 128  # as shells report a program that a signal ended


class Server(uvicorn.Server):
    """uvicorn with our end: drain first, close afterwards."""

    def __init__(self, service: Service, config: uvicorn.Config, url: str, quiet: bool) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._url = url
        self._quiet = quiet
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, log that the server is ready, and hear of an engine that was given up."""
        await super().startup(sockets)
        self._loop = loop = asyncio.get_running_loop()
        service = self._service
        service.engine.on_death = lambda reason: loop.call_soon_threadsafe(self._end_broken, reason)
        facts = {"model": service.name, "proposer": service.proposer, "k": service.llm.engine.speculation.k}
        LOG.info("ready", extra={"url": self._url, "context": service.max_model_len} | facts)
        if not self._quiet:
            header = '-H "content-type: application/json"'
            note(f'try: curl {self._url}/v1/completions {header} -d \'{{"prompt": "Hello"}}\'')

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, abort at the second."""
        if self._drain is None:
            LOG.info(
                "draining", extra={"signal": signal.Signals(sig).name, "requests": self._service.engine.num_choices}
            )
            self._service.draining = True
            if self._loop is None:
                self.should_exit = True
            else:
                self._drain = asyncio.run_coroutine_threadsafe(self._wait_and_end(), self._loop)
        else:
            self.exit_code = SIGNAL_BASE + sig
            self._abort()

    async def _wait_and_end(self) -> None:
        timeout = self._service.config.shutdown_timeout
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._service.engine.num_choices:
                    await asyncio.sleep(POLL_S)
        left = self._service.engine.num_choices
        if left:
            LOG.warning("not all requests ended in time", extra={"requests": left, "seconds": timeout})
        self._abort()

    def _abort(self) -> None:
        self._service.engine.abort_all(unavailable("the server is ending", "draining"))
        self.should_exit = True

    def _end_broken(self, reason: str) -> None:
        LOG.error("the engine was given up; the server ends", extra={"reason": reason})
        self.exit_code = ENGINE_DIED
        self._abort()


def http_options(service: Service) -> uvicorn.Config:
    """uvicorn's options, with this server's connections and limits."""
    most = room_for_connections(service.engine.capacity)
    patience = service.config.client_timeout
    # The library takes whatever makes a connection, though it says a class.
    http: Any = functools.partial(Connection, most=most, patience=patience, warnings=LimitedWarnings())
    return uvicorn.Config(
        make_app(service),
        loop="uvloop",
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def serve(llm: LLM, config: ServerConfig, listener: socket.socket, observer: StepObserver, quiet: bool) -> int:
    """Serve until a signal comes, or the engine is given up. Returns the exit code."""
    set_up(config.log_format)
    service = Service(llm, config, observer)
    server = Server(service, http_options(service), _url(listener), quiet)
    service.engine.start()
    service.start_grammars()
    gc.freeze()  # what is there stays; looking through it would stop everything for a while
    try:
        server.run(sockets=[listener])
    finally:
        service.engine.stop()
    LOG.info("ended", extra={"code": server.exit_code})
    return server.exit_code


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
