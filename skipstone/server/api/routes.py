"""The server's addresses: what each takes, does and gives back. /openapi.json is made from this table."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from skipstone.server.api import jobs, requests, responses
from skipstone.server.api.answer import Answer, periodic_events
from skipstone.server.api.decode import decode, read_body
from skipstone.server.api.errors import ApiError, bad_request
from skipstone.server.api.tools import tool_use
from skipstone.server.api.writers import ChatWriter, CompletionWriter, TraceWriter
from skipstone.server.service import Service, program_version

JSON = "application/json"
EVENTS_S = 0.5  # between two events of /v1/stats
BODY_ERRORS = (400, 404, 408, 413, 415, 429)


@dataclass(frozen=True)
class Endpoint:
    """One address. `response` None: the answer is no JSON; `events`: what a stream consists of.

    `handle` takes the service, the request and, if there is to be one, the `body`; it returns a struct or an
    application, and runs beside the event loop where the body is large, unless it is a coroutine.
    """

    method: str
    path: str
    handle: Callable[..., Any]
    response: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    media: str = JSON
    is_open: bool = False  # no key needed
    is_work: bool = False  # for the engine

    @functools.cached_property
    def body(self) -> type[requests.Body] | None:
        """The struct that the handler's parameter of this name is; None without one."""
        return get_type_hints(self.handle).get("body")

    @property
    def summary(self) -> str:
        """What it does, by the handler's docstring."""
        text = inspect.getdoc(self.handle) or ""
        return text[:1].lower() + text[1:].removesuffix(".")

    @property
    def errors(self) -> tuple[int, ...]:
        """Statuses of its own errors."""
        if self.body is None:
            return (404,) if "{" in self.path else ()
        return (*BODY_ERRORS, 499, 500, 503) if self.is_work else BODY_ERRORS

    async def answer(self, service: Service, request: Request) -> ASGIApp:
        """The application that sends the answer. Raises ApiError."""
        if self.body is None:
            result = self.handle(service, request)
        else:
            raw = await read_body(request, service)
            if self.is_work:
                service.check_open()
            result = await service.prepare(raw, functools.partial(self._handle_body, service, request))
        if inspect.isawaitable(result):
            result = await result
        return _json(result) if isinstance(result, msgspec.Struct) else result

    def _handle_body(self, service: Service, request: Request, raw: bytes) -> Any:
        assert self.body is not None
        body = decode(raw, self.body)
        service.check_model(getattr(body, "model", None))
        return self.handle(service, request, body)


def _json(struct: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(struct), status, media_type=JSON)


def complete(service: Service, request: Request, body: requests.CompletionRequest) -> Answer:
    """Go on with prompts."""
    job = jobs.completion_job(service, body, request.scope)
    _log_request(service, request, body, body.prompt)
    return Answer(service, CompletionWriter(service, body, job))


def chat(service: Service, request: Request, body: requests.ChatRequest) -> Answer:
    """Answer a conversation."""
    tools = tool_use(body, service.tokenizer)
    job = jobs.chat_job(service, body, tools, request.scope)
    _log_request(service, request, body, body.messages)
    return Answer(service, ChatWriter(service, body, job, tools))


def _log_request(service: Service, request: Request, body: requests.Sampling, prompt: object) -> None:
    if body.user is not None:
        request.scope["log"]["user"] = body.user[:100]
    if service.config.log_requests:
        request.scope["log"]["prompt"] = msgspec.to_builtins(prompt)


def list_models(service: Service, request: Request) -> responses.ModelList:
    """The served model."""
    return responses.ModelList(data=[show_model(service, request)])


def show_model(service: Service, request: Request) -> responses.ModelCard:
    """The served model."""
    service.check_model(request.path_params.get("model"))
    return responses.ModelCard(
        id=service.name,
        created=service.created,
        root=service.llm.folder.name,
        max_model_len=service.max_model_len,
        defaults=service.llm.default_params,
        speculative=responses.SpeculationCard(service.proposer, service.llm.engine.speculation.k),
    )


