"""The server as the official client sees it: answers equal those of the engine asked directly."""

from __future__ import annotations

import asyncio
import json
import math
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
PROMPT = "A virtual table is an object that"
TALK: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What does zip() do?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(spec="mtp:3") as running:
        yield running
        wait_for(lambda: running.idle)  # an answer may be here before the engine has let go of its blocks
        running.service.llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def oracle() -> LLM:
    """The same model, asked directly and without drafts."""
    return LLM("demo", spec="off")


def params(oracle: LLM, **options: Any) -> SamplingParams:
    return SamplingParams(**oracle.default_params | options)


def text_of(oracle: LLM, prompt: Any, **options: Any) -> str:
    return oracle.generate([prompt], params(oracle, **options), progress=False)[0].outputs[0].text


# What a request may set, in the API's words, and in the engine's where they differ.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "greedy": ({"temperature": 0}, {}),
    "temperature": ({"temperature": 1.3}, {}),
    "top_p": ({"top_p": 0.5}, {}),
    "penalties": ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {}),
    "logit_bias": ({"logit_bias": {"308": -100, "271": 5}}, {"logit_bias": {308: -100.0, 271: 5.0}}),
    "stop text": ({"stop": [".", " the"]}, {}),
    "one stop text": ({"stop": "e"}, {}),
    "top_k": ({"extra_body": {"top_k": 3}}, {"top_k": 3}),
    "min_p": ({"extra_body": {"min_p": 0.2}}, {"min_p": 0.2}),
    "repetition": ({"extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
    "min_tokens": (
        {"stop": ["a"], "extra_body": {"min_tokens": 9}},
        {"stop": ["a"], "min_tokens": 9},
    ),
    "ids": (
        {"extra_body": {"stop_token_ids": [308, 271, 13], "ignore_eos": True}},
        {"stop_token_ids": [308, 271, 13], "ignore_eos": True},
    ),
    "stop kept": (
        {"stop": ["e"], "extra_body": {"include_stop_str_in_output": True}},
        {"stop": ["e"], "include_stop_str_in_output": True},
    ),
    "no drafts": ({"extra_body": {"speculation": {"k": 0}}}, {}),
    "one draft": ({"extra_body": {"speculation": {"k": 1, "proposer": "mtp"}}}, {}),
}


class TestCompletions:
    @pytest.mark.parametrize("name", SETTINGS)
    def test_settings(self, client: openai.OpenAI, oracle: LLM, name: str) -> None:
        api, engine = SETTINGS[name]
        direct = engine or api
        direct = {key: value for key, value in direct.items() if key != "extra_body"}
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=20, seed=5, **api)
        expected = oracle.generate([PROMPT], params(oracle, max_tokens=20, seed=5, **direct), progress=False)[0]
        choice, output = answer.choices[0], expected.outputs[0]
        assert choice.text == output.text
        assert choice.finish_reason == output.finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(output.token_ids)
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)

    @pytest.mark.parametrize("name", SETTINGS)
    def test_streams_add_up_to_the_same(self, client: openai.OpenAI, oracle: LLM, name: str) -> None:
        api, engine = SETTINGS[name]
        direct = {key: value for key, value in (engine or api).items() if key != "extra_body"}
        events = list(client.completions.create(model="demo", prompt=PROMPT, max_tokens=20, seed=6, stream=True, **api))
        assert "".join(event.choices[0].text for event in events) == text_of(
            oracle, PROMPT, max_tokens=20, seed=6, **direct
        )
        assert all(event.choices[0].finish_reason is None for event in events[:-1])
        assert events[-1].choices[0].finish_reason in ("stop", "length")
        assert all(event.usage is None for event in events)

    def test_every_form_of_prompt(self, client: openai.OpenAI, server: Serving, oracle: LLM) -> None:
        assert oracle.tokenizer is not None
        ids = oracle.tokenizer.encode(PROMPT)
        expected = text_of(oracle, ids, max_tokens=6, seed=1)
        other = text_of(oracle, "def f(", max_tokens=6, seed=1)
        for prompt, texts in (
            (PROMPT, [expected]),
            (ids, [expected]),
            ([PROMPT, "def f("], [expected, other]),
            ([ids, oracle.tokenizer.encode("def f(")], [expected, other]),
        ):
            answer = client.completions.create(model="demo", prompt=prompt, max_tokens=6, seed=1)
            assert [choice.text for choice in answer.choices] == texts
            assert [choice.index for choice in answer.choices] == list(range(len(texts)))

    def test_max_tokens_is_16_unless_given(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="demo", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
        assert answer.usage is not None and answer.usage.completion_tokens == 16
        assert answer.choices[0].finish_reason == "length"

    def test_an_end_of_text_is_named_only_to_those_who_asked_for_it(self, client: openai.OpenAI, oracle: LLM) -> None:
        (end, *_) = sorted(oracle.eos_token_ids)
        for asked, named in (({}, None), ({"stop_token_ids": [end]}, end)):
            answer = client.completions.create(
                model="demo", prompt=PROMPT, logit_bias={str(end): 100}, max_tokens=5, extra_body=asked
            )
            choice = answer.choices[0]
            assert choice.model_extra is not None
            assert (choice.text, choice.finish_reason, choice.model_extra["stop_reason"]) == ("", "stop", named)

    def test_several_choices(self, client: openai.OpenAI, oracle: LLM) -> None:
        expected = oracle.generate([PROMPT], params(oracle, n=3, max_tokens=8, seed=3), progress=False)[0].outputs
        answer = client.completions.create(model="demo", prompt=PROMPT, n=3, max_tokens=8, seed=3)
        assert [choice.text for choice in answer.choices] == [output.text for output in expected]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in expected)
        texts = ["", "", ""]
        for event in client.completions.create(model="demo", prompt=PROMPT, n=3, max_tokens=8, seed=3, stream=True):
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == [output.text for output in expected]

    def test_two_prompts_with_two_choices_each(self, client: openai.OpenAI) -> None:
        prompts = [PROMPT, "def f("]
        answer = client.completions.create(model="demo", prompt=prompts, n=2, max_tokens=3, seed=1)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        single = client.completions.create(model="demo", prompt="def f(", n=2, max_tokens=3, seed=1)
        assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in single.choices]

    def test_logprobs(self, client: openai.OpenAI, oracle: LLM) -> None:
        options: dict[str, Any] = {"max_tokens": 6, "seed": 2}
        expected = oracle.generate([PROMPT], params(oracle, logprobs=3, **options), progress=False)[0].outputs[0]
        answer = client.completions.create(model="demo", prompt=PROMPT, logprobs=3, **options)
        found = answer.choices[0].logprobs
        assert found is not None and expected.logprobs is not None
        assert found.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-5)
        assert found.tokens is not None and "".join(found.tokens) == answer.choices[0].text
        assert found.top_logprobs is not None
        for top, entry, token in zip(found.top_logprobs, expected.logprobs, found.tokens, strict=True):
            assert 3 <= len(top) <= 4 and token in top
            assert max(top.values()) == pytest.approx(max(entry.top_logprobs), abs=1e-5)
        assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))]
        none = client.completions.create(model="demo", prompt=PROMPT, logprobs=0, **options).choices[0].logprobs
        assert none is not None and none.top_logprobs is None and none.token_logprobs == found.token_logprobs
        streamed: list[float] = []
        for event in client.completions.create(model="demo", prompt=PROMPT, logprobs=3, stream=True, **options):
            part = event.choices[0].logprobs
            assert part is not None and part.token_logprobs is not None
            streamed += part.token_logprobs
        assert streamed == found.token_logprobs

    def test_echo_with_logprobs_scores_the_prompt(self, client: openai.OpenAI, oracle: LLM) -> None:
        assert oracle.tokenizer is not None
        ids = oracle.tokenizer.encode(PROMPT)
        scored = oracle.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1, seed=1), progress=False)[0]
        assert scored.prompt_logprobs is not None
        answer = client.completions.create(model="demo", prompt=ids, max_tokens=1, echo=True, logprobs=1, seed=1)
        found = answer.choices[0].logprobs
        assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
        assert len(found.token_logprobs) == len(ids) + 1
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        expected = [entry.logprob for entry in scored.prompt_logprobs if entry is not None]
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)

    def test_echo_of_text(self, client: openai.OpenAI, oracle: LLM) -> None:
        prompts = [PROMPT, "def f("]
        answer = client.completions.create(model="demo", prompt=prompts, max_tokens=4, echo=True, seed=1)
        texts = [prompt + text_of(oracle, prompt, max_tokens=4, seed=1) for prompt in prompts]
        assert [choice.text for choice in answer.choices] == texts
        stream = client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, echo=True, seed=1, stream=True)
        assert "".join(event.choices[0].text for event in stream) == texts[0]

    def test_the_prefix_cache_is_reported(self, client: openai.OpenAI) -> None:
        prompt = " ".join(f"word{i}" for i in range(60))
        first = client.completions.create(model="demo", prompt=prompt, max_tokens=2, temperature=0)
        second = client.completions.create(model="demo", prompt=prompt, max_tokens=2, temperature=0)
        assert first.usage and second.usage and second.usage.prompt_tokens_details
        assert first.choices[0].text == second.choices[0].text
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 32

    def test_raw_responses_carry_ids(self, client: openai.OpenAI, server: Serving) -> None:
        headers = {"X-Request-Id": "mine-17"}
        raw = client.completions.with_raw_response.create(model="demo", prompt="a", max_tokens=1, extra_headers=headers)
        assert raw.headers["x-request-id"] == "mine-17"
        answer = raw.parse()
        assert answer.id == "cmpl-mine-17"
        assert answer.model == "demo" and answer.system_fingerprint == server.service.fingerprint
        bad = client.completions.with_raw_response.create(
            model="demo", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "not an id"}
        )
        assert len(bad.headers["x-request-id"]) == 24


