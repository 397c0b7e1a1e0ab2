"""POST /v1/completions: what it answers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from skipstone.core.request import TokenLogprobs
from skipstone.serve.api_requests import CompletionRequest
from skipstone.serve.api_responses import CompletionChoice, CompletionLogprobs, CompletionResponse
from skipstone.serve.api_writers import Totals, extras
from skipstone.serve.generation import Delta, Job, Timing
from skipstone.serve.service import Service

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class CompletionWriter:
    """Texts, whole or in pieces."""

    def __init__(self, service: Service, body: CompletionRequest, job: Job, timing: Timing) -> None:
        self.totals = Totals(service, job, timing, body.prediction is not None)
        self._service = service
        self._body = body
        self._job = job
        self._head: dict[str, Any] = {
            "id": f"cmpl-{job.request_id}",
            "created": service.now(),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._offsets = [0] * job.num_choices
        self._begun: set[int] = set()
        options = body.stream_options
        self._usage = None if options is not None and options.include_usage else UNSET
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}

    def event(self, delta: Delta) -> msgspec.Struct:
        """A piece of one text."""
        return CompletionResponse(**self._head, choices=[self._choice(delta)], usage=self._usage)

    def closing(self) -> msgspec.Struct:
        """Token counts."""
        return CompletionResponse(**self._head, choices=[], usage=self.totals.usage(), metrics=self.totals.metrics())

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """All texts."""
        choices = [self._choice(delta) for delta in deltas]
        choices.sort(key=lambda choice: choice.index)
        return CompletionResponse(
            **self._head, choices=choices, usage=self.totals.usage(), metrics=self.totals.metrics()
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        self.totals.add(delta)
        body, place = self._body, delta.index // self._job.params.n
        if delta.prompt is not None and delta.prompt.logprobs is not None:
            self._prompt_logprobs[place] = delta.prompt.logprobs
        text = delta.text
        entries: list[TokenLogprobs | None] | None = None if delta.logprobs is None else [*delta.logprobs]
        token_ids = delta.token_ids
        if body.echo and delta.index not in self._begun:
            self._begun.add(delta.index)
            text = self._prompt_text(place) + text
            token_ids = self._job.prompts[place] + token_ids
            if entries is not None:
                entries = self._prompt_logprobs[place] + entries
        logprobs = None
        if entries is not None:
            logprobs = self._logprobs(delta.index, token_ids, entries)
        return CompletionChoice(index=delta.index, text=text, logprobs=logprobs, **extras(self._service, body, delta))

    def _prompt_text(self, place: int) -> str:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        given = prompt[place]
        if isinstance(given, str):
            return given
        return self._service.tokenizer.decode(self._job.prompts[place], skip_special_tokens=False)

    def _logprobs(self, index: int, token_ids: list[int], entries: list[TokenLogprobs | None]) -> CompletionLogprobs:
        """One entry per token; None for a prompt's first."""
        name = self._service.token_text
        tokens = [name(token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        top: list[dict[str, float] | None] = []
        for entry in entries:
            top.append(None if entry is None else self._top(entry))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if entry is None else max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
            top_logprobs=top if self._body.logprobs else None,
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens; of those that read the same, the likelier. The token itself is always among them."""
        found: dict[str, float] = {}
        pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True), (entry.token_id, entry.logprob)]
        for token_id, logprob in pairs:
            found.setdefault(self._service.token_text(token_id), max(logprob, LOWEST_LOGPROB))
        return found
