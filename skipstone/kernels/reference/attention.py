"""Attention over paged caches in plain torch, vectorised over rows. The CPU path, and the twin of every fast kernel.

Bits of a row do not depend on the other rows of the step: every reduction over keys has a fixed length. Dense attention
adds up tiles of KEY_TILE keys in ascending order, where a tile beyond a row's own length adds exactly zero; sparse
attention always reduces over the whole budget, with masked entries as exact zeros. Values in slots that were never
written are set to zero before the product, as zero times a NaN would be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, ZERO_BLOCK, Span
from skipstone.kernels.reference.gemm import bmm

KEY_TILE = 128
LOWEST = torch.finfo(torch.float32).min
SMALLEST = torch.finfo(torch.float32).tiny


def gather_blocks(cache: Tensor, block_table: Tensor, multiple: int) -> Tensor:
    """All cached rows of each request, in order: [R, heads, S, width], S rounded up to a multiple of `multiple`.

    cache [num_blocks, heads, block_size, width], block_table [R, blocks] int64. Entries past a request's blocks are
    ZERO_BLOCK; slots past its last row hold anything, and the caller masks them.
    """
    num_requests, blocks = block_table.shape
    _, heads, block_size, width = cache.shape
    padding = -blocks % max(multiple // block_size, 1)
    if padding:
        block_table = torch.nn.functional.pad(block_table, (0, padding), value=ZERO_BLOCK)
    head = torch.arange(heads, device=cache.device)[:, None]
    place = block_table[:, None] * heads + head  # [R, heads, blocks]
    gathered = cache.view(-1, block_size * width).index_select(0, place.view(-1))
    return gathered.view(num_requests, heads, -1, width)


def dense_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, scale: float, exact: bool) -> Tensor:
    """Causal attention of each row over all keys of its request up to its own position.

    q [R * n, H, D] for the R requests of `span`; caches [num_blocks, Hkv, block_size, D]. Returns [R * n, H, D]; a row
    at position -1 gives zeros.
    """
    requests, n = span.positions.shape
    kv_heads, width = k_cache.shape[1], k_cache.shape[3]
    group = q.shape[1] // kv_heads
    keys = gather_blocks(k_cache, span.block_table, KEY_TILE).flatten(0, 1)  # [R * Hkv, S, D]
    values = gather_blocks(v_cache, span.block_table, KEY_TILE)  # [R, Hkv, S, D]
    length = keys.shape[1]
    queries = (
        q.view(requests, n, kv_heads, group, width)
        .permute(0, 2, 1, 3, 4)
        .reshape(requests * kv_heads, n * group, width)
    )
    scores = bmm(queries, keys.transpose(1, 2), exact).float().mul_(scale).view(requests, kv_heads, n, group, length)
    hidden = torch.arange(length, device=q.device) > span.positions[:, :, None]  # [R, n, S]
    scores.masked_fill_(hidden[:, None, :, None], -torch.inf)
    unwritten = torch.arange(length, device=q.device) > span.positions.amax(dim=1, keepdim=True)  # [R, S]
    values.masked_fill_(unwritten[:, None, :, None], 0)
    highest = scores.amax(dim=-1, keepdim=True).clamp_(min=LOWEST)  # a padding row sees nothing
    weights = torch.exp(scores - highest)  # [R, Hkv, n, group, S] float32
    tiles = length // KEY_TILE
    weights = weights.view(requests * kv_heads, n * group, tiles, KEY_TILE).transpose(1, 2)
    total = add_in_order(weights.sum(dim=-1)).clamp_(min=SMALLEST)  # [R * Hkv, n * group]
    partial = bmm(
        weights.reshape(-1, n * group, KEY_TILE).to(q.dtype), values.reshape(-1, KEY_TILE, values.shape[-1]), exact
    )
    out = add_in_order(partial.view(requests * kv_heads, tiles, n * group, -1).float()) / total[:, :, None]
    out = out.view(requests, kv_heads, n, group, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(requests * n, kv_heads * group, -1).to(q.dtype)


def add_in_order(parts: Tensor) -> Tensor:
    """Sum over dim 1, first to last, so that trailing zeros change no bit."""
    total = parts[:, 0]
    for tile in range(1, parts.shape[1]):
        total = total + parts[:, tile]
    return total


class SelectedKeys(NamedTuple):
    """Where a selection's keys lie: rows of the caches seen as [-1, unit * width], and which keys are masked.

    PAD entries point at ZERO_BLOCK. Of the rest only the last unit may reach past its row: `tail` is its index and
    `tail_hidden` the keys of it that were never written; None when units are single tokens.
    """

    place: Tensor  # [B * S] int64, B key sets of S units
    hidden: Tensor  # [B, 1, S * unit] bool
    tail: Tensor | None = None  # [B] int64
    tail_hidden: Tensor | None = None  # [B, unit, 1] bool


def locate_blocks(
    indices: Tensor, unit: int, positions: Tensor, row_block_table: Tensor, block_size: int
) -> SelectedKeys:
    """Cache places of selected blocks of `unit` tokens, one key set per row and KV head.

    indices [T, Hkv, S] int32 ascending then PAD, positions [T], row_block_table [T, blocks] int64.
    """
    rows, kv_heads, budget = indices.shape
    per_block = block_size // unit
    chosen = indices >= 0
    units = indices.clamp(min=0).long()  # [T, Hkv, S]
    block = torch.div(units, per_block, rounding_mode="floor")
    physical = row_block_table[:, None].expand(-1, kv_heads, -1).gather(2, block)  # [T, Hkv, S]
    physical = torch.where(chosen, physical, ZERO_BLOCK)
    head = torch.arange(kv_heads, device=indices.device)[:, None]
    place = ((physical * kv_heads + head) * per_block + units % per_block).view(-1)
    offset = torch.arange(unit, device=indices.device)
    left = positions[:, None, None] - units * unit  # [T, Hkv, S] tokens of the unit before the row, less one
    left = torch.where(chosen, left, PAD)
    hidden = (offset > left[..., None]).view(rows * kv_heads, 1, budget * unit)
    tail = (chosen.sum(dim=-1) - 1).clamp_(min=0).view(-1)  # [T * Hkv]
    tail_left = left.view(-1, budget).gather(1, tail[:, None])  # [T * Hkv, 1]
    return SelectedKeys(place, hidden, tail, (offset > tail_left)[..., None])


def locate_tokens(indices: Tensor, row_block_table: Tensor, block_size: int) -> SelectedKeys:
    """Cache places of selected tokens, one key set per row. indices [T, S] int32 then PAD."""
    tokens = indices.clamp(min=0).long()  # [T, S]
    block = torch.div(tokens, block_size, rounding_mode="floor")
    slots = row_block_table.gather(1, block) * block_size + tokens % block_size
    padding = indices < 0
    return SelectedKeys(torch.where(padding, ZERO_BLOCK * block_size, slots).view(-1), padding[:, None])


def sparse_gqa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, unit: int, span: Span, scale: float, exact: bool
) -> Tensor:
    """Attention of each row of a span and KV head over its selected blocks: `locate_blocks`, then attention.

    q [R * n, H, D], caches [num_blocks, Hkv, block_size, D], indices [R * n, Hkv, S] int32 ascending then PAD.
    Returns [R * n, H, D]; rows without a key (position -1) give zeros.
    """
    requests, n = span.positions.shape
    table = span.block_table[:, None].expand(requests, n, -1).flatten(0, 1)
    keys = locate_blocks(indices, unit, span.positions.flatten(), table, k_cache.shape[2])
    return block_sparse_attention(q, k_cache, v_cache, keys, unit, scale, exact)


def sparse_mla(
    q: Tensor, latent_cache: Tensor, indices: Tensor, span: Span, value_width: int, scale: float, exact: bool
) -> Tensor:
    """Absorbed MLA of each row of a span over its selected tokens: `locate_tokens`, then attention.

    q [R * n, H, D_latent], indices [R * n, 1, S] int32 then PAD. Returns [R * n, H, value_width].
    """
    requests, n = span.positions.shape
    table = span.block_table[:, None].expand(requests, n, -1).flatten(0, 1)
    keys = locate_tokens(indices[:, 0], table, latent_cache.shape[2])
    return token_sparse_attention(q, latent_cache, keys, value_width, scale, exact)


def block_sparse_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: SelectedKeys, unit: int, scale: float, exact: bool
) -> Tensor:
    """Attention of each row and KV head over its selected blocks (MiniMax-M3).

    q [T, H, D], caches [num_blocks, Hkv, block_size, D]. Returns [T, H, D]. A row without any key gives zeros.
    """
    rows, heads, width = q.shape
    kv_heads = k_cache.shape[1]
    k = k_cache.view(-1, unit * width).index_select(0, keys.place).view(rows * kv_heads, -1, width)
    v = v_cache.view(-1, unit * width).index_select(0, keys.place).view(rows * kv_heads, -1, unit, width)
    assert keys.tail is not None and keys.tail_hidden is not None
    key_set = torch.arange(rows * kv_heads, device=q.device)
    v[key_set, keys.tail] = v[key_set, keys.tail].masked_fill_(keys.tail_hidden, 0)
    queries = q.reshape(rows * kv_heads, heads // kv_heads, width)
    return _attend(queries, k, v.flatten(1, 2), keys.hidden, scale, exact).reshape(rows, heads, width)


def token_sparse_attention(
    q: Tensor, latent_cache: Tensor, keys: SelectedKeys, value_width: int, scale: float, exact: bool
) -> Tensor:
    """Absorbed MLA over the selected tokens (DeepSeek-V3.2): keys are latent rows, values their first dims.

    q [T, H, D_latent], latent_cache [num_blocks, 1, block_size, D_latent]. Returns [T, H, value_width]. A row without
    any key gives zeros.
    """
    rows, _, width = q.shape
    latents = latent_cache.view(-1, width).index_select(0, keys.place).view(rows, -1, width)
    return _attend(q, latents, latents[..., :value_width], keys.hidden, scale, exact)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, exact: bool) -> Tensor:
    """Softmax attention, one query set per key set: q [B, M, D], k [B, S, D], v [B, S, V], hidden [B, 1, S].

    Hidden keys get weight exactly 0 (any weight where every key is hidden), so their values must be finite.
    """
    scores = bmm(q, k.transpose(1, 2), exact).float().mul_(scale).masked_fill_(hidden, LOWEST)  # [B, M, S]
    return bmm(torch.softmax(scores, dim=-1).to(q.dtype), v, exact)
