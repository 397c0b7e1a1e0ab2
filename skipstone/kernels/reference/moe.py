"""Mixture of experts: routing by biased sigmoid scores, grouped products over the experts touched, weighted sum.

The sum over a row's experts goes in slot order and every expert's rows pass a row-invariant product, so a row's bits
do not depend on which other rows share its experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skipstone.kernels.reference.gemm import bmm, bmm_equals_linear, linear
from skipstone.kernels.reference.pointwise import sigmoid

DENSE_EXPERTS = 16  # up to this many experts every expert runs every row when rows are few: one product, no dispatch


def route(
    router_logits: Tensor, bias: Tensor, top_k: int, scaling: float, groups: int = 1, kept_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Pick `top_k` experts per row by sigmoid score + bias; weights are the unbiased scores, normalised, scaled.

    router_logits [T, E] float32, bias [E] float32. With groups > 1 only experts of the `kept_groups` groups survive
    whose two best biased scores have the largest sum (DeepSeek-V3, "noaux_tc"). Equal scores: lower id first.
    Returns expert ids [T, top_k] int64 and weights [T, top_k] float32.
    """
    scores = sigmoid(router_logits)
    biased = scores + bias
    if groups > 1:
        grouped = biased.view(biased.shape[0], groups, -1)
        best_two = grouped.topk(2, dim=-1).values
        kept = _best_first(best_two[..., 0] + best_two[..., 1], kept_groups)  # [T, kept_groups]
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=biased.device).scatter_(1, kept, False)
        biased = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    experts = _best_first(biased, top_k)
    weights = scores.gather(1, experts)
    return experts, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scaling


def _best_first(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of the last dimension, largest first, equal ones by ascending id."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def experts_forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    exact: bool,
) -> Tensor:
    """Weighted sum of each row's experts.

    x [T, H], experts [T, K] int64, weights [T, K] float32, gate_up [E, 2I, H], down [E, H, I]. Returns [T, H] float32.
    """
    if gate_up.shape[0] <= DENSE_EXPERTS and x.shape[0] <= DENSE_EXPERTS and (not exact or _same_bits(gate_up, down)):
        per_slot = _all_experts(x, experts, gate_up, down, activation, exact)
    else:
        per_slot = _touched_experts(x, experts, gate_up, down, activation, exact)
    total = per_slot[:, 0].float() * weights[:, :1]
    for slot in range(1, experts.shape[1]):
        total = total + per_slot[:, slot].float() * weights[:, slot : slot + 1]
    return total


def _same_bits(gate_up: Tensor, down: Tensor) -> bool:
    """Whether both ways below give the same bits on this machine, so that either may be taken in exact mode."""
    threads = torch.get_num_threads()
    return all(bmm_equals_linear(w.shape[2], w.shape[1], w.dtype, threads) for w in (gate_up, down))


def _all_experts(
    x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], exact: bool
) -> Tensor:
    """[T, K, H]: every expert runs every row in one batched product, then each slot's output is picked."""
    hidden = bmm(x[None].expand(gate_up.shape[0], -1, -1), gate_up.transpose(1, 2), exact)  # [E, T, 2I]
    out = bmm(activation(hidden), down.transpose(1, 2), exact)  # [E, T, H]
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return out[experts, row]


def _touched_experts(
    x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], exact: bool
) -> Tensor:
    """[T, K, H]: rows sorted by expert, one pair of products per expert that any row picked."""
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # (row, slot) pairs by expert
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0]).tolist()
    sorted_x = x.index_select(0, torch.div(order, top_k, rounding_mode="floor"))
    outputs = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            hidden = linear(sorted_x[start : start + count], gate_up[expert], exact)
            outputs.append(linear(activation(hidden), down[expert], exact))
            start += count
    per_slot = torch.empty(order.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    per_slot.index_copy_(0, order, torch.cat(outputs))
    return per_slot.view(x.shape[0], top_k, x.shape[1])
