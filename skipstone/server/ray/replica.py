"""One replica of the server under Ray Serve: engine, service and application in an actor of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message

from skipstone.config import EngineConfig
from skipstone.llm import LLM
from skipstone.server.api.app import make_app
from skipstone.server.config import ServerConfig
from skipstone.server.log import set_up
from skipstone.server.ray.proxy import ForwardedRequest
from skipstone.server.service import Service
from skipstone.server.step_observer import StepObserver

REPORT_S = 1.0  # between two metrics pages of a replica


class Replica:
    """What Ray Serve starts, asks for its health, and ends."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, reports: Any) -> None:
        set_up(config.log_format)
        observer = StepObserver()
        llm = LLM(config=engine, observer=observer)
        if config.warmup == "all":
            llm.engine.warm_up()
        context = serve.get_replica_context()
        self.service = Service(llm, config, observer, str(context.rank.rank))
        self.app = make_app(self.service)
        self._name, self._reports = context.replica_tag, reports
        self._end = threading.Event()
        self.service.engine.start()
        threading.Thread(target=self._report, name="reports", daemon=True).start()

    async def __call__(self, asked: ForwardedRequest) -> AsyncIterator[Message]:
        """Answer one request: the messages of an ASGI application. Ended early, the request is given up."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": asked.method,
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "root_path": "",
            "query_string": asked.query,
            "headers": asked.headers,
        }
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # a client that leaves ends this call
            return body.pop()

        async def run() -> None:
            try:
                await self.app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()

    def check_health(self) -> None:
        """Asked by Ray Serve; a replica that raises is replaced."""
        if self.service.engine.dead is not None:
            raise RuntimeError(f"the engine has stopped: {self.service.engine.dead}")

    def __del__(self) -> None:
        """Called by Ray Serve once the requests under way have ended."""
        if hasattr(self, "_end"):
            self._end.set()
            self.service.engine.stop()

    def _report(self) -> None:
        while not self._end.wait(REPORT_S):
            self._reports.put.remote(self._name, self.service.metrics.text())
