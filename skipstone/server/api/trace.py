"""POST /trace: what the model read for one token, and which tokens were likely there."""

from __future__ import annotations

import msgspec

from skipstone.core.request import SamplingParams
from skipstone.server.api.chat import token_fields
from skipstone.server.api.errors import ApiError, bad_request
from skipstone.server.api.requests import TraceRequest
from skipstone.server.api.responses import TopLogprob, TraceResponse
from skipstone.server.api.writers import Totals
from skipstone.server.generation import Delta, Job, Timing
from skipstone.server.service import Service


def trace_job(service: Service, body: TraceRequest, request_id: str) -> Job:
    """One more token behind the given ones. Exact numerics make its row the one that wrote the text."""
    service.check_model(body.model)
    highest, limit = service.llm.engine.vocab_size - 1, service.max_model_len
    if max(body.tokens) > highest:
        raise bad_request(f"tokens has the id {max(body.tokens)}, but ids go from 0 to {highest}", "tokens")
    if len(body.tokens) >= limit:
        message = f"{len(body.tokens)} tokens leave no room for another, as the context holds {limit}; send fewer"
        raise ApiError(400, message, param="tokens", code="context_length_exceeded")
    top = 5 if body.top_logprobs is None else body.top_logprobs
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top, num_speculative_tokens=0)
    return Job(request_id=request_id, prompts=[body.tokens], params=params, trace=True)


class TraceWriter:
    """The one answer."""

    def __init__(self, service: Service, job: Job, timing: Timing) -> None:
        self.totals = Totals(service, job, timing)
        self._service = service
        self._job = job

    def event(self, delta: Delta) -> msgspec.Struct:
        """There is no stream."""
        raise NotImplementedError

    def closing(self) -> msgspec.Struct:
        """There is no stream."""
        raise NotImplementedError

    def whole(self, deltas: list[Delta]) -> msgspec.Struct:
        """What was read, and the likely tokens."""
        (delta,) = deltas
        self.totals.add(delta)
        (entry,) = delta.logprobs or []
        likely = zip(entry.top_ids, entry.top_logprobs, strict=True)
        layers = {spec.layer for spec in self._service.llm.engine.model.cache_specs()}
        return TraceResponse(
            position=len(self._job.prompts[0]),
            top_logprobs=[TopLogprob(**token_fields(self._service, *one)) for one in likely],
            layers=delta.reads,
            dense_layers=sorted(layers - {read.layer for read in delta.reads}),
        )
