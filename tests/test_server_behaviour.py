"""The server when clients leave, queue up, wait too long or send nonsense; when the engine fails; when it is to end."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from serving import LONG, Serving, serving
from waiting import PATIENCE_S, wait_for

from skipstone import LLM, SamplingParams
from skipstone.cli.main import load_command
from skipstone.cli.options import Parser, resolve
from skipstone.cli.serve import listen
from skipstone.errors import ConfigError, RequestError
from skipstone.server import engine_thread, generation
from skipstone.server import log as server_log
from skipstone.server.config import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
KEY = "a-secret-key"
PROMPT = "A virtual table is an object that"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """Places for two, one more may wait; the proposer looks up text."""
    options = {"max_queue": 1, "max_body_bytes": 20_000, "request_timeout": PATIENCE_S}
    with serving(server=options, max_num_seqs=2, spec="ngram:4") as running:
        yield running
        wait_for(lambda: running.idle)
        running.service.llm.engine.scheduler.check()


def steps(server: Serving) -> int:
    return server.service.llm.engine.stats.steps


def aborts(server: Serving) -> int:
    """How many choices have been aborted so far."""
    found = re.search(r'finished_reason="abort".*} (\d+)\.0', server.get("/metrics").text)
    assert found is not None
    return int(found[1])


def long_streams(server: Serving, client: openai.OpenAI, count: int) -> list[Any]:
    """Streams under way that would go on for long."""
    streams = []
    for _ in range(count):
        stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, **LONG)
        next(iter(stream))
        streams.append(stream)
    return streams


class TestClientsThatLeave:
    def test_from_a_stream(self, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, aborted = server.service.llm.engine.runner, aborts(server)
        start = runner.start

        def slow(plan: Any) -> Any:
            time.sleep(0.05)
            return start(plan)

        monkeypatch.setattr(runner, "start", slow)  # so that a hundred steps are long even for a busy machine
        (stream,) = long_streams(server, server.client(), 1)
        assert server.service.llm.engine.pool.num_used > 0
        before = steps(server)
        stream.close()
        wait_for(lambda: server.idle and aborts(server) == aborted + 1)
        assert steps(server) - before < 100

    def test_while_they_wait_for_a_whole_answer(self, server: Serving) -> None:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        body = json.dumps({"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_for(lambda: server.service.llm.engine.pool.num_used > 0)
        aborted = aborts(server)
        connection.close()
        wait_for(lambda: server.idle and aborts(server) == aborted + 1)

    def test_an_abort_takes_effect_before_the_next_step(self, server: Serving) -> None:
        engine, started, seen = server.service.engine, threading.Event(), []
        (stream,) = long_streams(server, server.client(), 1)
        abort = engine._abort

        def watched(generation: Any) -> None:
            abort(generation)
            seen.append((steps(server), server.service.llm.engine.pool.num_used))
            started.set()

        engine._abort = watched  # type: ignore[method-assign]
        try:
            stream.close()
            assert started.wait(PATIENCE_S)
        finally:
            engine._abort = abort  # type: ignore[method-assign]
        time.sleep(0.1)
        assert seen == [(steps(server), 0)]

    def test_others_are_not_disturbed(self, server: Serving) -> None:
        expected = LLM("demo", spec="off").generate([PROMPT], SamplingParams(max_tokens=40, seed=1), progress=False)[0]
        (stream,) = long_streams(server, server.client(), 1)
        closing = threading.Timer(0.2, stream.close)
        closing.start()
        answer = server.client().completions.create(
            model="demo", prompt=PROMPT, max_tokens=40, seed=1, temperature=1, top_p=1
        )
        assert answer.choices[0].text == expected.outputs[0].text
        closing.join()
        wait_for(lambda: server.idle)

    def test_cancelled_tasks(self, server: Serving) -> None:
        async def ask() -> None:
            async with server.async_client() as client:
                call = asyncio.create_task(client.completions.create(model="demo", prompt=PROMPT, **LONG))
                await asyncio.to_thread(wait_for, lambda: server.service.llm.engine.pool.num_used > 0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call

        aborted = aborts(server)
        asyncio.run(ask())
        wait_for(lambda: server.idle and aborts(server) == aborted + 1)


class TestLimits:
    def test_a_full_queue_is_429_and_says_when_to_come_back(self, server: Serving) -> None:
        client = server.client()
        streams = long_streams(server, client, 2)
        waiting = threading.Thread(
            target=lambda: client.completions.create(model="demo", prompt="a", max_tokens=1), daemon=True
        )
        waiting.start()
        wait_for(lambda: server.service.stats().waiting == 1)
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model="demo", prompt="a", max_tokens=1)
        assert raised.value.code == "queue_full"
        assert int(raised.value.response.headers["retry-after"]) >= 1
        page = server.get("/metrics").text
        assert re.search(r"vllm:num_requests_running{.*} 2.0", page)
        assert re.search(r"vllm:num_requests_waiting{.*} 1.0", page)
        for stream in streams:
            stream.close()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert client.completions.create(model="demo", prompt="a", max_tokens=1).choices

    def test_the_advice_when_to_come_back_follows_what_requests_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a clock under which an answer takes minutes."""
        clock = SimpleNamespace(perf_counter=lambda: 10_000 * time.perf_counter())
        for module in (engine_thread, generation):
            monkeypatch.setattr(module, "time", clock)
        with serving(server={"max_queue": 0}, max_num_seqs=1) as server:
            client, waits = server.client(), []
            for _ in range(2):
                (stream,) = long_streams(server, client, 1)
                with pytest.raises(openai.RateLimitError) as raised:
                    client.completions.create(model="demo", prompt="a", max_tokens=1)
                waits.append(int(raised.value.response.headers["retry-after"]))
                stream.close()
                wait_for(lambda: server.idle)
                client.completions.create(model="demo", prompt=PROMPT, max_tokens=20)
                wait_for(lambda: server.idle)
        assert waits[0] == 1 and 5 <= waits[1] <= 60

    def test_more_choices_than_ever_fit(self, server: Serving) -> None:
        with pytest.raises(openai.BadRequestError, match="4 texts are more than the 3"):
            server.client().completions.create(model="demo", prompt="a", n=4)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_long_body_is_413(self, server: Serving, chunked: bool) -> None:
        body = json.dumps({"prompt": "a" * 30_000}).encode()
        content: Any = (body[i : i + 1000] for i in range(0, len(body), 1000)) if chunked else body
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + "/v1/completions", content=content, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 413 and "20000 bytes" in answer.json()["error"]["message"]

    def test_time_is_limited(self) -> None:
        with serving(server={"request_timeout": 0.5}) as server:
            client = server.client()
            with pytest.raises(openai.APIStatusError) as raised:
                client.completions.create(model="demo", prompt=PROMPT, **LONG)
            assert raised.value.status_code == 408 and raised.value.code == "request_timeout"
            with pytest.raises(openai.APIError, match=r"0.5 seconds") as broken:
                list(client.completions.create(model="demo", prompt=PROMPT, stream=True, **LONG))
            assert broken.value.code == "request_timeout"
            wait_for(lambda: server.idle)


