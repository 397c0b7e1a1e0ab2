"""From deltas to response bodies and stream events, by kind of request. Counts tokens on the way."""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Any

import msgspec
from msgspec import UNSET

from skipstone.core.request import TokenLogprobs
from skipstone.core.speculation import SpeculationStats
from skipstone.server.api import responses
from skipstone.server.api.requests import ChatRequest, CompletionRequest, Sampling
from skipstone.server.api.tools import ToolUse
from skipstone.server.generation import Delta, Job
from skipstone.server.service import Service
from skipstone.text.stream import Detokenizer
from skipstone.text.tool_readers import Call, Text

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class Writer:
    """What every kind of answer needs: the counts so far, and tokens as the API shows them."""

    def __init__(self, service: Service, job: Job) -> None:
        self.job = job
        self.prompt_tokens = sum(map(len, job.prompts))  # each prompt counted once
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self._service = service
        self._cached_tokens = 0
        self._speculation: SpeculationStats | None = None
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """The body of an answer that is sent at once; a delta for every choice, in any order."""
        raise NotImplementedError

    def count(self, delta: Delta) -> None:
        """Add a delta to the counts, before it is written."""
        self.completion_tokens += len(delta.token_ids)
        self._drafted += delta.drafted
        self._accepted += delta.accepted
        self._cached_tokens += delta.num_cached_tokens
        if delta.speculation is not None:
            self._speculation = (self._speculation or SpeculationStats()).plus(delta.speculation)
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)

    def likely(self, entry: TokenLogprobs, hide: bool = True) -> list[responses.TopLogprob]:
        """The likeliest tokens at a position."""
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return [responses.TopLogprob(**self.token_fields(*pair, hide)) for pair in pairs]

    def token_fields(self, token_id: int, logprob: float, hide: bool) -> dict[str, Any]:
        """A token with its log-probability, as fields of TopLogprob; `hide`: special tokens are not in the text."""
        content, tokenizer = self._service.token_bytes(token_id), self._service.llm.tokenizer
        hidden = hide and tokenizer is not None and token_id in tokenizer.special_names
        return {
            "token": content.decode(errors="backslashreplace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": [] if hidden else list(content),
        }


class TextWriter(Writer):
    """Completions and chats, which can be streams. `response` and `chunk`: their bodies and events."""

    response: type[responses.CompletionResponse | responses.ChatResponse]
    chunk: type[responses.CompletionResponse | responses.ChatChunk]
    id_prefix: str

    def __init__(self, service: Service, body: Sampling, job: Job) -> None:
        super().__init__(service, job)
        self._request = body
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{job.request_id}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._begun: set[int] = set()
        self._wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """The body with all choices."""
        for delta in deltas:
            self.count(delta)
        choices: list[Any] = sorted(map(self._choice, deltas), key=lambda choice: choice.index)
        return self.response(**self._head, choices=choices, usage=self._usage(), metrics=self._metrics())

    def event(self, delta: Delta) -> msgspec.Struct:
        """The stream event of a delta."""
        self.count(delta)
        choices: list[Any] = [self._choice(delta)]
        return self.chunk(**self._head, choices=choices, usage=None if self._wants_usage else UNSET)

    def closing(self) -> msgspec.Struct | None:
        """Token counts, if the request asks for them."""
        if not self._wants_usage:
            return None
        return self.chunk(**self._head, choices=[], usage=self._usage(), metrics=self._metrics())

    def _choice(self, delta: Delta) -> responses.Choice:
        raise NotImplementedError

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """What choices of every kind have; some of it on request only."""
        asked = self._request
        fields: dict[str, Any] = {
            "index": delta.index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if asked.return_token_ids:
            fields["token_ids"] = delta.token_ids
        if asked.return_token_strs:
            fields["token_strs"] = [self._service.token_text(token) for token in delta.token_ids]
        if asked.return_token_origins:
            fields["token_origins"] = delta.origins
        return fields

    def _is_first(self, delta: Delta) -> bool:
        """Whether this is the first delta of its choice."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        return first

    def _usage(self) -> responses.Usage:
        usage = responses.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=responses.PromptTokensDetails(self._cached_tokens),
        )
        if self._request.prediction is not None:  # the drafts come from it
            stats = self._speculation or SpeculationStats()
            usage.completion_tokens_details = responses.CompletionTokensDetails(
                stats.accepted, stats.drafted - stats.accepted
            )
        return usage

    def _metrics(self) -> responses.Metrics:
        timing, further = self.job.timing, self.completion_tokens - 1
        first, end = timing.first_token, timing.end or time.perf_counter()
        has_rate = further > 0 and self.job.num_choices == 1
        return responses.Metrics(
            queue_time_ms=_ms_between(timing.arrival, timing.started),
            time_to_first_token_ms=_ms_between(timing.arrival, first),
            generation_time_ms=_ms_between(first, end),
            mean_itl_ms=_ms_between(first, end, further) if has_rate else None,
            tokens_per_second=round(self.completion_tokens / (end - timing.arrival), 2),
            speculative_decoding=self._speculative_decoding(self._speculation) if self._speculation else None,
        )

    def _speculative_decoding(self, stats: SpeculationStats) -> responses.SpeculativeDecoding:
        reached = [stats.steps, *stats.accepted_per_position, 0]  # steps with at least j accepted
        asked = self.job.params.num_speculative_tokens
        one = self.job.origins and self.job.num_choices == 1
        return responses.SpeculativeDecoding(
            num_spec_tokens=self._service.llm.engine.speculation.k if asked is None else asked,
            num_spec_steps=stats.steps,
            num_draft_tokens=stats.drafted,
            num_accepted_draft_tokens=stats.accepted,
            mean_acceptance_length=stats.acceptance_length,
            draft_acceptance_rate=stats.accepted / stats.drafted if stats.drafted else None,
            acceptance_histogram=[at_least - more for at_least, more in itertools.pairwise(reached)],
            per_step_drafted=self._drafted if one else UNSET,
            per_step_accepted=self._accepted if one else UNSET,
        )


def _ms_between(start: float | None, end: float | None, parts: int = 1) -> float | None:
    return None if start is None or end is None else round((end - start) / parts * 1000, 3)


class CompletionWriter(TextWriter):
    """POST /v1/completions: texts, whole or in pieces."""

    response, chunk, id_prefix = responses.CompletionResponse, responses.CompletionResponse, "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, job: Job) -> None:
        super().__init__(service, body, job)
        self._body = body
        self._given_prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        tokenizer, hide = service.llm.tokenizer, job.params.skip_special_tokens
        self._detokenizers = [Detokenizer(tokenizer, hide) for _ in range(job.num_choices)] if tokenizer else []
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}

    def _choice(self, delta: Delta) -> responses.CompletionChoice:
        place = delta.index // self.job.params.n
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[place] = delta.prompt_logprobs
        text = delta.text
        entries: list[TokenLogprobs | None] | None = None if delta.logprobs is None else [*delta.logprobs]
        token_ids, offsets = delta.token_ids, []
        if self._body.echo and self._is_first(delta):
            given, tokenizer = self._given_prompts[place], self._service.tokenizer
            prompt_text = given if isinstance(given, str) else tokenizer.decode(self.job.prompts[place], False)
            text = prompt_text + text
            self._detokenizers[delta.index].length = len(prompt_text)
            if entries is not None:
                entries = self._prompt_logprobs[place] + entries
                token_ids = self.job.prompts[place] + token_ids
                offsets = self._prompt_offsets(place, prompt_text)
        logprobs = None
        if entries is not None:
            own = self._detokenizers[delta.index] if self._detokenizers else None
            offsets += _begins(own, delta.token_ids) if own else [0] * len(delta.token_ids)
            logprobs = self._logprobs(token_ids, entries, offsets)
        return responses.CompletionChoice(text=text, logprobs=logprobs, **self._fields(delta))

    def _prompt_offsets(self, place: int, text: str) -> list[int]:
        """Where each of a prompt's tokens begins in its text."""
        token_ids, tokenizer = self.job.prompts[place], self._service.tokenizer
        if isinstance(self._given_prompts[place], str):
            return tokenizer.places(text, token_ids)
        whole = Detokenizer(tokenizer, skip_special_tokens=False)
        begins = _begins(whole, token_ids)
        stripped = whole.length + len(whole.finish()) - len(text)  # a space before the first word
        return [max(begin - stripped, 0) for begin in begins]

    def _logprobs(
        self, token_ids: list[int], entries: list[TokenLogprobs | None], offsets: list[int]
    ) -> responses.CompletionLogprobs:
        """One entry per token; None for a prompt's first."""
        top = [None if entry is None else self._top(entry) for entry in entries]
        return responses.CompletionLogprobs(
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


class AnswerParser:
    """Takes the text of one answer apart into what is said and what is called."""

    def __init__(self, tools: ToolUse | None) -> None:
        self.num_calls = 0
        self._reader = tools.reader() if tools else None
        self._most_calls = None if tools is None or tools.several else 1

    def read(self, delta: Delta) -> tuple[str, list[responses.FunctionCall]]:
        """What a delta adds: text, and calls; those beyond the one that was allowed are dropped."""
        if self._reader is None:
            return delta.text, []
        pieces = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        calls = [responses.FunctionCall(*piece) for piece in pieces if isinstance(piece, Call)]
        if self._most_calls is not None:
            calls = calls[: self._most_calls - self.num_calls]
        self.num_calls += len(calls)
        return content, calls

    @property
    def called(self) -> bool:
        """Whether calls have been made, and none was cut off."""
        return bool(self.num_calls) and not (self._reader and self._reader.cut)


class ChatWriter(TextWriter):
    """POST /v1/chat/completions: answers, whole or in pieces."""

    response, chunk, id_prefix = responses.ChatResponse, responses.ChatChunk, "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest, job: Job, tools: ToolUse | None) -> None:
        super().__init__(service, body, job)
        self._parsers = [AnswerParser(tools) for _ in range(job.num_choices)]

    def _choice(self, delta: Delta) -> responses.ChatChoice | responses.ChatChunkChoice:
        parser = self._parsers[delta.index]
        first_call = parser.num_calls
        content, calls = parser.read(delta)
        fields = self._fields(delta) | {"logprobs": self._logprobs(delta)}
        if delta.finish_reason == "stop" and parser.called:
            fields["finish_reason"] = "tool_calls"
        has_content = content or not calls
        if not self.job.stream:
            whole = [responses.ToolCall(id=_new_id(), function=call) for call in calls]
            answer = responses.AnswerMessage(content=content if has_content else None, tool_calls=whole or UNSET)
            return responses.ChatChoice(message=answer, **fields)
        new = [
            responses.ToolCallDelta(index=i, id=_new_id(), function=call) for i, call in enumerate(calls, first_call)
        ]
        message = responses.DeltaMessage(content=content if has_content else UNSET, tool_calls=new or UNSET)
        if self._is_first(delta):
            message.role = "assistant"
        return responses.ChatChunkChoice(delta=message, **fields)

    def _logprobs(self, delta: Delta) -> responses.ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        hide = self.job.params.skip_special_tokens
        content = []
        for entry in delta.logprobs:
            own = self.token_fields(entry.token_id, entry.logprob, hide)
            content.append(responses.TokenLogprob(**own, top_logprobs=self.likely(entry, hide)))
        return responses.ChatLogprobs(content=content)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class TraceWriter(Writer):
    """POST /trace: what was read, and the likely tokens."""

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """The one answer."""
        (delta,) = deltas
        self.count(delta)
        (entry,) = delta.logprobs or []
        layers = {spec.layer for spec in self._service.llm.engine.model.cache_specs()}
        return responses.TraceResponse(
            position=len(self.job.prompts[0]),
            top_logprobs=self.likely(entry),
            layers=delta.reads,
            dense_layers=sorted(layers - {read.layer for read in delta.reads}),
        )
