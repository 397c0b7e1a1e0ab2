"""What the handlers of the HTTP server share: the model, the engine's thread, the options, the state."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import msgspec
from starlette.types import Scope

from skipstone.core.request import SamplingParams
from skipstone.llm import LLM
from skipstone.server.api.errors import ApiError, bad_request, busy, unavailable
from skipstone.server.api.responses import ServerStats
from skipstone.server.config import ServerConfig
from skipstone.server.engine_thread import EngineThread
from skipstone.server.metrics import ServerMetrics
from skipstone.server.online_check import OnlineCheck
from skipstone.server.step_observer import StepObserver
from skipstone.text.tokenizer import Tokenizer

T = TypeVar("T")
LARGE_BODY = 20_000  # bytes from which on a request is read and encoded beside the event loop
MOST_BODIES = 32  # bodies of the largest allowed size that may be held at a time
RETRY_S = 1.0  # when more are sent
SOURCE = "0+source"


def program_version() -> str:
    """The installed version of this package, or what stands for a source folder."""
    try:
        return version("skipstone")
    except PackageNotFoundError:
        return SOURCE


class Service:
    """One model behind one server."""

    def __init__(self, llm: LLM, config: ServerConfig, observer: StepObserver, engine: str = "0") -> None:
        """`engine`: which of several replicas this is, for the metrics."""
        self.llm = llm
        self._observer = observer
        self.config = config
        self.name = config.served_model_name or llm.folder.name
        self.names = {self.name, llm.config.model} if config.served_model_name is None else {self.name}
        self.created = int(time.time())
        self._started = time.perf_counter()
        digest = hashlib.sha256(msgspec.json.encode(llm.config)).hexdigest()
        self.fingerprint = f"skipstone-{program_version()}-{digest[:8]}"
        self.draining = False
        online = OnlineCheck(llm, config.online)
        self.metrics = ServerMetrics(llm, self.name, config.metrics_prefix, observer, online, engine)
        self.engine = EngineThread(llm, config.max_queue, self.metrics, observer, online)
        self._grammar_executor = ThreadPoolExecutor(1, "grammars")  # a costly one holds up its like alone
        self.body_bytes = 0
        """Bytes of the bodies of all requests under way; see `hold`."""
        self._body_executor = ThreadPoolExecutor(1, "bodies")  # one at a time: each may take a hundred times its bytes

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.llm.engine.caches.max_model_len

    @property
    def proposer(self) -> str:
        """The name of what drafts, or "off"."""
        return self.llm.proposer or "off"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError when it has none."""
        if self.llm.tokenizer is None:
            raise bad_request(f"{self.name} has no tokenizer.json, so prompts must be token ids", "prompt")
        return self.llm.tokenizer

    def check_open(self) -> None:
        """Raise ApiError unless new work is taken."""
        if self.engine.dead is not None:
            raise unavailable(f"the engine has stopped: {self.engine.dead}", "engine_dead")
        if self.draining:
            raise unavailable("the server is ending and takes nothing new", "draining")

    def check_model(self, name: str | None) -> None:
        """Raise ApiError when another model than the served one is named."""
        if name is not None and name not in self.names:
            message = f"model={name!r:.200} is not served here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def token_text(self, token_id: int) -> str:
        """Text of a token in the middle of a text; none without a tokenizer."""
        return self.llm.tokenizer.token_text(token_id) if self.llm.tokenizer else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in the middle of a text; none without a tokenizer."""
        return self.llm.tokenizer.token_bytes(token_id) if self.llm.tokenizer else b""

    def start_grammars(self) -> None:
        """Begin to read the vocabulary for grammars, so that the first who asks for one need not wait for it."""
        self._grammar_executor.submit(self.llm.prepare_grammar, SamplingParams(choice=["a"]))

    async def make_grammar(self, params: SamplingParams) -> object | None:
        """What LLM.prepare_grammar returns, made beside the event loop. Raises SkipstoneError."""
        known = self.llm.prepare_grammar(params, make=False)
        if known is not None or params.structured_output is None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_executor, self.llm.prepare_grammar, params)

    def hold(self, scope: Scope, size: int) -> None:
        """Count bytes of a request's body, until `release`. Raises ApiError when all requests have too many."""
        scope["body_bytes"] = scope.get("body_bytes", 0) + size
        self.body_bytes += size
        most = MOST_BODIES * self.config.max_body_bytes
        if self.body_bytes > most:
            message = f"the bodies of the requests under way have more than {most} bytes together; try again later"
            raise busy(message, RETRY_S)

    def release(self, scope: Scope) -> None:
        """Stop counting the bytes of a request that has ended."""
        self.body_bytes -= scope.get("body_bytes", 0)

    async def prepare(self, body: bytes, make: Callable[[bytes], T]) -> T:
        """What `make` makes of a body: at once, or beside the event loop when the body is large."""
        try:
            if len(body) < LARGE_BODY:
                return make(body)
            return await asyncio.get_running_loop().run_in_executor(self._body_executor, make, body)
        except RecursionError:
            raise bad_request("the body is nested too deeply; make it flatter", code="invalid_json") from None

    def stats(self) -> ServerStats:
        """The state in numbers."""
        engine, metrics = self.llm.engine, self.metrics
        scheduler, speculation = engine.scheduler, engine.scheduler.stats.speculation
        return ServerStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=engine.pool.num_used / engine.pool.num_ownable,
            steps=engine.stats.steps,
            prompt_tokens=metrics.prompt_tokens,
            generated_tokens=engine.stats.output_tokens,
            drafted_tokens=speculation.drafted,
            accepted_tokens=speculation.accepted,
            drafted_per_position=list(speculation.drafted_per_position),
            accepted_per_position=list(speculation.accepted_per_position),
            acceptance_length=speculation.acceptance_length,
            recent_acceptance_length=metrics.acceptance.recent_length,
            **{f"{phase}_seconds": round(seconds, 6) for phase, seconds in self._observer.seconds.items()},
            uptime_seconds=round(time.perf_counter() - self._started, 3),
        )
