"""Decode steps that stay on the device: which plans they can run, the slots of requests, graphs, and results.

The host sends what changed (new requests, new blocks), starts a step, and reads one packed tensor when it is over. As
the state advances on the device, the next step can be started before that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipstone.core.plan import ScheduledRequest, StepOutput, StepPlan, StepResult
from skipstone.core.request import Request
from skipstone.runtime.decode_step import DecodeStep
from skipstone.runtime.device_state import SlotValues

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Known(NamedTuple):
    """What the device holds of a request, as far as the host knows."""

    epoch: int
    num_tokens: int
    drafts: list[int]
    most_drafts: int
    num_blocks: int


class DeviceStep:
    """A step under way for the given requests, in order."""

    def __init__(self, loop: DeviceLoop, requests: list[Request], k: int, result: Tensor) -> None:
        self.loop, self.requests, self.k = loop, requests, k
        self.plan: StepPlan | None = None
        self._result = torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=result.is_cuda)
        self._result.copy_(result, non_blocking=True)
        self._over = torch.cuda.Event() if result.is_cuda else None
        if self._over is not None:
            self._over.record()

    def wait(self) -> StepOutput:
        """The results of the plan's requests."""
        if self._over is not None:
            self._over.synchronize()
        assert self.plan is not None
        place = {request: row for row, request in enumerate(self.requests)}
        rows = self._result.tolist()
        return StepOutput([self._read(item, rows[place[item.request]]) for item in self.plan.scheduled])

    def _read(self, item: ScheduledRequest, row: list[int]) -> StepResult:
        accepted, k = row[0], self.k
        emitted, drafts = row[1 : accepted + 2], [token for token in row[k + 2 :] if token >= 0]
        computed = item.start + accepted + 1 if self.loop.drafts and item.request.max_drafts else 0
        num_tokens = len(item.request.token_ids) + len(emitted)
        known = self.loop.known[item.request]
        self.loop.known[item.request] = known._replace(num_tokens=num_tokens, drafts=drafts)
        return StepResult(emitted, accepted, list(drafts), computed)


