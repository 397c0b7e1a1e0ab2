"""Mixture of experts: routing by biased sigmoid scores, grouped products over the experts touched, weighted sum.

The sum over a row's experts goes in slot order and every expert's rows pass a row-invariant product, so a row's bits
do not depend on which other rows share its experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.kernels.reference.gemm import linear
from skipstone.kernels.reference.pointwise import GatedActivation, sigmoid


def route(
    router_logits: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    groups: int = 1,
    kept_groups: int = 1,
    shared: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick `top_k` experts per row by sigmoid score + bias; weights are the unbiased scores, normalised, scaled.

    router_logits [T, E] float32, bias [E] float32. With groups > 1 only experts of the `kept_groups` groups survive
    whose two best biased scores have the largest sum (DeepSeek-V3, "noaux_tc"). Equal scores: lower id first.
    `shared` is an expert that every row takes last, with weight 1. Returns expert ids [T, top_k (+ 1)] int64 and
    weights of the same shape, float32.
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
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scaling
    if shared is not None:
        experts, weights = F.pad(experts, (0, 1), value=shared), F.pad(weights, (0, 1), value=1.0)
    return experts, weights


def _best_first(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of the last dimension, largest first, equal ones by ascending id."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


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
    """Weighted sum of each row's experts, added up in float32.

    x [T, H], experts [T, K] int64, weights [T, K] float32, gate_up [E, H, 2I], down [E, I, H].
    Returns [T, H] in `out_dtype`.
    """
    top_k = experts.shape[1]
    chosen = experts.flatten()
    if x.shape[0] == 1:
        touched, parts, order = chosen.tolist(), [x] * top_k, None
    else:
        order = chosen.argsort(stable=True)  # (row, slot) pairs by expert
        counts = torch.bincount(chosen, minlength=gate_up.shape[0]).tolist()
        touched = [expert for expert, count in enumerate(counts) if count]
        by_expert = x.index_select(0, torch.div(order, top_k, rounding_mode="floor"))
        parts = list(by_expert.split([counts[expert] for expert in touched]))
    hidden = torch.cat([linear(part, gate_up[e], exact) for part, e in zip(parts, touched, strict=True)])
    inner = activation(hidden).split([part.shape[0] for part in parts])
    out = torch.cat([linear(part, down[e], exact) for part, e in zip(inner, touched, strict=True)])  # [T * K, H]
    if order is not None:
        out = torch.empty_like(out).index_copy_(0, order, out)
    per_slot = out.float().view(x.shape[0], top_k, -1).mul_(weights[..., None])
    total = per_slot[:, 0]
    for slot in range(1, top_k):
        total = total + per_slot[:, slot]
    return total.to(out_dtype)
