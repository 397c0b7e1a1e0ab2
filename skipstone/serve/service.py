"""What the handlers of the HTTP server share: the model, the engine's thread, the options, the state."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from skipstone.llm import LLM
from skipstone.serve.api_errors import ApiError, bad_request, unavailable
from skipstone.serve.api_requests import Message
from skipstone.serve.engine_thread import EngineThread
from skipstone.serve.metrics import PhaseClock, ServerMetrics
from skipstone.serve.server_config import ServerConfig
from skipstone.serve.text import Tokenizer

LONG_TEXT = 20_000  # characters from which on a text is encoded beside the event loop
SOURCE = "0+source"


def program_version() -> str:
    """The installed version."""
    try:
        return version("skipstone")
    except PackageNotFoundError:
        return SOURCE


class Service:
    """One model behind one server."""

    def __init__(self, llm: LLM, config: ServerConfig, clock: PhaseClock | None = None) -> None:
        self.llm = llm
        self.config = config
        self.name = config.served_model_name or llm.folder.name
        self.names = {self.name, llm.config.model} if config.served_model_name is None else {self.name}
        self.created = self.now()
        digest = hashlib.sha256(msgspec.json.encode(llm.config)).hexdigest()
        self.fingerprint = f"skipstone-{program_version()}-{digest[:8]}"
        self.draining = False
        self.metrics = ServerMetrics(llm, self.name, config.metrics_prefix, clock)
        self.engine = EngineThread(llm, config.max_queue, self.metrics, self._engine_died)
        self.token_text = functools.cache(self._token_text)
        self.death: asyncio.Future[str] | None = None
        """Set by whoever wants to know that the engine was given up."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.llm.engine.caches.max_model_len

    @property
    def proposer(self) -> str:
        """The name of what drafts, or "off"."""
        proposer = self.llm.engine.speculation.proposer
        return proposer.needs.name if proposer else "off"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError when it has none."""
        if self.llm.tokenizer is None:
            raise bad_request(f"{self.name} has no tokenizer.json, so prompts must be token ids", "prompt")
        return self.llm.tokenizer

    @staticmethod
    def now() -> int:
        """Seconds since 1970."""
        return int(time.time())

    def check_open(self) -> None:
        """Raise ApiError unless new work is taken."""
        if self.engine.dead is not None:
            raise unavailable(f"the engine has stopped: {self.engine.dead}", "engine_dead")
        if self.draining:
            raise unavailable("the server is ending and takes nothing new", "draining")

    def check_model(self, name: str | None) -> None:
        """Raise ApiError when another model than the served one is named."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model={name!r:.200} is not served here, only {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = self.tokenizer
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation, by the model's template."""
        tokenizer = self.tokenizer
        plain = [_plain(message) for message in messages]
        if sum(len(message["content"]) for message in plain) < LONG_TEXT:
            return tokenizer.encode_chat(plain, add_generation_prompt)
        return await asyncio.to_thread(tokenizer.encode_chat, plain, add_generation_prompt)

    def _token_text(self, token_id: int) -> str:
        return self.llm.tokenizer.token_text(token_id) if self.llm.tokenizer else ""

    def _engine_died(self, reason: str) -> None:
        death = self.death
        if death is not None:
            death.get_loop().call_soon_threadsafe(death.set_result, reason)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content} | ({"name": message.name} if message.name is not None else {})