class DeviceLoop:
    """Starts decode steps; as graphs on a GPU, one for every size of batch and number of drafts."""

    def __init__(self, step: DecodeStep, graphs: bool) -> None:
        self.step = step
        self.drafts = step.drafter is not None
        self.graphs = graphs and step.ops.implementation == "triton"
        self.most_k = step.state.most_k
        self.slots: dict[Request, int] = {}
        self.known: dict[Request, Known] = {}
        self._captured: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None
        self.replays = 0

    def covers(self, plan: StepPlan) -> bool:
        """Whether a plan only decodes, with sampling that the device does by itself."""
        places = self.step.state.padding_slot
        return 0 < len(plan.scheduled) <= places and not plan.block_copies and all(map(self._covered, plan.scheduled))

    def _covered(self, item: ScheduledRequest) -> bool:
        request = item.request
        decodes = item.query_len - item.num_drafts == 1 and item.samples and item.num_drafts <= self.most_k
        follows = not self.drafts or request.max_drafts == 0 or request.num_draft_computed >= item.start
        fits = self.step.drafter is None or request.max_total_tokens <= self.step.drafter.head.max_position
        return decodes and follows and fits and _plain(request)

    def start(self, plan: StepPlan) -> DeviceStep:
        """Start the plan's step."""
        requests = [item.request for item in plan.scheduled]
        next_drafts = max(item.num_next_drafts for item in plan.scheduled) if self.drafts else 0
        k = max(next_drafts, max(item.num_drafts for item in plan.scheduled))
        self._assign_slots(requests)
        changed = {}
        for item in plan.scheduled:
            request, most = item.request, item.num_next_drafts
            known = self.known.get(request)
            drafts = request.drafts[: item.num_drafts]
            now = Known(request.epoch, len(request.token_ids), drafts, most, len(request.block_ids))
            if known is None or not _agree(known, now, request):
                changed[self.slots[request]] = self._values(request, drafts, most)
            self.known[request] = now
        if changed:
            self.step.state.upload(changed)
        step = self._run(requests, k)
        step.plan = plan
        return step

    def start_next(self, before: DeviceStep) -> DeviceStep:
        """Start the step after one that is under way, for the same requests; they must own blocks for both."""
        grown = {}
        for request in before.requests:
            known = self.known[request]
            if known.num_blocks != len(request.block_ids):
                grown[self.slots[request]] = self._values(request, [], known.most_drafts)
                self.known[request] = known._replace(num_blocks=len(request.block_ids))
        if grown:
            self.step.state.upload_blocks(grown)
        return self._run(before.requests, before.k)

    def _values(self, request: Request, drafts: list[int], most: int) -> SlotValues:
        limit = min(len(request.block_ids) * self.step.block_size, request.max_total_tokens - 1)
        start = len(request.token_ids) - 1
        temperature = 0.0 if request.params.greedy else request.params.temperature
        tokens = [request.token_ids[-1], *drafts]
        p = request.params
        law = (max(p.top_k, 0), temperature, p.top_p, p.min_p)
        return SlotValues(tokens, start, limit, most, request.seed, *law, request.block_ids)

    def _assign_slots(self, requests: list[Request]) -> None:
        new = [request for request in requests if request not in self.slots]
        if not new:
            return
        kept = set(requests)
        for request in [r for r in self.slots if r not in kept]:
            del self.slots[request]
            self.known.pop(request, None)
        free = set(range(self.step.state.padding_slot)) - set(self.slots.values())
        for request in new:
            self.slots[request] = free.pop()

    def _run(self, requests: list[Request], k: int) -> DeviceStep:
        padding = self.step.state.padding_slot
        bucket = next((size for size in BUCKETS if size >= len(requests)), len(requests))
        bucket = max(min(bucket, padding), len(requests))
        slots = [self.slots[request] for request in requests] + [padding] * (bucket - len(requests))
        device = self.step.state.device
        ids = torch.tensor(slots, dtype=torch.int64, device="cpu")
        truncated = any(map(_truncated, requests))
        if not self.graphs:
            return DeviceStep(self, requests, k, self.step.run(ids.to(device), k, truncated))
        graph, buffer, result = self._graph(bucket, k, truncated)
        buffer.copy_(ids.pin_memory(), non_blocking=True)
        graph.replay()
        self.replays += 1
        return DeviceStep(self, requests, k, result)

    def _graph(self, bucket: int, k: int, truncated: bool) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Captured at first use, on padding only, so that no request's state moves."""
        kind = (bucket, k, truncated)
        if kind not in self._captured:
            slots = torch.full(
                (bucket,), self.step.state.padding_slot, dtype=torch.int64, device=self.step.state.device
            )
            warm = torch.cuda.Stream()
            warm.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm):
                self.step.run(slots, k, truncated)  # compiles what is not compiled yet
            torch.cuda.current_stream().wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = self.step.run(slots, k, truncated)
            self._pool = graph.pool()
            self._captured[kind] = (graph, slots, result)
        return self._captured[kind]


def _truncated(request: Request) -> bool:
    p = request.params
    return not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


def _plain(request: Request) -> bool:
    """Whether a request samples by temperature, top-k, top-p and min-p alone, and asks for nothing about its rows."""
    p = request.params
    unpenalised = p.repetition_penalty == 1.0 and not p.presence_penalty and not p.frequency_penalty
    unmasked = request.grammar is None and not p.logit_bias and request.num_output_tokens >= p.min_tokens
    return unpenalised and unmasked and p.logprobs is None


def _agree(known: Known, now: Known, request: Request) -> bool:
    """Whether the device's copy of a request is still right; it drops drafts past the limit by itself."""
    room = max(request.max_total_tokens - now.num_tokens - 1, 0)
    return known._replace(drafts=known.drafts[:room]) == now
