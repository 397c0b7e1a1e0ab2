"""From a request struct to a job for the engine: sampling parameters, limits, speculation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.types import Scope

from skipstone.core.request import SamplingParams
from skipstone.errors import SkipstoneError
from skipstone.server.api import requests
from skipstone.server.api.errors import bad_request, from_engine
from skipstone.server.api.structured import Constraint, constraint
from skipstone.server.api.tools import ToolUse
from skipstone.server.generation import Job
from skipstone.server.service import Service

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; the engine ends a text where the context does
# How the tokenizer's messages begin that are about one field, and what they say; else the caller knows the field.
_PATH = re.compile(r"chat_template_kwargs|messages\[\d+\]\.\S+")
_CODES = {
    "has no chat template": "missing_chat_template",
    "the context holds": "context_length_exceeded",
    " is missing": "missing_required_parameter",
}
API_NAMES = {name: name for name in SamplingParams.__struct_fields__} | {"num_speculative_tokens": "speculation.k"}


def completion_job(service: Service, body: requests.CompletionRequest, scope: Scope) -> Job:
    """The job of a /v1/completions body. Raises ApiError."""
    prompts = _read_prompts(service, body)
    wanted: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        wanted["prompt_logprobs"] = body.logprobs
    wanted["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _check_lengths(service, prompts, body.max_tokens, "prompt")
    return _job(service, body, scope, prompts, wanted, constraint(body))


def chat_job(service: Service, body: requests.ChatRequest, tools: ToolUse | None, scope: Scope) -> Job:
    """The job of a /v1/chat/completions body. Raises ApiError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) == 2:
        raise bad_request("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
    max_tokens = limits.pop() if limits else None
    with text_errors(service, "messages"):
        prompt = service.tokenizer.encode_chat(msgspec.to_builtins(body.messages), *template_options(body, tools))
    wanted: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None, "max_tokens": max_tokens}
    asked = constraint(body)
    whole = asked.path if asked else "tool_choice" if tools and tools.must_call else None
    if whole:
        _check_constraint(service, body, prompt, whole)
    if tools is not None:
        asked = tools.constraint(asked)
        if tools.special_marks:
            if body.skip_special_tokens:
                raise bad_request(
                    f"skip_special_tokens=true would hide {tools.special_marks[0]}, by which calls are recognised; "
                    "leave it out, or send tool_choice='none'",
                    "skip_special_tokens",
                )
            wanted["skip_special_tokens"] = False
    _check_lengths(service, [prompt], max_tokens, "messages")
    return _job(service, body, scope, [prompt], wanted, asked)


def trace_job(service: Service, body: requests.TraceRequest, scope: Scope) -> Job:
    """One more token behind the given ones. Exact numerics make its row the one that wrote the text."""
    check_token_ids(service, body.tokens, "tokens has the id")
    limit = service.max_model_len
    if len(body.tokens) >= limit:
        message = f"{len(body.tokens)} tokens leave no room for another, as the context holds {limit}; send fewer"
        raise bad_request(message, "tokens", "context_length_exceeded")
    top = 5 if body.top_logprobs is None else body.top_logprobs
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top, num_speculative_tokens=0)
    return Job(request_id=scope["request_id"], owner=scope["owner"], prompts=[body.tokens], params=params, trace=True)


def _check_constraint(service: Service, body: requests.ChatRequest, prompt: list[int], path: str) -> None:
    """Raise ApiError when what comes next is thought, and so no answer."""
    begun = _text(body.messages[-1].content or "") if body.continue_final_message else ""
    if begun.rfind("<think>") > begun.rfind("</think>"):
        raise bad_request(f"{path} says what the whole answer is, but the last message ends within a thought", path)
    with text_errors(service, path):
        service.tokenizer.check_constraint(prompt, path)


def template_options(body: requests.ChatRequest | requests.TemplateRequest, tools: ToolUse | None) -> tuple[Any, ...]:
    """What Tokenizer.render_chat takes beside the messages. Raises ApiError."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other; keep one of them"
        raise bad_request(message, "continue_final_message")
    return (
        body.add_generation_prompt is not False,
        tools.prompt_tools if tools else None,
        bool(body.continue_final_message),
        body.chat_template_kwargs,
    )


@contextmanager
def text_errors(service: Service, param: str) -> Iterator[None]:
    """Raise ApiError for what the tokenizer or its template refuses, without where the model lies on the disk."""
    try:
        yield
    except SkipstoneError as error:
        text = str(error).replace(str(service.llm.folder), service.name)
        path = _PATH.match(text)
        param = path[0] if path else param
        code = next((code for part, code in _CODES.items() if part in text.removeprefix(param)), "invalid_value")
        raise bad_request(text, param, code) from None


def _job(
    service: Service,
    body: requests.Sampling,
    scope: Scope,
    prompts: list[list[int]],
    wanted: dict[str, Any],
    asked: Constraint | None,
) -> Job:
    """`wanted`: parameters of the engine that the body names in another way."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    names = API_NAMES | ({asked.field: asked.path} if asked else {})
    params = _params(service, body, wanted | ({asked.field: asked.value} if asked else {}), names)
    return Job(
        request_id=scope["request_id"],
        owner=scope["owner"],
        prompts=prompts,
        params=params,
        prediction=_prediction(service, body),
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        origins=bool(body.return_token_origins),
        names=names,
    )