class TestChat:
    def expected(self, oracle: LLM, **options: Any) -> Any:
        return oracle.chat(TALK, params(oracle, **options)).outputs[0]

    def test_an_answer(self, client: openai.OpenAI, oracle: LLM) -> None:
        answer = client.chat.completions.create(model="demo", messages=TALK, max_completion_tokens=24, seed=4)
        output = self.expected(oracle, max_tokens=24, seed=4)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == (output.text, output.finish_reason)
        assert choice.message.role == "assistant" and answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")

    def test_a_stream(self, client: openai.OpenAI, oracle: LLM) -> None:
        stream = client.chat.completions.create(
            model="demo", messages=TALK, max_tokens=24, seed=4, stream=True, stream_options={"include_usage": True}
        )
        *events, last = list(stream)
        output = self.expected(oracle, max_tokens=24, seed=4)
        assert "".join(event.choices[0].delta.content or "" for event in events) == output.text
        assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
        assert events[-1].choices[0].finish_reason == output.finish_reason
        assert last.choices == [] and last.usage is not None
        assert last.usage.completion_tokens == len(output.token_ids)
        assert len(events) < len(output.token_ids)  # an event a step, with several tokens when drafts are accepted

    def test_several_answers(self, client: openai.OpenAI, oracle: LLM) -> None:
        answer = client.chat.completions.create(model="demo", messages=TALK, max_tokens=8, n=2, seed=1)
        outputs = oracle.chat(TALK, params(oracle, max_tokens=8, n=2, seed=1)).outputs
        assert [choice.message.content for choice in answer.choices] == [output.text for output in outputs]

    def test_logprobs(self, client: openai.OpenAI, oracle: LLM) -> None:
        answer = client.chat.completions.create(
            model="demo", messages=TALK, max_tokens=5, seed=4, logprobs=True, top_logprobs=2
        )
        output = self.expected(oracle, max_tokens=5, seed=4, logprobs=2)
        found = answer.choices[0].logprobs
        assert found is not None and found.content is not None
        assert [entry.logprob for entry in found.content] == pytest.approx(
            [entry.logprob for entry in output.logprobs], abs=1e-5
        )
        for entry in found.content:
            assert len(entry.top_logprobs) == 2
            assert entry.bytes is not None and bytes(entry.bytes).decode() == entry.token
        alone = client.chat.completions.create(model="demo", messages=TALK, max_tokens=5, seed=4, logprobs=True)
        assert alone.choices[0].logprobs and alone.choices[0].logprobs.content
        assert alone.choices[0].logprobs.content[0].top_logprobs == []

    def test_parts_and_the_developer(self, client: openai.OpenAI) -> None:
        parts: list[Any] = [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "What does zip() do?"}]},
        ]
        plain = client.chat.completions.create(model="demo", messages=TALK, max_tokens=8, seed=4)
        other = client.chat.completions.create(model="demo", messages=parts, max_tokens=8, seed=4)
        assert plain.choices[0].message.content == other.choices[0].message.content

    def test_a_conversation_goes_on(self, client: openai.OpenAI) -> None:
        first = client.chat.completions.create(model="demo", messages=TALK, max_tokens=8, temperature=0)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        more: list[Any] = [*TALK, said, {"role": "user", "content": "And map()?"}]
        second = client.chat.completions.create(model="demo", messages=more, max_tokens=8, temperature=0, user="me")
        assert second.usage and first.usage and second.usage.prompt_tokens > first.usage.prompt_tokens

    def test_fields_that_ask_for_nothing_are_fine(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="demo",
            messages=TALK,
            max_tokens=2,
            response_format={"type": "text"},
            tools=[],
            store=False,
            service_tier="auto",
            stop=None,
            logit_bias=None,
        )
        assert answer.choices[0].message.content is not None


