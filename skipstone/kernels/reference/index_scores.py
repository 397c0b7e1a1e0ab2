"""Scores of the small indexer branch: one per block (MiniMax-M3) or one per token (DeepSeek-V3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.core.kv_cache import movable
from skipstone.kernels.reference.attention import KEY_TILE, gather_blocks
from skipstone.kernels.reference.fp8 import FP8, widen
from skipstone.kernels.reference.gemm import bmm


def block_scores(index_q: Tensor, index_k_cache: Tensor, span: Span, unit: int, exact: bool) -> Tensor:
    """Largest dot product of each index head with the visible keys of each block.

    index_q [R * n, G, D], index_k_cache [num_blocks, 1, block_size, D]. Returns [R, n, G, S / unit] float32.
    """
    requests, n = span.positions.shape
    groups, width = index_q.shape[1:]
    keys = gather_blocks(index_k_cache, span.block_table, KEY_TILE)[:, 0]  # [R, S, D]
    queries = index_q.reshape(requests, n * groups, width)
    scores = bmm(queries, keys.transpose(1, 2), exact).float().view(requests, n, groups, -1)
    hidden = torch.arange(keys.shape[1], device=index_q.device) > span.positions[:, :, None]  # [R, n, S]
    return scores.masked_fill_(hidden[:, :, None], -torch.inf).unflatten(-1, (-1, unit)).amax(dim=-1)


def token_scores(
    index_q: Tensor,
    head_weights: Tensor,
    index_k_cache: Tensor,
    index_k_scale: Tensor | None,
    span: Span,
    exact: bool,
) -> Tensor:
    """Sum over index heads of weight * relu(q . k), times the key's scale if it has one: DeepSeek's lightning indexer.

    index_q [R * n, HI, D], head_weights [R * n, HI] float32, index_k_cache [num_blocks, 1, block_size, D],
    index_k_scale [num_blocks, 1, block_size, 1] float32 for FP8 keys and queries, whose products are made in float32.
    Returns [R, n, S] float32; entries past a row's position hold anything.
    """
    requests, n = span.positions.shape
    heads, width = index_q.shape[1:]
    keys = gather_blocks(movable(index_k_cache), span.block_table, KEY_TILE)[:, 0].view(index_k_cache.dtype)
    if keys.dtype == FP8:
        index_q, keys = widen(index_q), widen(keys)
    queries = index_q.reshape(requests, n * heads, width)
    scores = bmm(queries, keys.transpose(1, 2), exact).float().relu_().view(requests, n, heads, -1)
    scores = scores.mul_(head_weights.view(requests, n, heads, 1)).sum(dim=2)
    if index_k_scale is None:
        return scores
    scales = gather_blocks(index_k_scale, span.block_table, KEY_TILE)[:, 0, :, 0]  # [R, S]
    return scores.mul_(scales[:, None])