def tokenize(service: Service, request: Request, body: requests.TokenizeRequest) -> responses.TokenizeResponse:
    """Text to token ids."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give exactly one of prompt and messages", "prompt")
    if body.prompt is not None and body.add_generation_prompt is not None:
        raise bad_request("add_generation_prompt needs messages, not prompt", "add_generation_prompt")
    if body.messages is not None and body.add_special_tokens is not None:
        raise bad_request("add_special_tokens needs prompt; for messages the template decides", "add_special_tokens")
    with jobs.text_errors(service, "messages" if body.messages else "prompt"):
        if body.messages is not None:
            messages = msgspec.to_builtins(body.messages)
            token_ids = service.tokenizer.encode_chat(messages, body.add_generation_prompt is not False)
        else:
            token_ids = service.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    names = [service.token_text(token) for token in token_ids] if body.return_token_strs else None
    return responses.TokenizeResponse(
        count=len(token_ids), max_model_len=service.max_model_len, tokens=token_ids, token_strs=names
    )


def detokenize(service: Service, request: Request, body: requests.DetokenizeRequest) -> responses.DetokenizeResponse:
    """Token ids to text."""
    jobs.check_token_ids(service, body.tokens, "tokens has the id")
    return responses.DetokenizeResponse(service.tokenizer.decode(body.tokens, skip_special_tokens=False))


def apply_template(service: Service, request: Request, body: requests.TemplateRequest) -> responses.TemplateResponse:
    """A conversation as the prompt it becomes."""
    tools = tool_use(body, service.tokenizer)
    with jobs.text_errors(service, "messages"):
        prompt = service.tokenizer.render_chat(msgspec.to_builtins(body.messages), *jobs.template_options(body, tools))
    return responses.TemplateResponse(prompt)


def trace(service: Service, request: Request, body: requests.TraceRequest) -> Answer:
    """What the sparse layers read for one token."""
    return Answer(service, TraceWriter(service, jobs.trace_job(service, body, request.scope)))


def slots(service: Service, request: Request) -> responses.RequestList:
    """The requests under way with the same key."""
    now = time.perf_counter()
    cards = [
        responses.RequestCard(
            request_id=generation.job.request_id,
            state="waiting" if generation.timing.started is None else "running",
            seconds=round(now - generation.timing.arrival, 3),
            prompt_tokens=sum(map(len, generation.job.prompts)),
            max_tokens=generation.job.params.max_tokens,
            choices=generation.job.num_choices,
        )
        for generation in service.engine.open(request.scope["owner"])
    ]
    return responses.RequestList(cards)


async def abort(service: Service, request: Request, body: requests.AbortRequest) -> responses.AbortResponse:
    """End a request of the same key by its X-Request-Id."""
    error = ApiError(499, "the request was ended by /abort", code="aborted")
    return responses.AbortResponse(service.engine.abort(body.request_id, request.scope["owner"], error))


def stats(service: Service, request: Request) -> responses.ServerStats | Response:
    """The server's state; a feed for those who accept text/event-stream."""
    if "text/event-stream" in request.headers.get("accept", ""):
        return periodic_events(service, service.stats, EVENTS_S)
    return service.stats()


def health(service: Service, request: Request) -> Response:
    """503 when the engine was given up."""
    return _state(service, service.engine.dead is not None)


def ready(service: Service, request: Request) -> Response:
    """503 when no new work is taken."""
    return _state(service, service.engine.dead is not None or service.draining)


def _state(service: Service, fails: bool) -> Response:
    dead = service.engine.dead
    state = responses.Health(status="dead" if dead else "draining" if service.draining else "ready", detail=dead)
    return _json(state, 503 if fails else 200)


def show_version(service: Service, request: Request) -> responses.Version:
    """The program's version."""
    return responses.Version(program_version())


def metrics(service: Service, request: Request) -> Response:
    """Counters for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def show_openapi(service: Service, request: Request) -> Response:
    """This document."""
    # Its module reads the table below.
    return Response(request.app.openapi, media_type=JSON)


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat, responses.ChatResponse, responses.ChatChunk, is_work=True),
    Endpoint(
        "POST", "/v1/completions", complete, responses.CompletionResponse, responses.CompletionResponse, is_work=True
    ),
    Endpoint("GET", "/v1/models", list_models, responses.ModelList),
    Endpoint("GET", "/v1/models/{model}", show_model, responses.ModelCard),
    Endpoint("POST", "/tokenize", tokenize, responses.TokenizeResponse),
    Endpoint("POST", "/detokenize", detokenize, responses.DetokenizeResponse),
    Endpoint("POST", "/apply-template", apply_template, responses.TemplateResponse),
    Endpoint("POST", "/trace", trace, responses.TraceResponse, is_work=True),
    Endpoint("GET", "/slots", slots, responses.RequestList),
    Endpoint("POST", "/abort", abort, responses.AbortResponse),
    Endpoint("GET", "/v1/stats", stats, responses.ServerStats, responses.ServerStats),
    Endpoint("GET", "/health", health, responses.Health, is_open=True),
    Endpoint("GET", "/ready", ready, responses.Health, is_open=True),
    Endpoint("GET", "/version", show_version, responses.Version),
    Endpoint("GET", "/metrics", metrics, media="text/plain"),
    Endpoint("GET", "/openapi.json", show_openapi),
)