MALFORMED: dict[str, tuple[bytes, str | None, int, str]] = {  # body, content type, status, code
    "nothing": (b"", "application/json", 400, "invalid_json"),
    "cut off": (b'{"prompt": "a"', "application/json", 400, "invalid_json"),
    "two": (b'{"prompt": "a"} {}', "application/json", 400, "invalid_json"),
    "a list": (b'["a"]', "application/json", 400, "invalid_type"),
    "a number": (b"3", "application/json", 400, "invalid_type"),
    "null": (b"null", "application/json", 400, "invalid_type"),
    "no UTF-8": (b'{"prompt": "\xff"}', "application/json", 400, "invalid_json"),
    "half a pair": (b'{"prompt": "\\ud800"}', "application/json", 400, "invalid_json"),
    "nan": (b'{"prompt": "a", "temperature": NaN}', "application/json", 400, "invalid_json"),
    "too large a number": (b'{"prompt": "a", "temperature": 1e999}', "application/json", 400, "invalid_json"),
    "a huge whole number": (b'{"prompt": "a", "seed": 1' + b"0" * 60 + b"}", "application/json", 400, "invalid_value"),
    "deep": (b"[" * 9000, "application/json", 400, "invalid_json"),
    "deep prompt": (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "application/json", 400, "invalid_type"),
    "nothing asked": (b"{}", "application/json", 400, "missing_required_parameter"),
    "null prompt": (b'{"prompt": null}', "application/json", 400, "invalid_type"),
    "form": (b"prompt=a", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
    "no type": (b'{"prompt": "a"}', None, 415, "unsupported_media_type"),
    "odd field": (b'{"prompt": "a", "\\u0000\\"`": 1}', "application/json", 400, "unknown_parameter"),
    "zero byte": (b'{"prompt": "a\x00"}', "application/json", 400, "invalid_json"),
    "long name": (b'{"prompt": "a", "' + b"x" * 5000 + b'": 1}', "application/json", 400, "unknown_parameter"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies(server: Serving, name: str) -> None:
    body, kind, status, code = MALFORMED[name]
    headers = {"content-type": kind} if kind else {}
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.content) < 1000


class TestPrediction:
    def test_it_is_looked_up_and_counted(self, server: Serving) -> None:
        client = server.client()
        options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 40}
        talk: Any = [{"role": "user", "content": "What does zip() do?"}]
        plain = client.chat.completions.create(messages=talk, **options)
        text = plain.choices[0].message.content
        assert text is not None and plain.usage is not None and plain.usage.completion_tokens_details is None
        guided = client.chat.completions.create(
            messages=talk, prediction={"type": "content", "content": text}, **options
        )
        assert guided.choices[0].message.content == text
        assert guided.usage is not None and guided.usage.completion_tokens_details is not None
        details = guided.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens or 0) >= 25
        assert guided.usage.completion_tokens == plain.usage.completion_tokens
        speculation = (guided.model_extra or {})["metrics"]["speculative_decoding"]
        assert details.accepted_prediction_tokens == speculation["num_accepted_draft_tokens"]
        assert details.rejected_prediction_tokens == (
            speculation["num_draft_tokens"] - speculation["num_accepted_draft_tokens"]
        )

    def test_a_wrong_one_changes_nothing(self, server: Serving) -> None:
        client = server.client()
        options: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "seed": 3, "max_tokens": 20}
        plain = client.completions.create(**options)
        extra = {"prediction": {"type": "content", "content": [{"type": "text", "text": "no such words at all"}]}}
        guided = client.completions.create(**options, extra_body=extra)
        assert guided.choices[0].text == plain.choices[0].text
        assert guided.usage and guided.usage.completion_tokens_details
        assert (guided.usage.completion_tokens_details.rejected_prediction_tokens or 0) > 0


