"""Steps that only decode, as CUDA graphs: for each size of batch and k one of the forward pass, one of what follows.

A request that samples with more than temperature and truncation has its step go on without the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from skipstone.core.plan import PlanItem, StepPlan
from skipstone.core.request import SamplingParams
from skipstone.core.sampling_rows import PLAIN, Features
from skipstone.runtime.layout import Layout
from skipstone.runtime.step import Step

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TRUNCATED = Features(SamplingParams(top_p=0.5), [], 0)
T = TypeVar("T")


class DecodeGraph:
    """A number of requests with k + 1 rows each. `inputs` [3, R] int64: slots, rows that are real, drafts to make."""

    def __init__(self, graphs: DecodeGraphs, inputs: Tensor, k: int) -> None:
        self._graphs, self.inputs = graphs, inputs
        layout = decode_layout(inputs[0], inputs[1], inputs[2], k, graphs.max_tokens)
        self.run, self.forward = graphs.capture(lambda: graphs.step.forward(layout))
        self._tails: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def finish(self, truncated: bool) -> Tensor:
        """Sample, accept and draft where nothing but temperature and, if `truncated`, truncation is asked for.

        Captured at first use, on padding, so that no request moves on.
        """
        if truncated not in self._tails:
            running = self.inputs.clone()
            self.inputs[0] = self._graphs.step.table.padding_slot
            self.run.replay()
            features = [TRUNCATED if truncated else PLAIN] * len(self.forward.layout.counts)
            self._tails[truncated] = self._graphs.capture(lambda: self._finish(features))
            self.inputs.copy_(running)
            self.run.replay()  # once more, as a forward pass can be repeated
        tail, result = self._tails[truncated]
        tail.replay()
        return result

    def _finish(self, features: list[Features]) -> Tensor:
        step = self._graphs.step
        outcome = step.finish(self.forward, features, None, self.forward.layout.end)
        drafts = step.draft(self.forward, outcome, features) if step.proposer is not None else None
        return outcome.packed if drafts is None else torch.cat([outcome.packed, drafts], dim=1)


class DecodeGraphs:
    """All graphs of an engine, captured at first use."""

    def __init__(self, step: Step, max_tokens: int) -> None:
        self.step, self.max_tokens = step, max_tokens
        self._captured: dict[tuple[int, int], DecodeGraph] = {}  # by requests and k
        self._pool: Any = None
        self.replays = self.captures = 0

    def covers(self, plan: StepPlan) -> bool:
        """Whether the plan only decodes."""
        return all(map(self._decodes, plan.items))

    def _decodes(self, item: PlanItem) -> bool:
        decodes = item.samples and item.num_rows == item.num_drafts + 1 and not item.prompt_rows[1]
        return decodes and (item.follows or self.step.proposer is None)

    def replay(self, plan: StepPlan) -> DecodeGraph:
        """Start the forward pass of a plan."""
        items, padding = plan.items, self.step.table.padding_slot
        k = max(max(item.num_next_drafts, item.num_drafts) for item in items)
        bucket = next((size for size in BUCKETS if size >= len(items)), len(items))
        bucket = max(min(bucket, padding), len(items))
        graph = self._graph(bucket, k)
        values = np.zeros((3, bucket), dtype=np.int64)
        values[0] = padding
        values[:, : len(items)] = [
            [item.slot for item in items],
            [item.num_rows for item in items],
            [item.num_next_drafts for item in items],
        ]
        graph.inputs.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)
        graph.run.replay()
        self.replays += 1
        return graph

    def _graph(self, bucket: int, k: int) -> DecodeGraph:
        if (bucket, k) not in self._captured:
            inputs = torch.zeros(3, bucket, dtype=torch.int64, device=self.step.table.device)
            inputs[0] = self.step.table.padding_slot
            self._captured[bucket, k] = DecodeGraph(self, inputs, k)
        return self._captured[bucket, k]

    def capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of the work, and the tensors that it leaves its results in."""
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            work()  # compiles what is not compiled yet
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = graph.pool()
        self.captures += 1
        return graph, result


def decode_layout(slots: Tensor, num_rows: Tensor, wanted: Tensor, k: int, end: int) -> Layout:
    """What a graph runs: k + 1 rows of every request, of which `num_rows` [R] are real; on the device of `slots`."""
    count, n = len(slots), k + 1
    row = torch.arange(count * n, device=slots.device)
    return Layout(
        counts=np.full(count, n),
        slots=slots,
        num_rows=num_rows,
        row_item=row // n,
        row_offset=row % n,
        sampling=None,
        lead=None,
        wanted=wanted,
        place=(row // n, row % n),
        uniform=True,
        logit_rows=None,
        first_rows=row[::n].contiguous(),
        kept=None,
        most_drafts=k,
        num_sampled=count * n,
        k=k,
        end=end,
        chunks=False,
        sampled_items=np.arange(count).repeat(n),
        first_sampled=np.arange(count) * n,
    )
