"""The acceptance list of specs/ecosystem.md, section 9, as far as it is about the server: a test for each line.

Lines that have a file of their own are checked to be there.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import LONG, serving
from waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
CHECKPOINTS = ROOT / "checkpoints"
pytestmark = pytest.mark.skipif(
    not any((CHECKPOINTS / "demo").glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
SPECS = {
    "off": "off",
    "ngram": "ngram:4",
    "mtp": "mtp:3",
    "eagle3": f"eagle3:{CHECKPOINTS / 'demo-eagle3'}:3",
    "dflash": f"dflash:{CHECKPOINTS / 'demo-dflash'}:4",
}
# Where each line of the list is tested: functions here, or files.
ITEMS: dict[str, list[str]] = {
    "2 the client's calls, the same for every proposer": ["TestCalls.test_forty_calls"],
    "3 schemathesis, malformed bodies": ["test_server_schema.py", "test_server_behaviour.py::test_malformed_bodies"],
    "4 log-probabilities": [
        "test_server.py::test_logprobs",
        "test_server.py::test_echo_with_logprobs_scores_the_prompt",
    ],
    "5 the counts of a bench client are those of the server": ["test_bench_serve.py", "test_counts_agree"],
    "6 SIGINT": ["test_server_behaviour.py::test_a_second_signal_aborts"],
    "6 SIGTERM": ["test_server_behaviour.py::test_sigterm_drains"],
    "6 SIGKILL of the parent, worker crash": ["TestEnds.test_no_process_outlives_sigkill"],
    "6 client vanishing": ["test_server_behaviour.py::test_from_a_stream"],
    "6 port in use": ["TestEnds.test_port_in_use"],
    "6 full queue": ["test_server_behaviour.py::test_a_full_queue_is_429_and_says_when_to_come_back"],
    "6 a body of 8 MB": ["test_a_body_of_eight_megabytes"],
    "6 files missing or cut off": ["TestEnds.test_damaged_models"],
    "7 the page in Chromium": ["test_page.py"],
    "10 error codes are in the docs": ["test_every_error_code_is_in_the_docs"],
    "10 flags are in the docs": ["test_cli_docs.py"],
}


@pytest.mark.parametrize("item", ITEMS)
def test_the_list(item: str) -> None:
    for place in ITEMS[item]:
        file, _, name = (
            place.rpartition("::") if "::" in place else (place, "", "") if ".py" in place else ("", "", place)
        )
        source = (TESTS / file).read_text() if file else Path(__file__).read_text()
        names = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert not name or name.rpartition(".")[2] in names


# ---- 2


TALK: list[Any] = [{"role": "user", "content": "What does zip() do?"}]
PROMPT = "A virtual table is an object that"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
Call = Callable[[openai.OpenAI], Any]


def complete(**options: Any) -> Call:
    defaults = {"model": "demo", "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
    return lambda client: client.completions.create(**defaults | options)


def chat(**options: Any) -> Call:
    defaults = {"model": "demo", "messages": TALK, "max_tokens": 10, "temperature": 0}
    return lambda client: client.chat.completions.create(**defaults | options)


CALLS: dict[str, Call] = {
    "plain": complete(),
    "ids": complete(prompt=[5, 6, 7]),
    "prompts": complete(prompt=[PROMPT, "def f("]),
    "lists of ids": complete(prompt=[[5, 6], [7, 8]]),
    "n": complete(n=2, temperature=1, seed=3),
    "echo": complete(echo=True),
    "echo and logprobs": complete(echo=True, logprobs=1, max_tokens=1),
    "logprobs": complete(logprobs=2),
    "stop": complete(stop=[" the"]),
    "stop kept": complete(stop=["e"], extra_body={"include_stop_str_in_output": True}),
    "stop ids": complete(extra_body={"stop_token_ids": [271]}),
    "penalties": complete(presence_penalty=1, frequency_penalty=1),
    "repetition": complete(extra_body={"repetition_penalty": 1.2}),
    "bias": complete(logit_bias={"308": -100}),
    "min tokens": complete(extra_body={"min_tokens": 5, "ignore_eos": True}),
    "seed": complete(temperature=1, seed=7),
    "top p": complete(temperature=1, seed=7, top_p=0.5),
    "top k": complete(temperature=1, seed=7, extra_body={"top_k": 5}),
    "min p": complete(temperature=1, seed=7, extra_body={"min_p": 0.1}),
    "stream": complete(stream=True),
    "stream with n": complete(stream=True, n=2, temperature=1, seed=1),
    "stream with usage": complete(stream=True, stream_options={"include_usage": True}),
    "stream with logprobs": complete(stream=True, logprobs=1),
    "user": complete(user="me"),
    "no drafts": complete(extra_body={"speculation": {"k": 0}}),
    "regex": complete(extra_body={"structured_outputs": {"regex": "[a-z]{3} [0-9]{2}"}}),
    "choice": complete(extra_body={"structured_outputs": {"choice": ["one", "two"]}}),
    "grammar": complete(extra_body={"structured_outputs": {"grammar": 'start: "a" /[bc]+/ "d"'}}),
    "chat": chat(),
    "chat stream": chat(stream=True),
    "chat usage": chat(stream=True, stream_options={"include_usage": True}),
    "chat logprobs": chat(logprobs=True, top_logprobs=2),
    "chat n": chat(n=2, temperature=0.8, seed=4),
    "chat stop": chat(stop="."),
    "chat limit": chat(max_tokens=None, max_completion_tokens=4),
    "chat turns": chat(messages=[*TALK, {"role": "assistant", "content": "It zips."}, *TALK]),
    "chat system": chat(messages=[{"role": "system", "content": "Be short."}, *TALK]),
    "json object": chat(response_format={"type": "json_object"}, max_tokens=16),
    "json schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    "tool": chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=40),
    "named tool": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=40),
    "tool stream": chat(tools=[TOOL], tool_choice="required", stream=True, max_tokens=40, parallel_tool_calls=False),
    "tool auto": chat(tools=[TOOL]),
}
REFUSED: dict[str, tuple[Call, type[openai.APIStatusError]]] = {
    "another model": (complete(model="gpt-9"), openai.NotFoundError),
    "temperature": (complete(temperature=-1), openai.BadRequestError),
    "too long": (complete(max_tokens=99999), openai.BadRequestError),
    "roles": (chat(messages=[{"role": "robot", "content": "a"}]), openai.BadRequestError),
}


def contents(answer: Any) -> Any:
    """What the model has said, without ids and times."""
    events = [answer] if hasattr(answer, "choices") else list(answer)
    said: dict[int, list[Any]] = {}
    for event in events:
        for choice in event.choices:
            message = getattr(choice, "message", None) or getattr(choice, "delta", None)
            parts = said.setdefault(choice.index, ["", "", None])
            parts[0] += (message.content or "") if message else choice.text
            for call in (message.tool_calls or []) if message else []:
                parts[1] += (call.function.name or "") + call.function.arguments
            parts[2] = choice.finish_reason or parts[2]
    return said


def everything(spec: str) -> dict[str, Any]:
    """Each call's content on a server with this proposer, and the async client's for some."""
    with serving(spec=SPECS[spec]) as server:
        client = server.client()
        found = {name: contents(call(client)) for name, call in CALLS.items()}
        for call, error in REFUSED.values():
            with pytest.raises(error):
                call(client)

        async def at_once() -> list[Any]:
            async with server.async_client() as client:
                calls = [
                    client.completions.create(model="demo", prompt=PROMPT, max_tokens=10, temperature=0)
                    for _ in range(6)
                ]
                return list(await asyncio.gather(*calls))

        for i, answer in enumerate(asyncio.run(at_once())):
            found[f"at once {i}"] = contents(answer)
        stats = server.service.stats()
        assert (stats.drafted_tokens > 0) == (spec != "off")
        wait_for(lambda: server.idle)
        return found


class TestCalls:
    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls) -> dict[str, Any]:
        """Without drafts."""
        return everything("off")

    def test_there_are_forty(self) -> None:
        assert len(CALLS) + len(REFUSED) >= 40

    @pytest.mark.parametrize("spec", [name for name in SPECS if name != "off"])
    def test_forty_calls(self, plain: dict[str, Any], spec: str) -> None:
        for name, content in everything(spec).items():
            assert content == plain[name], name


# ---- 5


def test_counts_agree() -> None:
    """Answers, /metrics and /v1/stats count the same drafts."""
    with serving(spec="mtp:3") as server:
        drafted = accepted = 0
        for seed in range(4):
            answer = complete(max_tokens=30, temperature=0.8, seed=seed)(server.client())
            found = answer.model_extra["metrics"]["speculative_decoding"]
            drafted += found["num_draft_tokens"]
            accepted += found["num_accepted_draft_tokens"]
        stats, page = server.get("/v1/stats").json(), server.get("/metrics").text
        assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (drafted, accepted)
        for name, value in (("num_draft_tokens", drafted), ("num_accepted_tokens", accepted)):
            assert re.search(rf"vllm:spec_decode_{name}_total{{.*}} {value}\.0", page)


# ---- 6


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "skipstone", "serve", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


class TestEnds:
    @pytest.fixture(scope="class")
    @classmethod
    def taken(cls) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as other:
            yield other.getsockname()[1]

    def test_port_in_use(self, taken: int) -> None:
        """Found out before the model is loaded; the last line says what to do."""
        program = start("demo", "--port", str(taken))
        _, errors = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 2
        assert f"port={taken}" in errors.splitlines()[-1] and "--port" in errors.splitlines()[-1]
        assert "loading" not in errors and "Traceback" not in errors

    @pytest.mark.parametrize("damage", ["no folder", "no weights", "cut off"])
    def test_damaged_models(self, tmp_path: Path, damage: str) -> None:
        folder = tmp_path / "model"
        if damage != "no folder":
            folder.mkdir()
            for file in (CHECKPOINTS / "demo").iterdir():
                target = folder / file.name
                if file.suffix == ".safetensors" and damage == "no weights":
                    continue
                content = file.read_bytes()
                target.write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
        program = start(str(folder), "--port", "0")
        _, errors = program.communicate(timeout=PATIENCE_S)
        assert program.returncode != 0 and "Traceback" not in errors
        assert str(folder) in errors.splitlines()[-1]

    def test_no_process_outlives_sigkill(self) -> None:
        """Beside the server runs what tries grammars, and that ends with it; the port is free at once."""
        program = start("demo", "--port", "0", "--log-format", "json")
        assert program.stderr is not None
        ready = next(json.loads(line) for line in program.stderr if line.startswith("{"))
        url = ready["url"]
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(program.pid)], capture_output=True, text=True)
        children = [int(pid) for pid in listed.stdout.split()]
        assert len(children) <= 1
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        stream = iter(client.completions.create(model="demo", prompt="a", stream=True, **LONG))
        next(stream)
        program.send_signal(signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        assert program.wait(PATIENCE_S) == -signal.SIGKILL
        address = ("127.0.0.1", int(url.rpartition(":")[2]))

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(address) == 0 and probe.getsockname() != address  # not with itself

        wait_for(lambda: not listens() and not any(map(runs, children)))


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_body_of_eight_megabytes() -> None:
    """As long as allowed: an answer that names the field; a byte more: 413. The server goes on."""
    with serving() as server:
        limit = server.service.config.max_body_bytes
        assert limit == 8 << 20
        start_of, end_of = b'{"prompt": "', b'", "max_tokens": 1}'
        for size, status in ((limit, 400), (limit + 1, 413)):
            body = start_of + b"a " * ((size - len(start_of) - len(end_of)) // 2)
            body += b"a" * (size - len(body) - len(end_of)) + end_of
            assert len(body) == size
            headers = {"content-type": "application/json"}
            answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == status and len(answer.content) < 1000
        assert answer.json()["error"]["code"] == "body_too_large"
        assert contents(complete(max_tokens=1)(server.client()))


# ---- 10


def test_every_error_code_is_in_the_docs() -> None:
    source = "".join(file.read_text() for file in (ROOT / "skipstone" / "server").rglob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', source))
    codes |= set(re.findall(r'"((?:invalid|missing|unknown|unsupported)_[a-z_]+)"', source)) - {"invalid_request_error"}
    page = (ROOT / "docs" / "server.md").read_text()
    assert len(codes) >= 15
    assert {code for code in codes if f"`{code}`" not in page} == set()