def _params(service: Service, body: requests.Sampling, wanted: dict[str, Any], names: dict[str, str]) -> SamplingParams:
    given = {name: getattr(body, name, None) for name in SamplingParams.__struct_fields__}
    values: dict[str, Any] = service.llm.default_params | {k: v for k, v in given.items() if v is not None} | wanted
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(text): bias for text, bias in body.logit_bias.items()}
        if len(values["logit_bias"]) < len(body.logit_bias):
            raise bad_request("logit_bias names a token twice, such as by 5 and 05; keep one of them", "logit_bias")
    values["num_speculative_tokens"] = _drafts(service, body)
    params = SamplingParams(**values)
    try:
        params.validate(service.llm.engine.vocab_size)
    except SkipstoneError as error:
        raise from_engine(error, names) from None
    if params.stop_strings and service.llm.tokenizer is None:
        raise bad_request("stop needs a tokenizer.json, which this model has not; use stop_token_ids", "stop")
    return params


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise bad_request(f'logit_bias has the key {text!r:.40}; keys are token ids, such as "17"', "logit_bias")
    return int(text[:20])


def _drafts(service: Service, body: requests.Sampling) -> int | None:
    """Drafts per step that the request asks for; None: the server's usual."""
    asked = body.speculation
    if asked is None:
        return None
    if asked.proposer is not None and asked.proposer != service.proposer:
        raise bad_request(
            f"speculation.proposer={asked.proposer!r:.60} is not this server's, which is {service.proposer!r}; leave "
            "it out, or start a server with it",
            "speculation.proposer",
        )
    most = service.llm.engine.speculation.k
    if asked.k is not None and asked.k > most:
        raise bad_request(
            f"speculation.k={asked.k} is more than this server's {most} (proposer {service.proposer!r}); start it with "
            "a larger k in --spec",
            "speculation.k",
        )
    return asked.k


def _prediction(service: Service, body: requests.Sampling) -> list[int]:
    """Token ids of the predicted answer."""
    if body.prediction is None:
        return []
    if service.proposer != "ngram":
        raise bad_request(
            f"prediction needs the proposer 'ngram', and this server's is {service.proposer!r}; leave prediction "
            "out, or start the server with --spec ngram:4",
            "prediction",
            "unsupported_parameter",
        )
    with text_errors(service, "prediction.content"):
        return service.tokenizer.encode(_text(body.prediction.content), add_special_tokens=False)


def _text(content: requests.Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _read_prompts(service: Service, body: requests.CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt: text, ids, or a list of either."""
    prompt = body.prompt
    items: list[Any] = [prompt] if isinstance(prompt, str) or _all(prompt, int) else list(prompt)
    if not items or not (_all(items, str) or _all(items, list)):
        raise bad_request("prompt must be a text, a list of token ids, or a list of either, and not empty", "prompt")
    num_texts, most = len(items) * (body.n or 1), service.engine.capacity
    if num_texts > most:
        raise bad_request(f"{num_texts} texts are more than the {most} that may be under way")
    with text_errors(service, "prompt"):
        prompts = [item if isinstance(item, list) else service.tokenizer.encode(item) for item in items]
    for token_ids in prompts:
        if not token_ids:
            raise bad_request("the prompt is empty; it needs at least one token", "prompt")
        check_token_ids(service, token_ids, "prompt has the token id")
    return prompts


def check_token_ids(service: Service, token_ids: list[int], what: str) -> None:
    """Raise ApiError for an id beyond the vocabulary; `what` begins its message, first the field's name."""
    highest = service.llm.engine.vocab_size - 1
    if max(token_ids, default=0) > highest:
        raise bad_request(f"{what} {max(token_ids)}, but ids go from 0 to {highest}", what.split()[0])


def _all(items: list[Any], kind: type) -> bool:
    return bool(items) and all(isinstance(item, kind) for item in items)


def _check_lengths(service: Service, prompts: list[list[int]], max_tokens: int | None, param: str) -> None:
    """Raise ApiError when a prompt, or a prompt with what is asked for, is longer than the context."""
    limit, longest = service.max_model_len, max(map(len, prompts))
    if longest + (max_tokens or 1) <= limit:
        return
    asked = f" and {max_tokens} more are asked for" if max_tokens else ""
    room = limit - longest
    advice = f"max_tokens may be at most {room}" if room > 0 else "shorten it"
    message = f"the prompt has {longest} tokens{asked}, but the context holds {limit}; {advice}"
    raise bad_request(message, param, "context_length_exceeded")
