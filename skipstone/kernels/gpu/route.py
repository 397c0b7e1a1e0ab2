"""Routing in Triton: each row's experts and their weights, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _keep_groups(
    biased, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_G: tl.constexpr
):
    """`biased` with -inf at the experts outside the KEPT groups whose two best values have the largest sum."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group_id = tl.arange(0, BLOCK_G)
    sums = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = (expert >= group * SIZE) & (expert < (group + 1) * SIZE)
        members = tl.where(inside, biased, float("-inf"))
        best, place = tl.max(members, axis=0, return_indices=True, return_indices_tie_break_left=True)
        second = tl.max(tl.where(expert == place, float("-inf"), members), axis=0)
        sums = tl.where(group_id == group, best + second, sums)
    kept = tl.zeros(biased.shape, tl.int32)
    for _ in tl.static_range(KEPT):
        _best, group = tl.max(sums, axis=0, return_indices=True, return_indices_tie_break_left=True)
        sums = tl.where(group_id == group, float("-inf"), sums)
        kept = tl.where((expert >= group * SIZE) & (expert < (group + 1) * SIZE), 1, kept)
    return tl.where(kept == 1, biased, float("-inf"))


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, EXPERTS] float32
    bias_ptr,  # [EXPERTS] float32
    ids_ptr,  # [T, COLUMNS] int64
    weights_ptr,  # [T, COLUMNS] float32
    row_stride,
    scaling,
    shared,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per row. Columns behind TOP_K hold `shared` with weight 1."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < EXPERTS
    logits = tl.load(logits_ptr + row * row_stride + expert, mask=inside, other=0.0).to(tl.float32)
    scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    biased = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    # A padding row may hold NaN; its ids must be experts all the same.
    biased = tl.where(biased == biased, tl.maximum(biased, LOWEST), LOWEST)
    biased = tl.where(inside, biased, float("-inf"))
    if GROUPS > 1:
        biased = _keep_groups(biased, expert, EXPERTS, GROUPS, KEPT, BLOCK_G)
    slot_id = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32) + shared
    weights = tl.zeros([BLOCK_K], tl.float32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        _best, chosen = tl.max(biased, axis=0, return_indices=True, return_indices_tie_break_left=True)
        biased = tl.where(expert == chosen, float("-inf"), biased)
        score = tl.sum(tl.where(expert == chosen, scores, 0.0), axis=0)
        total += score
        ids = tl.where(slot_id == slot, chosen, ids)
        weights = tl.where(slot_id == slot, score, weights)
    weights = tl.div_rn(weights, tl.zeros([BLOCK_K], tl.float32) + (total + 1e-20)) * scaling
    weights = tl.where(slot_id < TOP_K, weights, 1.0)
    tl.store(ids_ptr + row * COLUMNS + slot_id, ids.to(tl.int64), mask=slot_id < COLUMNS)
    tl.store(weights_ptr + row * COLUMNS + slot_id, weights, mask=slot_id < COLUMNS)


def route(
    router_logits: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    groups: int = 1,
    kept_groups: int = 1,
    shared: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick `top_k` experts per row by sigmoid score + bias; see the reference's `route`.

    Returns expert ids [T, top_k (+ 1)] int64 and weights of that shape, float32. Ids are experts even where logits are
    NaN.
    """
    rows, experts = router_logits.shape
    columns = top_k + (shared is not None)
    ids = torch.empty(rows, columns, dtype=torch.int64, device=router_logits.device)
    weights = torch.empty(rows, columns, dtype=torch.float32, device=router_logits.device)
    if rows:
        _route_kernel[(rows,)](
            router_logits, bias, ids, weights, router_logits.stride(0), scaling, 0 if shared is None else shared,
            EXPERTS=experts, TOP_K=top_k, COLUMNS=columns, GROUPS=groups, KEPT=kept_groups,
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_G=triton.next_power_of_2(groups),
            BLOCK_K=triton.next_power_of_2(columns), num_warps=1,
        )  # fmt: skip
    return ids, weights
