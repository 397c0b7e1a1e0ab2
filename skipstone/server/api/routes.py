"""The server's addresses: what each takes, does and gives back. /openapi.json is made from this table."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from skipstone.errors import SkipstoneError
from skipstone.server.api.answer import Answer, Feed
from skipstone.server.api.chat import ChatWriter
from skipstone.server.api.completions import CompletionWriter
from skipstone.server.api.decode import decode, read_body
from skipstone.server.api.errors import ApiError, aborted, bad_request
from skipstone.server.api.jobs import (
    chat_job,
    completion_job,
    make_grammar,
    template_error,
    template_options,
    text_error,
)
from skipstone.server.api.requests import (
    AbortRequest,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TemplateRequest,
    TokenizeRequest,
    TraceRequest,
)
from skipstone.server.api.responses import (
    AbortResponse,
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    RequestCard,
    RequestList,
    ServerStats,
    SpeculationCard,
    TemplateResponse,
    TokenizeResponse,
    TraceResponse,
    Version,
)
from skipstone.server.api.tools import ToolUse, tool_use
from skipstone.server.api.trace import TraceWriter, trace_job
from skipstone.server.generation import Job
from skipstone.server.service import Service, plain_messages, program_version

BODY_ERRORS = (400, 404, 408, 413, 415, 429)
WORK_ERRORS = (*BODY_ERRORS, 499, 500, 503)
JSON = "application/json"
Asked = TypeVar("Asked")
FEED_S = 0.5  # between two events of /v1/stats


class Endpoint(NamedTuple):
    """One address. `response` None: the answer is no JSON; `events`: what a stream consists of."""

    method: str
    path: str
    summary: str
    handle: Callable[[Service, Request], Awaitable[ASGIApp]]
    body: type[Body] | None = None
    response: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    media: str = JSON
    is_open: bool = False  # no key needed


def _json(struct: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(struct), status, media_type=JSON)


async def complete(service: Service, request: Request) -> ASGIApp:
    """Go on with prompts."""

    def prepare(raw: bytes) -> tuple[CompletionRequest, Job]:
        body = decode(raw, CompletionRequest)
        return body, completion_job(service, body, request.scope["request_id"])

    body, job = await _prepared(service, request, prepare)
    _log_request(request, service, body, body.prompt)
    return Answer(service, job, lambda timing: CompletionWriter(service, body, job, timing), _wants_usage(body))


async def chat(service: Service, request: Request) -> ASGIApp:
    """Answer a conversation."""

    def prepare(raw: bytes) -> tuple[tuple[ChatRequest, ToolUse | None], Job]:
        body = decode(raw, ChatRequest)
        tools = tool_use(body, service.tokenizer)
        return (body, tools), chat_job(service, body, tools, request.scope["request_id"])

    (body, tools), job = await _prepared(service, request, prepare)
    _log_request(request, service, body, body.messages)
    return Answer(service, job, lambda timing: ChatWriter(service, body, job, timing, tools), _wants_usage(body))


async def _prepared(
    service: Service, request: Request, prepare: Callable[[bytes], tuple[Asked, Job]]
) -> tuple[Asked, Job]:
    """What a request asks for, and its job, checked as far as it can be before the engine sees it."""
    raw = await read_body(request, service)
    service.check_open()
    asked, job = await service.prepare(raw, prepare)
    await make_grammar(service, job)
    job.owner = request.scope["owner"]
    return asked, job


def _wants_usage(body: Sampling) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _log_request(request: Request, service: Service, body: Sampling, prompt: object) -> None:
    if body.user is not None:
        request.scope["log"]["user"] = body.user[:100]
    if service.config.log_requests:
        request.scope["log"]["prompt"] = msgspec.to_builtins(prompt)


async def list_models(service: Service, request: Request) -> ASGIApp:
    """The one model."""
    return _json(ModelList(data=[_card(service)]))


async def show_model(service: Service, request: Request) -> ASGIApp:
    """The model of that name."""
    service.check_model(request.path_params["model"])
    return _json(_card(service))


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.name,
        created=service.created,
        root=service.llm.folder.name,
        max_model_len=service.max_model_len,
        defaults=service.llm.default_params,
        speculative=SpeculationCard(service.proposer, service.llm.engine.speculation.k),
    )


async def tokenize(service: Service, request: Request) -> ASGIApp:
    """Text to token ids."""
    make = functools.partial(_tokenized, service)
    return _json(await service.prepare(await read_body(request, service), make))


def _tokenized(service: Service, raw: bytes) -> TokenizeResponse:
    body = decode(raw, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give exactly one of prompt and messages", "prompt")
    if body.prompt is not None and body.add_generation_prompt is not None:
        raise bad_request("add_generation_prompt needs messages, not prompt", "add_generation_prompt")
    if body.messages is not None and body.add_special_tokens is not None:
        raise bad_request("add_special_tokens needs prompt; for messages the template decides", "add_special_tokens")
    try:
        if body.messages is not None:
            token_ids = service.tokenizer.encode_chat(
                plain_messages(body.messages), body.add_generation_prompt is not False
            )
        else:
            token_ids = service.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    except SkipstoneError as error:
        raise text_error(str(error), "messages" if body.messages else "prompt") from None
    names = [service.token_text(token) for token in token_ids] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(token_ids), max_model_len=service.max_model_len, tokens=token_ids, token_strs=names
    )


async def detokenize(service: Service, request: Request) -> ASGIApp:
    """Token ids to text."""
    make = functools.partial(_detokenized, service)
    return _json(await service.prepare(await read_body(request, service), make))


def _detokenized(service: Service, raw: bytes) -> DetokenizeResponse:
    body = decode(raw, DetokenizeRequest)
    service.check_model(body.model)
    highest = service.llm.engine.vocab_size - 1
    if max(body.tokens, default=0) > highest:
        raise bad_request(f"tokens has the id {max(body.tokens)}, but ids go from 0 to {highest}", "tokens")
    return DetokenizeResponse(service.tokenizer.decode(body.tokens, skip_special_tokens=False))


async def apply_template(service: Service, request: Request) -> ASGIApp:
    """A conversation as the prompt that the model gets."""
    make = functools.partial(_rendered, service)
    return _json(await service.prepare(await read_body(request, service), make))


def _rendered(service: Service, raw: bytes) -> TemplateResponse:
    body = decode(raw, TemplateRequest)
    service.check_model(body.model)
    tools = tool_use(body, service.tokenizer)
    try:
        prompt = service.tokenizer.render_chat(plain_messages(body.messages), *template_options(body, tools))
    except SkipstoneError as error:
        raise template_error(error, service) from None
    return TemplateResponse(prompt)


async def trace(service: Service, request: Request) -> ASGIApp:
    """What the model read for one token."""

    def prepare(raw: bytes) -> tuple[None, Job]:
        return None, trace_job(service, decode(raw, TraceRequest), request.scope["request_id"])

    _, job = await _prepared(service, request, prepare)
    return Answer(service, job, lambda timing: TraceWriter(service, job, timing), closing=False)


async def slots(service: Service, request: Request) -> ASGIApp:
    """What is under way with the same key, without its content."""
    now = time.perf_counter()
    cards = [
        RequestCard(
            request_id=generation.job.request_id,
            state="waiting" if generation.timing.started is None else "running",
            seconds=round(now - generation.timing.arrival, 3),
            prompt_tokens=sum(map(len, generation.job.prompts)),
            max_tokens=generation.job.params.max_tokens,
            choices=generation.job.num_choices,
        )
        for generation in service.engine.open(request.scope["owner"])
    ]
    return _json(RequestList(cards))


async def abort(service: Service, request: Request) -> ASGIApp:
    """End a request of the same key by its id."""
    body = decode(await read_body(request, service), AbortRequest)
    return _json(AbortResponse(service.engine.abort(body.request_id, request.scope["owner"], aborted())))


async def stats(service: Service, request: Request) -> ASGIApp:
    """The server's state, once or as a feed."""
    if "text/event-stream" in request.headers.get("accept", ""):
        return Feed(service.stats, FEED_S)
    return _json(service.stats())


