"""POST /v1/chat/completions: what it answers."""

from __future__ import annotations

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
    TokenLogprob,
    TopLogprob,
)
from skipstone.serve.api_writers import Totals, extras
from skipstone.serve.generation import Delta, Job, Timing
from skipstone.serve.service import Service
from skipstone.serve.text import UNFINISHED


class ChatWriter:
    """Answers, whole or in pieces."""

    def __init__(self, service: Service, body: ChatRequest, job: Job, timing: Timing) -> None:
        self.totals = Totals(service, job, body, timing)
        self._service = service
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{job.request_id}",
            "created": service.now(),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._begun: set[int] = set()
        options = body.stream_options
        self._usage = None if options is not None and options.include_usage else UNSET

    def event(self, delta: Delta) -> msgspec.Struct:
        """A piece of one answer; the first says who speaks."""
        self.totals.add(delta)
        message = DeltaMessage(content=delta.text)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            message.role = "assistant"
        choice = ChatChunkChoice(
            index=delta.index, delta=message, logprobs=self._logprobs(delta), **extras(self._body, delta)
        )
        return ChatChunk(**self._head, choices=[choice], usage=self._usage)

    def closing(self) -> msgspec.Struct:
        """Token counts."""
        return ChatChunk(**self._head, choices=[], usage=self.totals.usage(), metrics=self.totals.metrics())

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """All answers."""
        choices = []
        for delta in sorted(deltas, key=lambda delta: delta.index):
            self.totals.add(delta)
            message = AnswerMessage(content=delta.text)
            fields = extras(self._body, delta)
            choices.append(ChatChoice(index=delta.index, message=message, logprobs=self._logprobs(delta), **fields))
        return ChatResponse(**self._head, choices=choices, usage=self.totals.usage(), metrics=self.totals.metrics())

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        return ChatLogprobs(content=[self._entry(entry) for entry in delta.logprobs])

    def _entry(self, entry: TokenLogprobs) -> TokenLogprob:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [TopLogprob(**self._token(token_id, logprob)) for token_id, logprob in pairs]
        return TokenLogprob(**self._token(entry.token_id, entry.logprob), top_logprobs=top)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._service.token_text(token_id)
        content = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": content}