class TestSpeculation:
    def metrics(self, answer: Any) -> dict[str, Any]:
        found = answer.model_extra["metrics"]["speculative_decoding"]
        assert isinstance(found, dict)
        return found

    def test_acceptance_and_origins(self, client: openai.OpenAI) -> None:
        extra = {"return_token_origins": True, "return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0, extra_body=extra)
        found, choice = self.metrics(answer), answer.choices[0]
        assert choice.model_extra is not None
        origins = choice.model_extra["token_origins"]
        assert len(choice.model_extra["token_ids"]) == len(origins) == 40
        assert found["num_spec_tokens"] == 3
        assert origins.count("accepted") == found["num_accepted_draft_tokens"] == sum(found["per_step_accepted"]) > 0
        assert found["num_draft_tokens"] == sum(found["per_step_drafted"])
        assert found["num_spec_steps"] == len(found["per_step_drafted"]) == sum(found["acceptance_histogram"])
        histogram = [found["per_step_accepted"].count(j) for j in range(4)]
        assert found["acceptance_histogram"] == histogram
        assert found["mean_acceptance_length"] == pytest.approx(
            1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
        )
        expected = ["target"]
        for drafted, accepted in zip(found["per_step_drafted"], found["per_step_accepted"], strict=True):
            expected += ["accepted"] * accepted + ["bonus" if accepted == drafted else "recovered"]
        assert {"recovered", "bonus"} <= set(expected)
        assert origins == [*expected, *["target"] * 40][:40]

    def test_a_stream_says_the_same(self, client: openai.OpenAI) -> None:
        extra = {"return_token_origins": True, "ignore_eos": True}
        options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "extra_body": extra}
        whole = client.completions.create(model="demo", **options)
        stream = client.completions.create(model="demo", **options, stream=True, stream_options={"include_usage": True})
        *events, last = list(stream)
        origins: list[str] = []
        for event in events:
            assert event.choices[0].model_extra is not None
            part = event.choices[0].model_extra["token_origins"]
            assert "accepted" not in part[len(part) - part[::-1].index(part[-1]) :] and 1 <= len(part) <= 4
            origins += part
        assert whole.choices[0].model_extra is not None
        assert origins == whole.choices[0].model_extra["token_origins"]
        assert self.metrics(last) == self.metrics(whole)

    def test_k_of_the_request(self, client: openai.OpenAI) -> None:
        for k in (0, 1, 2):
            extra = {"speculation": {"k": k}, "ignore_eos": True}
            answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=9, seed=1, extra_body=extra)
            assert answer.model_extra is not None
            found = answer.model_extra["metrics"]["speculative_decoding"]
            assert (found is None) == (k == 0)
            if found:
                assert found["num_spec_tokens"] == k and len(found["acceptance_histogram"]) <= k + 1

    def test_drafts_are_no_predictions(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=4)
        assert answer.usage is not None and answer.usage.completion_tokens_details is None


