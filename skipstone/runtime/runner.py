"""Runs plans on the device: fills the sequence table, starts steps, as graphs where they only decode, reads results."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups
from skipstone.core.kv_cache import CacheMemory, KVCache
from skipstone.core.observer import EmittedRun, Observer, Phase
from skipstone.core.plan import PlanItem, StepPlan, StepResult
from skipstone.core.request import Request, TokenLogprobs
from skipstone.core.sampling_rows import PLAIN, Features
from skipstone.core.sequence_table import SequenceTable
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.gemm import cpu_threads
from skipstone.kernels.reference.sampling import decision_scores, token_logprobs
from skipstone.models.base import CausalLM
from skipstone.registry import GPU
from skipstone.runtime.layout import Layout, make_layout, packed
from skipstone.runtime.masks import GrammarMasks, Mask
from skipstone.runtime.speculation import Speculation
from skipstone.runtime.step import Forward, Outcome, Step
from skipstone.spec.proposer import Proposer

# Steps of less work than this (rows x bytes of weights) run on one thread: their operations are so short that a second
# one gains at most a fifth, and costs a hundredfold where other programs keep the cores busy (2.2 s against 22 ms for
# 16 rows of a demo, 2 cores).
ONE_THREAD_BYTES = 1e9


class Watched(NamedTuple):
    """For an observer: of the sampled rows, the model's logits and what the sampler took the maximum of, [L, V]."""

    logits: Tensor
    scores: Tensor


