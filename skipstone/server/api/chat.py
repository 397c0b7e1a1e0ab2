"""POST /v1/chat/completions: what it answers."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import UNSET

from skipstone.core.request import TokenLogprobs
from skipstone.server.api.completions import LOWEST_LOGPROB
from skipstone.server.api.requests import ChatRequest
from skipstone.server.api.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    DeltaMessage,
    FunctionCall,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from skipstone.server.api.tools import ToolUse
from skipstone.server.api.writers import Totals, extras
from skipstone.server.generation import Delta, Job, Timing
from skipstone.server.service import Service
from skipstone.text.tool_readers import Call, Text


class Speech:
    """The text of one answer, taken apart into what is said and what is called."""

    def __init__(self, tools: ToolUse | None) -> None:
        self.num_calls = 0
        self._reader = tools.reader() if tools else None
        self._most = None if tools is None or tools.several else 1

    def more(self, delta: Delta) -> DeltaMessage:
        """What a delta adds."""
        first = self.num_calls
        content, calls = self._read(delta)
        made = [ToolCallDelta(index=first + i, id=_new_id(), function=call) for i, call in enumerate(calls)]
        return DeltaMessage(content=content if content or not calls else UNSET, tool_calls=made or UNSET)

    def all(self, delta: Delta) -> AnswerMessage:
        """A whole answer."""
        content, calls = self._read(delta)
        made = [ToolCall(id=_new_id(), function=call) for call in calls]
        return AnswerMessage(content=content if content or not calls else None, tool_calls=made or UNSET)

    @property
    def called(self) -> bool:
        """Whether calls have been made, and none was cut off."""
        return bool(self.num_calls) and not (self._reader and self._reader.cut)

    def _read(self, delta: Delta) -> tuple[str, list[FunctionCall]]:
        """The text and the calls of a delta; calls beyond the one that was allowed are dropped."""
        if self._reader is None:
            return delta.text, []
        pieces = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        calls = [FunctionCall(*piece) for piece in pieces if isinstance(piece, Call)]
        if self._most is not None:
            calls = calls[: self._most - self.num_calls]
        self.num_calls += len(calls)
        return content, calls


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
        """Why the answer has ended: calls are its end unless something cut one off."""
        called = delta.finish_reason == "stop" and self._spoken[delta.index].called
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
