"""An OpenAI server that answers by a script: what it sends, and when, is known to the test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from waiting import PATIENCE_S

Script = list[tuple[float, str]]  # seconds to wait, then what to send
HELD = float("inf")  # instead of seconds: until as many answers are open as `wanted`


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


DONE = "data: [DONE]\n\n"


def answer(first: float, gap: float, events: int, tokens: int = 3, **closing: Any) -> Script:
    """`events` events of that many tokens, the first after `first` seconds; then the counts."""
    usage = {"prompt_tokens": 7, "completion_tokens": events * tokens}
    steps = [(gap if i else first, event(choices=[{"text": "abc"}], usage=None)) for i in range(events)]
    return [*steps, (0, event(choices=[], usage=usage, **closing)), (0, DONE)]


@dataclass
class Scripted:
    """What came in, and the answers, which are used in turn."""

    scripts: list[Script | int]  # a number: an error of that status
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    all_open: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: int = 0
    open: int = 0
    most_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                headers = dict(line.lower().split(": ", 1) for line in head.strip().split("\r\n")[1:])
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(head.split()[1], headers.get("authorization"), body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, key: str | None, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path.startswith("/v1/models"):
            self._send(writer, 200, b'{"data": [{"id": "scripted"}]}')
            return
        script = self.scripts[len(self.bodies) % len(self.scripts)]
        self.bodies.append(json.loads(body))
        self.times.append(time.perf_counter())
        self.paths.append(path)
        self.keys.append(key)
        if isinstance(script, int):
            self._send(writer, script, b'{"error": {"message": "too busy"}}')
            return
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        if self.most_open >= self.wanted:
            self.all_open.set()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for wait, text in script:
            await (self.all_open.wait() if wait == HELD else asyncio.sleep(wait))
            writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.open -= 1
        writer.write(b"0\r\n\r\n")

    def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)


@contextmanager
def scripted(*scripts: Script | int, wanted: int = 0) -> Iterator[Scripted]:
    """The server on a free port, on a thread of its own."""
    server, ready, end = Scripted(list(scripts), wanted=wanted), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        loops.append(asyncio.get_running_loop())
        ready.set()
        await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(end.set)
        thread.join(PATIENCE_S)
