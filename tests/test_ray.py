"""`serve --ray`: what stands before the replicas, and two replicas of which one is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skipstone import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"


ray = pytest.importorskip("ray", reason="the extra ray is not installed")
from ray.exceptions import RayError  # noqa: E402

from skipstone.server.api.decode import MOST_VALUES  # noqa: E402
from skipstone.server.ray.proxy import ATTEMPTS, ForwardedRequest, ReplicaProxy, _prompt, merge_pages  # noqa: E402

START = {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"r"), (b"a", b"b")]}
Script = list[Any]  # messages; an exception is raised in its place


class Handle:
    """Replicas that follow a script each."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts, self.works, self.cancelled = list(scripts), [], 0

    def options(self, stream: bool) -> Handle:
        return self

    def remote(self, work: ForwardedRequest) -> Any:
        self.works.append(work)
        return Stream(self, self.scripts[min(len(self.works), len(self.scripts)) - 1])


class Stream:
    def __init__(self, handle: Handle, script: Script) -> None:
        self.handle, self.script, self.task = handle, script, None

    async def __aiter__(self) -> AsyncIterator[Any]:
        self.task = asyncio.current_task()
        for message in self.script:
            if isinstance(message, Exception):
                raise message
            if message == "wait":
                await asyncio.sleep(10)
            if message == "linger":  # the replica's call ends later than its answer
                await asyncio.sleep(0.5)
                return
            yield message

    def cancel(self) -> None:
        self.handle.cancelled += 1
        if self.task is not None:
            self.task.cancel()


def call(handle: Handle, body: bytes = b"{}", leaves: bool = False, **scope: Any) -> list[Any]:
    """What one request is answered."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": body[i : i + 10], "more_body": True} for i in range(0, len(body), 10)]
    parts += [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop(0)
        await asyncio.sleep(0.1 if leaves else 60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    usual = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(ReplicaProxy(handle, None, 40)(usual | scope, receive, send))
    return sent


class TestReplicaProxy:
    def test_messages_pass(self) -> None:
        rest = [{"type": "http.response.body", "body": text, "more_body": text != b"b"} for text in (b"a", b"b")]
        handle = Handle([START, *rest])
        sent = call(handle, b'{"prompt": "words"}', headers=[(b"k", b"v")])
        assert sent == [START | {"headers": [(b"a", b"b")]}, *rest]
        (work,) = handle.works
        assert work.body == b'{"prompt": "words"}' and work.headers == [(b"k", b"v")] and work.prompt == "words"

    @pytest.mark.parametrize(
        ("body", "prompt"),
        [
            (b"", "-"), (b'{"prompt": ""}', "-"), (b'{"prompt": [1, 2]}', "[1,2]"), (b"[1]", "-"),
            (b'{"messages":[{"content":"a"}]}', '[{"content":"a"}]'), (b"\xff", "-"),
        ],
    )  # fmt: skip
    def test_what_the_router_sees_is_never_empty(self, body: bytes, prompt: str) -> None:
        handle = Handle([START])
        call(handle, body)
        assert handle.works[0].prompt == prompt

    def test_what_would_take_long_to_read_is_not_read(self) -> None:
        assert _prompt(b'{"prompt": [' + b"[]," * MOST_VALUES + b"[]]}") == "-"

    def test_a_body_that_does_not_come_is_given_up(self) -> None:
        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b"a", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        handle = Handle([START])
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        asyncio.run(ReplicaProxy(handle, None, 4000, patience=0.1)(scope, receive, send))
        assert sent[0]["status"] == 408 and json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"
        assert handle.works == []

    def test_a_body_that_is_too_long_is_not_read_to_its_end(self) -> None:
        handle = Handle([START])
        call(handle, b"x" * 200)
        assert len(handle.works[0].body) == 50  # more than 40, so the replica refuses it

    def test_a_replica_that_dies_before_it_answers_is_exchanged(self) -> None:
        handle = Handle([RayError("gone")], [RayError("gone")], [START, {"type": "http.response.body", "body": b"a"}])
        sent = call(handle)
        assert len(handle.works) == 3 and handle.works[0] == handle.works[2]
        assert [message.get("status") for message in sent] == [200, None]

    def test_without_replicas_it_says_so(self) -> None:
        handle = Handle([RayError("gone")])
        start, body = call(handle)
        assert start["status"] == 503 and json.loads(body["body"])["error"]["code"] == "replica_lost"
        assert len(handle.works) == ATTEMPTS and (b"retry-after") in dict(start["headers"])

    def test_a_stream_that_has_begun_ends_with_an_error(self) -> None:
        begun = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
        sent = call(Handle([START, begun, RayError("gone")]))
        assert sent[1] == begun and not sent[2].get("more_body")
        assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "replica_lost"

    def test_a_client_that_leaves_ends_the_work(self) -> None:
        handle = Handle([START, "wait"])
        sent = call(handle, leaves=True)
        assert handle.cancelled == 1 and len(sent) == 1

    @pytest.mark.parametrize("script", ["linger", RayError("cancelled")], ids=["ends later", "raises"])
    def test_nothing_follows_the_end_of_an_answer(self, script: Any) -> None:
        """Once it is complete the server says that the client has left, as it always does then."""
        handle = Handle([START, {"type": "http.response.body", "body": b"a"}, script])
        assert len(call(handle, leaves=True)) == 2 and handle.cancelled == 0

    def test_metrics_of_all_replicas_are_one_page(self) -> None:
        pages = []
        for engine in "01":
            pages.append(
                f'# HELP a_total of a\n# TYPE a_total counter\na_total{{engine="{engine}"}} 3.0\n'
                f'# HELP b of b\n# TYPE b gauge\nb{{engine="{engine}"}} {engine}.0\n'.encode()
            )
        page = merge_pages(pages).decode()
        families = {family.name: family for family in text_string_to_metric_families(page)}
        assert page.count("# TYPE") == 2 and page.count("# HELP") == 2
        assert [sample.value for sample in families["a"].samples] == [3, 3]
        assert [sample.labels["engine"] for sample in families["b"].samples] == ["0", "1"]


def descendants(pid: int) -> Iterator[int]:
    """All processes below one."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(re.search(r"PPid:\s+(\d+)", status.read_text())[1])  # type: ignore
    below = {pid}
    while new := {child for child, parent in parents.items() if parent in below} - below:
        below |= new
    yield from below - {pid}


