"""Times decode steps, and counts the least that they must read from memory by the experts that their rows touch."""

from __future__ import annotations

import argparse
import gc
import statistics
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from skipstone.kernels.ops import use_ops
from skipstone.layers.feed_forward import MixtureOfExperts, Router
from skipstone.runtime.engine import Engine
from skipstone.tools.bench.slices import mean_seconds, random_request, reach_decoding


def measure(engine: Engine, k: int, batch: int, prompt: int, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One cell. A step's time is that of `steps` steps in which every request decodes and nothing else runs.

    Prompts and steps take turns, as a GPU that reads prompts only soon reaches its power limit.
    """

    def start(tokens: int, seed: int) -> None:
        for i in range(batch):
            engine.add(random_request(engine, f"{seed}-{i}", prompt, tokens, seed + i))

    def finish() -> None:
        while engine.has_work:
            engine.step()

    def read_prompts(seed: int) -> float:
        start(1, seed)
        return mean_seconds(finish, 1)

    read_prompts(0)  # compiles
    prefills, steps, lengths = [], [], []
    for seed in range(1, args.rounds + 1):
        prefills.append(read_prompts(seed))
        start(output_room(k, batch, args.steps), seed)
        reach_decoding(engine)
        if seed == 1:
            mean_seconds(engine.step, 8)  # captures
        touched = touched_experts(engine, 4)
        gc.collect()  # not in the middle of what is timed
        stats = engine.scheduler.stats.speculation
        drafted, accepted = stats.steps, stats.accepted
        steps.append(mean_seconds(engine.step, args.steps))
        drafted = stats.steps - drafted
        lengths.append(1 + (stats.accepted - accepted) / drafted if drafted else 1.0)
        floor_bytes, experts = decode_floor(engine, touched + touched_experts(engine, 4), batch, prompt, k)
        for request in list(engine.scheduler.running):
            engine.abort(request)
    seconds, length, prefill = (statistics.median(values) for values in (steps, lengths, prefills))
    least = floor_bytes / rate
    return {
        "k": k,
        "batch": batch,
        "prompt": prompt,
        "prefill": round(batch * prompt / prefill),
        "step_ms": seconds * 1e3,
        "length": length,
        "ms_per_token": seconds / length * 1e3,
        "floor_ms": least / length * 1e3,
        "share": least / seconds,
        "experts": experts,
    }


def output_room(k: int, batch: int, steps: int) -> int:
    """Tokens that a request may write at most: while the others' prompts are read, while it is timed, and after."""
    return (steps + 2 * batch + 32) * (k + 1)


def touched_experts(engine: Engine, steps: int) -> list[list[int]]:
    """For every mixture that a step runs, in order: how many experts its rows touched, over a few steps run apart."""
    counts: list[int] = []
    ops = engine.kernels.ops

    def route(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        ids, weights = ops.route(logits, *rest)
        counts.append(int((ids.unique() < logits.shape[1]).sum()))  # without the shared one
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
    """The target and, where there is one, the draft head."""
    head = getattr(engine.speculation.proposer, "head", None)
    return [engine.model, head] if isinstance(head, nn.Module) else [engine.model]


def route_alike(module: nn.Module) -> None:
    """Have all rows choose the same experts, as weights near zero do: there the router's bias decides alone."""
    for part in module.modules():
        if isinstance(part, Router):
            part.bias[: part.top_k] += 2.0  # scores are below 1


def decode_floor(engine: Engine, touched: list[list[int]], batch: int, context: int, k: int) -> tuple[float, float]:
    """Bytes that a step must read, each once, whatever number of rows needs them; experts of one of its mixtures.

    The step has `batch` requests at `context` tokens: verification of k drafts, then k drafts. The shared expert is not
    counted among a mixture's.
    """
    weights, target_expert = _bytes(engine.model)
    passes, head_expert = len(_mixtures(engine.model)), 0
    vocabulary = sum(p.nbytes for p in engine.model.lm_head.parameters())
    for head in computing_modules(engine)[1:]:
        own, head_expert = _bytes(head)
        weights += k * (own + vocabulary)
    mean = [sum(column) / len(touched) for column in zip(*touched, strict=True)]
    experts = sum(mean[:passes]) * target_expert + sum(mean[passes:]) * head_expert
    proposer, sparse = engine.speculation.proposer, engine.model.config.sparse
    caches = 0
    for spec in [*engine.model.cache_specs(), *(list(proposer.cache_specs()) * k if proposer else [])]:
        selects = spec.backend in ("msa", "dsa")  # keys and values; index keys are all read
        tokens = min(context, sparse.unit * sparse.budget) if selects else context
        caches += batch * spec.bytes_per_token(engine.dtype) * tokens
    return weights + experts + caches, sum(mean[:passes]) / passes if passes else 0.0


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
