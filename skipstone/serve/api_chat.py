"""POST /v1/chat/completions: what it answers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from skipstone.core.request import TokenLogprobs
from skipstone.serve.api_completions import LOWEST_LOGPROB
from skipstone.serve.api_requests import ChatRequest
from skipstone.serve.api_responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    DeltaMessage,
    FunctionCall,
    FunctionCallDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from skipstone.serve.api_tools import ToolUse
from skipstone.serve.api_writers import Totals, extras
from skipstone.serve.generation import Delta, Job, Timing
from skipstone.serve.service import Service
from skipstone.serve.tool_readers import Arguments, Begin, Piece, Reader, Text


class Speech:
    """The text of one answer, taken apart into what is said and what is called."""

    def __init__(self, tools: ToolUse | None) -> None:
        self.num_calls = 0
        self._reader = tools.reader() if tools else None
        self._most = math.inf if tools is None or tools.several else 1
        self._dropped = False

    def more(self, delta: Delta) -> DeltaMessage:
        """What a delta adds."""
        if self._reader is None:
            return DeltaMessage(content=delta.text)
        content, calls = "", []
        for piece in self._pieces(self._reader, delta):
            match piece:
                case Text(text):
                    content += text
                case Begin(name):
                    function = FunctionCallDelta(name=name, arguments="")
                    calls.append(
                        ToolCallDelta(index=self.num_calls - 1, id=_new_id(), type="function", function=function)
                    )
                case Arguments(text) if calls:
                    calls[-1].function.arguments += text
                case Arguments(text):
                    calls.append(ToolCallDelta(index=self.num_calls - 1, function=FunctionCallDelta(arguments=text)))
        return DeltaMessage(content=content if content or not calls else UNSET, tool_calls=calls or UNSET)

    def all(self, delta: Delta) -> AnswerMessage:
        """A whole answer."""
        if self._reader is None:
            return AnswerMessage(content=delta.text)
        content, calls = "", []
        for piece in self._pieces(self._reader, delta):
            match piece:
                case Text(text):
                    content += text
                case Begin(name):
                    calls.append(ToolCall(id=_new_id(), function=FunctionCall(name=name, arguments="")))
                case Arguments(text):
                    calls[-1].function.arguments += text
        return AnswerMessage(content=content if content or not calls else None, tool_calls=calls or UNSET)

    def _pieces(self, reader: Reader, delta: Delta) -> Iterator[Piece]:
        """The pieces of a delta's text; calls beyond the one that was allowed are dropped."""
        pieces = reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        for piece in pieces:
            if isinstance(piece, Begin):
                self._dropped = self.num_calls >= self._most
                self.num_calls += not self._dropped
            if not (self._dropped and isinstance(piece, (Begin, Arguments))):
                yield piece


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ChatWriter:
    """Answers, whole or in pieces."""

    def __init__(
        self, service: Service, body: ChatRequest, job: Job, timing: Timing, tools: ToolUse | None = None
    ) -> None:
        self.totals = Totals(service, job, timing, body.prediction is not None)
        self._service = service
        self._body = body
        self._job = job
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{job.request_id}",
            "created": service.now(),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._begun: set[int] = set()
        self._spoken = [Speech(tools) for _ in range(job.num_choices)]
        options = body.stream_options
        self._usage = None if options is not None and options.include_usage else UNSET

    def event(self, delta: Delta) -> msgspec.Struct:
        """A piece of one answer; the first says who speaks."""
        self.totals.add(delta)
        message, fields = self._spoken[delta.index].more(delta), extras(self._service, self._body, delta)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            message.role = "assistant"
        fields["finish_reason"] = self._reason(delta)
        choice = ChatChunkChoice(index=delta.index, delta=message, logprobs=self._logprobs(delta), **fields)
        return ChatChunk(**self._head, choices=[choice], usage=self._usage)

    def closing(self) -> msgspec.Struct:
        """Token counts."""
        return ChatChunk(**self._head, choices=[], usage=self.totals.usage(), metrics=self.totals.metrics())

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """All answers."""
        choices = []
        for delta in sorted(deltas, key=lambda delta: delta.index):
            self.totals.add(delta)
            message, fields = self._spoken[delta.index].all(delta), extras(self._service, self._body, delta)
            fields["finish_reason"] = self._reason(delta)
            choices.append(ChatChoice(index=delta.index, message=message, logprobs=self._logprobs(delta), **fields))
        return ChatResponse(**self._head, choices=choices, usage=self.totals.usage(), metrics=self.totals.metrics())

    def _reason(self, delta: Delta) -> str | None:
        """Why the answer has ended; calls are its end when nothing cut them off."""
        called = delta.finish_reason == "stop" and self._spoken[delta.index].num_calls
        return "tool_calls" if called else delta.finish_reason

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        return ChatLogprobs(content=[self._entry(entry) for entry in delta.logprobs])

    def _entry(self, entry: TokenLogprobs) -> TokenLogprob:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        hide = self._job.params.skip_special_tokens
        top = [TopLogprob(**token_fields(self._service, *pair, hide)) for pair in pairs]
        return TokenLogprob(**token_fields(self._service, entry.token_id, entry.logprob, hide), top_logprobs=top)


def token_fields(service: Service, token_id: int, logprob: float, skip_special_tokens: bool = True) -> dict[str, Any]:
    """A token with its log-probability, as fields of TopLogprob."""
    content, tokenizer = service.token_bytes(token_id), service.llm.tokenizer
    hidden = skip_special_tokens and tokenizer is not None and token_id in tokenizer.special_names
    return {
        "token": content.decode(errors="backslashreplace"),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": [] if hidden else list(content),
    }
