"""Constrained output over HTTP: every way of asking, with drafts and without, and what is refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import LONG, Serving, serving
from waiting import PATIENCE_S, wait_for

from skipstone import LLM, SamplingParams

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
PROMPT = "A virtual table is an object that"
TALK: list[Any] = [{"role": "user", "content": "Describe zip() as JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class"]},
        "arity": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["kind", "arity", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "call " NAME "(" NAME ")"\nNAME: /[a-z]{2,6}/\n'
GBNF = 'root ::= "call " name "(" name ")"\nname ::= [a-z] [a-z]+\n'


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running
        wait_for(lambda: running.idle)


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def oracle() -> LLM:
    return LLM("demo", spec="off")


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["kind", "arity", "tags"]
    assert value["kind"] in ("function", "class") and 0 <= value["arity"] <= 9
    return all(isinstance(tag, str) and len(tag) <= 6 for tag in value["tags"]) and len(value["tags"]) <= 2


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


# What the API takes, the same for the engine, and a judge that knows nothing of masks.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[str], bool]]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json_schema": json.dumps(SCHEMA)},
        follows_schema,
    ),
    "json": (
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": json.dumps(SCHEMA)},
        follows_schema,
    ),
    "json text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"json_schema": json.dumps(SCHEMA)},
        follows_schema,
    ),
    "regex": (
        {"structured_outputs": {"regex": r"[A-Z][a-z]{3,9}(, [a-z]{2,5}){2}"}},
        {"regex": r"[A-Z][a-z]{3,9}(, [a-z]{2,5}){2}"},
        matches(r"[A-Z][a-z]{3,9}(, [a-z]{2,5}){2}"),
    ),
    "choice": (
        {"structured_outputs": {"choice": ["an iterator", "a list", 'a "tuple"']}},
        {"choice": ["an iterator", "a list", 'a "tuple"']},
        lambda text: text in ("an iterator", "a list", 'a "tuple"'),
    ),
    "lark": (
        {"structured_outputs": {"grammar": LARK}},
        {"grammar": LARK},
        matches(r"call [a-z]{2,6}\([a-z]{2,6}\)"),
    ),
    "gbnf": (
        {"structured_outputs": {"grammar": GBNF}},
        {"grammar": GBNF},
        matches(r"call [a-z]{2,}\([a-z]{2,}\)"),
    ),
}


@pytest.mark.parametrize("name", WAYS)
class TestTexts:
    def test_a_completion_is_the_engines_and_obeys(self, client: openai.OpenAI, oracle: LLM, name: str) -> None:
        api, engine, judge = WAYS[name]
        for seed in range(3):
            answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=90, seed=seed, extra_body=api)
            params = SamplingParams(**oracle.default_params | {"max_tokens": 90, "seed": seed} | engine)
            expected = oracle.generate([PROMPT], params, progress=False)[0].outputs[0]
            assert answer.choices[0].text == expected.text
            if answer.choices[0].finish_reason == "stop":
                assert judge(expected.text), expected.text
            assert answer.usage and answer.usage.completion_tokens == len(expected.token_ids)

    def test_a_streamed_chat_is_the_same_for_every_k(self, client: openai.OpenAI, name: str) -> None:
        api, _, judge = WAYS[name]
        texts = set()
        for k in (0, 1, 3):
            stream = client.chat.completions.create(
                model="demo", messages=TALK, max_tokens=90, temperature=0, stream=True,
                extra_body=api | {"speculation": {"k": k}},
            )  # fmt: skip
            events = list(stream)
            texts.add("".join(event.choices[0].delta.content or "" for event in events))
            assert events[-1].choices[0].finish_reason == "stop"
        (text,) = texts
        assert judge(text), text


def test_any_json_object(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": TALK, "max_tokens": 200, "n": 4, "seed": 1}
    for api in (
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
    ):
        answer = client.chat.completions.create(**options, **api)
        ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
        assert all(isinstance(json.loads(choice.message.content or ""), dict) for choice in ended)
        assert all((choice.message.content or "").startswith("{") for choice in answer.choices)


def test_parsed_by_the_client(client: openai.OpenAI) -> None:
    """The client's own helper makes the schema from a class, and an instance from the text."""
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.create_model("Point", x=(bool, ...), label=(str, ...))
    schema = pydantic.TypeAdapter(point).json_schema()
    answer = client.chat.completions.parse(
        model="demo", messages=TALK, max_tokens=300, temperature=0, response_format=point
    )
    assert schema["required"] == ["x", "label"]
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and isinstance(parsed.x, bool)


def test_text_asks_for_nothing(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": TALK, "max_tokens": 8, "seed": 1}
    plain = client.chat.completions.create(**options)
    other = client.chat.completions.create(**options, response_format={"type": "text"})
    assert plain.choices[0].message.content == other.choices[0].message.content


def test_a_costly_grammar_keeps_nobody_waiting(server: Serving, client: openai.OpenAI, monkeypatch: Any) -> None:
    """It is made beside the engine's thread, and once: the engine only copies it."""
    llm, threads = server.service.llm, list[str]()
    make, begun, others_go_on = llm._grammars._make, threading.Event(), threading.Event()

    def slow(name: str, value: Any) -> Any:
        threads.append(threading.current_thread().name)
        begun.set()
        assert others_go_on.wait(PATIENCE_S)
        return make(name, value)

    monkeypatch.setattr(llm._grammars, "_make", slow)
    stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, **LONG)
    next(iter(stream))
    asked = {"structured_outputs": {"regex": "(ab|cd){3}"}}
    done: list[str] = []
    waiting = threading.Thread(
        target=lambda: done.append(
            client.completions.create(model="demo", prompt="a", n=2, extra_body=asked).choices[0].text
        )
    )
    waiting.start()
    assert begun.wait(PATIENCE_S)
    written = llm.stats()["output_tokens"]
    wait_for(lambda: llm.stats()["output_tokens"] > written + 30, PATIENCE_S / 3)
    next(iter(stream))
    others_go_on.set()
    waiting.join(PATIENCE_S)
    stream.close()
    assert len(done[0]) == 6
    assert len(threads) == 1 and "engine" not in threads[0]
    client.completions.create(model="demo", prompt="b", extra_body=asked)
    assert len(threads) == 1


def by_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {  # fields, param, a word of the message
    "kind": ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    "empty": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    "stray schema": (
        {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
        "response_format.json_schema",
        "json_object",
    ),
    "bad type": (by_schema({"type": "tuple"}), "response_format.json_schema.schema", "tuple"),
    "not an object": (by_schema(3), "response_format.json_schema.schema", "3"),
    "dangling": (by_schema({"$ref": "#/nowhere"}), "response_format.json_schema.schema", "nowhere"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    "none": ({"structured_outputs": {}}, "structured_outputs", "none"),
    "both": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "response_format",
    ),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "(a"),
    "grammar": ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar", "Expected token"),
    "neither": ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", "GBNF"),
    "no json": ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    "choices": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ">= 1"),
    "choice": ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", ">= 1"),
    "old name": ({"guided_json": {}}, "guided_json", "use structured_outputs.json"),
    "min_tokens": ({"structured_outputs": {"regex": "a+"}, "min_tokens": 3}, "min_tokens", "grammar"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(client: openai.OpenAI, name: str, stream: bool) -> None:
    fields, param, word = BAD[name]
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, stream=stream, extra_body=fields)
    assert raised.value.param == param and word in raised.value.message, raised.value.message