class TestModels:
    def test_list_and_retrieve(self, client: openai.OpenAI) -> None:
        (model,) = client.models.list().data
        assert model.id == "demo" and model == client.models.retrieve("demo")
        assert model.model_extra is not None
        assert model.model_extra["max_model_len"] == 4096
        assert model.model_extra["speculative"] == {"method": "mtp", "k": 3}
        assert model.model_extra["defaults"] == {"temperature": 0.8, "top_p": 0.95}

    def test_another_model(self, client: openai.OpenAI) -> None:
        for call in (
            lambda: client.models.retrieve("gpt-9"),
            lambda: client.completions.create(model="gpt-9", prompt="a"),
            lambda: client.chat.completions.create(model="gpt-9", messages=TALK),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                call()
            assert raised.value.code == "model_not_found" and "'demo'" in raised.value.message


BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {  # fields, param, code, a word of the message
    "temperature": ({"temperature": -1}, "temperature", "invalid_value", "-1"),
    "n": ({"n": 0}, "n", "invalid_value", ">= 1"),
    "top_p": ({"top_p": "hot"}, "top_p", "invalid_type", "hot"),
    "bool": ({"stream": 1}, "stream", "invalid_type", "bool"),
    "float for int": ({"max_tokens": 2.5}, "max_tokens", "invalid_type", "int"),
    "stops": ({"stop": list("abcde")}, "stop", "invalid_value", "<= 4"),
    "empty stop": ({"stop": [""]}, "stop[0]", "invalid_value", ">= 1"),
    "bias key": ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "token ids"),
    "bias id": ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value", "999999"),
    "bias twice": ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "invalid_value", "twice"),
    "bias value": ({"logit_bias": {"1": 7, "5": 101}}, "logit_bias", "invalid_value", 'logit_bias["5"]=101 is not'),
    "bias type": ({"logit_bias": {"5": "x"}}, "logit_bias", "invalid_type", 'logit_bias["5"]="x" is not'),
    "min_tokens": ({"extra_body": {"min_tokens": 99}}, "min_tokens", "invalid_value", "max_tokens=4"),
    "unknown": ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter", "did you mean temperature?"),
    "unknown inside": (
        {"extra_body": {"speculation": {"q": 1}}},
        "speculation.q",
        "unknown_parameter",
        "speculation.q",
    ),
    "suffix": ({"suffix": "x"}, "suffix", "unsupported_parameter", "go on"),
    "best_of": ({"best_of": 3}, "best_of", "unsupported_parameter", "use n"),
    "beams": ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "unsupported_parameter", "beam"),
    "options": ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream=true"),
    "proposer": (
        {"extra_body": {"speculation": {"proposer": "ngram"}}},
        "speculation.proposer",
        "invalid_value",
        "'mtp'",
    ),
    "k": ({"extra_body": {"speculation": {"k": 9}}}, "speculation.k", "invalid_value", "this server's 3"),
    "prediction": (
        {"extra_body": {"prediction": {"type": "content", "content": "x"}}},
        "prediction",
        "unsupported_parameter",
        "'mtp'",
    ),
    "too much": ({"max_tokens": 4096}, "prompt", "context_length_exceeded", "at most 408"),
    "stop id": ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids", "invalid_value", "1000000"),
}


