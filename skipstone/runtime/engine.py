"""The engine: requests in, steps, tokens out. One step is schedule, execute, wait, commit."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from skipstone.config import EngineConfig
from skipstone.core.kv_cache import CacheMemory
from skipstone.core.observer import Observer
from skipstone.core.request import FinishReason, Request
from skipstone.errors import ConfigError, RequestError
from skipstone.kernels.dispatch import choose_device, choose_dtype, choose_ops
from skipstone.models.base import CausalLM, ModelConfig
from skipstone.models.loader import Build, ModelInfo, Place, build_model, with_index_keys
from skipstone.runtime.block_pool import BlockPool
from skipstone.runtime.device_loop import DeviceStep
from skipstone.runtime.dry_run import LargestStep, measure_room
from skipstone.runtime.k_table import asked_spec
from skipstone.runtime.memory import CachePlan, Room, check_fits, choose_block_size, plan_caches
from skipstone.runtime.runner import ModelRunner, StepHandle
from skipstone.runtime.scheduler import Scheduler
from skipstone.runtime.speculation import Surroundings, make_speculation
from skipstone.spec.hidden_state import HiddenStateProposer


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
        self.dtype = choose_dtype(config.dtype, self.device)
        self.kernels = choose_ops(self.device, config.kernels, config.exact, self.dtype)
        info = with_index_keys(info, config.index_keys)
        positions = info.config.max_position_embeddings
        longest = min(config.max_model_len or positions, positions)
        place = Place(self.device, self.kernels.ops, self.dtype)
        spec, _ = asked_spec(config)
        with_mtp = spec.method in ("auto", "mtp") and spec.k != 0
        self.model: CausalLM = build_model(info, Build(config.exact, longest, place, with_mtp))
        self.speculation = make_speculation(config, Surroundings(info, self.model, longest, place))
        proposer = self.speculation.proposer
        specs = self.model.cache_specs() + (proposer.cache_specs() if proposer else [])
        draft_unit = proposer.needs.block_unit if proposer else 1
        room = self._measured_room(config, info.config, draft_unit)
        self.caches: CachePlan = plan_caches(config, info.config, specs, self.dtype, draft_unit, room)
        if proposer and config.prefix_caching and proposer.needs.next_tokens > self.caches.block_size:
            # The positions that a request computes again behind a shared beginning must lie in its own last block.
            raise ConfigError(
                f"block_size={self.caches.block_size} and the {proposer.needs.next_tokens} MTP modules of "
                f"spec={config.spec} cannot be combined with prefix_caching; raise it or pass --no-prefix-caching"
            )
        check_fits(self.caches, config, self.device)
        memory = CacheMemory(self.caches.num_blocks, self.caches.block_size, self.dtype, self.device)
        self.runner = ModelRunner(self.model, memory, config.exact, self.kernels.ops, self.speculation, observer)
        self.pool = BlockPool(self.caches.num_blocks, self.caches.block_size)
        limits = (config.max_num_batched_tokens, config.max_num_seqs)
        needs, table = proposer.needs if proposer else None, self.speculation.table
        most_drafts = table.most_drafts if table else None
        self.scheduler = Scheduler(self.pool, *limits, config.prefix_caching, needs, most_drafts)
        self.scheduler.stats.speculation.simulated = self.speculation.simulated
        self.stats = EngineStats()
        self.overlap = False
        self._ahead: DeviceStep | None = None
        if self.device.type != "cpu":
            k = self.speculation.k if isinstance(proposer, HiddenStateProposer) else 0
            loop = self.runner.make_device_loop(config.max_num_seqs, k, self.caches.max_model_len, config.cuda_graphs)
            self.overlap = config.overlap and loop is not None
        self.vocab_size: int = info.config.vocab_size

    def _measured_room(self, config: EngineConfig, model: ModelConfig, draft_unit: int) -> Room | None:
        """On a GPU: what a dry run of the largest step leaves for the caches."""
        if self.device.type == "cpu" or config.num_blocks or config.cache_memory_gb:
            return None
        block_size = choose_block_size(config, model, draft_unit)
        longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
        rows = config.max_num_batched_tokens
        sampled = config.max_num_seqs * (self.speculation.k + 1)
        proposer = self.speculation.proposer
        taps = proposer.needs.taps if proposer else ()
        step = LargestStep(rows, longest, sampled, taps)
        return measure_room(self.model, self.kernels.ops, block_size, self.dtype, step)

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
        """Run one step; returns the requests that got tokens, each with its new tokens."""
        started = time.perf_counter()
        handle = self._ahead or self.runner.execute(self.scheduler.schedule())
        self._ahead = self._start_next(handle) if self.overlap else None
        plan = handle.plan
        assert plan is not None
        committed = self.scheduler.commit(plan, handle.wait())
        if self._ahead is not None:
            self._ahead.plan = self.scheduler.plan_committed(self._ahead.requests)
            if not self._ahead.plan.scheduled:
                self._ahead = None
        self.stats.steps += 1
        self.stats.rows += plan.num_rows
        self.stats.output_tokens += sum(len(tokens) for _, tokens in committed)
        self.stats.seconds += time.perf_counter() - started
        return committed

    def _start_next(self, handle: StepHandle | DeviceStep) -> DeviceStep | None:
        """Start the step after a device step before its results are known, unless there is more to decide."""
        if not isinstance(handle, DeviceStep) or self.scheduler.waiting:
            return None
        assert handle.plan is not None
        items = handle.plan.scheduled
        ended = any(item.request.finished or item.request.epoch != item.epoch for item in items)
        if ended or len(items) < len(self.scheduler.running):
            return None
        if not self.scheduler.reserve_ahead(handle.plan, handle.k):
            return None
        return self.runner.execute_next(handle)

    def drop_started(self) -> None:
        """Forget a step that was started early, once nothing runs that waits for it."""
        if not self.scheduler.running:
            self._ahead = None

    def abort(self, request: Request) -> None:
        """End a request now; its blocks are free at once. Nothing happens if it has ended."""
        self.scheduler.finish(request, FinishReason.ABORT)

    def stop(self, request: Request, emitted: int, surplus: int) -> None:
        """End a request whose text contains a stop string, `surplus` of its `emitted` new tokens behind it."""
        self.scheduler.stop(request, emitted, surplus)
        self.stats.output_tokens -= surplus
