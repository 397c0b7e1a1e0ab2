"""The least that a decode step must read from memory, counted from the experts that its rows really touch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skipstone.core.kv_cache import CacheSpec
from skipstone.kernels.ops import use_ops
from skipstone.layers.feed_forward import MixtureOfExperts, Router
from skipstone.runtime.engine import Engine


class Floor(NamedTuple):
    """Bytes that one step reads: each once, whatever number of rows needs them."""

    weight_bytes: int
    expert_bytes: float
    cache_bytes: int
    experts_touched: float  # of one mixture, on average; the shared one not counted

    @property
    def total(self) -> float:
        """Bytes of a step."""
        return self.weight_bytes + self.expert_bytes + self.cache_bytes


def copy_rate() -> float:
    """Bytes per second that a large copy reads and writes here: the ceiling of whatever streams memory."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / sorted(times)[2]


def touched_experts(engine: Engine, steps: int) -> list[list[int]]:
    """For every mixture that a step runs, in order: how many experts its rows touched, over a few steps run apart."""
    counts: list[int] = []
    ops = engine.kernels.ops

    def route(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        ids, weights = ops.route(logits, *rest)
        routed = logits.shape[1]
        counts.append(int((ids.unique() < routed).sum()))
        return ids, weights

    watched = replace(ops, route=route)
    modules = computing_modules(engine)
    for module in modules:
        use_ops(module, watched)
    runner = engine.runner
    graphs, overlap = runner.graphs, engine.overlap
    runner.graphs, engine.overlap = None, False
    engine.step()  # what was started early
    per_step = []
    for _ in range(steps):
        counts.clear()
        engine.step()
        per_step.append(list(counts))
    for module in modules:
        use_ops(module, ops)
    runner.graphs, engine.overlap = graphs, overlap
    return per_step


def computing_modules(engine: Engine) -> list[nn.Module]:
    """The target and the draft head."""
    return [engine.model, *_head(engine)]


def route_alike(module: nn.Module) -> None:
    """Have all rows choose the same experts, as weights near zero do: there the router's bias decides alone."""
    for part in module.modules():
        if isinstance(part, Router):
            part.bias[: part.top_k] += 2.0  # scores are below 1


def _head(engine: Engine) -> list[nn.Module]:
    head = getattr(engine.speculation.proposer, "head", None)
    return [head] if isinstance(head, nn.Module) else []


def decode_floor(engine: Engine, touched: list[list[int]], batch: int, context: int, k: int) -> Floor:
    """Of a step of `batch` requests at `context` tokens: verification of k drafts, then k drafts."""
    target, target_expert = _bytes(engine.model)
    vocabulary = sum(p.nbytes for p in engine.model.lm_head.parameters())
    weights, passes = target, len(_mixtures(engine.model))
    head_expert = 0
    for head in _head(engine):
        own, head_expert = _bytes(head)
        weights += k * (own + vocabulary)
    mean = [sum(column) / len(touched) for column in zip(*touched, strict=True)]
    experts = sum(mean[:passes]) * target_expert + sum(mean[passes:]) * head_expert
    caches = batch * sum(_cache_bytes(engine, specs, context) for specs in _specs(engine, k))
    average = sum(mean[:passes]) / passes if passes else 0.0
    return Floor(weights, experts, int(caches), average)


def _specs(engine: Engine, k: int) -> list[list[CacheSpec]]:
    proposer = engine.speculation.proposer
    return [list(engine.model.cache_specs()), *([list(proposer.cache_specs())] * k if proposer else [])]


def _cache_bytes(engine: Engine, specs: list[CacheSpec], context: int) -> int:
    """Selected keys and values, and all index keys, of one request."""
    sparse = engine.model.config.sparse
    total = 0
    for spec in specs:
        per_token = spec.bytes_per_token(engine.dtype)
        selects = spec.backend in ("msa", "dsa")
        total += per_token * (min(context, sparse.unit * sparse.budget) if selects else context)
    return total


def _mixtures(module: nn.Module) -> list[MixtureOfExperts]:
    return [part for part in module.modules() if isinstance(part, MixtureOfExperts)]


def _bytes(module: nn.Module) -> tuple[int, int]:
    """Weights that every step reads (the embedding is not), and those of one routed expert."""
    every = sum(p.nbytes for p in module.parameters())
    embed = getattr(module, "embed", None)
    every -= embed.nbytes if isinstance(embed, Tensor) else 0
    expert = 0
    for mixture in _mixtures(module):
        expert = (mixture.gate_up[0].nbytes + mixture.down[0].nbytes) or expert
        every -= mixture.routed * expert
    return every, expert
