"""From deltas to response bodies and stream events. Counts tokens on the way."""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET

from skipstone.core.speculation import SpeculationStats
from skipstone.server.api.requests import Sampling
from skipstone.server.api.responses import (
    CompletionTokensDetails,
    Metrics,
    PromptTokensDetails,
    SpeculativeDecoding,
    Usage,
)
from skipstone.server.generation import Delta, Job, Timing
from skipstone.server.service import Service

S = TypeVar("S", bound=msgspec.Struct)


class Writer(Protocol):
    """One kind of completion."""

    totals: Totals

    def event(self, delta: Delta) -> msgspec.Struct:
        """The stream event of a delta."""

    def closing(self) -> msgspec.Struct:
        """The event with the token counts, behind all others."""

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """The body of an answer that is sent at once; a delta for every choice, in any order."""


class Totals:
    """What a request has used up so far."""

    def __init__(self, service: Service, job: Job, timing: Timing, predicted: bool = False) -> None:
        """`predicted`: whether the drafts come from the request's own prediction."""
        self._job = job
        self._timing = timing
        self._most_drafts = service.llm.engine.speculation.k
        self._predicted = predicted
        self._cached_tokens = 0
        self._stats: list[SpeculationStats] = []
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []

    def add(self, delta: Delta) -> None:
        """Count a delta."""
        self.completion_tokens += len(delta.token_ids)
        self._drafted += delta.drafted
        self._accepted += delta.accepted
        if delta.prompt is not None:
            self._cached_tokens += delta.prompt.num_cached_tokens
        if delta.speculation is not None:
            self._stats.append(delta.speculation)
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self._job.prompts))

    def usage(self) -> Usage:
        """Token counts."""
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens),
        )
        if self._predicted:
            accepted, drafted = sum(s.accepted for s in self._stats), sum(s.drafted for s in self._stats)
            usage.completion_tokens_details = CompletionTokensDetails(accepted, drafted - accepted)
        return usage

    def metrics(self) -> Metrics:
        """Times and drafts."""
        timing, now = self._timing, time.perf_counter()
        first, end = timing.first_token, timing.end or now
        seconds = end - first if first is not None else None
        further = self.completion_tokens - 1
        itl = seconds / further if seconds is not None and further > 0 and self._job.num_choices == 1 else None
        return Metrics(
            queue_time_ms=_ms(timing.started - timing.arrival) if timing.started is not None else None,
            time_to_first_token_ms=_ms(first - timing.arrival) if first is not None else None,
            generation_time_ms=_ms(seconds) if seconds is not None else None,
            mean_itl_ms=_ms(itl) if itl is not None else None,
            tokens_per_second=round(self.completion_tokens / (end - timing.arrival), 2),
            speculative_decoding=self._speculation() if self._stats else None,
        )

    def _speculation(self) -> SpeculativeDecoding:
        steps, accepted = sum(s.steps for s in self._stats), sum(s.accepted for s in self._stats)
        drafted = sum(s.drafted for s in self._stats)
        histogram = [0] * (1 + max(len(s.accepted_per_position) for s in self._stats))
        for stats in self._stats:
            reached = [stats.steps, *stats.accepted_per_position, 0]  # steps with at least j accepted
            for j in range(len(reached) - 1):
                histogram[j] += reached[j] - reached[j + 1]
        asked = self._job.params.num_speculative_tokens
        one = self._job.origins and self._job.num_choices == 1
        return SpeculativeDecoding(
            num_spec_tokens=self._most_drafts if asked is None else asked,
            num_spec_steps=steps,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=1 + accepted / steps if steps else None,
            draft_acceptance_rate=accepted / drafted if drafted else None,
            acceptance_histogram=histogram,
            per_step_drafted=self._drafted if one else UNSET,
            per_step_accepted=self._accepted if one else UNSET,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def extras(service: Service, body: Sampling, delta: Delta) -> dict[str, Any]:
    """Fields of a choice that are sent on request only, and the reason of its end."""
    fields: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    if body.return_token_ids:
        fields["token_ids"] = delta.token_ids
    if body.return_token_strs:
        fields["token_strs"] = [service.token_text(token) for token in delta.token_ids]
    if body.return_token_origins:
        fields["token_origins"] = delta.origins
    return fields
