"""What clients can do to a server beside ordinary requests: huge bodies, half requests, too many connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Serving, serving
from waiting import PATIENCE_S, slowness, wait_for

from skipstone.server import http_connection
from skipstone.server.api.decode import num_values
from skipstone.server.api.errors import SLOWEST
from skipstone.server.http_connection import LONGEST_HEAD, room_for_connections
from skipstone.server.service import MOST_BODIES

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
FILES = 256
CLIENT_S = 3.0  # that clients may take; those of these tests must not be held up for so long where they go on
SLOWEST_HEALTH_S = 0.5
MANY = 1_500_000


class Program:
    """The server as a user starts it, with few descriptors."""

    def __init__(self, log: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "skipstone", "serve", "demo", "--port", "0", "--log-format", "json", *flags]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
            )
        wait_for(lambda: '"event": "ready"' in log.read_text())
        found = re.search(r'"url": "http://([^"]+)"', log.read_text())
        assert found is not None
        self.address = found[1]
        self.host, port = self.address.split(":")
        self.port = int(port)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE_S)

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def busy(self) -> float:
        """Seconds of processor time that the server has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def health(self) -> tuple[float, float]:
        """Seconds until the server has said that it lives, and for how many of them it was at work."""
        begun, busy = time.perf_counter(), self.busy()
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        return time.perf_counter() - begun, self.busy() - busy

    def memory(self, what: str = "VmRSS") -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{what}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ask for its health all the while; every answer must come in time.

        What a busy machine makes of it does not count: an answer is late that the server itself has held up.
        """
        ended, times, limit = threading.Event(), list[tuple[float, float]](), SLOWEST_HEALTH_S * slowness()
        faults: list[Exception] = []

        def ask() -> None:
            while not (ended.is_set() or faults):
                try:
                    times.append(self.health())
                except Exception as fault:
                    faults.append(fault)
                time.sleep(0.02)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            ended.set()
            asking.join()
        late = [(wall, busy) for wall, busy in times if wall > limit and busy > limit / 2]
        assert times and not late and not faults, (late, faults)
        assert max(times)[0] < PATIENCE_S / 10


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("server") / "log", "--client-timeout", str(CLIENT_S))
    yield program
    program.process.terminate()
    assert program.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in program.log.read_text()


def tools(count: int) -> str:
    function = '{"type": "function", "function": {"name": "f%d", "description": "what it does"}}'
    return "[" + ",".join(function % i for i in range(count)) + "]"


LONG = "a" * 8_300_000
PROMPT = '{"prompt": "%s"}'
FIELD = '{"prompt": "a", "max_tokens": 1, "%s": "%s"}'
TALK = '{"messages": [{"role": "user", "content": "%s"}]}'
TOOLS = '{"messages": [{"role": "user", "content": "a"}], "tools": %s}'
DEEP = "[" * 50_000 + "]" * 50_000
SEVERAL_PROMPTS = json.dumps({"prompt": ["a " * 190_000] * 5, "max_tokens": 1})
HOSTILE: dict[str, tuple[str, Callable[[], str], int, str | None]] = {  # address, body, status, code
    "prompts": ("/v1/completions", lambda: '{"prompt": [' + '"a",' * MANY + '"a"]}', 400, "invalid_json"),
    "fewer prompts": ("/v1/completions", lambda: '{"prompt": [' + '"a",' * 240_000 + '"a"]}', 400, "invalid_value"),
    "lists": ("/v1/completions", lambda: '{"prompt": [' + "[]," * 2_700_000 + "[]]}", 400, "invalid_json"),
    "fewer lists": ("/v1/completions", lambda: '{"prompt": [' + "[1]," * 240_000 + "[1]]}", 400, "invalid_value"),
    "ids": ("/v1/completions", lambda: '{"prompt": [' + "1," * 4_000_000 + "1]}", 400, "context_length_exceeded"),
    "text": ("/v1/completions", lambda: PROMPT % LONG, 400, "context_length_exceeded"),
    "large texts": ("/v1/completions", lambda: SEVERAL_PROMPTS, 400, "context_length_exceeded"),
    "talk": ("/v1/chat/completions", lambda: TALK % LONG, 400, "context_length_exceeded"),
    "messages": (
        "/v1/chat/completions",
        lambda: '{"messages": [' + '{"role":"user","content":"a"},' * 40_000 + '{"role":"user","content":"a"}]}',
        400,
        "context_length_exceeded",
    ),
    "tools": ("/v1/chat/completions", lambda: TOOLS % tools(20_000), 400, "context_length_exceeded"),
    "tools in a template": ("/apply-template", lambda: TOOLS % tools(20_000), 400, "context_length_exceeded"),
    "template": ("/apply-template", lambda: TALK % LONG, 400, "context_length_exceeded"),
    "tokenize": ("/tokenize", lambda: PROMPT % LONG, 400, "context_length_exceeded"),
    "tokenize a talk": ("/tokenize", lambda: TALK % LONG, 400, "context_length_exceeded"),
    "detokenize": ("/detokenize", lambda: '{"tokens": [' + "300," * 2_000_000 + "300]}", 200, None),
    "trace": ("/trace", lambda: '{"tokens": [' + "1," * 4_000_000 + "1]}", 400, "context_length_exceeded"),
    "bias": (
        "/v1/completions",
        lambda: '{"prompt": "a", "logit_bias": {' + ",".join(f'"{i}": 1' for i in range(240_000)) + "}}",
        400,
        "invalid_value",
    ),
    "unknown fields": (
        "/v1/completions",
        lambda: "{" + ",".join(f'"{i}": 1' for i in range(240_000)) + "}",
        400,
        "unknown_parameter",
    ),
    "stop ids": (
        "/v1/completions",
        lambda: '{"prompt": "a", "stop_token_ids": [' + "0," * 10**6 + "0]}",
        400,
        "invalid_value",
    ),
    "stop": ("/v1/completions", lambda: FIELD % ("stop", LONG), 400, "invalid_value"),
    "salt": ("/v1/completions", lambda: FIELD % ("cache_salt", LONG), 200, None),
    "too deep": ("/v1/completions", lambda: f'{{"prompt": {DEEP}}}', 400, "invalid_json"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_hold_nobody_up(program: Program, name: str) -> None:
    """They are refused, or answered, and meanwhile the server says in time that it lives."""
    path, make, status, code = HOSTILE[name]
    body = make().encode()
    with program.watched():
        found, answer = program.post(path, body)
    assert found == status, answer
    if status != 200:
        assert answer["error"]["code"] == code
        assert len(answer["error"]["message"]) < 1000


def test_values_are_counted_as_they_are_read() -> None:
    """What texts contain does not count, however it is escaped."""
    text = '[{"' * 100_000 + "\\"
    body = json.dumps({"prompt": [text, text], "a": [[], {}]}).encode()
    assert num_values(body) == 9
    assert num_values(b"[" + b"[]," * 300_000 + b"1]") == 300_001
    assert num_values(b'["' + b'","' * 300_000 + b'"]') == 300_001


def test_many_large_bodies_take_little_memory(program: Program) -> None:
    body = b'{"prompt": "' + "word \N{SNOWMAN} ".encode() * 900_000 + b'"}'
    before = program.memory()
    with program.watched(), ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: program.post("/v1/completions", body), range(12)))
    assert {(status, answer["error"]["code"]) for status, answer in answers} == {(400, "context_length_exceeded")}
    assert program.memory("VmHWM") - before < 600


class TestHalfRequests:
    def ended(self, program: Program, begin: bytes, further: bytes = b"") -> bytes:
        """What the server says to a client that goes on with the same bytes until the connection ends."""
        said = b""
        with program.connect() as client:
            client.sendall(begin)
            client.settimeout(0.2)
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end:
                try:
                    client.sendall(further)
                    part = client.recv(1000)
                except TimeoutError:
                    continue
                except ConnectionError:
                    return said
                said += part
                if not part:
                    return said
        raise AssertionError("the connection lives on")

    def test_they_are_given_up(self, program: Program) -> None:
        """Headers, drops of headers, a letter, a body, chunks of one; who never asked for anything is told nothing."""
        post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        cases = [
            (b"GET /health HTTP/1.1\r\nhost: a", b""),
            (b"GET /health HTTP/1.1\r\n", b"a: b\r\n"),
            (b"G", b""),
            (post + b"content-length: 100000\r\n\r\n{", b" "),
            (post + b"content-length: 100000\r\n\r\n{", b""),
            (post + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
            (b"", b""),
            (b"", b"\r\n"),
        ]
        with program.watched(), ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(lambda case: self.ended(program, *case), cases))
        for (begin, further), said in zip(cases, answers, strict=True):
            head, _, body = said.partition(b"\r\n\r\n")
            if (head or not further) and begin:  # who is still sending may lose the answer
                assert head.startswith(b"HTTP/1.1 408 "), (begin, said)
                assert json.loads(body)["error"]["code"] == "request_timeout"
        assert answers[-2] == b"" and "a request was not sent in time" in program.log.read_text()

    def test_an_answer_is_not_cut_off(self, program: Program) -> None:
        """The body of a request that was refused at once, still on its way; there must be one answer."""
        head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
        assert self.ended(program, head, b"a").count(b"HTTP/1.1") == 1

    def test_a_slow_client_that_goes_on_is_served(self, program: Program) -> None:
        body = b'{"prompt": "a", "max_tokens": 1' + b" " * int(1.5 * CLIENT_S * 2 * SLOWEST) + b"}"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with program.connect() as client:
            client.sendall(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
            for i in range(0, len(body), 6000):
                client.sendall(body[i : i + 6000])
                time.sleep(0.3)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")

    @pytest.mark.parametrize(
        "begin",
        [
            b"GET /",
            b"GET / HTTP/1.1\r\na: ",
            b"GET / HTTP/1.1\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n1;a=",
        ],
        ids=["address", "header", "headers", "trailers", "name of a chunk"],
    )
    def test_long_heads(self, program: Program, begin: bytes) -> None:
        """Without a key as well: they are refused before anything looks at them."""
        further = b"a: b\r\n" * 10_000 if begin.endswith(b"\n") else b"a" * 60_000
        before, sent = program.memory(), 0
        with program.watched(), program.connect() as client, contextlib.suppress(ConnectionError):
            client.sendall(begin)
            for sent in range(0, 100_000_000, len(further)):  # noqa: B007
                client.sendall(further)
        assert sent < 20_000_000  # what the system keeps for both sides, and one read
        assert program.memory() - before < 50

    def test_a_long_head_has_an_answer(self, program: Program) -> None:
        with program.connect() as client:
            client.sendall(b"GET /health HTTP/1.1\r\na: " + b"a" * LONGEST_HEAD)
            assert client.recv(1000).startswith(b"HTTP/1.1 431 ")


class TestManyConnections:
    def test_idle_ones_give_way(self, program: Program) -> None:
        """More sockets than the process may have; whoever wants something gets it, and the log says why."""
        idle = [program.connect() for _ in range(300)]
        with program.watched():
            assert program.post("/v1/completions", b'{"prompt": "a", "max_tokens": 1}')[0] == 200
            half = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"
            for _ in range(300):
                idle.append(program.connect())
                idle[-1].sendall(half)
            assert program.post("/v1/completions", b'{"prompt": "a", "max_tokens": 1}')[0] == 200
        for one in idle:
            one.close()
        line = next(line for line in program.log.read_text().splitlines() if "too many connections" in line)
        assert json.loads(line)["most"] < FILES and json.loads(line)["level"] == "warning"

    def test_the_number_follows_the_limit_of_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 40)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
        assert room_for_connections(320) == 4096 and room_for_connections(9000) == 18_000
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
        assert 900 < room_for_connections(320) < 950

    def test_when_all_are_at_work_health_is_still_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_connection, "MOST_CONNECTIONS", 4)
        with serving(server={"max_queue": 0}, max_num_seqs=1) as server, contextlib.ExitStack() as feeds:
            most = 4
            for _ in range(most):
                headers = {"accept": "text/event-stream"}
                feed = httpx.stream("GET", server.url + "/v1/stats", headers=headers, timeout=PATIENCE_S)
                feeds.enter_context(feed)
            assert server.get("/health").status_code == server.get("/ready").status_code == 200
            answer = server.get("/v1/models")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_connections"
            assert answer.headers["retry-after"]


def test_all_bodies_together_are_bounded() -> None:
    with serving(server={"max_body_bytes": 10_000}) as server:
        service, scope = server.service, {}
        service.hold(scope, MOST_BODIES * 10_000)
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 429 and answer.headers["retry-after"]
        service.release(scope)
        wait_for(lambda: service.body_bytes == 0)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        wait_for(lambda: service.body_bytes == 0)


def test_who_takes_nothing_is_given_up() -> None:
    """A client that asks again and again, and never reads."""
    with serving(server={"client_timeout": 0.5}) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                client.sendall(request * 100)
                time.sleep(0.01)


DEPTHS = [100, 950, 970, 990, 5000]
TURN = '"messages": [{"role": "user", "content": "a"}]'
DEEP_FIELDS = {
    "prompt": '{"prompt": DEEP}',
    "schema": '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": {"enum": DEEP}}}',
    "schema as text": '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": "DEEP"}}',
    "format": '{"prompt": "a", "max_tokens": 1, "response_format": '
    '{"type": "json_schema", "json_schema": {"schema": {"enum": DEEP}}}}',
    "unsupported": '{"prompt": "a", "guided_json": DEEP}',
    "unknown": '{"prompt": "a", "no_such": DEEP}',
    "variables": "{" + TURN + ', "max_tokens": 1, "chat_template_kwargs": {"a": DEEP}}',
    "tools": "{" + TURN + ', "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f", '
    '"parameters": {"type": "object", "properties": {"a": {"enum": DEEP}}}}}]}',
    "tools and a schema": "{" + TURN + ', "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f"}}], '
    '"structured_outputs": {"json": "DEEP"}}',
    "arguments": '{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": '
    '[{"function": {"name": "f", "arguments": "{\\"a\\": DEEP}"}}]}]}',
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(server={"api_key": ["first", "second"]}) as running:
        yield running


def headers(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"} | more


@pytest.mark.parametrize("name", DEEP_FIELDS)
def test_depth_is_never_a_fault(server: Serving, name: str) -> None:
    for depth in DEPTHS:
        body = DEEP_FIELDS[name].replace("DEEP", "[" * depth + "]" * depth)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = httpx.post(server.url + path, content=body, headers=headers("first"), timeout=PATIENCE_S)
        assert answer.status_code in (200, 400), (depth, answer.text)


class TestOthers:
    def test_requests_of_another_key_are_not_seen(self, server: Serving) -> None:
        body = {"prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        mine = headers("first", **{"x-request-id": "mine"})
        url = server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, headers=mine, timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            listed = {
                key: [card["request_id"] for card in server.get("/slots", headers=headers(key)).json()["requests"]]
                for key in ("first", "second")
            }
            assert listed == {"first": ["mine"], "second": []}
            aborted = [
                server.post("/abort", {"request_id": "mine"}, headers=headers(key)).json()["aborted"]
                for key in ("second", "first")
            ]
            assert aborted == [0, 1]
        wait_for(lambda: server.idle)

    def test_a_salt_keeps_prefixes_apart(self, server: Serving) -> None:
        def cached(salt: str | None) -> int:
            body = {"prompt": list(range(40, 240)), "max_tokens": 1, "cache_salt": salt}
            answer = server.post("/v1/completions", body, headers=headers("first")).json()
            return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)

        assert cached("a long secret") == 0
        assert cached(None) == cached("another") == 0
        assert cached("a long secret") == cached(None) == cached("another") > 100
        answer = server.post("/v1/completions", {"prompt": "a", "cache_salt": ""}, headers=headers("first"))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        (
            {},
            ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"],
            ["a.example", "a.example:8000", "127.0.0.1.a"],
        ),
        ({"allowed_host": "a.example"}, ["a.example", "A.example:80", "localhost:8000"], ["b.example"]),
        ({"allowed_host": "a.example", "api_key": "k"}, ["a.example"], ["b.example"]),
        ({"allowed_host": "*"}, ["b.example"], []),
        ({"api_key": "k"}, ["b.example"], []),
        ({"host": "0.0.0.0"}, ["b.example"], []),
    ],
)
def test_host(options: dict[str, Any], allowed: list[str], refused: list[str], folder: Callable[[str], Path]) -> None:
    with serving(str(folder("m3")), options) as server:
        for host in [*allowed, *refused]:
            answer = server.get("/v1/models", headers=headers("k", host=host))
            assert answer.status_code == (200 if host in allowed else 403), host
            assert server.get("/health", headers={"host": host}).status_code == 200
        if refused:
            error = answer.json()["error"]
            assert error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]
            assert server.get("/", headers={"host": refused[0]}).status_code == 403
