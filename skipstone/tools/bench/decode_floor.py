"""The least that a decode step must read from memory, counted from the experts that its rows really touch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from skipstone.kernels.ops import use_ops
from skipstone.layers.feed_forward import MixtureOfExperts, Router
from skipstone.runtime.engine import Engine


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
