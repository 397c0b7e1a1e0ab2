"""What the server says of single tokens: where they begin, and their bytes; and stop texts that are tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import Serving, serving
from waiting import wait_for

from skipstone import LLM, SamplingParams

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
WRITTEN = "漢字 👋🏽 zażółć, a"  # most of its characters are several tokens
FORCED = {"structured_outputs": {"choice": [WRITTEN]}}
HIDDEN = {"logit_bias": {"4": 100}, "max_tokens": 3}  # <|user|> again and again


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running
        wait_for(lambda: running.idle)


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.client()


def check_offsets(server: Serving, ids: list[int], offsets: list[int], text: str, hidden: set[int]) -> None:
    """Each token begins at the character that its first byte belongs to; hidden ones take no room."""
    tokenizer, content = server.service.tokenizer, b""
    assert len(ids) == len(offsets)
    for i, (token, offset) in enumerate(zip(ids, offsets, strict=True)):
        if i in hidden:
            assert offset == len(content.decode(errors="ignore"))
            continue
        own = tokenizer.token_bytes(token)
        assert offset == len((content + own[:1]).decode(errors="replace")) - 1
        content += own
    assert text.startswith(content.decode(errors="ignore"))


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters(client: openai.OpenAI, server: Serving, stream: bool) -> None:
    extra = FORCED | {"return_token_ids": True}
    made = client.completions.create(
        model="demo", prompt="a", max_tokens=90, temperature=0, logprobs=1, stream=stream, extra_body=extra
    )
    ids: list[int] = []
    offsets: list[int] = []
    text = ""
    for answer in made if stream else [made]:
        choice: Any = answer.choices[0]
        ids, offsets, text = ids + choice.token_ids, offsets + choice.logprobs.text_offset, text + choice.text
    assert text == WRITTEN
    ended = {len(ids) - 1} if server.service.tokenizer.token_text(ids[-1]) == "<|eos|>" else set()
    check_offsets(server, ids, offsets, text, ended)
    assert len(ids) > len(text)


@pytest.mark.parametrize("kind", ["text", "ids", "texts"])
def test_offsets_behind_a_prompt(client: openai.OpenAI, server: Serving, kind: str) -> None:
    """The token that begins a text is written for a prompt of ids only; names in the prompt are text."""
    written = "é <|user|> 漢 a"
    ids = server.service.tokenizer.encode(written)
    shown = "<|bos|>" + written if kind == "ids" else written
    prompt: Any = {"text": written, "ids": ids, "texts": ["b", written]}[kind]
    answer = client.completions.create(
        model="demo", prompt=prompt, echo=True, logprobs=0, temperature=0, **(HIDDEN | {"max_tokens": 2})
    )
    choice = answer.choices[-1]
    assert choice.text == shown  # the two tokens of the answer are hidden
    assert choice.logprobs is not None and choice.logprobs.text_offset is not None
    offsets = choice.logprobs.text_offset
    assert offsets[-2:] == [len(shown), len(shown)]
    check_offsets(server, ids, offsets[:-2], shown, set() if kind == "ids" else {0})


def test_hidden_tokens_take_no_room(client: openai.OpenAI) -> None:
    shown = client.completions.create(
        model="demo", prompt="a", logprobs=0, temperature=0, extra_body={"skip_special_tokens": False}, **HIDDEN
    ).choices[0]
    hidden = client.completions.create(model="demo", prompt="a", logprobs=0, temperature=0, **HIDDEN).choices[0]
    assert shown.logprobs is not None and hidden.logprobs is not None
    assert (shown.text, shown.logprobs.text_offset) == ("<|user|>" * 3, [0, 8, 16])
    assert (hidden.text, hidden.logprobs.text_offset) == ("", [0, 0, 0])


def test_parts_of_characters_have_names_of_their_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="a", max_tokens=90, temperature=0, logprobs=5, extra_body=FORCED
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.top_logprobs is not None
    assert not any("\ufffd" in token for token in found.tokens)
    assert "bytes:\\xe6" in found.tokens[0]
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        assert token in top and len(top) >= 5


def test_the_text_is_recovered_from_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=90,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=FORCED,
    )
    choice = answer.choices[0]
    assert choice.message.content == WRITTEN
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == WRITTEN
    for entry in choice.logprobs.content:
        for one in (entry, *entry.top_logprobs):
            assert one.bytes is not None and "\ufffd" not in one.token
            assert not one.bytes or bytes(one.bytes).decode(errors="backslashreplace") == one.token
    hidden = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "a"}], temperature=0, logprobs=True, **HIDDEN
    ).choices[0]
    assert hidden.logprobs is not None and hidden.logprobs.content is not None
    assert [(entry.token, entry.bytes) for entry in hidden.logprobs.content] == [("<|user|>", [])] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_that_is_a_hidden_token(client: openai.OpenAI, stream: bool) -> None:
    made = client.completions.create(
        model="demo", prompt="a", temperature=0, stop=["never", "<|user|>"], stream=stream, **HIDDEN
    )
    last = list(made)[-1] if stream else made
    choice: Any = last.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "<|user|>")


def test_a_stop_text_that_is_a_hidden_token_in_python() -> None:
    llm = LLM("demo")
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={4: 100.0}, stop="<|user|><|user|>", logprobs=0)
    output = llm.generate(["a"], params, progress=False)[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", [4, 4], "stop")
    assert output.stop_reason == "<|user|><|user|>" and output.logprobs is not None and len(output.logprobs) == 2


def test_every_prompt_has_the_limit_of_its_own_length(client: openai.OpenAI, server: Serving) -> None:
    """16 tokens when nothing is said, and as many as the context holds behind the one prompt that fills it."""
    prompts = [[300] * 10, [300] * 4094]
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="demo", prompt=prompts, temperature=0, extra_body=extra)
    choices: list[Any] = list(answer.choices)
    assert [len(choice.token_ids) for choice in choices] == [16, 2]
    assert [choice.finish_reason for choice in choices] == ["length", "length"]


def test_stop_texts_of_any_length_are_not_taken(server: Serving) -> None:
    answer = server.post("/v1/completions", {"model": "demo", "prompt": "a", "stop": ["b" * 1001]})
    assert answer.status_code == 400 and "stop" in answer.json()["error"]["message"]
