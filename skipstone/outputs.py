"""What callers get back: finished requests and the events of a stream."""

from __future__ import annotations

import msgspec

from skipstone.core.request import TokenLogprobs
from skipstone.core.speculation import SpeculationStats


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice. `finish_reason` is "stop", "length" or "abort"; `stop_reason` the stop string or id, if one hit.

    `error` says why no token could follow, where that ended the text ("abort"). `speculation` counts the choice's
    drafts; None when it ran without.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    speculation: SpeculationStats | None = None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Seconds from arrival to the first token and to the end."""

    first_token_s: float | None = None
    total_s: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A finished request. `prompt_logprobs[i]` belongs to prompt token i; the first is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    metrics: RequestMetrics


class StreamEvent(msgspec.Struct, kw_only=True):
    """New text of one choice. `output` is set on the last event of the last choice."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finished: bool
    output: RequestOutput | None = None
