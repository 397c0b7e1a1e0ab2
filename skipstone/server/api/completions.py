"""POST /v1/completions: what it answers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from skipstone.core.request import TokenLogprobs
from skipstone.server.api.requests import CompletionRequest
from skipstone.server.api.responses import CompletionChoice, CompletionLogprobs, CompletionResponse
from skipstone.server.api.writers import Totals, extras
from skipstone.server.generation import Delta, Job, Timing
from skipstone.server.service import Service
from skipstone.text.stream import Detokenizer

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
        tokenizer, hide = service.llm.tokenizer, job.params.skip_special_tokens
        self._detokenizers = [Detokenizer(tokenizer, hide) for _ in range(job.num_choices)] if tokenizer else []
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
        token_ids, offsets = delta.token_ids, []
        if body.echo and delta.index not in self._begun:
            self._begun.add(delta.index)
            prompt_text = self._prompt_text(place)
            text = prompt_text + text
            self._detokenizers[delta.index].length = len(prompt_text)
            if entries is not None:
                entries = self._prompt_logprobs[place] + entries
                token_ids = self._job.prompts[place] + token_ids
                offsets = self._prompt_offsets(place, prompt_text)
        logprobs = None
        if entries is not None:
            own = self._detokenizers[delta.index] if self._detokenizers else None
            offsets += _begins(own, delta.token_ids) if own else [0] * len(delta.token_ids)
            logprobs = self._logprobs(token_ids, entries, offsets)
        return CompletionChoice(index=delta.index, text=text, logprobs=logprobs, **extras(self._service, body, delta))

    def _prompt_text(self, place: int) -> str:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        given = prompt[place]
        if isinstance(given, str):
            return given
        return self._service.tokenizer.decode(self._job.prompts[place], skip_special_tokens=False)

    def _prompt_offsets(self, place: int, text: str) -> list[int]:
        """Where each of a prompt's tokens begins in its text."""
        token_ids, tokenizer = self._job.prompts[place], self._service.tokenizer
        if isinstance(self._body.prompt, str) or isinstance(self._body.prompt[place], str):
            return tokenizer.places(text, token_ids)
        whole = Detokenizer(tokenizer, skip_special_tokens=False)
        begins = _begins(whole, token_ids)
        stripped = whole.length + len(whole.finish()) - len(text)  # a space before the first word
        return [max(begin - stripped, 0) for begin in begins]

    def _logprobs(
        self, token_ids: list[int], entries: list[TokenLogprobs | None], offsets: list[int]
    ) -> CompletionLogprobs:
        """One entry per token; None for a prompt's first."""
        top: list[dict[str, float] | None] = []
        for entry in entries:
            top.append(None if entry is None else self._top(entry))
        return CompletionLogprobs(
            tokens=[self._name(token) for token in token_ids],
            token_logprobs=[None if entry is None else max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
            top_logprobs=top if self._body.logprobs else None,
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens; of those that read the same, the likelier. The token itself is always among them."""
        found: dict[str, float] = {}
        pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True), (entry.token_id, entry.logprob)]
        for token_id, logprob in pairs:
            found.setdefault(self._name(token_id), max(logprob, LOWEST_LOGPROB))
        return found

    def _name(self, token_id: int) -> str:
        """A token's text; as OpenAI has it, a part of a character by its bytes."""
        content = self._service.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + content.decode(errors="backslashreplace")


def _begins(detokenizer: Detokenizer, token_ids: list[int]) -> list[int]:
    """Where each of the tokens that come next begins in the text."""
    begins = []
    for token in token_ids:
        detokenizer.push(token)
        begins.append(detokenizer.begin)
    return begins