async def health(service: Service, request: Request) -> ASGIApp:
    """Whether the engine is alive; a server that is ending still is."""
    return _state(service, service.engine.dead is not None)


async def ready(service: Service, request: Request) -> ASGIApp:
    """Whether new work is taken."""
    return _state(service, service.engine.dead is not None or service.draining)


def _state(service: Service, fails: bool) -> Response:
    dead = service.engine.dead
    state = Health(status="dead" if dead else "draining" if service.draining else "ready", detail=dead)
    return _json(state, 503 if fails else 200)


async def show_version(service: Service, request: Request) -> ASGIApp:
    """The program's version."""
    return _json(Version(program_version()))


async def metrics(service: Service, request: Request) -> ASGIApp:
    """Counters for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def show_openapi(service: Service, request: Request) -> ASGIApp:
    """This table."""
    # The document's module reads the table below.
    document: bytes = request.app.openapi
    return Response(document, media_type=JSON)


def unknown_address(method: str, path: str) -> ApiError:
    """The error for an address that is not in the table."""
    return ApiError(404, f"there is no {method} {path[:200]}; /openapi.json lists what there is", code="not_found")


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        "answer a conversation",
        chat,
        ChatRequest,
        ChatResponse,
        ChatChunk,
        WORK_ERRORS,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        "go on with prompts",
        complete,
        CompletionRequest,
        CompletionResponse,
        CompletionResponse,
        WORK_ERRORS,
    ),
    Endpoint("GET", "/v1/models", "the served model", list_models, response=ModelList),
    Endpoint("GET", "/v1/models/{model}", "the served model", show_model, response=ModelCard, errors=(404,)),
    Endpoint("POST", "/tokenize", "text to token ids", tokenize, TokenizeRequest, TokenizeResponse, errors=BODY_ERRORS),
    Endpoint(
        "POST",
        "/detokenize",
        "token ids to text",
        detokenize,
        DetokenizeRequest,
        DetokenizeResponse,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        "POST",
        "/apply-template",
        "a conversation as the prompt it becomes",
        apply_template,
        TemplateRequest,
        TemplateResponse,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        "POST",
        "/trace",
        "what the sparse layers read for one token",
        trace,
        TraceRequest,
        TraceResponse,
        errors=WORK_ERRORS,
    ),
    Endpoint("GET", "/slots", "the requests under way with the same key", slots, response=RequestList),
    Endpoint(
        "POST",
        "/abort",
        "end a request of the same key by its X-Request-Id",
        abort,
        AbortRequest,
        AbortResponse,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        "GET",
        "/v1/stats",
        "the server's state; a feed for those who accept text/event-stream",
        stats,
        response=ServerStats,
        events=ServerStats,
    ),
    Endpoint("GET", "/health", "503 when the engine was given up", health, response=Health, is_open=True),
    Endpoint("GET", "/ready", "503 when no new work is taken", ready, response=Health, is_open=True),
    Endpoint("GET", "/version", "the program's version", show_version, response=Version),
    Endpoint("GET", "/metrics", "counters for Prometheus", metrics, media="text/plain"),
    Endpoint("GET", "/openapi.json", "this document", show_openapi, media=JSON),
)
