"""Mixture of experts: routing by biased sigmoid scores, grouped products over the experts touched, weighted sum.

The sum over a row's experts goes in slot order and every expert's rows pass a row-invariant product, so a row's bits
do not depend on which other rows share its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.kernels.reference.gemm import padded_rows, padded_rows_of_both
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


class ExpertRows(NamedTuple):
    """The (row, slot) pairs of a step sorted by expert, each expert's rows at places of their own.

    An expert may get more places than rows, so that its products have a number of rows that keeps a row's bits.
    """

    touched: list[int]
    sizes: list[int]  # places of each expert
    source: Tensor  # [P] int64, the row at each place; row 0 where there is none
    place: Tensor  # [T * K] int64, of every pair


def group_by_expert(experts: Tensor, num_experts: int, padded: tuple[int, ...]) -> ExpertRows:
    """Sort the pairs of experts [T, K]. `padded`: for small counts of rows, how many places they get."""
    device, top_k = experts.device, experts.shape[1]
    if experts.shape[0] == 1:
        size = padded[1] if padded else 1
        source = torch.zeros(1, dtype=torch.int64, device=device).expand(top_k * size)
        return ExpertRows(experts[0].tolist(), [size] * top_k, source, torch.arange(top_k, device=device) * size)
    ids = experts.reshape(-1).cpu().numpy()
    order = ids.argsort(kind="stable")
    counts = np.bincount(ids, minlength=num_experts)
    small = (counts > 0) & (counts < len(padded))
    places = counts.copy()
    places[small] = np.array(padded, dtype=np.int64)[counts[small]]
    shift = (places.cumsum() - places) - (counts.cumsum() - counts)
    taken = np.arange(len(ids)) + shift.repeat(counts)
    row_at, place_of = np.zeros(int(places.sum()), dtype=np.int64), np.empty(len(ids), dtype=np.int64)
    row_at[taken] = order // top_k
    place_of[order] = taken
    chosen = counts.nonzero()[0]
    on_device = (torch.from_numpy(array).to(device) for array in (row_at, place_of))
    return ExpertRows(chosen.tolist(), places[chosen].tolist(), *on_device)


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
    x = x.to(gate_up.dtype)
    rows = group_by_expert(experts, gate_up.shape[0], padding(x, gate_up, down) if exact else ())
    hidden = expert_products(x.index_select(0, rows.source), rows, gate_up)
    out = expert_products(activation(hidden), rows, down).index_select(0, rows.place)  # [T * K, H]
    per_slot = out.float().view(*experts.shape, -1).mul_(weights[..., None])
    total = per_slot[:, 0]
    for slot in range(1, experts.shape[1]):
        total = total + per_slot[:, slot]
    return total.to(out_dtype)


def padding(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[int, ...]:
    """Places for each small number of rows, such that both products give a row the same bits."""
    if not x.is_cpu:
        return ()
    shapes, threads = (gate_up.shape[1:], down.shape[1:]), torch.get_num_threads()
    return padded_rows_of_both(*(padded_rows(k, n, x.dtype, False, threads) for k, n in shapes))


def expert_products(x: Tensor, rows: ExpertRows, weight: Tensor) -> Tensor:
    """x [P, K] times each expert's own weight [E, K, N]: [P, N]."""
    out = x.new_empty(x.shape[0], weight.shape[2])
    each = weight.unbind(0)
    for expert, part, place in zip(rows.touched, x.split(rows.sizes), out.split(rows.sizes), strict=True):
        torch.mm(part, each[expert], out=place)
    return out