class TestFaults:
    def fail_once(self, server: Serving, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        """The next steps raise in the middle of their work."""
        runner = server.service.llm.engine.runner
        start, left = runner.start, [times]

        def broken(plan: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise ValueError("out of luck, at /secret/path")
            return start(plan)

        monkeypatch.setattr(runner, "start", broken)

    def test_a_failed_step_ends_what_ran_and_nothing_else(
        self, server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = server.client()
        (stream,) = long_streams(server, client, 1)
        self.fail_once(server, monkeypatch)
        with pytest.raises(openai.APIError) as broken:
            list(stream)
        assert broken.value.code == "engine_error" and "secret" not in str(broken.value.body)
        self.fail_once(server, monkeypatch)
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(model="demo", prompt="a", extra_headers={"X-Request-Id": "here"})
        assert "here" in raised.value.message and "secret" not in raised.value.message
        assert any("step failed" in record.message and record.exc_info for record in caplog.records)
        wait_for(lambda: server.idle)
        assert client.completions.create(model="demo", prompt="a", max_tokens=2).choices
        assert server.get("/health").status_code == 200

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("fault", "status"), [(RequestError("n=3 is no good"), 400), (KeyError("secret"), 500)])
    def test_a_job_of_which_a_part_cannot_be_added_leaves_nothing(
        self, fault: Exception, status: int, stream: bool, server: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = server.service.llm
        add, given = llm.add, []

        def broken(prompt: Any, *rest: Any) -> Any:
            given.append(prompt)
            if len(given) == 3:
                raise fault
            return add(prompt, *rest)

        monkeypatch.setattr(llm, "add", broken)
        before = llm.stats()["output_tokens"]
        answer = server.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 200, "stream": stream})
        assert (answer.status_code, len(given)) == (status, 3)
        assert "secret" not in answer.text
        wait_for(lambda: server.idle)
        assert llm.stats()["output_tokens"] == before
        assert server.client().completions.create(model="demo", prompt="a", max_tokens=2).choices

    def test_an_engine_that_goes_on_failing_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving() as server:
            self.fail_once(server, monkeypatch, times=99)
            codes = [server.post("/v1/completions", {"prompt": "a"}).status_code for _ in range(3)]
            assert codes == [500, 500, 500]
            wait_for(lambda: server.service.engine.dead is not None)  # the last answer may be here before
            assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
            health = server.get("/health")
            assert health.status_code == 503 and "ValueError" in health.json()["detail"]
            assert server.get("/ready").status_code == 503

    def test_a_fault_of_a_handler(
        self, server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(name: Any) -> None:
            raise KeyError("secret")

        monkeypatch.setattr(server.service, "check_model", broken)
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"
        assert "secret" not in answer.text and "secret" in caplog.text


@pytest.fixture(scope="module")
def locked() -> Iterator[Serving]:
    options = {"api_key": ["other", KEY], "cors_origin": "https://page.example", "served_model_name": "mine"}
    with serving(server=options) as running:
        yield running


class TestKeysAndOrigins:
    def test_keys(self, locked: Serving) -> None:
        assert locked.client(api_key=KEY).models.list().data[0].id == "mine"
        for key in ("wrong", KEY + "x", "\u00e9".encode().decode("latin-1")):
            answer = locked.get("/v1/models", headers={"authorization": f"Bearer {key}".encode("latin-1")})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for headers in ({}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                assert locked.get(path, headers=headers).status_code == 401
        assert locked.post("/v1/completions", {"prompt": "a"}).status_code == 401
        assert locked.get("/health").status_code == locked.get("/ready").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            locked.client(api_key="wrong").completions.create(model="mine", prompt="a")

    def test_the_document_asks_for_one(self, locked: Serving) -> None:
        document = locked.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
        assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]

    def test_only_named_origins(self, locked: Serving, server: Serving) -> None:
        for origin, allowed in (("https://page.example", True), ("https://other.example", False)):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            answer = httpx.options(locked.url + "/v1/completions", headers=headers, timeout=PATIENCE_S)
            assert ("access-control-allow-origin" in answer.headers) == allowed
        answer = server.get("/v1/models", headers={"origin": "https://page.example"})
        assert "access-control-allow-origin" not in answer.headers

    def test_only_its_own_name(self, locked: Serving) -> None:
        with pytest.raises(openai.NotFoundError):
            locked.client(api_key=KEY).completions.create(model="demo", prompt="a")


class TestLog:
    @pytest.fixture
    def lines(self, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
        with caplog.at_level(logging.INFO, "skipstone"):
            yield caplog

    def test_a_line_per_request_without_its_content(self, server: Serving, lines: pytest.LogCaptureFixture) -> None:
        server.post("/v1/completions", {"prompt": "hidden words", "max_tokens": 3}, headers={"x-request-id": "r1"})
        server.get("/health")
        server.get("/metrics")
        wait_for(lambda: any(getattr(record, "request_id", "") == "r1" for record in lines.records))
        assert not any(getattr(record, "path", "") in ("/health", "/metrics") for record in lines.records)
        (record,) = [record for record in lines.records if getattr(record, "request_id", "") == "r1"]
        fields = server_log.fields_of(record)
        assert fields["status"] == 200 and fields["completion_tokens"] <= 3
        assert "hidden" not in server_log.JsonFormatter().format(record)
        line = server_log.PairsFormatter().format(record)
        assert "event=request" in line and "request_id=r1" in line and "path=/v1/completions" in line

    def test_prompts_when_asked_for(self, lines: pytest.LogCaptureFixture) -> None:
        with serving(server={"log_requests": True}) as server:
            server.post("/v1/completions", {"prompt": "shown words", "max_tokens": 1, "user": "u"})
        (record,) = [record for record in lines.records if hasattr(record, "user")]
        fields = json.loads(server_log.JsonFormatter().format(record))
        assert fields["prompt"] == "shown words" and fields["user"] == "u"

    def test_odd_values_stay_on_their_line(self) -> None:
        record = logging.LogRecord("skipstone", logging.INFO, "", 0, "two words", None, None)
        record.path = 'a"\nlevel=error'
        line = server_log.PairsFormatter().format(record)
        assert "\n" not in line and 'event="two words"' in line and r'path="a\"\nlevel=error"' in line


class TestCommand:
    """The program as a user starts it."""

    def start(self, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        """The running server and its address."""
        command = [sys.executable, "-m", "skipstone", "serve", "demo", "--port", "0", "--log-format", "json"]
        program = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        assert program.stderr is not None
        for line in program.stderr:
            if line.startswith("{"):
                ready = json.loads(line)
                assert ready["event"] == "ready"
                return program, ready["url"]
        raise AssertionError("the server did not start")

    def test_sigterm_drains(self) -> None:
        program, url = self.start("--shutdown-timeout", str(PATIENCE_S), SKIPSTONE_API_KEY=KEY)
        client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
        extra = {"ignore_eos": True}
        stream = client.completions.create(model="demo", prompt="a", max_tokens=300, stream=True, extra_body=extra)
        events = iter(stream)
        next(events)
        program.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(url + "/ready", timeout=PATIENCE_S).status_code == 503)
        assert httpx.get(url + "/health", timeout=PATIENCE_S).json()["status"] == "draining"
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(model="demo", prompt="a")
        assert raised.value.code == "draining" and raised.value.response.headers["retry-after"]
        assert [event.choices[0].finish_reason for event in events][-1] == "length"
        assert program.wait(PATIENCE_S) == 0
        assert program.stderr is not None
        log = program.stderr.read()
        assert KEY not in log and '"ended"' in log and "Traceback" not in log

    def test_a_second_signal_aborts(self) -> None:
        program, url = self.start()
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        stream = iter(client.completions.create(model="demo", prompt="a", stream=True, **LONG))
        next(stream)
        program.send_signal(signal.SIGINT)
        wait_for(lambda: httpx.get(url + "/ready", timeout=PATIENCE_S).status_code == 503)
        program.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError) as raised:
            list(stream)
        assert raised.value.code == "draining"
        assert program.wait(PATIENCE_S) == 130

    def test_a_port_in_use(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=f"port={port} cannot be used"):
                listen(ServerConfig(port=port))
        with pytest.raises(ConfigError, match=r"host=no\.such\.host\.invalid"):
            listen(ServerConfig(host="no.such.host.invalid"))

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--replicas", "2"], "replicas=2 and max_replicas=None need Ray Serve; pass --ray"),
            (["--max-replicas", "2"], "need Ray Serve; pass --ray"),
            (["--ray", "--replicas", "3", "--max-replicas", "2"], "max_replicas=2 is less than replicas=3"),
        ],
    )
    def test_replicas_that_do_not_fit(self, flags: list[str], words: str) -> None:
        command = load_command("serve")
        args = Parser("serve", command).parse(["demo", *flags])
        with pytest.raises(ConfigError, match=re.escape(words)):
            command.run(args, resolve(command, args, {}))

    def test_options_come_from_one_definition(self, tmp_path: Path) -> None:
        command = load_command("serve")
        (tmp_path / "options.yaml").write_text("max_queue: 7\nspec: ngram:2\n")
        arguments = ["demo", "--config", str(tmp_path / "options.yaml"), "--max-body-bytes", "1M"]
        args = Parser("serve", command).parse(arguments)
        settings = resolve(command, args, {"SKIPSTONE_API_KEY": KEY, "SKIPSTONE_PORT": "1234"})
        values = [settings.values[name] for name in ("max_queue", "spec", "max_body_bytes", "port", "api_key")]
        assert values == [7, "ngram:2", 1 << 20, 1234, KEY]
        assert KEY not in settings.describe() and "# api_key: given, not shown" in settings.describe()
        assert 'model: "demo"' in settings.describe()
