"""Tools over HTTP, as the official client uses them: calls are valid, and the same streamed or not and for every k."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import pydantic_function_tool
from serving import Serving, serving
from waiting import wait_for

from skipstone import SamplingParams
from skipstone.errors import RequestError

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
TALK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Current weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "hourly": {"type": "boolean"},
            },
            "required": ["city", "days", "hourly"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
NOTHING: dict[str, Any] = {"type": "function", "function": {"name": "nothing"}}
# What the model is made to write where it could write anything.
TWO_CALLS = (
    'start: "Well. " <|tool_call|> call <|tool_call|> call\ncall: "{\\"name\\": \\"clock\\", \\"arguments\\": {}}"'
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running
        wait_for(lambda: running.idle)


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.client()


def fits(arguments: str) -> bool:
    value = json.loads(arguments)
    assert list(value) == ["city", "days", "hourly"]
    return value["city"] in ("Paris", "Rome") and 1 <= value["days"] <= 9 and isinstance(value["hourly"], bool)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "demo", "messages": TALK, "tools": [WEATHER], "max_tokens": 120, "temperature": 0}
    return client.chat.completions.create(**defaults | options)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[dict[str, str]], str, int]:
    """Text, calls, reason of the end, and the number of events with a part of a call."""
    text, calls, reason, parts = "", list[dict[str, str]](), "", 0
    for event in ask(client, stream=True, **options):
        (choice,) = event.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        parts += bool(choice.delta.tool_calls)
        for part in choice.delta.tool_calls or []:
            assert part.index == len(calls) and part.id and part.type == "function" and part.function.name
            calls.append({"id": part.id, "name": part.function.name, "arguments": part.function.arguments})
    return text, calls, reason, parts


class TestRequired:
    def test_the_arguments_fit_by_construction(self, client: openai.OpenAI) -> None:
        for seed in range(4):
            choice = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=seed).choices[
                0
            ]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            (call,) = choice.message.tool_calls
            assert call.type == "function" and call.id.startswith("call_")
            assert call.function.name == "weather" and fits(call.function.arguments)

    def test_a_stream_says_the_same_for_every_k(self, client: openai.OpenAI) -> None:
        found = []
        for k in (0, 1, 3):
            options = {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"speculation": {"k": k}}}
            text, calls, reason, parts = streamed(client, **options)
            assert text == "" and reason == "tool_calls" and parts == 1
            (whole,) = ask(client, **options).choices[0].message.tool_calls
            assert (whole.function.name, whole.function.arguments) == (calls[0]["name"], calls[0]["arguments"])
            found.append(calls[0]["arguments"])
        assert fits(found[0]) and len(set(found)) == 1

    def test_a_named_function(self, client: openai.OpenAI) -> None:
        named: Any = {"type": "function", "function": {"name": "nothing"}}
        choice = ask(client, tools=[WEATHER, NOTHING], tool_choice=named).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("nothing", "{}")

    def test_several_answers_and_several_functions(self, client: openai.OpenAI) -> None:
        answer = ask(
            client, tools=[WEATHER, NOTHING], tool_choice="required", n=4, temperature=1, seed=2, max_tokens=60
        )
        for choice in answer.choices:
            assert choice.finish_reason in ("tool_calls", "length")
            for call in choice.message.tool_calls or []:
                name, arguments = call.function.name, call.function.arguments
                assert fits(arguments) if name == "weather" else arguments == "{}"
        ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
        assert len(set(ids)) == len(ids)

    @pytest.mark.parametrize(
        "cut",
        [
            {"max_tokens": 12},
            {"max_tokens": 24},
            {"stop": ["ity"]},
            {"stop": ["days"]},
            {"stop": ["}"]},
            {"stop": ["hourly"], "extra_body": {"include_stop_str_in_output": True}},
            {"extra_body": {"stop_token_ids": "a later one"}},
        ],
    )
    def test_one_that_is_cut_off_is_text(self, client: openai.OpenAI, server: Serving, cut: dict[str, Any]) -> None:
        """Nobody can run it, and a client can send it back as what was said."""
        if "stop_token_ids" in cut.get("extra_body", {}):
            found = ask(client, tool_choice="required", extra_body={"return_token_ids": True}).choices[0]
            ids = found.model_extra["token_ids"]
            texts = [server.service.token_text(token) for token in ids]
            first = next(i for i in range(len(ids)) if "days" in "".join(texts[:i]) and ids[i] not in ids[:i])
            cut = {"extra_body": {"stop_token_ids": [ids[first]]}}
        for tool_choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            choice = ask(client, tool_choice=tool_choice, **cut).choices[0]
            assert choice.finish_reason == ("length" if "max_tokens" in cut else "stop")
            assert not choice.message.tool_calls and choice.message.content.startswith(
                '<|tool_call|>{"name": "weather"'
            )
            text, calls, reason, _ = streamed(client, tool_choice=tool_choice, **cut)
            assert (text, calls, reason) == (choice.message.content, [], choice.finish_reason)
            again = ask(client, messages=[*TALK, choice.message, *TALK], max_tokens=2)
            assert again.choices[0].finish_reason == "length"

    def test_whole_calls_before_one_that_is_cut_off(self, client: openai.OpenAI, server: Serving) -> None:
        """They are given, but are not the reason of the end, and what comes back is taken."""
        never = {str(token): -100 for token in server.service.llm.eos_token_ids}
        options: Any = {"tool_choice": "required", "temperature": 1, "seed": 1, "logit_bias": never}
        answers = [(ask(client, tools=[NOTHING], **options, max_tokens=most).choices[0], "length") for most in (40, 44)]
        either = ask(client, tools=[NOTHING, WEATHER], **options, n=8, stop=["weather"])
        answers += [(choice, "stop") for choice in either.choices if choice.finish_reason == "stop"]
        assert any(choice.message.tool_calls for choice, _ in answers[2:])
        for choice, reason in answers:
            calls = choice.message.tool_calls or []
            assert choice.finish_reason == reason and all(call.function.arguments == "{}" for call in calls)
            assert choice.message.content.startswith("<|tool_call|>")
            results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in calls]
            assert ask(client, messages=[*TALK, choice.message, *results], max_tokens=1).choices

    def test_the_clients_own_helper(self, client: openai.OpenAI) -> None:
        pydantic = pytest.importorskip("pydantic")
        point = pydantic.create_model("Point", x=(bool, ...), y=(bool, ...))
        answer = client.chat.completions.parse(
            model="demo", messages=TALK, max_tokens=100, temperature=0, tool_choice="required",
            parallel_tool_calls=False, tools=[pydantic_function_tool(point)],
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, point)


class TestAuto:
    def test_an_answer_without_calls(self, client: openai.OpenAI) -> None:
        choice = ask(client, max_tokens=8).choices[0]
        assert choice.message.tool_calls is None and choice.message.content
        text, calls, _, _ = streamed(client, max_tokens=8)
        assert (text, calls) == (choice.message.content, [])

    @pytest.mark.parametrize("several", [True, False])
    def test_calls_behind_text(self, client: openai.OpenAI, server: Serving, several: bool) -> None:
        """The tiny model calls nothing by itself, so a grammar that the server does not know of makes it."""
        llm = server.service.llm
        compile_before = llm._grammars.compile

        def scripted(params: Any) -> Any:
            import msgspec

            return compile_before(msgspec.structs.replace(params, grammar=TWO_CALLS))

        llm._grammars.compile = scripted  # type: ignore[method-assign]
        try:
            options = {"tools": [CLOCK], "parallel_tool_calls": several}
            choice = ask(client, **options).choices[0]
            text, calls, reason, _ = streamed(client, **options)
        finally:
            llm._grammars.compile = compile_before  # type: ignore[method-assign]
        assert choice.message.content == text == "Well. "
        assert choice.finish_reason == reason == "tool_calls"
        made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert made == [("clock", "{}")] * (2 if several else 1)
        assert [(call["name"], call["arguments"]) for call in calls] == made

    def test_strict_functions_and_json_answers(self, client: openai.OpenAI) -> None:
        strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
        for seed in range(3):
            choice = ask(client, tools=[strict], temperature=1, seed=seed, logit_bias={"8": 30}, max_tokens=60).choices[
                0
            ]
            calls = choice.message.tool_calls
            assert calls and all(fits(call.function.arguments) for call in calls)
        schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                  "additionalProperties": False}}  # fmt: skip
        asked = {"type": "json_schema", "json_schema": schema}
        choice = ask(client, response_format=asked).choices[0]
        assert choice.message.tool_calls or isinstance(json.loads(choice.message.content)["a"], bool)
        choice = ask(client, response_format=asked, logit_bias={"8": 100}, parallel_tool_calls=False).choices[0]
        assert choice.finish_reason == "tool_calls" and fits(choice.message.tool_calls[0].function.arguments)

    def test_none_leaves_the_tools_out(self, client: openai.OpenAI) -> None:
        plain = ask(client, tools=[], max_tokens=8)
        none = ask(client, tool_choice="none", max_tokens=8)
        auto = ask(client, max_tokens=8)
        assert plain.choices[0].message.content == none.choices[0].message.content
        assert plain.usage.prompt_tokens == none.usage.prompt_tokens < auto.usage.prompt_tokens


class TestConversations:
    def test_calls_and_results_go_back(self, client: openai.OpenAI, server: Serving) -> None:
        first = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Rain."}
        for said in (first, first.model_dump()):
            answer = ask(client, messages=[*TALK, said, result], max_tokens=8)
            assert answer.choices[0].message.content is not None
        dumped = [*TALK, first.model_dump(exclude_unset=True), result]
        text = server.post("/tokenize", {"messages": dumped, "return_token_strs": True}).json()
        name, arguments = first.tool_calls[0].function.name, first.tool_calls[0].function.arguments
        written = f'<|tool_call|>{{"name": "{name}", "arguments": {arguments}}}<|end|><|tool_result|>Rain.<|end|>'
        assert written in "".join(text["token_strs"])


BAD: dict[str, tuple[dict[str, Any], str, str]] = {  # fields, param, a word of the message
    "no tools": ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    "choice": ({"tool_choice": "any"}, "tool_choice", "any"),
    "another": (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
        "'f' is not among",
    ),
    "twice": ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a b"),
    "type": ({"tools": [{"type": "code"}]}, "tools[0].type", "code"),
    "schema": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
        "object",
    ),
    "bad schema": (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": 1}}}}}
            ],
            "tool_choice": "required",
        },
        "tools",
        "cannot be used",
    ),
    "format": (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "tool_choice",
    ),
    "regex": ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "tools"),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON object",
    ),
    "hidden marks": ({"skip_special_tokens": True}, "skip_special_tokens", "<|tool_call|>"),
    "variable": ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "'enable_thinking'"),
    "going on with calls": (
        {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "continue_final_message": True,
        },
        "messages",
        "tool_calls",
    ),
    "required": (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "required": 3}}}],
            "tool_choice": "required",
        },
        "tools",
        "cannot be used",
    ),
    "whose": (
        {"messages": [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
        "messages[0].tool_calls",
        "assistant",
    ),
    "whose result": (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
        "messages[0].tool_call_id",
        "role tool",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(client: openai.OpenAI, name: str) -> None:
    fields, param, word = BAD[name]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=TALK, extra_body={"tools": [WEATHER]} | fields)
    assert raised.value.param == param and word in raised.value.message, raised.value.message


def test_a_template_without_tools(tmp_path: Path) -> None:
    model = tmp_path / "bare"
    shutil.copytree(DEMO, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(str(model)) as server:
        answer = server.post("/v1/chat/completions", {"messages": TALK, "tools": [WEATHER]})
        assert answer.status_code == 400 and "says nothing of tools" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        (model / "chat_template.jinja").write_text("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(str(model)) as server:
        answer = server.post("/v1/chat/completions", {"messages": TALK, "tools": [WEATHER]})
        assert "not known here" in answer.json()["error"]["message"]


def test_special_tokens_are_hidden_where_calls_do_not_need_them(client: openai.OpenAI, tmp_path: Path) -> None:
    """An explicit wish is obeyed or refused; without one, tools change nothing where marks are plain text."""
    user = {"logit_bias": {"4": 100}, "max_tokens": 3}
    hidden = ask(client, tool_choice="none", **user, extra_body={"skip_special_tokens": True})
    assert hidden.choices[0].message.content == ""
    model = tmp_path / "plain"
    shutil.copytree(DEMO, model)
    (model / "chat_template.jinja").write_text("{{ tools }}]<]minimax[>[{{ messages[0].content }}")
    with serving(str(model)) as server:
        for skip, content in ((True, ""), (None, ""), (False, "<|user|>" * 3)):
            answer = ask(server.client(), model="plain", **user, extra_body={"skip_special_tokens": skip})
            assert answer.choices[0].message.content == content
        with pytest.raises(RequestError, match="regex says what the whole answer is"):
            server.service.llm.chat([{"role": "user", "content": "<think>"}], SamplingParams(regex="a"))


def test_a_thought_is_not_held_to_what_the_answer_is(tmp_path: Path) -> None:
    """A prompt that opens a thought and a constraint on the whole answer exclude each other."""
    model = tmp_path / "thinks"
    shutil.copytree(DEMO.parent / "demo-dsa", model)
    (model / "chat_template.jinja").unlink()
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}}}}
    constraints: list[tuple[str, dict[str, Any]]] = [
        ("response_format.json_schema.schema", {"response_format": schema}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a"}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"]}}),
        ("response_format", {"response_format": {"type": "json_object"}, "tools": [NOTHING]}),
        ("tool_choice", {"tool_choice": "required", "tools": [NOTHING]}),
    ]
    strict = {"type": "function", "function": NOTHING["function"] | {"strict": True}}
    prefill = [*TALK, {"role": "assistant", "content": "<think>Hm"}]
    with serving(str(model)) as server:
        for name in ("thinking", "enable_thinking"):
            thinks = {"messages": TALK, "max_tokens": 2, "chat_template_kwargs": {name: True}}
            for param, fields in constraints:
                answer = server.post("/v1/chat/completions", thinks | fields)
                assert answer.status_code == 400 and answer.json()["error"]["param"] == param
                assert "chat_template_kwargs" in answer.json()["error"]["message"]
            for fields in ({}, {"tools": [strict]}):
                assert server.post("/v1/chat/completions", thinks | fields).is_success
        closed = {"messages": TALK, "max_tokens": 2, "chat_template_kwargs": {"thinking": False}}
        for _, fields in constraints:
            assert server.post("/v1/chat/completions", closed | fields).is_success
        goes_on = {"messages": prefill, "max_tokens": 2, "continue_final_message": True}
        assert server.post("/v1/chat/completions", goes_on).is_success
        assert server.post("/v1/chat/completions", goes_on | constraints[0][1]).status_code == 400
        done = goes_on | {"messages": [*TALK, {"role": "assistant", "content": "<think>Hm</think>"}]}
        assert server.post("/v1/chat/completions", done | constraints[0][1]).is_success


@pytest.mark.parametrize("notation", ["minimax", "dsml"])
def test_notations_of_the_big_models(tmp_path: Path, notation: str) -> None:
    """Their templates decide; for DeepSeek the one that is built in. Their tags are plain text for this tokenizer."""
    model = tmp_path / notation
    shutil.copytree(DEMO if notation == "minimax" else DEMO.parent / "demo-dsa", model)
    (model / "chat_template.jinja").unlink()
    if notation == "minimax":
        template = (
            "{% if tools %}write ]<]minimax[>[<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        (model / "chat_template.jinja").write_text(template)
    with serving(str(model)) as server:
        client, found = server.client(), set()
        for k in (0, 3):
            options = {
                "model": notation, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400,
                "extra_body": {"speculation": {"k": k}},
            }  # fmt: skip
            (call,) = ask(client, **options).choices[0].message.tool_calls
            assert call.function.name == "weather" and fits(call.function.arguments)
            _, calls, reason, _ = streamed(client, **options)
            assert reason == "tool_calls"
            found |= {call.function.arguments, calls[0]["arguments"]}
        assert len(found) == 1
        assert ask(client, model=notation, tools=[CLOCK], max_tokens=8).choices[0].message.content
        strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
        assert ask(client, model=notation, tools=[strict], max_tokens=8).choices[0].message.content
