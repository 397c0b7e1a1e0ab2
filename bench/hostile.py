"""What bench/soak.py sends beside ordinary load: bodies that once held a server up or ended it, and half requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "a" * 8_000_000
TALK = [{"role": "user", "content": "a"}]
AT_ONCE = 10  # silent connections opened in a tenth of a second, so that the server's own clients never seem the idlest
LIVE_S = 20.0

# Asks for the server's health until its input ends, then tells how long each answer took, and for how much of that the
# server was at work: a process of its own, as this one is busy. Its arguments are host, port and the server's process.
WATCH = """
import http.client, json, os, sys, threading, time
def busy():
    fields = open(f"/proc/{sys.argv[3]}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
times = []
while not ended.is_set():
    begun, worked = time.perf_counter(), busy()
    connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=30)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except OSError:
        status = 0
    connection.close()
    times.append((time.perf_counter() - begun, busy() - worked) if status == 200 else (99.0, 99.0))
    time.sleep(0.05)
print(json.dumps(times))
"""


def _tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "description": "what it does"}} for i in range(count)]


def _chain(count: int) -> dict[str, Any]:
    """A schema whose definitions lead from one to the next."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "string"}}}


def _rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"\n'


def bodies(grammars: bool) -> dict[str, tuple[str, bytes, tuple[int, ...]]]:
    """Name -> address, body, and the statuses that may come of it."""
    deep = "[" * 5000 + "]" * 5000
    made: dict[str, tuple[str, Any, tuple[int, ...]]] = {
        "many prompts": (COMPLETIONS, {"prompt": ["a"] * 1_500_000}, (400,)),
        "fewer prompts": (COMPLETIONS, {"prompt": ["a"] * 200_000}, (400,)),
        "many lists": (COMPLETIONS, b'{"prompt": [' + b"[]," * 2_500_000 + b"[]]}", (400,)),
        "a long prompt": (COMPLETIONS, {"prompt": LONG}, (400,)),
        "a long talk": (CHAT, {"messages": [{"role": "user", "content": LONG}]}, (400,)),
        "many tools": (CHAT, {"messages": TALK, "tools": _tools(20_000)}, (400,)),
        "many tools in a template": (
            "/apply-template",
            {"messages": TALK, "tools": _tools(20_000)},
            (400,),
        ),
        "many ids": ("/detokenize", {"tokens": [300] * 1_500_000}, (200,)),
        "a deep body": (COMPLETIONS, f'{{"prompt": {deep}}}'.encode(), (400,)),
        "a deep text": (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": deep}}, (400,)),
        "too long": (COMPLETIONS, {"prompt": LONG + LONG}, (413,)),
    }
    if grammars:
        schema = {"type": "json_schema", "json_schema": {"schema": _chain(1000)}}
        rules = {"grammar": _rules(2700)}
        short = {"prompt": "a", "max_tokens": 1}
        made["a chain of definitions"] = (COMPLETIONS, short | {"response_format": schema}, (200, 400))
        made["a chain of rules"] = (COMPLETIONS, short | {"structured_outputs": rules}, (200, 400))
    return {
        name: (path, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode(), statuses)
        for name, (path, body, statuses) in made.items()
    }


async def keep_silent(host: str, port: int, most: int, until: float) -> int:
    """Hold that many connections which say nothing, or only the half of something; returns how many were opened."""
    begins = [b"", b"GET /v1/models HTTP/1.1\r\nhost: a", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
              b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"]  # fmt: skip
    held: list[tuple[float, asyncio.StreamWriter]] = []
    opened = 0
    while time.monotonic() < until or opened < most:
        for _ in range(AT_ONCE):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                writer.write(begins[opened % len(begins)])
                held.append((time.monotonic(), writer))
                opened += 1
        while held and (len(held) > most or held[0][0] < time.monotonic() - LIVE_S):
            held.pop(0)[1].transport.abort()
        await asyncio.sleep(0.1)
    for _, writer in held:
        writer.transport.abort()
    return opened
