"""`--online M`: one of M verify steps is computed again without drafts, while the server goes on.

A copy of the request as it was before the step runs beside the others, from its first token and without the prefix
cache, so that it depends on nothing that speculation has written. It must emit the tokens that the step has emitted.
Nobody waits for it, and in exact mode its company changes no other text. Lives on the engine's thread.
"""

from __future__ import annotations

import logging

import msgspec

from skipstone.core.request import Request
from skipstone.errors import ConfigError
from skipstone.llm import LLM
from skipstone.outputs import StreamEvent
from skipstone.session import Session

LOG = logging.getLogger("skipstone.online")


class RecomputedStep(msgspec.Struct):
    """A step that is computed again, and what must come out."""

    session: Session
    request_id: str  # of the HTTP request, for the log
    position: int  # of the first token, counted from the text's first
    expected: list[int]
    got: list[int] = []


class OnlineCheck:
    """One copy at a time: a step that is due meanwhile waits for the first verify step after it has ended."""

    def __init__(self, llm: LLM, every: int | None) -> None:
        """`every` None: no step is checked. Raises ConfigError where the text without drafts may be another one."""
        if every is not None:
            _check_exact(llm, every)
        self.checks = 0
        self.mismatches = 0
        self._llm = llm
        self._every = every
        self._since = 0  # verify steps since the last that was chosen
        self._steps: dict[str, int] = {}  # verify steps of each running request
        self._copy: RecomputedStep | None = None

    def on_tokens(self, request: Request, num_tokens: int, request_id: str) -> None:
        """A request has got tokens in a step."""
        if self._every is None:
            return
        steps = request.speculation.steps
        verified = steps > self._steps.get(request.request_id, 0)
        if request.finished:
            self._steps.pop(request.request_id, None)
        else:
            self._steps[request.request_id] = steps
        if not verified or not num_tokens:
            return
        self._since += 1
        if self._since >= self._every and self._copy is None:
            self._since = 0
            start = len(request.token_ids) - num_tokens
            expected, position = request.token_ids[start:], start - request.num_prompt_tokens
            self._copy = RecomputedStep(self._llm.add_copy(request, start, num_tokens), request_id, position, expected)

    def forget(self, request: Request) -> None:
        """Drop the count of a request that was aborted."""
        self._steps.pop(request.request_id, None)

    def reset(self) -> None:
        """Drop all counts and the copy: a failed step has ended everything that ran."""
        self._steps.clear()
        self._copy = None

    def take(self, event: StreamEvent) -> bool:
        """Whether the event is the copy's; then it has been dealt with."""
        copy = self._copy
        if copy is None or event.request_id != copy.session.session_id:
            return False
        self._llm.engine.stats.output_tokens -= len(event.token_ids)  # nobody's text
        copy.got += event.token_ids
        if event.finished or copy.got != copy.expected[: len(copy.got)]:
            self._llm.abort(copy.session.session_id)
            self._copy = None
            self._judge(copy)
        return True

    def _judge(self, copy: RecomputedStep) -> None:
        self.checks += 1
        if copy.got == copy.expected:
            return
        self.mismatches += 1
        same = [a == b for a, b in zip(copy.got, copy.expected, strict=False)]
        first = copy.position + (same.index(False) if False in same else len(same))
        LOG.error(
            "a verify step gave other tokens than a computation without drafts",
            extra={"request_id": copy.request_id, "position": first, "tokens": len(copy.expected)},
        )


def _check_exact(llm: LLM, every: int) -> None:
    speculation, config = llm.engine.speculation, llm.config
    if speculation.proposer is None:
        raise ConfigError(f"online={every} has no verify steps to check, as spec={config.spec!r} makes no drafts")
    if not config.exact:
        raise ConfigError(f"online={every} and exact=false cannot be combined: bits depend on the batch then")
    if speculation.verifier.rule != "exact" or speculation.simulated:
        raise ConfigError(
            f"online={every} needs verification=exact and no simulated acceptance: the text depends on drafts then"
        )
