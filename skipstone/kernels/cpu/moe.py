"""Mixture of experts: routing, rows by expert, their products, and the weighted sum."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipstone.kernels.cpu.gemm import blas_segment, grouped_product, small
from skipstone.kernels.cpu.jit import F32, array, exp, kept, kernel, result
from skipstone.kernels.cpu.norm_rope import gate, gated
from skipstone.kernels.reference import moe as reference
from skipstone.kernels.reference.pointwise import GatedActivation

MOST_ROWS = 16  # above, BLAS multiplies the rows of an expert faster
LOWEST = -F32(np.inf)


@kernel(
    "(float32[:, ::1], float32[::1], int64, float32, int64, int64, int64, int64[:, ::1], float32[:, ::1])",
)
def _route(logits, bias, top_k, scaling, groups, kept_groups, shared, experts, weights):
    """`shared` is an expert that is taken last with weight 1, or -1."""
    rows, count = logits.shape
    per_group = count // groups
    scores, biased = np.empty(count, np.float32), np.empty(count, np.float32)
    group_scores = np.empty(groups, np.float32)
    for t in range(rows):
        for e in range(count):
            scores[e] = F32(1) / (F32(1) + exp(-logits[t, e]))
            biased[e] = scores[e] + bias[e]
        if groups > 1:
            for g in range(groups):
                first = second = LOWEST
                for e in range(g * per_group, (g + 1) * per_group):
                    if biased[e] > first:
                        first, second = biased[e], first
                    elif biased[e] > second:
                        second = biased[e]
                group_scores[g] = first + second
            for _ in range(groups - kept_groups):  # drop the least, of equal ones the last
                least = 0
                for g in range(groups):
                    if group_scores[g] <= group_scores[least]:
                        least = g
                group_scores[least] = F32(np.inf)
                for e in range(least * per_group, (least + 1) * per_group):
                    biased[e] = LOWEST
        total = F32(0)
        for slot in range(top_k):
            best = -1
            for e in range(count):
                if biased[e] > LOWEST and (best < 0 or biased[e] > biased[best]):
                    best = e
            best = max(best, 0)
            experts[t, slot], weights[t, slot] = best, scores[best]
            biased[best] = LOWEST
            total += scores[best]
        for slot in range(top_k):
            weights[t, slot] = weights[t, slot] / (total + F32(1e-20)) * scaling
        if shared >= 0:
            experts[t, top_k], weights[t, top_k] = shared, F32(1)


@kernel("(int64[:, ::1], int64[::1], int64[::1], int64[::1])")
def _group(experts, starts, rows, place):
    """Sort the (row, slot) pairs by expert: starts [E + 1], rows [T * K] in that order, place [T * K] of each pair."""
    count, top_k = experts.shape
    starts[:] = 0
    for t in range(count):
        for slot in range(top_k):
            starts[experts[t, slot] + 1] += 1
    for e in range(len(starts) - 1):
        starts[e + 1] += starts[e]
    for t in range(count):
        for slot in range(top_k):
            e = experts[t, slot]
            rows[starts[e]], place[t * top_k + slot] = t, starts[e]
            starts[e] += 1
    for e in range(len(starts) - 1, 0, -1):
        starts[e] = starts[e - 1]
    starts[0] = 0


@kernel("(float32[:, ::1], int64[::1], float32[:, ::1], float32[:, ::1])")
def _combine(parts, place, weights, out):
    """out [T, H]: the sum over slots, in their order, of weights [T, K] times parts[place]."""
    rows, width = out.shape
    top_k = weights.shape[1]
    for t in range(rows):
        out[t] = F32(0)
        for slot in range(top_k):
            source, weight = place[t * top_k + slot], weights[t, slot]
            for d in range(width):
                out[t, d] += weight * parts[source, d]


@kernel(
    *(
        f"(float32[:, ::1], int64[:, ::1], float32[:, ::1], {weight}, {weight}, int64, int64,"
        " float32, float32, float32, float32[:, ::1])"
        for weight in ("float32[:, :, ::1]", "uint16[:, :, ::1]")
    )
)
def _few_rows(x, experts, weights, gate_up, down, gate_up_segment, down_segment, alpha, limit, shift, out):
    """Both products, the activation between them and the weighted sum; weights as float32 or as `small` gives them."""
    pairs = experts.size
    starts, rows, place = np.empty(len(gate_up) + 1, np.int64), np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    _group(experts, starts, rows, place)
    hidden = np.empty((pairs, gate_up.shape[2]), np.float32)
    inner, parts = np.empty((pairs, down.shape[1]), np.float32), np.empty((pairs, down.shape[2]), np.float32)
    grouped_product(x, rows, starts, gate_up, gate_up_segment, hidden)
    gate(hidden, alpha, limit, shift, inner)
    grouped_product(inner, np.arange(pairs), starts, down, down_segment, parts)
    _combine(parts, place, weights, out)


def route(
    router_logits: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    groups: int = 1,
    kept_groups: int = 1,
    shared: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See the plain-torch twin."""
    slots = top_k + (shared is not None)
    experts, chosen = result(len(router_logits), slots, dtype=np.int64)
    weights, shares = result(len(router_logits), slots)
    settings = (top_k, scaling, groups, kept_groups, -1 if shared is None else shared)
    _route(array(router_logits), kept(bias), *settings, chosen, shares)
    return experts, weights


def experts_forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: GatedActivation,
    exact: bool,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See the plain-torch twin, which also does what is not float32."""
    if not x.dtype == gate_up.dtype == out_dtype == torch.float32:
        return reference.experts_forward(x, experts, weights, gate_up, down, activation, exact, out_dtype)
    threads = torch.get_num_threads()
    segments = [blas_segment(*weight.shape[1:], threads) for weight in (gate_up, down)]
    out, values = result(*x.shape)
    if len(x) <= MOST_ROWS and None not in segments:
        both = small(gate_up), small(down)
        if both[0].dtype != both[1].dtype:
            both = kept(gate_up), kept(down)
        _few_rows(array(x), array(experts), array(weights), *both, *segments, *activation, values)
        return out
    padding = reference.padding(x, gate_up, down) if exact else ()
    rows = reference.group_by_expert(experts, gate_up.shape[0], padding)
    hidden = reference.expert_products(x.index_select(0, rows.source), rows, gate_up)
    parts = reference.expert_products(gated(hidden, activation), rows, down)
    _combine(array(parts), array(rows.place), array(weights), values)
    return out
