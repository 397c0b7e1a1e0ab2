"""Runs a plan on the device: builds the batch, runs the model, verifies, drafts, and brings one result to the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups
from skipstone.core.kv_cache import CacheMemory, KVCache
from skipstone.core.observer import EmittedRun, Observer, Phase
from skipstone.core.plan import StepOutput, StepPlan, StepResult
from skipstone.core.request import Request, TokenLogprobs
from skipstone.core.sampling_rows import SampledRow, sampling_rows
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.gemm import cpu_threads
from skipstone.kernels.reference.sampling import decision_scores, token_logprobs
from skipstone.models.base import CausalLM, HiddenStates, Kept
from skipstone.runtime.batch_builder import LogitRow, StepRows, build_rows
from skipstone.runtime.decode_step import DecodeStep, Drafter
from skipstone.runtime.device_loop import DeviceLoop, DeviceStep
from skipstone.runtime.device_state import DeviceState
from skipstone.runtime.speculation import Speculation
from skipstone.spec.choose import DraftChooser
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import DraftRequest, DraftStep, Proposer, ProposerNeeds
from skipstone.spec.verify import Run, Verifier

# Steps of less work than this (rows x bytes of weights) run on one thread: their operations are so short that a second
# one gains at most a fifth, and costs a hundredfold where other programs keep the cores busy (2.2 s against 22 ms for
# 16 rows of a demo, 2 cores).
ONE_THREAD_BYTES = 1e9


class StepHandle:
    """A step under way. On the CPU it is over when it is returned; `wait` is the step's one synchronization."""

    def __init__(self, plan: StepPlan, output: StepOutput) -> None:
        self.plan = plan
        self._output = output

    def wait(self) -> StepOutput:
        """The step's results on the host."""
        return self._output


