"""A server in this process, on a free port, with its parts at hand."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from waiting import PATIENCE_S, wait_for

from skipstone import LLM
from skipstone.server.config import ServerConfig
from skipstone.server.http_server import http_options
from skipstone.server.service import Service
from skipstone.server.step_observer import StepObserver

LONG = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}


@dataclass
class Serving:
    """What tests talk to, and what they look into."""

    url: str
    service: Service

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", **{"api_key": "none", "max_retries": 0} | options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", **{"api_key": "none", "max_retries": 0} | options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def post_text(self, path: str, body: str) -> httpx.Response:
        return httpx.post(
            self.url + path, content=body, headers={"content-type": "application/json"}, timeout=PATIENCE_S
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, **options)

    @property
    def idle(self) -> bool:
        """Whether no request is left and no block is owned."""
        engine = self.service.llm.engine
        return not engine.has_work and engine.pool.num_used == 0 and self.service.engine.num_choices == 0


@contextmanager
def serving(model: str = "demo", server: dict[str, Any] | None = None, **engine: Any) -> Iterator[Serving]:
    observer = StepObserver()
    if model == "demo":
        engine = {"spec": "mtp:3"} | engine  # auto would choose k by the clock
    llm = LLM(model, observer=observer, **engine)
    service = Service(llm, ServerConfig(**server or {}), observer)
    listener = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(http_options(service))
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    service.engine.start()
    thread.start()
    try:
        wait_for(lambda: http.started)
        yield Serving(f"http://127.0.0.1:{listener.getsockname()[1]}", service)
    finally:
        http.should_exit = True
        service.engine.stop()
        thread.join()