def replicas(pid: int) -> list[int]:
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"ServeReplica:skipstone:replica" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


PROMPTS = ["The module provides", "A virtual table is", "def read(self, size):", "SELECT name FROM", "In this section"]


@pytest.mark.long
@pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here")
def test_a_killed_replica_costs_no_other_request(tmp_path: Path) -> None:
    bodies = [
        {"prompt": f"{text} {i}", "seed": i, "temperature": 0.8, "top_p": 1.0, "max_tokens": 60, "ignore_eos": True}
        for i, text in enumerate(PROMPTS * 4)
    ]
    params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
    with LLM("demo", spec="off") as llm:
        outputs = llm.generate([str(body["prompt"]) for body in bodies], params, progress=False)
    expected = [output.outputs[0].text for output in outputs]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "skipstone",
        "serve",
        "demo",
        "--ray",
        "--replicas",
        "2",
        "--port",
        str(port),
        "-q",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert program.stdout is not None and "2 replicas" in program.stdout.readline()
        url = f"http://127.0.0.1:{port}"
        first = replicas(program.pid)
        assert len(first) == 2
        asyncio.run(under_load(url, program.pid, bodies, expected))
        print(f"back after {wait_for_return(program.pid, first):.1f} s")
        page = httpx.get(url + "/metrics", timeout=60).text
        labels = set(re.findall(r'num_requests_running{engine="(\d)"', page))
        assert labels == {"0", "1"}
        asyncio.run(until_the_end(url, program, bodies, expected))
        assert program.wait(90) == 0
    finally:
        program.kill()
    deadline = time.monotonic() + 20
    while list(descendants(program.pid)) and time.monotonic() < deadline:
        time.sleep(0.5)


async def under_load(url: str, pid: int, bodies: list[dict[str, Any]], expected: list[str]) -> None:
    """Ask for everything, half of it as streams; kill a replica once it is at work."""
    lost = 0
    begun: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:

        async def whole(body: dict[str, Any]) -> str | None:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        async def streamed(body: dict[str, Any]) -> str | None:
            text = ""
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            assert event["error"]["code"] == "replica_lost"
                            return None
                        text += event["choices"][0]["text"] if event["choices"] else ""
                        begun.append(len(text))
            return text

        ways = [whole, streamed]
        tasks = [asyncio.create_task(ways[i % 2](body)) for i, body in enumerate(bodies)]
        while len(begun) < 30:  # streams are well under way
            await asyncio.sleep(0.05)
        os.kill(replicas(pid)[0], signal.SIGKILL)
        killed = time.monotonic()
        later = await whole(bodies[0])
        print(f"a new request was answered {time.monotonic() - killed:.1f} s after the kill")
        assert later == expected[0] and time.monotonic() - killed < 15
        texts = await asyncio.gather(*tasks)
    for text, right in zip(texts, expected, strict=True):
        lost += text is None
        assert text is None or text == right
    print(f"{lost} of {len(texts)} requests were lost: streams that the killed replica had begun")
    assert lost <= len(texts) // 2


async def until_the_end(url: str, program: subprocess.Popen[str], bodies: list[Any], expected: list[str]) -> None:
    """Connections are used again and again; then a SIGTERM while requests are under way."""
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:

        async def ask(number: int) -> None:
            answer = await client.post("/v1/completions", json=bodies[number])
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected[number]

        for first in range(0, len(bodies), 5):
            await asyncio.gather(*[ask(number) for number in range(first, first + 5)])
        last = [asyncio.create_task(ask(number)) for number in range(4)]
        await asyncio.sleep(0.5)
        program.send_signal(signal.SIGTERM)
        await asyncio.gather(*last)


def wait_for_return(pid: int, first: list[int]) -> float:
    """Seconds until there are two replicas again."""
    began = time.monotonic()
    while not (len(now := replicas(pid)) == 2 and set(now) != set(first)):
        assert time.monotonic() - began < 90
        time.sleep(0.5)
    time.sleep(15)  # until it has loaded its model and sent its metrics
    return time.monotonic() - began - 15