class StepHandle:
    """A step under way. Reading its results is the step's one synchronization."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.finished = False
        self.forward: Forward | None = None
        self.graph: Any = None  # the DecodeGraph that runs it
        self.watched: Watched | None = None
        self._parts: list[Tensor] = []
        self._width = 0
        self._logprob_rows: list[tuple[PlanItem, int, int]] = []  # item, number of drafts before it or PAD, top n
        self._over: torch.cuda.Event | None = None

    def bring(self, parts: list[Tensor], width: int) -> None:
        """Begin to copy results to the host; `width`: tokens per item."""
        self.finished, self.forward, self._width = True, None, width
        for part in parts:
            host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.is_cuda)
            self._parts.append(host.copy_(part, non_blocking=True))
        if parts[0].is_cuda:
            self._over = torch.cuda.Event()
            self._over.record()

    def wait(self) -> list[StepResult]:
        """One result per item of the plan."""
        if self._over is not None:
            self._over.synchronize()
        rows, width = iter(self._parts[0].tolist()), self._width
        results = []
        for item in self.plan.items:
            if not item.samples:
                results.append(StepResult())
                continue
            row = next(rows)
            drafts = [token for token in row[1 + width :] if token >= 0]
            results.append(StepResult(row[1 : row[0] + 2], row[0], drafts))
        if self._logprob_rows:
            self._read_logprobs(results)
        return results

    def _read_logprobs(self, results: list[StepResult]) -> None:
        token, logprob, rank, ids, values = (part.tolist() for part in self._parts[1:])
        of_item = {id(item): result for item, result in zip(self.plan.items, results, strict=True)}
        for i, (item, place, top) in enumerate(self._logprob_rows):
            result = of_item[id(item)]
            entry = TokenLogprobs(token[i], logprob[i], rank[i], ids[i][:top], values[i][:top])
            if place < 0:
                result.prompt_logprobs.append(entry)
            elif place < len(result.token_ids):
                result.logprobs.append(entry)


class ModelRunner:
    """Owns the model's caches, attention groups and sequence table."""

    def __init__(
        self,
        model: CausalLM,
        memory: CacheMemory,
        exact: bool,
        ops: Ops,
        speculation: Speculation,
        max_requests: int,
        max_tokens: int,
        graphs: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.model, self.ops, self.observer = model, ops, observer
        self.block_size, self.device = memory.block_size, memory.device
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        specs, config = model.cache_specs(), model.config
        self.cache = KVCache(specs, memory)
        self.groups = AttentionGroups(specs, self.cache, config.softmax_scale, config.sparse, exact, ops)
        self.groups.observer = observer
        if speculation.proposer is not None:
            speculation.proposer.bind(memory, ops)
        with torch.inference_mode():
            self.table = SequenceTable(max_requests, max_tokens, self.block_size, speculation.k, self.device)
        self.max_tokens, self.most_drafts = max_tokens, speculation.k
        parts = (model, self.groups, self.table, ops, self.block_size)
        self.step = Step(*parts, speculation.proposer, speculation.verifier, speculation.draft_sampling, speculation.k)
        self.features: dict[int, Features] = {}
        self._last_shape: Any = None
        self._last_layout: Layout
        capturable = speculation.proposer is None or speculation.proposer.needs.graphs
        self.graphs: Any = None  # DecodeGraphs, which a CPU does not load
        if graphs and capturable and ops.implementation == "triton" and self.device.type != "cpu":
            self.graphs = GPU.load("graphs")(self.step, max_tokens)

    @property
    def watched(self) -> bool:
        """Whether an observer is to be told of each step's tokens."""
        return self.observer is not None and self.observer.wants_runs

    @property
    def proposer(self) -> Proposer | None:
        """What drafts."""
        return self.step.proposer

    def start(self, plan: StepPlan) -> StepHandle:
        """Start a plan's step up to its logits."""
        handle = StepHandle(plan)
        with torch.inference_mode(), self._place(plan):
            self._update(plan)
            if self.graphs is not None and not self.watched and self.graphs.covers(plan):
                handle.graph = self.graphs.replay(plan)
                handle.forward = handle.graph.forward
                return handle
            handle.forward = self.step.forward(self._layout(plan.items))
            self._ended("target")
        return handle

    def _layout(self, items: list[PlanItem]) -> Layout:
        """The last step's, moved on, where the same requests run as many rows again."""
        every_row = self.step.needs_every_row or self.watched
        shape = (every_row, [(item.slot, *item[3:]) for item in items])
        if shape != self._last_shape:
            self._last_shape, self._last_layout = shape, make_layout(items, self.table, every_row)
        return self._last_layout._replace(end=max(item.end for item in items))

    def finish(self, handle: StepHandle, masks: GrammarMasks) -> None:
        """Sample and draft.

        On a GPU drafts are drawn without masks, which would need the drafts before them on the host.
        """
        plan, forward = handle.plan, handle.forward
        assert forward is not None
        features = [self.features[item.slot] for item in plan.items if item.samples]
        with torch.inference_mode(), self._place(plan):
            if handle.graph is not None:
                if all(each.plain for each in features):
                    result = handle.graph.finish(any(each.truncated for each in features))
                    handle.bring([result], forward.layout.most_drafts + 1)
                    return
                features += [PLAIN] * (len(forward.layout.counts) - len(features))  # of padding
            end = max(item.end for item in plan.items)
            outcome = self.step.finish(forward, features, self._allowed(handle, masks.verified), end)
            if self.watched and handle.graph is None:
                logits = forward.logits[: forward.layout.num_sampled].float()
                handle.watched = Watched(logits, decision_scores(logits, outcome.rows))
            self._ended("verify")
            drafts_or_follows = any(item.follows or item.num_next_drafts for item in plan.items)
            follows = self.proposer is not None and drafts_or_follows
            allowed = None
            if masks.verified and self.device.type == "cpu":
                emitted = [row[1 : row[0] + 2] for row in outcome.packed.tolist()]
                allowed = partial(masks.of_drafts, emitted)
            drafts = self.step.draft(forward, outcome, features, allowed) if follows else None
            self._ended("draft")
            result = outcome.packed if drafts is None else torch.cat([outcome.packed, drafts], dim=1)
            handle.bring([result, *self._logprobs(handle, forward, outcome)], outcome.accepted.emitted.shape[1])

    def report(self, handle: StepHandle, results: list[StepResult], owners: list[Request | None]) -> None:
        """Tell the observer what the plan's items emit; their requests have not taken it over yet."""
        assert handle.watched is not None and self.observer is not None
        runs, row, first = [], 0, 0
        for item, result, request in zip(handle.plan.items, results, owners, strict=True):
            if item.samples and request is not None:
                count = len(result.token_ids)
                kept = slice(first, first + count)
                newest = row + item.num_rows - 1 - item.num_drafts
                own = (request, len(request.token_ids), result.token_ids, request.drafts[: item.num_drafts])
                rows, (logits, scores) = list(range(newest, newest + count)), handle.watched
                runs.append(EmittedRun(*own, result.num_accepted, rows, logits[kept], scores[kept]))
            row += item.num_rows
            first += item.num_drafts + 1 if item.samples else 0
        if runs:
            self.observer.on_runs(runs)

    def _place(self, plan: StepPlan) -> AbstractContextManager[Any]:
        """Whatever a step makes on the way is made on its device."""
        if self.device.type != "cpu":
            return self.device
        small = plan.num_rows * self.weight_bytes <= ONE_THREAD_BYTES
        return cpu_threads(1 if small else torch.get_num_threads())

    def _ended(self, phase: Phase) -> None:
        if self.observer is None or (self.device.type != "cpu" and not self.observer.wants_phases):
            return
        if self.device.type != "cpu":
            torch.cuda.synchronize()
        self.observer.on_phase(phase)

    def _update(self, plan: StepPlan) -> None:
        """Take over what the plan says about requests and blocks."""
        if plan.admissions:
            self.table.admit(plan.admissions)
            for new in plan.admissions:
                self.features[new.slot] = Features(new.params, new.end_token_ids, new.num_prompt_tokens)
        if plan.new_blocks:
            self.table.own(plan.new_blocks)
        if plan.block_copies:
            sources, destinations = self.table.moved(np.array(plan.block_copies, dtype=np.int64).T.copy())
            self.cache.copy_blocks(sources, destinations)
            if self.proposer is not None:
                self.proposer.copy_blocks(sources, destinations)

    def _allowed(self, handle: StepHandle, masks: list[Mask]) -> Tensor | None:
        """The masks by sampled row; rows without one may choose anything."""
        if not masks:
            return None
        assert handle.forward is not None
        firsts = handle.forward.layout.first_sampled
        whole = torch.ones(handle.forward.layout.num_sampled, len(masks[0].allowed), dtype=torch.bool, device="cpu")
        for mask in masks:
            whole[firsts[mask.place] + mask.num_drafts] = mask.allowed
        return self.table.moved(whole.numpy())

    def _logprobs(self, handle: StepHandle, forward: Forward, outcome: Outcome) -> list[Tensor]:
        """Log-probabilities of emitted tokens and of prompts' own next ones, as far as anybody wants them."""
        rows: list[int] = []
        places: list[int] = []
        wanted: list[tuple[PlanItem, int, int]] = []
        sampling = [item for item in handle.plan.items if item.samples]
        for place, (item, row) in enumerate(zip(sampling, forward.layout.first_sampled.tolist(), strict=False)):
            count, top = item.num_drafts + 1, self.features[item.slot].logprobs
            if top is not None:
                rows += range(row, row + count)
                places += [place * outcome.accepted.emitted.shape[1] + i for i in range(count)]
                wanted += [(item, i, top) for i in range(count)]
        row = forward.layout.num_sampled
        of_prompt = []
        for item in handle.plan.items:
            first, last = item.prompt_rows
            rows += range(row, row + last - first)
            row += last - first
            of_prompt += [(item.slot, item.start + place + 1) for place in range(first, last)]
            top = self.features[item.slot].prompt_logprobs or 0
            wanted += [(item, -1, top)] * (last - first)
        if not wanted:
            return []
        vocab = forward.logits.shape[1]
        handle._logprob_rows = [(item, place, vocab if top < 0 else min(top, vocab)) for item, place, top in wanted]
        most = max(top for *_, top in handle._logprob_rows)
        slots, positions = np.array(of_prompt, dtype=np.int64).reshape(-1, 2).T
        index, emitted, slot, position = packed([np.array(rows), np.array(places), slots, positions], self.table)
        tokens = torch.cat([outcome.accepted.emitted.flatten()[emitted], self.table.tokens[slot, position].long()])
        return [tokens, *token_logprobs(forward.logits[index].float(), tokens, most)]
