"""The Python interface: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skipstone.config import EngineConfig, make_config
from skipstone.core.observer import Observer
from skipstone.core.request import Request, SamplingParams
from skipstone.errors import ConfigError, RequestError
from skipstone.models.loader import read_json, read_model_info
from skipstone.models.locate import locate
from skipstone.outputs import RequestOutput, StreamEvent
from skipstone.runtime.block_pool import hash_salt
from skipstone.runtime.engine import Engine
from skipstone.serve.structured import GrammarCompiler
from skipstone.serve.text import Tokenizer
from skipstone.session import Choice, Session

Prompt = str | list[int]
Messages = Sequence[dict[str, Any]]
Stream = Generator[StreamEvent, None, None]
OnOutput = Callable[[int, RequestOutput], None]
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LLM:
    """A model ready to write. Options are those of EngineConfig; errors are SkipstoneErrors.

    An `observer` is told what happens inside each step, and costs nothing when there is none.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        if (model is None) == (config is None):
            raise ConfigError("give either a model or a config, not both")
        self.config = config or make_config(model=str(model), **options)
        self.folder = locate(self.config.model)
        self.info = read_model_info(self.folder)
        self.tokenizer = Tokenizer(self.folder) if (self.folder / "tokenizer.json").exists() else None
        generation_file = self.folder / "generation_config.json"
        self._generation = read_json(generation_file, "it may be deleted") if generation_file.exists() else {}
        self.eos_token_ids = eos_token_ids(self._generation, self.info.raw, self.info.config.vocab_size)
        self._grammars = GrammarCompiler(self.folder, self.info.config.vocab_size, self.eos_token_ids)
        self.engine = Engine(self.info, self.config, observer)
        if self.tokenizer is not None:
            self.tokenizer.context = self.engine.caches.max_model_len
        self._sessions: dict[str, tuple[Session, Choice]] = {}
        self._numbers = itertools.count()

    @property
    def default_params(self) -> dict[str, Any]:
        """Sampling defaults of the checkpoint's generation_config.json."""
        if self._generation.get("do_sample") is False:
            return {"temperature": 0.0}
        return {key: self._generation[key] for key in SAMPLING_KEYS if self._generation.get(key) is not None}

    @property
    def card(self) -> list[tuple[str, str]]:
        """What was chosen at start-up and why, a row each."""
        caches, config = self.engine.caches, self.config
        layers = ", ".join(f"{count} {group}" for group, count in self._layer_kinds().items())
        tokens = self.engine.pool.num_ownable * caches.block_size
        dtype = str(self.engine.dtype).removeprefix("torch.")
        keys = "; index keys in FP8 with a float32 scale each" if config.index_keys == "fp8" else ""
        on_cpu = self.engine.device.type == "cpu"
        kind = "CPU" if on_cpu else "GPU"
        name = f"cpu, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name()
        exact = "exact: a row's bits do not depend on the batch"
        return [
            ("model", f"{self.info.architecture} from {self.folder.name}"),
            ("layers", layers),
            ("dtype", f"{dtype} ({f'chosen for a {kind}' if config.dtype == 'auto' else 'as asked'}){keys}"),
            ("device", name),
            ("kernels", f"{self.engine.kernels.ops.implementation} ({self.engine.kernels.reason})"),
            ("numerics", exact if config.exact else "fast: bits may depend on the batch"),
            ("context", f"{caches.max_model_len} tokens"),
            (
                "cache",
                f"{tokens} tokens of {caches.bytes_per_token} bytes, blocks of {caches.block_size} ({caches.reason})",
            ),
            ("prefix cache", "on" if config.prefix_caching else "off"),
            ("speculation", self.engine.speculation.description),
        ]

    @property
    def proposer(self) -> str | None:
        """What drafts; None without speculation."""
        proposer = self.engine.speculation.proposer
        return proposer.needs.name if proposer else None

    def _layer_kinds(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for spec in self.engine.model.cache_specs():
            kinds[spec.group] = kinds.get(spec.group, 0) + 1
        return kinds

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids); results come in the order of the prompts.

        `on_output` gets each prompt's place and its result as soon as that is finished.

        One SamplingParams serves all prompts, or give one each. Raises RequestError for a bad prompt or parameter,
        before anything runs.
        """
        if not isinstance(prompts, (str, Sequence)):
            raise RequestError(f"prompts must be texts or lists of token ids, not {prompts!r:.60}")
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        items: list[Any] = [prompts] if single else list(prompts)
        each = self._params_for(params, len(items))
        return self._run([self._session(prompt, p) for prompt, p in zip(items, each, strict=True)], progress, on_output)

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, [{"role": ..., "content": ...}, ...], by the model's chat template."""
        return self._run([self._chat_session(messages, params)], progress=False)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, text as it comes. Closing the iterator aborts the request."""
        return self._stream(self._session(prompt, self._params_for(params, 1)[0]))

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Stream:
        """Answer a conversation, text as it comes."""
        return self._stream(self._chat_session(messages, params))

    def abort(self, request_id: str) -> None:
        """End every choice of a running request, a stream by an event with its output; the others go on.

        An unknown id is ignored: it may just have ended.
        """
        for session, choice in list(self._sessions.values()):
            if session.session_id == request_id:
                self.engine.abort(choice.request)
                del self._sessions[choice.request.request_id]
                if session.inbox is not None:
                    session.inbox.append(session.push(choice, [], self.engine))

    def stats(self) -> dict[str, float]:
        """Totals since the start."""
        engine, scheduler = self.engine.stats, self.engine.scheduler.stats
        return {
            "steps": engine.steps,
            "rows": engine.rows,
            "output_tokens": engine.output_tokens,
            "seconds": engine.seconds,
            "prefix_hit_tokens": scheduler.prefix_hit_tokens,
            "preemptions": scheduler.preemptions,
            "verify_steps": scheduler.speculation.steps,
            "drafted_tokens": scheduler.speculation.drafted,
            "accepted_tokens": scheduler.speculation.accepted,
            "cache_blocks_total": self.engine.pool.num_ownable,
            "cache_blocks_used": self.engine.pool.num_used,
        }

    def close(self) -> None:
        """End whatever still runs, as `abort` does."""
        for session, _ in list(self._sessions.values()):
            self.abort(session.session_id)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self, prompt: Prompt, params: SamplingParams, prediction: Sequence[int] = (), cache_salt: str = ""
    ) -> Session:
        """Queue a prompt without running it; `step` runs all that is queued.

        `prediction`: tokens that the output is expected to contain; prompt lookup drafts from them as well.
        `cache_salt`: cached blocks are shared among requests of the same salt only.
        """
        session = self._session(prompt, self._params_for(params, 1)[0])
        for choice in session.choices:
            choice.request.prediction = list(prediction)
            choice.request.first_parent = hash_salt(cache_salt)
        self._submit([session])
        return session

    def add_copy(self, request: Request, end: int, count: int) -> Session:
        """Queue a copy of a request that goes on from its first `end` tokens, `count` tokens far and without drafts.

        It is computed from its first token, without the prefix cache.
        """
        params = msgspec.structs.replace(
            request.params, n=1, num_speculative_tokens=0, logprobs=None, stop=[], prompt_logprobs=0
        )
        session = self._make_session(None, request.token_ids[:end], params)
        copy = session.choices[0].request
        copy.seed, copy.num_prompt_tokens = request.seed, request.num_prompt_tokens
        copy.max_total_tokens = end + count
        # A request for prompt logprobs does without the prefix cache; these are marked as known, so that none are made.
        copy.prompt_logprobs = [None] * end
        for token in copy.output_token_ids:
            if copy.grammar is not None:
                copy.grammar.advance(token)
        self._submit([session])
        return session

    def check_grammar(self, params: SamplingParams) -> None:
        """Raise RequestError when the text is to follow a grammar that cannot be used.

        May be called from any thread, and takes that work off `add`, where every running request would wait for it.
        """
        self._grammars.compile(params)

    def step(self) -> list[StreamEvent]:
        """Run one engine step for everything queued; returns what came out, an event per choice that got tokens."""
        events = []
        for request, tokens in self.engine.step():
            session, choice = self._sessions[request.request_id]
            event = session.push(choice, tokens, self.engine)
            events.append(event)
            if session.inbox is not None:
                session.inbox.append(event)
            if request.finished:
                del self._sessions[request.request_id]
        return events

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = msgspec.convert(self.default_params, SamplingParams)
        each = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError(f"params={params!r:.60} is not allowed; give SamplingParams, or a list of them")
        if len(each) != count:
            raise RequestError(f"{len(each)} sampling parameters were given for {count} prompts; give one or one each")
        return list(each)

    def _session(self, prompt: Prompt, params: SamplingParams) -> Session:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{self.folder.name} has no tokenizer.json, so prompts must be token ids, not text")
            return self._make_session(prompt, self.tokenizer.encode(prompt), params)
        if not isinstance(prompt, (list, tuple)) or not all(isinstance(token, int) for token in prompt):
            raise RequestError(f"a prompt must be a text or a list of token ids, not {prompt!r:.60}")
        return self._make_session(None, list(prompt), params)

    def _chat_session(self, messages: Messages, params: SamplingParams | None) -> Session:
        if self.tokenizer is None:
            raise RequestError(f"{self.folder.name} has no tokenizer.json, so it cannot chat")
        return self._make_session(None, self.tokenizer.encode_chat(messages), self._params_for(params, 1)[0])

    def _make_session(self, prompt: str | None, token_ids: list[int], params: SamplingParams) -> Session:
        params.validate(self.engine.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer.json; use stop_token_ids")
        number = next(self._numbers)
        eos = self.eos_token_ids
        return Session(f"request-{number}", prompt, token_ids, params, self.tokenizer, eos, self._grammars)

    def _submit(self, sessions: list[Session]) -> None:
        """Queue all choices, or none when one of them is refused."""
        added: list[Request] = []
        try:
            for session in sessions:
                for choice in session.choices:
                    self.engine.add(choice.request)
                    added.append(choice.request)
                    self._sessions[choice.request.request_id] = (session, choice)
        except RequestError:
            self._withdraw(added)
            raise

    def _withdraw(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request)
            self._sessions.pop(request.request_id, None)

    def _run(self, sessions: list[Session], progress: bool, done: OnOutput | None = None) -> list[RequestOutput]:
        self._submit(sessions)
        places = {session.session_id: place for place, session in enumerate(sessions)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(
            *columns, console=Console(stderr=True), disable=not progress or len(sessions) < 2, transient=True
        )
        try:
            with bar:
                task = bar.add_task("generating", total=len(sessions))
                while not all(session.finished for session in sessions):
                    for event in self.step():
                        if event.output is not None and event.request_id in places:
                            bar.advance(task)
                            if done is not None:
                                done(places[event.request_id], event.output)
        except BaseException:
            self._withdraw([choice.request for session in sessions for choice in session.choices])
            raise
        return [session.output() for session in sessions]

    def _stream(self, session: Session) -> Stream:
        self._submit([session])
        inbox: deque[StreamEvent] = deque()
        session.inbox = inbox  # another stream's turn may run the step that brings this one's events
        try:
            while inbox or not session.finished:
                if not inbox:
                    self.step()
                while inbox:
                    yield inbox.popleft()
        finally:
            self._withdraw([choice.request for choice in session.choices])


def eos_token_ids(generation: dict[str, Any], raw: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """Ids that end a text: from generation_config.json, else config.json. Raises ConfigError for an id out of range."""
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(f"eos_token_id={token!r} is not an id of the vocabulary, 0 to {vocab_size - 1}")
    return frozenset(ids)
