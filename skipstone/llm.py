"""The Python interface: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skipstone.config import EngineConfig, make_config
from skipstone.core.grammar import GrammarMaker
from skipstone.core.observer import Observer
from skipstone.core.request import Request, SamplingParams
from skipstone.errors import ConfigError, RequestError
from skipstone.models.loader import ModelInfo, read_json, read_model_info
from skipstone.models.locate import locate
from skipstone.outputs import RequestOutput, StreamEvent
from skipstone.registry import GRAMMARS
from skipstone.runtime.block_pool import hash_salt
from skipstone.runtime.engine import Engine
from skipstone.session import Choice, Session
from skipstone.text.tokenizer import Tokenizer

Prompt = str | list[int]
Messages = Sequence[dict[str, Any]]
Stream = Generator[StreamEvent, None, None]
OnOutput = Callable[[int, RequestOutput], None]
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class GenerationConfig:
    """What the generation_config.json of a folder says, if it has one. Raises CheckpointError for an unreadable one."""

    def __init__(self, folder: Path) -> None:
        file = folder / "generation_config.json"
        self.raw = read_json(file, "it may be deleted") if file.exists() else {}

    @property
    def sampling(self) -> dict[str, Any]:
        """Defaults of sampling parameters; `do_sample` false means temperature 0, whatever temperature is named."""
        given = {key: self.raw[key] for key in SAMPLING_KEYS if self.raw.get(key) is not None}
        return given | {"temperature": 0.0} if self.raw.get("do_sample") is False else given

    def eos_token_ids(self, info: ModelInfo) -> frozenset[int]:
        """Ids that end a text: of this file, else of config.json. Raises ConfigError for an id out of range."""
        key, text = "eos_token_id", info.raw.get("text_config")
        places = (self.raw, info.raw, text if isinstance(text, dict) else {})
        value = next((raw[key] for raw in places if key in raw), None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        size = info.config.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < size:
                raise ConfigError(f"{key}={token!r} is not an id of the vocabulary: vocab_size={size}")
        return frozenset(ids)


class LLM:
    """A model ready to write. Options are those of EngineConfig; errors are SkipstoneErrors.

    Any thread may call it. The engine does one thing at a time; a step brings every caller's requests forward.

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
        if config is None:
            options["model"] = model
        elif not isinstance(config, EngineConfig) or options:
            raise ConfigError(f"config={config!r:.60} must be an EngineConfig that holds all options; got {options}")
        else:  # whatever it was made with
            options = msgspec.structs.asdict(config)
        self.config = make_config(**options)
        self.folder = locate(self.config.model)
        self.info = read_model_info(self.folder)
        self.tokenizer = Tokenizer(self.folder) if (self.folder / "tokenizer.json").exists() else None
        generation = GenerationConfig(self.folder)
        self.default_params = generation.sampling
        self.eos_token_ids = generation.eos_token_ids(self.info)
        make = GRAMMARS.load("llguidance")
        self._grammars: GrammarMaker = make(self.folder, self.info.config.vocab_size, self.eos_token_ids)
        self.engine = Engine(self.info, self.config, observer)
        if self.tokenizer is not None:
            caches = self.engine.caches
            self.tokenizer.context, self.tokenizer.advice = caches.max_model_len, caches.advice
        self._sessions: dict[str, tuple[Session, Choice]] = {}
        self._numbers = itertools.count()
        self._lock, self._door = threading.RLock(), threading.Lock()
        self._inside: int | None = None  # the thread that has the lock

    @property
    def card(self) -> list[tuple[str, str]]:
        """What was chosen at start-up and why, a row each."""
        caches, config, specs = self.engine.caches, self.config, self.engine.model.cache_specs()
        layers = ", ".join(f"{count} {group}" for group, count in Counter(spec.group for spec in specs).items())
        tokens = self.engine.pool.num_ownable * caches.block_size
        dtype = str(self.engine.dtype).removeprefix("torch.")
        keys = "; index keys in FP8 with a float32 scale each" if config.index_keys == "fp8" else ""
        on_cpu = self.engine.device.type == "cpu"
        kind = "CPU" if on_cpu else "GPU"
        name = f"cpu, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name()
        exact = "exact: a row's bits do not depend on the batch"
        proposer = self.engine.speculation.proposer
        drafting = proposer.needs.describe(caches.max_model_len) if proposer else ""
        sparse = any(spec.backend != "dense" for spec in specs)
        return [
            ("model", f"{self.info.architecture} from {self.folder.name}"),
            ("layers", layers),
            *([("sparse budget", self.info.config.sparse.text)] if sparse else []),
            ("dtype", f"{dtype} ({f'chosen for a {kind}' if config.dtype == 'auto' else 'as asked'}){keys}"),
            ("device", name),
            ("kernels", f"{self.engine.kernels.ops.implementation} ({self.engine.kernels.reason})"),
            ("numerics", exact if config.exact else "fast: bits may depend on the batch"),
            ("context", f"{caches.max_model_len} tokens"),
            (
                "cache",
                f"{tokens} tokens of {caches.bytes_per_token} bytes, blocks of {caches.block_size} ({caches.reason})",
            ),
            ("rows a step", f"up to {self.engine.max_rows}, of up to {config.max_num_seqs} requests"),
            ("prefix cache", "on" if config.prefix_caching else "off"),
            ("speculation", self.engine.speculation.description),
            *([("drafting", drafting)] if drafting else []),
        ]

    @property
    def proposer(self) -> str | None:
        """What drafts; None without speculation."""
        proposer = self.engine.speculation.proposer
        return proposer.needs.name if proposer else None

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
        return self._events([self._session(prompt, self._params_for(params, 1)[0])])

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Stream:
        """Answer a conversation, text as it comes."""
        return self._events([self._chat_session(messages, params)])

    def abort(self, request_id: str) -> None:
        """End every choice of a running request, a stream by an event with its output; the others go on.

        An unknown id is ignored: it may just have ended.
        """
        with self._turn():
            self._abort(request_id)

    def stats(self) -> dict[str, float]:
        """Totals since the start. Waits for no step."""
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
        with self._turn():
            self._abort(None)

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

    def prepare_grammar(self, params: SamplingParams, make: bool = True) -> object | None:
        """Make the grammar that the text is to follow, which `add` then finds as long as somebody has what is returned.

        Takes that work off `add`, where every running request would wait for it. Without `make`: None for one that is
        not there. Raises RequestError for a grammar that cannot be used.
        """
        return self._grammars.prepare(params, make)

    def step(self) -> list[StreamEvent]:
        """Run one engine step for everything queued; returns what came out, an event per choice that got tokens."""
        with self._turn():
            return self._step()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone with the engine and the sessions. Who waits at the door comes before who has just been in."""
        me = threading.get_ident()
        if self._inside == me:  # a forgotten stream may be closed at any time
            yield
            return
        with self._door:
            self._lock.acquire()
        self._inside = me
        try:
            yield
        finally:
            self._inside = None
            self._lock.release()

    def _step(self) -> list[StreamEvent]:
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

    def _abort(self, session_id: str | None) -> None:
        """End a session; without an id, all of them."""
        for session, choice in list(self._sessions.values()):
            if session_id in (None, session.session_id):
                self.engine.abort(choice.request)
                del self._sessions[choice.request.request_id]
                if session.inbox is not None:
                    session.inbox.append(session.push(choice, [], self.engine))

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.default_params)
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
        token_ids, params = self.tokenizer.encode_chat(messages), self._params_for(params, 1)[0]
        if params.structured_output:
            self.tokenizer.check_constraint(token_ids, params.structured_output[0])
        return self._make_session(None, token_ids, params)

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
        with self._turn():
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

    def _events(self, sessions: list[Session]) -> Stream:
        """Run the sessions to their end; what comes out of them, wherever the step was run that brought it."""
        inbox: deque[StreamEvent] = deque()
        for session in sessions:
            session.inbox = inbox
        self._submit(sessions)
        try:
            while True:
                with self._turn():
                    if not inbox and all(session.finished for session in sessions):
                        return
                    if not inbox:
                        self._step()
                while inbox:
                    yield inbox.popleft()
        finally:
            with self._turn():
                self._withdraw([choice.request for session in sessions for choice in session.choices])

    def _run(self, sessions: list[Session], progress: bool, done: OnOutput | None = None) -> list[RequestOutput]:
        places = {session.session_id: place for place, session in enumerate(sessions)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(
            *columns, console=Console(stderr=True), disable=not progress or len(sessions) < 2, transient=True
        )
        with bar, closing(self._events(sessions)) as events:
            task = bar.add_task("generating", total=len(sessions))
            for event in events:
                if event.output is not None:
                    bar.advance(task)
                    if done is not None:
                        done(places[event.request_id], event.output)
        return [session.output() for session in sessions]