class TestErrors:
    @pytest.mark.parametrize("name", BAD)
    def test_bad_fields(self, client: openai.OpenAI, name: str) -> None:
        fields, param, code, word = BAD[name]
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 4} | fields)
        error = raised.value
        assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
        assert word in error.message

    @pytest.mark.parametrize(
        ("prompt", "word"),
        [([], "not empty"), ([[]], "empty"), ([1, "a"], "list of either"), ([9**9], "387420489")],
    )
    def test_bad_prompts(self, client: openai.OpenAI, prompt: Any, word: str) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="demo", prompt=prompt)
        assert raised.value.param == "prompt" and word in raised.value.message

    def test_too_long_a_prompt(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="demo", prompt=[5] * 5000)
        assert raised.value.code == "context_length_exceeded" and "5000" in raised.value.message

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
        ],
    )
    def test_bad_chats(self, client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**{"model": "demo", "messages": TALK} | fields)
        assert raised.value.param == param

    def test_the_server_goes_on(self, client: openai.OpenAI) -> None:
        assert client.completions.create(model="demo", prompt="a", max_tokens=1).choices[0].finish_reason


class TestAsync:
    def test_sixteen_at_once(self, server: Serving, oracle: LLM) -> None:
        async def ask() -> list[str]:
            async with server.async_client() as client:
                calls = [
                    client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, seed=seed)
                    for seed in range(16)
                ]
                return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

        each = [params(oracle, max_tokens=16, seed=seed) for seed in range(16)]
        expected = oracle.generate([PROMPT] * 16, each, progress=False)
        assert asyncio.run(ask()) == [output.outputs[0].text for output in expected]

    def test_streams_side_by_side(self, server: Serving, oracle: LLM) -> None:
        async def read(client: openai.AsyncOpenAI, seed: int) -> str:
            stream = await client.chat.completions.create(
                model="demo", messages=TALK, max_tokens=12, seed=seed, stream=True
            )
            return "".join([event.choices[0].delta.content or "" async for event in stream])

        async def ask() -> list[str]:
            async with server.async_client() as client:
                return list(await asyncio.gather(*(read(client, seed) for seed in range(4))))

        texts = [oracle.chat(TALK, params(oracle, max_tokens=12, seed=seed)).outputs[0].text for seed in range(4)]
        assert asyncio.run(ask()) == texts

    def test_errors(self, server: Serving) -> None:
        async def ask() -> None:
            async with server.async_client() as client:
                await client.completions.create(model="demo", prompt="a", n=99)

        with pytest.raises(openai.BadRequestError, match="n=99"):
            asyncio.run(ask())


