"""Addresses that show what the server does: a token's trace, the state in numbers, the prompt of a conversation."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import LONG, Serving, serving
from waiting import PATIENCE_S, below, wait_for

from skipstone import LLM, SamplingParams
from skipstone.core.request import FinishReason
from skipstone.tools.trace.run import Tracer

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
PROMPT = "A virtual table is an object that presents an SQL interface. " * 30  # more than a sparse layer may read
TALK: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What does zip() do?"}]
SO_FAR: list[Any] = [*TALK, {"role": "assistant", "content": "It pairs "}]
EVENTS = {"accept": "text/event-stream"}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(server={"keep_alive": 0.2}, max_num_seqs=1) as running:
        yield running
        wait_for(lambda: running.idle)


@pytest.mark.parametrize("model", ["demo", "demo-dsa"])
def test_a_trace_is_what_was_read_when_the_text_was_made(model: str) -> None:
    """The oracle watched a run with drafts; the server computes single rows of it anew, with a prefix cache."""
    tracer = Tracer()
    llm = LLM(model, observer=tracer, spec="mtp:3")
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompt = llm.tokenizer.encode(PROMPT) if llm.tokenizer else []
    ids = prompt + llm.generate([prompt], params, progress=False)[0].outputs[0].token_ids
    with serving(model) as server:
        for token in tracer.tokens[:24:5]:
            found = server.post("/trace", {"tokens": ids[: token.position], "top_logprobs": 2}).json()
            assert found["position"] == token.position
            reads = [{"layer": r.layer, "unit": r.unit, "selected": r.selected} for r in token.reads]
            assert found["layers"] == reads and len(reads) >= 5
            assert found["dense_layers"] == ([0] if model == "demo" else [])
            assert found["top_logprobs"][0]["token"] == server.service.token_text(token.token_id)
            assert len(found["top_logprobs"]) == 2
        # The answer may be here before the engine has let go of its blocks.
        wait_for(lambda: server.idle and not server.service.engine._observer.wants_runs)


def test_tracing_disturbs_nobody_and_ends_with_its_request(server: Serving) -> None:
    stream = server.client().completions.create(model="demo", prompt="a", stream=True, **LONG)
    first = next(iter(stream))
    assert first.choices[0].text is not None
    with pytest.raises(httpx.ReadTimeout):  # there is one place, and it is taken
        httpx.post(server.url + "/trace", json={"tokens": [5, 6]}, timeout=httpx.Timeout(PATIENCE_S, read=0.3))
    stream.close()
    wait_for(lambda: server.idle and not server.service.engine._observer.wants_runs)
    assert server.post("/trace", {"tokens": [5, 6]}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tokens": []}, "tokens", "invalid_value"),
        ({}, "tokens", "missing_required_parameter"),
        ({"tokens": [10**6]}, "tokens", "invalid_value"),
        ({"tokens": [5] * 4096}, "tokens", "context_length_exceeded"),
        ({"tokens": [5], "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ],
)
def test_bad_traces(server: Serving, body: dict[str, Any], param: str, code: str) -> None:
    error = server.post("/trace", body).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_stats_agree_with_the_metrics(server: Serving) -> None:
    server.client().completions.create(model="demo", prompt=PROMPT, max_tokens=20, temperature=0)
    found, llm = server.get("/v1/stats").json(), server.service.llm.stats()
    assert found["running"] == found["waiting"] == 0 and found["cache_usage"] == 0
    for name in ("steps", "drafted_tokens", "accepted_tokens"):
        assert found[name] == llm[name] > 0
    assert found["generated_tokens"] == llm["output_tokens"]
    assert sum(found["accepted_per_position"]) == found["accepted_tokens"]
    assert 1 < found["acceptance_length"] <= 4 and found["uptime_seconds"] > found["target_seconds"] > 0


def test_stats_as_a_feed(server: Serving) -> None:
    seen: list[dict[str, Any]] = []
    with httpx.stream("GET", server.url + "/v1/stats", headers=EVENTS, timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                seen.append(json.loads(line.removeprefix("data: ")))
            if len(seen) == 3:
                break
    assert seen[0].keys() == server.get("/v1/stats").json().keys()
    assert seen[0]["uptime_seconds"] < seen[1]["uptime_seconds"] < seen[2]["uptime_seconds"]


def test_the_feed_ends_when_the_server_does() -> None:
    with (
        serving() as server,
        httpx.stream("GET", server.url + "/v1/stats", headers=EVENTS, timeout=PATIENCE_S) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.service.draining = True
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_long_waits_are_bridged_by_comments(server: Serving) -> None:
    """A stream that waits for its place shows signs of life; the client passes over them."""
    client = server.client()
    running = client.completions.create(model="demo", prompt="a", stream=True, **LONG)
    next(iter(running))
    body = {"prompt": "b", "max_tokens": 2, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert (
            answer.status_code == 200
            and next(lines) == ": waiting"
            and next(lines) == ""
            and next(lines) == ": waiting"
        )
        running.close()
        rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]" and len(rest) >= 2
    running = client.completions.create(model="demo", prompt="a", stream=True, **LONG)
    next(iter(running))
    once: Any = {"max_tokens": 1, "extra_body": {"ignore_eos": True}}
    waiting = client.completions.create(model="demo", prompt="b", stream=True, **once)
    running.close()
    assert [event.choices[0].finish_reason for event in waiting] == ["length"]


def test_templates_are_applied(server: Serving) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = server.post("/apply-template", {"messages": TALK}).json()["prompt"]
    assert found == "<|bos|><|system|>Be short.<|end|><|user|>What does zip() do?<|end|><|assistant|>"
    open_end = server.post("/apply-template", {"messages": TALK, "add_generation_prompt": False}).json()["prompt"]
    assert open_end + "<|assistant|>" == found
    assert '{"name": "f"}' in server.post("/apply-template", {"messages": TALK, "tools": tools}).json()["prompt"]
    assert server.post("/apply-template", {"messages": []}).json()["error"]["param"] == "messages"


def test_texts_of_tokens(server: Serving) -> None:
    extra = {"return_token_strs": True, "return_token_ids": True}
    answer = server.client().completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0, extra_body=extra
    )
    choice = answer.choices[0]
    assert choice.model_extra is not None
    assert "".join(choice.model_extra["token_strs"]) == choice.text
    assert len(choice.model_extra["token_ids"]) == len(choice.model_extra["token_strs"]) == 12


def test_errors_in_a_stream_after_a_comment_are_events(server: Serving) -> None:
    client = server.client()
    running = client.completions.create(model="demo", prompt="a", stream=True, **LONG)
    next(iter(running))
    waiting = client.completions.create(model="demo", prompt="b", stream=True, max_tokens=1)
    for generation in list(server.service.engine._open):
        if generation.timing.first_token is None:
            generation.fail(ValueError("out of luck"))
    with pytest.raises(openai.APIError):
        list(waiting)
    running.close()
    wait_for(lambda: server.idle)
    assert FinishReason.ABORT.value in server.get("/metrics").text


def test_requests_under_way_are_listed_and_ended_by_their_ids(server: Serving) -> None:
    client = server.client()
    wait_for(lambda: server.idle)  # those of other tests may only just have ended
    assert server.get("/slots").json() == {"requests": []}
    named: Any = [{"extra_headers": {"X-Request-Id": name}} for name in ("first", "second")]
    running = client.completions.create(model="demo", prompt=[5, 6, 7], stream=True, **LONG, **named[0])
    next(iter(running))
    waiting = client.completions.create(
        model="demo", prompt="b", stream=True, max_tokens=2, n=1, extra_body={"ignore_eos": True}, **named[1]
    )
    first, second = server.get("/slots").json()["requests"]
    assert (first["request_id"], first["state"], first["prompt_tokens"]) == ("first", "running", 3)
    assert (second["request_id"], second["state"], second["max_tokens"]) == ("second", "waiting", 2)
    assert first["seconds"] >= second["seconds"] > 0 and first["choices"] == 1
    assert server.post("/abort", {"request_id": "third"}).json() == {"aborted": 0}
    assert server.post("/abort", {"request_id": "first"}).json() == {"aborted": 1}
    with pytest.raises(openai.APIError) as ended:
        list(running)
    assert ended.value.code == "aborted"
    assert [event.choices[0].finish_reason for event in waiting][-1] == "length"
    wait_for(lambda: server.idle)
    whole: list[Any] = []

    def ask() -> None:
        try:
            whole.append(client.completions.create(model="demo", prompt="a", **LONG, **named[0]))
        except openai.APIStatusError as error:
            whole.append((error.status_code, error.code))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: server.service.stats().running == 1)
    assert server.post("/abort", {"request_id": "first"}).json() == {"aborted": 1}
    asking.join(PATIENCE_S)
    assert whole == [(499, "aborted")]


def test_times_add_up(server: Serving) -> None:
    client = server.client()
    running = client.completions.create(model="demo", prompt="a", stream=True, **LONG)
    next(iter(running))

    def make_room() -> None:
        wait_for(lambda: server.service.stats().waiting == 1)
        time.sleep(0.5)
        running.close()

    making = threading.Thread(target=make_room)
    making.start()
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=9, temperature=0)
    making.join()
    times = (answer.model_extra or {})["metrics"]
    assert 450 < times["queue_time_ms"] < times["time_to_first_token_ms"]
    assert answer.usage is not None
    assert times["mean_itl_ms"] == pytest.approx(
        times["generation_time_ms"] / (answer.usage.completion_tokens - 1), abs=0.01
    )
    page = server.get("/metrics").text
    for part in ("queue", "prefill", "decode"):
        assert f"vllm:request_{part}_time_seconds_count" in page

    def queue_time() -> float:
        once = client.completions.create(
            model="demo", prompt="a", max_tokens=9, n=1, temperature=0, extra_body={"ignore_eos": True}
        )
        return float((once.model_extra or {})["metrics"]["queue_time_ms"])

    below(times["queue_time_ms"], queue_time)


class TestTemplateFields:
    def test_the_last_message_is_gone_on_with(self, server: Serving) -> None:
        client = server.client()
        body = {"messages": SO_FAR, "continue_final_message": True}
        prompt = server.post("/apply-template", body).json()["prompt"]
        assert prompt.endswith("<|assistant|>It pairs ")
        ids = server.post("/tokenize", {"prompt": prompt.removeprefix("<|bos|>")}).json()["tokens"]
        plain = client.completions.create(model="demo", prompt=ids, max_tokens=8, temperature=0)
        answer = client.chat.completions.create(
            model="demo", messages=SO_FAR, max_tokens=8, temperature=0, extra_body={"continue_final_message": True}
        )
        assert answer.choices[0].message.content == plain.choices[0].text
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)

    def test_the_template_gets_further_variables(self, tmp_path: Path) -> None:
        model = tmp_path / "varied"
        shutil.copytree(DEMO, model)
        (model / "chat_template.jinja").write_text("{{ mood or 'none' }}:{{ messages[0].content }}")
        with serving(str(model)) as server:
            for extra, prompt in (({}, "none:a"), ({"chat_template_kwargs": {"mood": "good"}}, "good:a")):
                body = {"messages": [{"role": "user", "content": "a"}]} | extra
                assert server.post("/apply-template", body).json()["prompt"] == prompt
                answer = server.post("/v1/chat/completions", body | {"max_tokens": 1}).json()
                ids = server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()["tokens"]
                assert answer["usage"]["prompt_tokens"] == len(ids)

    @pytest.mark.parametrize(
        ("fields", "param", "word"),
        [
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
            ({"chat_template_kwargs": 3}, "chat_template_kwargs", "3"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "contradict"),
            ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]}, "messages", "no text"),
        ],
    )
    def test_refused(self, server: Serving, fields: dict[str, Any], param: str, word: str) -> None:
        for path in ("/apply-template", "/v1/chat/completions"):
            answer = server.post(path, {"messages": TALK} | fields)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param and word in error["message"]
