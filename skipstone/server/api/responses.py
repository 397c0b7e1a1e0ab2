"""Response bodies. A field that is UNSET is left out; one that is None is sent as null, where OpenAI has it so."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from skipstone.server.generation import LayerRead, Origin

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Drafts made from `prediction`: emitted, and made in vain. Only the first are part of completion_tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts; drafts that were rejected are no completion tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class SpeculativeDecoding(msgspec.Struct, kw_only=True):
    """Drafts of a request; `acceptance_histogram[j]`: verify steps in which j drafts were accepted.

    The length includes the token that every step adds to its drafts. The lists per step are there for
    `return_token_origins`, with one choice.
    """

    num_spec_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    per_step_drafted: list[int] | UnsetType = UNSET
    per_step_accepted: list[int] | UnsetType = UNSET


class Metrics(msgspec.Struct, kw_only=True):
    """Times of a request, and what speculation did for it. `mean_itl_ms`: per token after the first, of one choice."""

    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities in the form of /v1/completions, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(msgspec.Struct, kw_only=True):
    """What the choices of both kinds of completion have, and of streams."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    token_strs: list[str] | UnsetType = UNSET
    token_origins: list[Origin] | UnsetType = UNSET


class CompletionChoice(Choice, kw_only=True):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None


class TopLogprob(msgspec.Struct, kw_only=True):
    """A likely token, parts of characters written as \\xe6. `bytes`: what it adds to the text; none if it is hidden."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """A token of the answer, and those that were likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities in the form of /v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """Which function, and its arguments: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the model says; null when it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ToolCallDelta(ToolCall, kw_only=True):
    """A call, of this index among the answer's; it comes whole."""

    index: int


class DeltaMessage(msgspec.Struct, kw_only=True):
    """What was added to an answer; the first has the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Choice, kw_only=True):
    """What one step added to one answer."""

    delta: DeltaMessage
    logprobs: ChatLogprobs | None


class AnswerHead(msgspec.Struct, kw_only=True):
    """What the bodies of both kinds of completion have, and the events of streams."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionResponse(AnswerHead, kw_only=True):
    """The texts; or, in a stream, what a step added to one of them."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class ChatResponse(AnswerHead, kw_only=True):
    """The answers."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics


class ChatChunk(AnswerHead, kw_only=True):
    """An event of a stream of answers."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class SpeculationCard(msgspec.Struct):
    """What the server drafts with."""

    method: str
    k: int


class ModelCard(msgspec.Struct, kw_only=True):
    """The model that is served; `defaults`: sampling parameters of requests that do not set them."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "skipstone"
    root: str
    max_model_len: int
    defaults: dict[str, float]
    speculative: SpeculationCard


class ModelList(msgspec.Struct, kw_only=True):
    """Every model that is served: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(msgspec.Struct, kw_only=True):
    """`status`: ready, draining or dead."""

    status: Literal["ready", "draining", "dead"]
    detail: str | None = None


class Version(msgspec.Struct):
    """The program's version."""

    version: str


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """Text."""

    prompt: str


class TemplateResponse(msgspec.Struct):
    """The prompt."""

    prompt: str


class RequestCard(msgspec.Struct, kw_only=True):
    """A request under way."""

    request_id: str
    state: Literal["waiting", "running"]
    seconds: float
    prompt_tokens: int
    max_tokens: int | None
    choices: int


class RequestList(msgspec.Struct):
    """Every request under way, the oldest first."""

    requests: list[RequestCard]


class AbortResponse(msgspec.Struct):
    """How many requests of that name were ended."""

    aborted: int


class TraceResponse(msgspec.Struct, kw_only=True):
    """What the row before a position read, and which tokens were likely at the position; dense layers read all."""

    position: int
    top_logprobs: list[TopLogprob]
    layers: list[LayerRead]
    dense_layers: list[int]


class ServerStats(msgspec.Struct, kw_only=True):
    """The state of the server in numbers; counts are since its start, `recent` is over the last minute."""

    running: int
    waiting: int
    cache_usage: float
    steps: int
    prompt_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    drafted_per_position: list[int]
    acceptance_length: float | None
    recent_acceptance_length: float | None
    target_seconds: float
    verify_seconds: float
    draft_seconds: float
    uptime_seconds: float