class TestOtherAddresses:
    def test_tokens_there_and_back(self, server: Serving, oracle: LLM) -> None:
        assert oracle.tokenizer is not None
        found = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
        assert found["tokens"] == oracle.tokenizer.encode(PROMPT)
        assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 4096
        assert PROMPT in "".join(found["token_strs"])
        back = server.post("/detokenize", {"tokens": found["tokens"]}).json()
        assert back == {"prompt": oracle.tokenizer.decode(found["tokens"], skip_special_tokens=False)}
        talk = server.post("/tokenize", {"messages": TALK}).json()
        assert talk["tokens"] == oracle.tokenizer.encode_chat(TALK)
        assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": TALK}, "prompt"),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
            ("/tokenize", {"messages": TALK, "add_special_tokens": True}, "add_special_tokens"),
            ("/detokenize", {"tokens": [10**7]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ],
    )
    def test_bad_bodies(self, server: Serving, path: str, body: Any, param: str) -> None:
        answer = server.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param

    def test_states(self, server: Serving) -> None:
        assert server.get("/health").json() == server.get("/ready").json() == {"status": "ready", "detail": None}
        assert set(server.get("/version").json()) == {"version"}
        assert server.get("/openapi.json").json()["openapi"] == "3.1.0"

    def test_unknown_addresses_and_methods(self, server: Serving) -> None:
        answer = server.post("/v1/embeddings", {"input": "a"})
        assert answer.status_code == 404 and "POST /v1/embeddings" in answer.json()["error"]["message"]
        answer = server.get("/v1/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert answer.json()["error"]["code"] == "method_not_allowed"

    def test_a_response_is_what_the_document_says(self, server: Serving) -> None:
        body = {"prompt": "a", "max_tokens": 3, "logprobs": 2}
        answer = server.post("/v1/completions", body).json()
        assert all(math.isfinite(value) for value in answer["choices"][0]["logprobs"]["token_logprobs"])
        assert json.loads(json.dumps(answer)) == answer
