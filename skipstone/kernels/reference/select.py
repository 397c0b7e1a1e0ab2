"""Selection: which blocks or tokens a row reads, from index scores. One total order for both models.

Higher score first, then the lower id, so that every rank and every batch picks the same keys. NaN ranks below every
number but above a key that the row may not see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.core.batch import PAD, Span
from skipstone.kernels.reference.index_scores import block_scores, token_scores

LOWEST = torch.finfo(torch.float32).min


def block_select(
    index_q: Tensor, index_k_cache: Tensor, span: Span, unit: int, budget: int, init: int, local: int, exact: bool
) -> Tensor:
    """The blocks that each row and index head reads: scores and choice in one (MiniMax-M3).

    index_q [R * n, G, D], index_k_cache [num_blocks, 1, block_size, D]. Returns [R * n, G, budget], see
    `select_blocks`.
    """
    scores = block_scores(index_q, index_k_cache, span, unit, exact)
    return select_blocks(scores, span.positions, unit, budget, init, local).flatten(0, 1)


def token_select(
    index_q: Tensor,
    head_weights: Tensor,
    index_k_cache: Tensor,
    index_k_scale: Tensor | None,
    span: Span,
    budget: int,
    exact: bool,
) -> Tensor:
    """The tokens that each row reads: scores and choice in one (DeepSeek-V3.2).

    index_q [R * n, HI, D], head_weights [R * n, HI] float32, index_k_cache [num_blocks, 1, block_size, D], and for FP8
    keys and queries index_k_scale [num_blocks, 1, block_size, 1] float32. Returns [R * n, 1, budget], see
    `select_tokens`.
    """
    scores = token_scores(index_q, head_weights, index_k_cache, index_k_scale, span, exact)
    return select_tokens(scores, span.positions, budget).flatten(0, 1)


def select_blocks(scores: Tensor, positions: Tensor, unit: int, budget: int, init: int, local: int) -> Tensor:
    """Pick `budget` blocks of `unit` tokens per row and group (MiniMax-M3).

    scores [R, n, G, NB] float32 (anything for blocks past the row), positions [R, n] int64 (-1: padding row).
    The first `init` and the last `local` visible blocks are always taken. Returns [R, n, G, budget] int32, ascending,
    then PAD.
    """
    visible_blocks = (torch.div(positions, unit, rounding_mode="floor") + 1)[:, :, None, None]  # [R, n, 1, 1]
    block = torch.arange(scores.shape[-1], device=scores.device)
    forced = (block < init) | (block >= visible_blocks - local)
    scores = _rankable(scores).masked_fill(forced, torch.inf)  # above every score, which are finite by now
    return _pick(scores.masked_fill(block >= visible_blocks, -torch.inf), budget)


def select_tokens(scores: Tensor, positions: Tensor, budget: int) -> Tensor:
    """Pick `budget` tokens per row (DeepSeek-V3.2).

    scores [R, n, S] float32 (anything past the row), positions [R, n] int64 (-1: padding row).
    Returns [R, n, 1, budget] int32, ascending, then PAD.
    """
    token = torch.arange(scores.shape[-1], device=scores.device)
    scores = _rankable(scores).masked_fill(token > positions[:, :, None], -torch.inf)
    return _pick(scores[:, :, None], budget)


def select_all(positions: Tensor, unit: int, groups: int, budget: int) -> Tensor:
    """Every visible unit, for rows that see at most `budget` units. positions [R, n] -> [R, n, G, budget] int32."""
    entry = torch.arange(budget, device=positions.device, dtype=torch.int32)
    visible = (torch.div(positions, unit, rounding_mode="floor") + 1)[:, :, None]  # [R, n, 1]
    chosen = torch.where(entry < visible, entry, PAD)
    return chosen[:, :, None].expand(-1, -1, groups, -1)


def _rankable(scores: Tensor) -> Tensor:
    """NaN and infinities as finite numbers: -inf is kept for keys that the row may not see."""
    return torch.nan_to_num(scores, nan=LOWEST, posinf=torch.finfo(torch.float32).max, neginf=LOWEST)


def _pick(scores: Tensor, budget: int) -> Tensor:
    """The `budget` best of the last dimension as ascending ids, then PAD. scores [..., N] with -inf: not visible."""
    candidates = scores.shape[-1]
    if candidates <= budget:
        chosen = scores > -torch.inf
    else:
        # torch.topk may return any of several equal scores, so it only gives the threshold; equal scores at the
        # threshold are taken by ascending id.
        threshold = scores.topk(budget, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
        above = scores > threshold
        equal = scores == threshold
        room = budget - above.sum(dim=-1, keepdim=True)
        chosen = (above | (equal & (equal.cumsum(dim=-1) <= room))) & (scores > -torch.inf)
    return _ascending_ids(chosen, budget)


def _ascending_ids(chosen: Tensor, budget: int) -> Tensor:
    """Ids of the True entries in ascending order, then PAD: [..., N] bool -> [..., budget] int32."""
    place = chosen.cumsum(dim=-1) - 1
    place = torch.where(chosen, place, budget)  # entries that are not chosen land in one spare column
    ids = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.int32).expand(chosen.shape)
    picked = torch.full((*chosen.shape[:-1], budget + 1), PAD, dtype=torch.int32, device=chosen.device)
    picked.scatter_(-1, place, ids)
    return picked[..., :budget]
