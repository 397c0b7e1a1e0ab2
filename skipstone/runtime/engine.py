"""The engine: requests in, steps, tokens out. One step is schedule, start, finish, wait, commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from skipstone.config import EngineConfig
from skipstone.core.kv_cache import CacheMemory
from skipstone.core.observer import Observer
from skipstone.core.plan import PlanItem
from skipstone.core.request import FinishReason, Request
from skipstone.errors import ConfigError, RequestError
from skipstone.kernels.dispatch import choose_device, choose_dtype, choose_ops
from skipstone.models.base import CausalLM, ModelConfig
from skipstone.models.loader import Build, ModelInfo, Place, build_model, with_index_keys
from skipstone.registry import GPU
from skipstone.runtime.adaptive import AdaptiveK
from skipstone.runtime.block_pool import BlockPool
from skipstone.runtime.chunk_limit import ChunkLimit
from skipstone.runtime.k_table import asked_spec
from skipstone.runtime.masks import GrammarMasks
from skipstone.runtime.memory import CachePlan, MemoryBudget, check_fits, choose_block_size, plan_caches
from skipstone.runtime.proposers import BuildContext
from skipstone.runtime.runner import ModelRunner, StepHandle
from skipstone.runtime.scheduler import Scheduler
from skipstone.runtime.speculation import make_speculation

# Rows of a step. A slice of MiniMax-M3 on an H200 reads 23,000 prompt tokens a second with 512 and 86,000 with 8,192,
# but decoding requests wait for each step: 24 ms with 2,048.
ROWS = {"cpu": 512, "cuda": 2048}


@dataclass
class EngineStats:
    """Totals since the start."""

    steps: int = 0
    rows: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


class Engine:
    """Runs requests over one model until they end. Not thread-safe: one caller steps it."""

    def __init__(self, info: ModelInfo, config: EngineConfig, observer: Observer | None = None) -> None:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.device = choose_device(config.device)
        self.max_rows = config.max_num_batched_tokens or ROWS[self.device.type]
        self.dtype = choose_dtype(config.dtype, self.device)
        self.kernels = choose_ops(self.device, config.kernels, config.exact, self.dtype)
        info = with_index_keys(info, config.index_keys)
        positions = info.config.max_position_embeddings
        longest = min(config.max_model_len or positions, positions)
        place = Place(self.device, self.kernels.ops, self.dtype)
        spec, _ = asked_spec(config)
        with_mtp = spec.method in ("auto", "mtp") and spec.k != 0
        self.model: CausalLM = build_model(info, Build(config.exact, longest, place, with_mtp))
        self.speculation = make_speculation(config, BuildContext(info, self.model, longest, place))
        proposer = self.speculation.proposer
        specs = self.model.cache_specs() + (proposer.cache_specs() if proposer else [])
        draft_unit = proposer.needs.block_unit if proposer else 1
        budget = self._measured_budget(config, info.config, draft_unit)
        self.caches: CachePlan = plan_caches(config, info.config, specs, self.dtype, draft_unit, budget)
        if proposer and config.prefix_caching and proposer.needs.next_tokens > self.caches.block_size:
            # The positions that a request computes again behind a shared beginning must lie in its own last block.
            raise ConfigError(
                f"block_size={self.caches.block_size} and the {proposer.needs.next_tokens} MTP modules of "
                f"spec={config.spec} cannot be combined with prefix_caching; raise it or pass --no-prefix-caching"
            )
        check_fits(self.caches, config, self.device)
        memory = CacheMemory(self.caches.num_blocks, self.caches.block_size, self.dtype, self.device)
        ops, limits = self.kernels.ops, (config.max_num_seqs, self.caches.max_model_len)
        self.runner = ModelRunner(
            self.model, memory, config.exact, ops, self.speculation, *limits, config.cuda_graphs, observer
        )
        self.pool = BlockPool(self.caches.num_blocks, self.caches.block_size)
        bounds = (self.max_rows, config.max_num_seqs)
        table = self.speculation.table
        most_drafts = table.most_drafts if table else None
        self.adaptive = AdaptiveK(self.speculation.k, most_drafts) if self.speculation.adapts else None
        delay = config.max_decode_delay
        self.chunk_limit = ChunkLimit(delay / 1000, self.max_rows) if delay else None
        needs = proposer.needs if proposer else None
        self.scheduler = Scheduler(
            self.pool, *bounds, config.prefix_caching, needs, most_drafts, self.adaptive, self.chunk_limit
        )
        # On a GPU a step beside a prompt's rows is as long as these make it, and longer by all that drafts add.
        self.scheduler.pauses_beside_prompts = config.spec == "auto" and self.device.type != "cpu"
        self.scheduler.stats.speculation.simulated = self.speculation.simulated
        self.stats = EngineStats()
        self.overlap = config.overlap and self.device.type != "cpu"
        self._under_way: StepHandle | None = None
        self._waited = 0.0  # when the last results were there
        self._warm = self._num_made
        self.vocab_size: int = info.config.vocab_size

    def _measured_budget(self, config: EngineConfig, model: ModelConfig, draft_unit: int) -> MemoryBudget | None:
        """On a GPU: what a dry run of the largest step leaves for the caches."""
        if self.device.type == "cpu" or config.num_blocks or config.cache_memory_gb:
            return None
        block_size = choose_block_size(config, model, draft_unit)
        longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
        sampled = config.max_num_seqs * (self.speculation.k + 1)
        proposer = self.speculation.proposer
        size = (self.max_rows, longest, sampled, proposer.needs.taps if proposer else ())
        budget: MemoryBudget = GPU.load("measure_budget")(self.model, self.kernels.ops, block_size, self.dtype, size)
        return budget

    def warm_up(self, tick: Callable[[int, int], None] | None = None) -> None:
        """On a GPU: compile and capture before the first request what later ones need. `tick`: (done, of how many)."""
        if self.kernels.ops.implementation == "triton" and self.device.type != "cpu":
            GPU.load("warm_up")(self.runner, self.scheduler.max_rows, tick)
            self._warm = self._num_made

    @property
    def _num_made(self) -> int:
        if self.device.type == "cpu":
            return 0
        return int(GPU.load("compilations")()) + (self.runner.graphs.captures if self.runner.graphs else 0)

    @property
    def late_compilations(self) -> int:
        """Kernels compiled or loaded, and graphs captured, since the warm-up, or since the start without one."""
        return self._num_made - self._warm

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for bad parameters, token ids or a prompt that does not fit."""
        request.params.validate(self.vocab_size)
        if not request.token_ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        for name, ids in (("prompt", request.token_ids), ("prediction", request.prediction)):
            for token in ids and (min(ids), max(ids)):
                if not 0 <= token < self.vocab_size:
                    raise RequestError(f"{name} token id {token} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        self.caches.check_length(len(request.token_ids))
        request.max_total_tokens = min(request.max_total_tokens, self.caches.max_model_len)
        request.max_drafts = self._drafts_for(request)
        request.speculation.simulated = self.speculation.simulated
        self.scheduler.add(request)

    def _drafts_for(self, request: Request) -> int:
        k, asked = self.speculation.k, request.params.num_speculative_tokens
        if asked is None:
            return k
        if asked > k:
            raise RequestError(
                f"num_speculative_tokens={asked} is more than the engine's {k}; start it with a larger k in --spec"
            )
        return asked

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def step(self) -> list[tuple[Request, list[int]]]:
        """Run one step; returns the requests that got tokens, each with its new tokens.

        With `overlap` the next step is started before this one's results are read, so the device never waits. After a
        step that raises, whatever ran is computed again from its beginning.
        """
        try:
            return self._step()
        except BaseException:
            self._under_way = None
            self.scheduler.preempt_all()
            raise

    def _step(self) -> list[tuple[Request, list[int]]]:
        started = time.perf_counter()
        begun = self._waited if self._under_way else started
        handle = self._under_way or self._start(ahead=False)
        assert handle is not None
        self._under_way = None  # should this step fail, nobody waits for what was started
        # An observer is told of a step's tokens before the next step begins.
        ahead = self._start(ahead=True) if self.overlap and not self.runner.watched else None
        results = handle.wait()
        self._waited = time.perf_counter()
        if self.adaptive is not None and not self.runner.watched:
            self.adaptive.observe(handle.plan, results, self._waited - begun)
        if self.chunk_limit is not None:
            self.chunk_limit.observe(handle.plan, self._waited - begun)
        if handle.watched is not None:
            self.runner.report(handle, results, [self.scheduler.owner(item) for item in handle.plan.items])
        committed = self.scheduler.commit(handle.plan, results)
        if ahead is not None:
            self._finish(ahead)
        self._under_way = ahead
        self.stats.steps += 1
        self.stats.rows += handle.plan.num_rows
        self.stats.output_tokens += sum(len(tokens) for _, tokens in committed)
        self.stats.seconds += time.perf_counter() - started
        return committed

    def _start(self, ahead: bool) -> StepHandle | None:
        """Start the next step. One that needs masks of a grammar is finished once the tokens before it are known."""
        plan = self.scheduler.schedule(ahead)
        if plan is None:
            return None
        handle = self.runner.start(plan)
        if not ahead or not any(map(self._constrained, plan.items)):
            self._finish(handle)
        return handle

    def _constrained(self, item: PlanItem) -> bool:
        owner = self.scheduler.owner(item)
        return item.samples and owner is not None and owner.grammar is not None

    def _finish(self, handle: StepHandle) -> None:
        """Sample and draft, unless that is done."""
        if not handle.finished:
            owners = [self.scheduler.owner(item) for item in handle.plan.items]
            self.runner.finish(handle, GrammarMasks(handle.plan, owners))

    def abort(self, request: Request) -> None:
        """End a request now; its blocks are free at once. Nothing happens if it has ended."""
        self.scheduler.finish(request, FinishReason.ABORT)

    def stop(self, request: Request, emitted: int, surplus: int) -> None:
        """End a request whose text contains a stop string, `surplus` of its `emitted` new tokens behind it."""
        self.scheduler.stop(request, emitted, surplus)
        self.stats.output_tokens -= surplus
