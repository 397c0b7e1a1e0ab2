"""Attention over paged caches in plain torch, vectorised over rows. The CPU path, and the twin of every fast kernel.

Bits of a row do not depend on the other rows of the step: every reduction over keys has a fixed length. Dense attention
adds up tiles of keys in ascending order, where a tile beyond a row's own length adds exactly zero; sparse
attention always reduces over the whole budget, with masked entries as exact zeros. Values in slots that were never
written are set to zero before the product, as zero times a NaN would be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.core.batch import ZERO_BLOCK, Span
from skipstone.kernels.reference.gemm import bmm

KEY_TILE = 128  # keys of a tile; as many whole blocks as fit, at least one
LOWEST = torch.finfo(torch.float32).min
SMALLEST = torch.finfo(torch.float32).tiny
HIDDEN = -1e30  # added to the score of a key that a row may not see; finite, so that a row may see none


def gather_blocks(cache: Tensor, block_table: Tensor, multiple: int) -> Tensor:
    """All cached rows of each request, in order: [R, heads, S, width], S rounded up to a multiple of `multiple`.

    cache [num_blocks, heads, block_size, width], block_table [R, blocks] int64. Entries past a request's blocks are
    ZERO_BLOCK; slots past its last row hold anything, and the caller masks them.
    """
    num_requests, blocks = block_table.shape
    _, heads, block_size, width = cache.shape
    padding = -blocks % max(multiple // block_size, 1)
    if padding:
        block_table = F.pad(block_table, (0, padding), value=ZERO_BLOCK)
    head = torch.arange(heads, device=cache.device)[:, None]
    place = block_table[:, None] * heads + head  # [R, heads, blocks]
    gathered = cache.view(-1, block_size * width).index_select(0, place.view(-1))
    return gathered.view(num_requests, heads, -1, width)


class KeyTiles(NamedTuple):
    """The tiles of keys that the requests of a span see, request after request: U of them, of S keys each."""

    most: int  # tiles of the longest request
    owner: Tensor  # [U] int64, the request
    slot: Tensor  # [U] int64, owner * most + number of the tile
    keys: Tensor  # [U, S] int64, positions
    place: Tensor  # [U * Hkv * blocks] int64, rows of the caches seen as [-1, block_size * width]


def key_tiles(span: Span, kv_heads: int, block_size: int) -> KeyTiles:
    """Lay out the tiles of a span; a request that sees nothing has one."""
    device, requests = span.positions.device, span.positions.shape[0]
    per_tile = max(KEY_TILE // block_size, 1)
    size = per_tile * block_size
    counts = torch.div(span.positions.amax(dim=1), size, rounding_mode="floor").clamp_(min=0).add_(1)
    most = int(counts.max())
    numbers = torch.arange(most, device=device)
    slot = (numbers < counts[:, None]).view(-1).nonzero()[:, 0]
    owner, number = torch.div(slot, most, rounding_mode="floor"), slot % most
    spare = max(most * size - span.block_table.shape[1] * block_size, 0)
    table = F.pad(span.block_table, (0, -(-spare // block_size)), value=ZERO_BLOCK)
    blocks = table[:, : most * per_tile].reshape(requests * most, per_tile).index_select(0, slot)
    head = torch.arange(kv_heads, device=device)[:, None]
    place = (blocks[:, None] * kv_heads + head).view(-1)
    keys = number[:, None] * size + torch.arange(size, device=device)
    return KeyTiles(most, owner, slot, keys, place)


def dense_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, scale: float, exact: bool) -> Tensor:
    """Causal attention of each row over all keys of its request up to its own position.

    q [R * n, H, D] for the R requests of `span`; caches [num_blocks, Hkv, block_size, D]. Returns [R * n, H, D]; a row
    at position -1 gives zeros.
    """
    requests, n = span.positions.shape
    kv_heads, block_size, width = k_cache.shape[1:]
    group, value_width = q.shape[1] // kv_heads, v_cache.shape[3]
    tiles = key_tiles(span, kv_heads, block_size)
    size = tiles.keys.shape[1]
    shape = (-1, kv_heads, n, group)
    k = k_cache.view(-1, block_size * width).index_select(0, tiles.place).view(-1, size, width)
    v = v_cache.view(-1, block_size * value_width).index_select(0, tiles.place).view(-1, kv_heads, size, value_width)
    queries = q.view(requests, n, kv_heads, group, width).permute(0, 2, 1, 3, 4).index_select(0, tiles.owner)
    scores = bmm(queries.reshape(-1, n * group, width), k.transpose(1, 2), exact).float().mul_(scale)
    scores = scores.view(*shape, size)  # [U, Hkv, n, group, S]
    positions = span.positions.index_select(0, tiles.owner)  # [U, n]
    scores.masked_fill_((tiles.keys[:, None] > positions[:, :, None])[:, None, :, None], -torch.inf)
    v.masked_fill_((tiles.keys > positions.amax(dim=1, keepdim=True))[:, None, :, None], 0)
    best = _by_request(scores.amax(dim=-1), tiles, requests, -torch.inf).amax(dim=1)  # [R, Hkv, n, group]
    best = best.clamp_(min=LOWEST).index_select(0, tiles.owner)  # a padding row sees nothing
    weights = scores.sub_(best[..., None]).exp_()
    partial = bmm(weights.view(-1, n * group, size).to(q.dtype), v.flatten(0, 1), exact).view(*shape, value_width)
    parts = torch.cat((partial.float(), weights.sum(dim=-1, keepdim=True)), dim=-1)
    total = add_in_order(_by_request(parts, tiles, requests, 0.0))  # [R, Hkv, n, group, value width + 1]
    out = total[..., :-1] / total[..., -1:].clamp(min=SMALLEST)
    return out.permute(0, 2, 1, 3, 4).reshape(requests * n, kv_heads * group, -1).to(q.dtype)


def _by_request(values: Tensor, tiles: KeyTiles, requests: int, missing: float) -> Tensor:
    """values [U, ...] as [R, most, ...], with `missing` where a request has fewer tiles."""
    if len(tiles.slot) == requests * tiles.most:
        return values.view(requests, tiles.most, *values.shape[1:])
    spread = values.new_full((requests * tiles.most, *values.shape[1:]), missing)
    return spread.index_copy_(0, tiles.slot, values).view(requests, tiles.most, *values.shape[1:])


def add_in_order(parts: Tensor) -> Tensor:
    """Sum over dim 1, first to last, so that trailing zeros change no bit."""
    total = parts[:, 0]
    for tile in range(1, parts.shape[1]):
        total = total + parts[:, tile]
    return total


def locate(tokens: Tensor, hidden: Tensor, span: Span, block_size: int) -> Tensor:
    """Rows of a cache seen as [num_blocks, heads, block_size, width] at head 0: block * block_size * heads is left out.

    tokens [T, ...] int64, positions in the request of each of the span's rows; `hidden` ones point at ZERO_BLOCK.
    Returns block * block_size + offset, of tokens' shape.
    """
    table = span.block_table.repeat_interleave(span.query_len, dim=0)  # [T, blocks]
    tokens = tokens.masked_fill(hidden, 0)
    block = torch.div(tokens, block_size, rounding_mode="floor")
    slots = table.gather(1, block.flatten(1)).view_as(block) * block_size + tokens % block_size
    return slots.masked_fill_(hidden, ZERO_BLOCK * block_size)


def sparse_gqa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, unit: int, span: Span, scale: float, exact: bool
) -> Tensor:
    """Attention of each row of a span and KV head over its selected blocks (MiniMax-M3).

    q [R * n, H, D], caches [num_blocks, Hkv, block_size, D], indices [R * n, Hkv, S] int32 ascending then PAD.
    Returns [R * n, H, D]; rows without a key (position -1) give zeros. The keys of a row and KV head are one entry of
    the fused kernel's batch, so its bits depend on nothing else.
    """
    rows, heads, width = q.shape
    kv_heads, block_size = k_cache.shape[1:3]
    within = torch.arange(unit, device=q.device)
    tokens = (indices.long()[..., None] * unit + within).flatten(2)  # [T, Hkv, S * unit]; negative for PAD
    hidden = (tokens < 0) | (tokens > span.positions.view(-1, 1, 1))
    slots = locate(tokens, hidden, span, block_size)
    block, offset = torch.div(slots, block_size, rounding_mode="floor"), slots % block_size
    place = (block * kv_heads + torch.arange(kv_heads, device=q.device)[:, None]) * block_size + offset
    sets = rows * kv_heads
    k, v = (cache.view(-1, width)[place].view(sets, 1, -1, width) for cache in (k_cache, v_cache))
    bias = torch.zeros(sets, 1, 1, hidden.shape[2], device=q.device).masked_fill_(hidden.view(sets, 1, 1, -1), HIDDEN)
    return fused_attention(q.reshape(sets, 1, -1, width), k, v, bias, scale).reshape(rows, heads, width)


def sparse_mla(
    q: Tensor, latent_cache: Tensor, indices: Tensor, span: Span, value_width: int, scale: float, exact: bool
) -> Tensor:
    """Absorbed MLA of each row of a span over its selected tokens (DeepSeek-V3.2).

    Keys are latent rows, values their first dims. q [R * n, H, D_latent], latent_cache [num_blocks, 1, block_size,
    D_latent], indices [R * n, 1, S] int32 then PAD. Returns [R * n, H, value_width]; rows without a key give zeros.
    """
    rows, _, width = q.shape
    tokens = indices[:, 0].long()
    hidden = tokens < 0
    place = locate(tokens, hidden, span, latent_cache.shape[2])
    latents = latent_cache.view(-1, width).index_select(0, place.view(-1)).view(rows, -1, width)
    return _attend(q, latents, latents[..., :value_width], hidden[:, None], scale, exact)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """torch's own attention in float32: q [B, 1, M, D], k and v [B, 1, S, D], bias [B, 1, 1, S] -> q's shape and dtype.

    On CPUs with instructions for bfloat16 torch chooses by the size of the batch how it multiplies that type.
    """
    out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=bias, scale=scale)
    return out.to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, exact: bool) -> Tensor:
    """Softmax attention, one query set per key set: q [B, M, D], k [B, S, D], v [B, S, V], hidden [B, 1, S].

    Hidden keys get weight exactly 0 (any weight where every key is hidden), so their values must be finite.
    """
    scores = bmm(q, k.transpose(1, 2), exact).float().mul_(scale).masked_fill_(hidden, LOWEST)  # [B, M, S]
    return bmm(torch.softmax(scores, dim=-1).to(q.dtype), v, exact)