class ModelRunner:
    """Owns the model, its caches and its attention groups; drives the proposer and the verifier."""

    def __init__(
        self,
        model: CausalLM,
        memory: CacheMemory,
        exact: bool,
        ops: Ops,
        speculation: Speculation | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.block_size = memory.block_size
        self.device = memory.device
        self.ops = ops
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        specs, config = model.cache_specs(), model.config
        self.cache = KVCache(specs, memory)
        self.groups = AttentionGroups(specs, self.cache, config.softmax_scale, config.sparse, exact, ops)
        self.observer = self.groups.observer = observer
        self.proposer = speculation.proposer if speculation else None
        self.verifier = speculation.verifier if speculation else Verifier()
        self.chooser = speculation.chooser if speculation else DraftChooser("coupled")
        if self.proposer is not None:
            self.proposer.bind(memory, ops)
        self.device_loop: DeviceLoop | None = None

    def make_device_loop(self, max_requests: int, k: int, max_model_len: int, graphs: bool) -> DeviceLoop | None:
        """Let plans that only decode stay on the device from now on; None where something must look at every step."""
        proposer, verifier = self.proposer, self.verifier
        single = isinstance(proposer, HiddenStateProposer) and proposer.head.num_modules == 1
        by_device = proposer is None or (single and self.chooser.mode != "independent")
        if not by_device or self.observer is not None or not (verifier.rule == "exact" or verifier.rates):
            return None
        drafter = None
        if isinstance(proposer, HiddenStateProposer):
            drafter = Drafter(proposer.head, proposer.groups, greedy=self.chooser.mode == "greedy")
        rates = None
        if verifier.rates is not None:
            rates = torch.tensor(verifier.rates, dtype=torch.float64, device=self.device)
        with torch.inference_mode():
            state = DeviceState(max_requests, k, -(-max_model_len // self.block_size), self.device)
        step = DecodeStep(self.model, self.groups, drafter, state, self.ops, self.block_size, rates)
        self.device_loop = DeviceLoop(step, graphs)
        return self.device_loop

    def execute_next(self, before: DeviceStep) -> DeviceStep:
        """Start the step after a device step that is under way."""
        assert self.device_loop is not None
        with torch.inference_mode(), self._on_device():
            return self.device_loop.start_next(before)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Whatever is made inside is made on the device."""
        return nullcontext() if self.device.type == "cpu" else self.device

    def execute(self, plan: StepPlan) -> StepHandle | DeviceStep:
        """Run the plan's rows and sample the rows that yield tokens."""
        if self.device_loop is not None and self.device_loop.covers(plan):
            with torch.inference_mode(), self._on_device():
                return self.device_loop.start(plan)
        if self.device.type != "cpu":
            # Whatever a step makes on the way is made on the device.
            with torch.inference_mode(), self._on_device():
                return self._execute(plan)
        small = plan.num_rows * self.weight_bytes <= ONE_THREAD_BYTES
        with torch.inference_mode(), cpu_threads(1 if small else torch.get_num_threads()):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepHandle:
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        rows = build_rows(plan, self.block_size, self._needs_every_row())
        taps = self.proposer.needs.taps if self.proposer else ()
        kept = rows.kept and Kept(rows.kept.rows, self.groups.plan(rows.kept.batch))
        hidden = self.model(rows.batch, self.groups.plan(rows.batch), taps, kept)
        wanted = (rows.kept or rows).batch.logits_indices
        logits = self.model.logits(hidden.final[wanted])  # [L, V] float32
        sampled_logits, prompt_logits = logits.split([len(rows.sampled), len(rows.prompt)])
        self._ended("target")
        results = [StepResult() for _ in plan.scheduled]
        self._verify(plan, rows.sampled, sampled_logits, results)
        self._report_prompt(plan, rows.prompt, prompt_logits, results)
        self._ended("verify")
        if self.proposer is not None:
            self._draft(self.proposer, plan, rows, hidden, results)
            self._ended("draft")
        return StepHandle(plan, StepOutput(results))

    def _needs_every_row(self) -> bool:
        """Whether somebody looks at the last layer's rows that have no logits."""
        needs = self.proposer.needs if self.proposer else ProposerNeeds("")
        drafting = needs.final_states or self.model.config.num_layers in needs.taps
        return drafting or (self.observer is not None and self.observer.wants_runs)

    def _ended(self, phase: Phase) -> None:
        if self.observer is not None:
            self.observer.on_phase(phase)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(copies).unbind(1)
        self.cache.copy_blocks(sources, destinations)
        if self.proposer is not None:
            self.proposer.copy_blocks(sources, destinations)

    def _verify(self, plan: StepPlan, rows: list[LogitRow], logits: Tensor, results: list[StepResult]) -> None:
        """Emit the accepted drafts and one more token of every request that samples."""
        sampled = []
        for row in rows:  # row j of a request has seen its committed tokens and its first j drafts
            request = plan.scheduled[row.item].request
            sampled.append(SampledRow(request, request.drafts[: row.draft]))
        items = [row.item for row in rows if row.draft == 0]
        scheduled = [plan.scheduled[item] for item in items]
        drafts = [item.request.drafts[: item.num_drafts] for item in scheduled]
        keep = self.chooser.keep_laws
        laws = [self.chooser.take(item.request, item.num_drafts) for item in scheduled] if keep else None
        runs = self.verifier.verify(logits, sampled, drafts, laws)
        kept: list[int] = []  # rows whose token is emitted
        first = 0
        for item, run, ids in zip(items, runs, drafts, strict=True):
            results[item].token_ids, results[item].num_accepted = run.token_ids, run.num_accepted
            kept += range(first, first + len(run.token_ids))
            first += len(ids) + 1
        if self.observer is not None and self.observer.wants_runs and runs:
            self.observer.on_runs(_emitted_runs(plan, rows, sampled, runs, kept, logits))
        emitted = [token for run in runs for token in run.token_ids]
        params = [plan.scheduled[rows[i].item].request.params for i in kept]
        wanted = [place for place, p in enumerate(params) if p.logprobs is not None]
        counts = [params[place].logprobs or 0 for place in wanted]
        entries = _logprobs(logits[[kept[place] for place in wanted]], [emitted[place] for place in wanted], counts)
        for place, entry in zip(wanted, entries, strict=True):
            results[rows[kept[place]].item].logprobs.append(entry)

    def _draft(
        self, proposer: Proposer, plan: StepPlan, rows: StepRows, hidden: HiddenStates, results: list[StepResult]
    ) -> None:
        """Have drafts made for the requests that speculate and whose draft caches can be kept up to date."""
        chosen, requests = [], []
        for i, (item, result) in enumerate(zip(plan.scheduled, results, strict=True)):
            request = item.request
            valid = request.num_draft_computed + max(proposer.needs.next_tokens - 1, 0)
            missed = proposer.needs.follows_target and valid < item.start
            if request.max_drafts == 0 or missed:
                continue
            draft = DraftRequest(request, slice(*rows.starts[i : i + 2]), item.start, result.token_ids, 0)
            limit = min(request.max_total_tokens, proposer.needs.max_position or request.max_total_tokens)
            if proposer.needs.uses_caches and draft.start + item.query_len >= limit:
                continue
            chosen.append(i)
            wanted = max(min(item.num_next_drafts, limit - draft.length - 1), 0)
            requests.append(draft._replace(wanted=wanted))
        if not any(request.wanted or proposer.needs.uses_caches for request in requests):
            return
        step = DraftStep(rows.batch, hidden, requests, self.chooser)
        for i, drafts in zip(chosen, proposer.propose(step), strict=True):
            results[i].drafts, results[i].num_draft_computed = drafts.token_ids, drafts.num_computed
            _cut_illegal(plan.scheduled[i].request, results[i])

    def _report_prompt(self, plan: StepPlan, rows: list[LogitRow], logits: Tensor, results: list[StepResult]) -> None:
        """Log-probabilities of the prompt's own next tokens."""
        items = [plan.scheduled[row.item] for row in rows]
        following = [item.request.token_ids[row.position + 1] for item, row in zip(items, rows, strict=True)]
        counts = [item.request.params.prompt_logprobs or 0 for item in items]
        for row, entry in zip(rows, _logprobs(logits, following, counts), strict=True):
            results[row.item].prompt_logprobs.append(entry)


def _emitted_runs(
    plan: StepPlan, rows: list[LogitRow], sampled: list[SampledRow], runs: list[Run], kept: list[int], logits: Tensor
) -> list[EmittedRun]:
    """What an observer is told; `kept` are the rows of the runs' tokens, one run after the other."""
    logits = logits[kept]
    scores = decision_scores(logits, sampling_rows([sampled[i] for i in kept]))
    emitted, first = [], 0
    for run in runs:
        part = slice(first, first + len(run.token_ids))
        item = plan.scheduled[rows[kept[first]].item]
        drafts, places = item.request.drafts[: item.num_drafts], [rows[i].row for i in kept[part]]
        start = len(item.request.token_ids)
        own = (run.token_ids, drafts, run.num_accepted, places, logits[part], scores[part])
        emitted.append(EmittedRun(item.request, start, *own))
        first = part.stop
    return emitted


def _cut_illegal(request: Request, result: StepResult) -> None:
    """Drop drafts from the first one on that the request's grammar forbids: they could only cost rows."""
    if request.grammar is not None and result.drafts:
        emitted = len(result.token_ids)
        legal = request.grammar.legal(result.token_ids + result.drafts)
        del result.drafts[max(legal - emitted, 0) :]


def _logprobs(logits: Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """One entry per row of logits [N, V]; count -1 means the whole vocabulary."""
    if not token_ids:
        return []
    vocab = logits.shape[1]
    sizes = [vocab if count < 0 else min(count, vocab) for count in counts]
    values = token_logprobs(logits, torch.tensor(token_ids), max(sizes))
    logprob, rank, top_ids, top_logprobs = (value.tolist() for value in values)
    return [
        TokenLogprobs(token, logprob[i], rank[i], top_ids[i][: sizes[i]], top_logprobs[i][: sizes[i]])
        for i, token in enumerate(token_ids)
    ]
