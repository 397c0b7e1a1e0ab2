"""One prompt and its n choices on the way through the engine: from tokens to text, stop strings, results."""

from __future__ import annotations

import secrets
import time
from collections import deque

from skipstone.core.grammar import GrammarMaker
from skipstone.core.request import Request, SamplingParams
from skipstone.kernels.reference.sampling import derive_seed
from skipstone.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from skipstone.runtime.engine import Engine
from skipstone.text.stream import TextStream
from skipstone.text.tokenizer import Tokenizer


class Choice:
    """One engine request and the text that comes out of it."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request = request
        self.stream = TextStream(tokenizer, request.params) if tokenizer else None
        self.token_ids: list[int] = []
        self.stop_string: str | None = None

    def push(self, token_ids: list[int]) -> str:
        """Take committed tokens; returns the text that is now safe to show."""
        self.token_ids += token_ids
        if self.stream is None:
            return ""
        request = self.request
        ended = request.finished and request.stop_token_id is not None
        hidden = (
            ended and not request.params.include_stop_str_in_output
        )  # the token that ended the text is no part of it
        new = self.stream.push(token_ids[:-1] if hidden else token_ids)
        if self.stream.stopped_by is not None:
            self.stop_string = self.stream.stopped_by
            del self.token_ids[self.stream.num_tokens :]
        elif request.finished:
            new += self.stream.finish()
        return new

    @property
    def text(self) -> str:
        """All text that was safe to show."""
        return self.stream.text if self.stream else ""

    def output(self) -> CompletionOutput:
        """The choice as the caller sees it."""
        request = self.request
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            finish_reason=request.finish_reason.value if request.finish_reason else None,
            stop_reason=self.stop_string if self.stop_string is not None else request.stop_token_id,
            error=request.error,
            speculation=request.speculation if request.max_drafts else None,
        )


class Session:
    """A prompt with its sampling parameters; the seed is drawn here when none is given."""

    def __init__(
        self,
        session_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarMaker,
    ) -> None:
        self.session_id = session_id
        self.prompt = prompt
        self.prompt_token_ids = token_ids
        self.params = params
        self.arrival = time.perf_counter()
        self.metrics = RequestMetrics()
        self.inbox: deque[StreamEvent] | None = None  # events that a stream has yet to hand out
        self._running = params.n  # choices whose last tokens have not come
        seed = secrets.randbits(63) if params.seed is None else params.seed
        limit = len(token_ids) + params.max_tokens if params.max_tokens is not None else 1 << 60
        self.choices = [
            Choice(
                i,
                Request(
                    request_id=f"{session_id}-{i}" if params.n > 1 else session_id,
                    token_ids=list(token_ids),
                    params=params,
                    seed=derive_seed(seed, i),
                    max_total_tokens=limit,
                    eos_token_ids=eos_token_ids,
                    grammar=grammars.compile(params),
                ),
                tokenizer,
            )
            for i in range(params.n)
        ]

    def push(self, choice: Choice, token_ids: list[int], engine: Engine) -> StreamEvent:
        """Take a choice's committed tokens; ends it when its text contains a stop string."""
        now = time.perf_counter() - self.arrival
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = now
        text = choice.push(token_ids)
        if choice.stop_string is not None:
            surplus = choice.request.num_output_tokens - len(choice.token_ids)
            engine.stop(choice.request, len(token_ids), surplus)
            token_ids = token_ids[: len(token_ids) - surplus]
        event = StreamEvent(
            request_id=self.session_id,
            index=choice.index,
            text=text,
            token_ids=token_ids,
            finished=choice.request.finished,
        )
        self._running -= choice.request.finished
        if not self._running:
            self.metrics.total_s = now
            event.output = self.output()
        return event

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.request.finished for choice in self.choices)

    def output(self) -> RequestOutput:
        """The result so far."""
        first = self.choices[0].request
        wants_prompt = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.session_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=[None, *first.prompt_logprobs] if wants_prompt else None,
            outputs=[choice.output() for choice in self.choices],
            num_cached_tokens=first.num_cached_tokens,
            metrics=self.metrics,
        )
