"""Runs a plan on the device: builds the batch, runs the model, samples, and brings one result back to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionGroups
from skipstone.core.kv_cache import KVCache
from skipstone.core.plan import StepOutput, StepPlan, StepResult
from skipstone.core.request import TokenLogprobs
from skipstone.core.sampling_rows import SampledRow, sampling_rows
from skipstone.kernels.reference.gemm import cpu_threads
from skipstone.kernels.reference.sampling import sample, token_logprobs
from skipstone.models.base import CausalLM
from skipstone.runtime.batch_builder import LogitRow, build_rows

# Steps of less work than this (rows x bytes of weights) run on one thread: their operations are so short that a second
# one gains at most a fifth, and costs a hundredfold where other programs keep the cores busy (2.2 s against 22 ms for
# 16 rows of a demo, 2 cores).
ONE_THREAD_BYTES = 1e9


class StepHandle:
    """A step under way. On the CPU it is over when it is returned; `wait` is the step's one synchronization."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        """The step's results on the host."""
        return self._output


class ModelRunner:
    """Owns the model, its caches and its attention backends."""

    def __init__(self, model: CausalLM, num_blocks: int, block_size: int, dtype: torch.dtype, exact: bool) -> None:
        self.model = model
        self.block_size = block_size
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        specs = model.cache_specs()
        self.cache = KVCache(specs, num_blocks, block_size, dtype, torch.device("cpu"))
        config = model.config
        self.groups = AttentionGroups(specs, self.cache, config.softmax_scale, config.sparse, exact)

    def execute(self, plan: StepPlan) -> StepHandle:
        """Run the plan's rows and sample the rows that yield tokens."""
        small = plan.num_rows * self.weight_bytes <= ONE_THREAD_BYTES
        with torch.inference_mode(), cpu_threads(1 if small else torch.get_num_threads()):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepHandle:
        rows = build_rows(plan, self.block_size)
        hidden = self.model(rows.batch, self.groups.plan(rows.batch))
        logits = self.model.logits(hidden.final[rows.batch.logits_indices])  # [L, V] float32
        sampled_logits, prompt_logits = logits.split([len(rows.sampled), len(rows.prompt)])
        sampled = self._sampled(plan, rows.sampled)
        tokens = sample(sampled_logits, sampling_rows(sampled)).tolist() if sampled else []
        results = [StepResult() for _ in plan.scheduled]
        self._emit(plan, rows.sampled, sampled_logits, tokens, results)
        self._report_prompt(plan, rows.prompt, prompt_logits, results)
        return StepHandle(StepOutput(results))

    def _sampled(self, plan: StepPlan, rows: list[LogitRow]) -> list[SampledRow]:
        """Row j of a request sees its committed tokens and its first j drafts."""
        requests = [plan.scheduled[row.item].request for row in rows]
        return [SampledRow(r, r.drafts[: row.draft]) for r, row in zip(requests, rows, strict=True)]

    def _emit(
        self, plan: StepPlan, rows: list[LogitRow], logits: Tensor, tokens: list[int], results: list[StepResult]
    ) -> None:
        """Keep drafts while they equal the model's own choice, then emit one more token."""
        kept: list[int] = []  # rows whose token is emitted
        ended: set[int] = set()  # items whose run is complete
        for i, row in enumerate(rows):
            if row.item in ended:
                continue  # an earlier draft was rejected, so this row saw a wrong token
            item = plan.scheduled[row.item]
            results[row.item].token_ids.append(tokens[i])
            kept.append(i)
            if row.draft < item.num_drafts and item.request.drafts[row.draft] == tokens[i]:
                results[row.item].num_accepted += 1
            else:
                ended.add(row.item)
        wanted = [i for i in kept if plan.scheduled[rows[i].item].request.params.logprobs is not None]
        chosen = [tokens[i] for i in wanted]
        counts = [plan.scheduled[rows[i].item].request.params.logprobs or 0 for i in wanted]
        for i, entry in zip(wanted, _logprobs(logits[wanted], chosen, counts), strict=True):
            results[rows[i].item].logprobs.append(entry)

    def _report_prompt(self, plan: StepPlan, rows: list[LogitRow], logits: Tensor, results: list[StepResult]) -> None:
        """Log-probabilities of the prompt's own next tokens."""
        items = [plan.scheduled[row.item] for row in rows]
        following = [item.request.token_ids[row.position + 1] for item, row in zip(items, rows, strict=True)]
        counts = [item.request.params.prompt_logprobs or 0 for item in items]
        for row, entry in zip(rows, _logprobs(logits, following, counts), strict=True):
            results[row.item].prompt_logprobs.append(entry)


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
