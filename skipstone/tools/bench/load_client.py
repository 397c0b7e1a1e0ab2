"""One streamed request to an OpenAI server: the time of every event, and the counts at the end."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec

EVENT = "data: "
END = "[DONE]"


class Drafts(msgspec.Struct, kw_only=True):
    """What speculation did for a request, under vLLM's names."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = []


class Sample(msgspec.Struct, kw_only=True):
    """One request as the client saw it. Times in seconds: `due` and `sent` from the start, the others from sending."""

    prompt: str
    due: float
    sent: float = 0.0
    arrivals: list[float] = []  # of events with new tokens
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafts: Drafts | None = None
    error: str | None = None

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def per_token(self) -> float | None:
        """Time per further token; None when there was only one."""
        return (self.seconds - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Times between events; with speculation an event brings several tokens."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Message(msgspec.Struct):
    """What is new of a chat."""

    role: str | None = None
    content: str | None = None


class Piece(msgspec.Struct):
    """What is new of a choice."""

    text: str | None = None
    delta: Message | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether it stands for tokens. Their text may be held back; an event that only names the role has none."""
        return self.delta is None or bool(self.delta.content) or self.delta.role is None or bool(self.finish_reason)


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Facts(msgspec.Struct):
    """What servers tell of a request besides its text."""

    speculative_decoding: Drafts | None = None


class Event(msgspec.Struct):
    """One event of a stream, as far as it matters here."""

    choices: list[Piece] = []
    usage: Usage | None = None
    metrics: Facts | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(Event)


async def ask(client: httpx.AsyncClient, path: str, body: bytes, sample: Sample) -> None:
    """Send a body that asks for a stream and note in `sample` what comes; errors are noted, not raised."""
    started = time.perf_counter()
    try:
        async with client.stream("POST", path, content=body) as answer:
            if answer.status_code != httpx.codes.OK:
                sample.error = f"HTTP {answer.status_code}: {_message(await answer.aread())}"
                return
            ended = False
            async for line in answer.aiter_lines():
                if line.startswith(EVENT):
                    ended = line.endswith(END)
                    if not ended:
                        _take(_DECODER.decode(line.removeprefix(EVENT)), time.perf_counter() - started, sample)
            if sample.error is None and not (ended and sample.arrivals):
                sample.error = "the stream was cut off" if not ended else "no tokens came"
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        sample.seconds = time.perf_counter() - started if sample.error else sample.arrivals[-1]
    sample.output_tokens = sample.output_tokens or len(sample.arrivals)


def _take(event: Event, now: float, sample: Sample) -> None:
    if event.error is not None:
        sample.error = f"error in the stream: {event.error!s:.200}"
    if any(piece.has_token for piece in event.choices):
        sample.arrivals.append(now)
    if event.usage is not None:
        sample.prompt_tokens, sample.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    if event.metrics is not None:
        sample.drafts = event.metrics.speculative_decoding


def _message(content: bytes) -> str:
    """The server's own words, cut short."""
    try:
        error = msgspec.json.decode(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
