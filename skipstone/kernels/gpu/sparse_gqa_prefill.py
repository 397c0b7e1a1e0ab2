"""Grouped-query attention over selected blocks for chunks of a prompt, where bits may depend on neighbouring rows.

A program takes a tile of neighbouring rows and walks the union of the blocks they selected in ascending order. Blocks
that lie before the first of its rows, all but the last one or two, need no mask of keys: a row that did not select one
subtracts so much from its scores that no weight is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from skipstone.core.batch import Span
from skipstone.kernels.gpu.dot import is_hip
from skipstone.kernels.gpu.partial_sums import LOG2_E, LOWEST
from skipstone.kernels.gpu.sparse_gqa_blocks import BlockConfig, attend_by_blocks, block_config
from skipstone.kernels.gpu.sparse_gqa_union import most_rows, union_of_rows, whole_rows

MOST_DECODE_ROWS = 8  # rows per request of decoding and verification; longer runs are chunks of prompts
NO_LIMIT = 1 << 30


class PrefillConfig(NamedTuple):
    """Tile shape and launch parameters."""

    rows: int  # query rows of a tile, a power of two
    heads: int  # rows of a matrix product: query rows times the heads of a group
    keys: int
    warps: int
    stages: int
    descriptors: bool  # whether keys and values are loaded through tensor descriptors


def prefill_config(dtype: torch.dtype, unit: int, group: int, budget: int, device: str, hip: bool) -> PrefillConfig:
    """Tiles for caches of `dtype`, blocks of `unit` tokens, groups of `group` heads and `budget` blocks per row."""
    heads = 16 if dtype == torch.float32 else 64
    rows = min(heads // triton.next_power_of_2(group), most_rows(budget))
    if dtype == torch.float32:
        return PrefillConfig(rows, heads, min(unit & -unit, 16), 4, 1, False)
    keys = min(unit & -unit, 64)
    if hip or device != "cuda":
        return PrefillConfig(rows, heads, keys, 4, 2, False)
    return PrefillConfig(rows, heads, keys, 4, 3, True)


def block_limit(rows: int, budget: int, unit: int, table_tokens: int) -> int:
    """The largest union of a tile that is still walked by tiles; NO_LIMIT where walking blocks cannot pay.

    Measured with 4 rows of 16 blocks on an H200: the two orders break even at about 44 of at most 64 blocks, which
    rows that share nothing exceed only when there are many more blocks to choose from.
    """
    long = table_tokens > 6 * budget * unit
    return rows * budget * 11 // 16 if long and unit & (unit - 1) == 0 and 16 <= unit <= 128 else NO_LIMIT


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    unit: int,
    span: Span,
    scale: float,
    tiles: PrefillConfig | None = None,
    blocks: BlockConfig | None = None,
    limit: int | None = None,
) -> Tensor:
    """`sparse_gqa` by tiles of rows; see there for the shapes. The last arguments replace what would be chosen."""
    requests, n = span.positions.shape
    kv_heads, budget = indices.shape[1:]
    group, width = q.shape[1] // kv_heads, q.shape[2]
    hip = is_hip()
    tiles = tiles or prefill_config(k_cache.dtype, unit, group, budget, q.device.type, hip)
    if limit is None:
        limit = block_limit(tiles.rows, budget, unit, span.block_table.shape[1] * k_cache.shape[2])
    q = whole_rows(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    union = union_of_rows(indices, unit, span, tiles.rows, k_cache.shape[2])
    keys, values = k_cache, v_cache
    if tiles.descriptors:
        keys, values = (TensorDescriptor.from_tensor(c.view(-1, width), [tiles.keys, width]) for c in (keys, values))
    _prefill_kernel[(requests * triton.cdiv(n, tiles.rows) * kv_heads,)](
        q, k_cache, v_cache, keys, values, out, *union, span.positions, q.stride(0), n, scale * LOG2_E, limit,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), WIDTH=width,
        BUDGET_PAD=triton.next_power_of_2(budget), UNIT=unit, KEYS=tiles.keys, BLOCK_SIZE=k_cache.shape[2],
        ROWS=tiles.rows, HEADS=tiles.heads, DESCRIPTORS=tiles.descriptors, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    if limit != NO_LIMIT:
        blocks = blocks or block_config(k_cache.dtype, group, hip)
        attend_by_blocks(q, k_cache, v_cache, out, indices, unit, span, scale, union, tiles.rows, limit, blocks)
    return out


@triton.jit
def _attend_tile(q, k, v, m_i, l_i, acc, scale, chooses, limit, key, MASKED: tl.constexpr):
    """Add a tile of keys to the running softmax of the rows that chose it; keys past `limit` are hidden if MASKED."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
    new_m = tl.where(chooses, tl.maximum(m_i, tl.max(scores, axis=1) * scale), m_i)
    base = tl.where(chooses, new_m, -LOWEST)
    weights = tl.exp2(scores * scale - base[:, None])
    old = tl.exp2(m_i - new_m)
    l_i = l_i * old + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return new_m, l_i, acc


@triton.jit(do_not_specialize=["n", "largest"])
def _prefill_kernel(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_ptr,  # [num_blocks, G, block_size, D]
    v_ptr,  # as k
    k_rows,  # the caches as tensor descriptors of [rows, D], or again as pointers
    v_rows,
    out_ptr,  # [T, H, D]
    block_ptr,  # see Union
    page_ptr,
    rows_ptr,
    count_ptr,
    positions_ptr,  # [R, n]
    q_stride,
    n,
    scale,
    largest,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    TILES: tl.constexpr = UNIT // KEYS
    pid = tl.program_id(0)
    row_tiles = (n + ROWS - 1) // ROWS
    # Neighbouring tiles of one head run side by side, as they read much the same blocks; the longest come first.
    row_tile = row_tiles - 1 - pid % row_tiles
    kv_head = pid // row_tiles % KV_HEADS
    request = (pid // (row_tiles * KV_HEADS)).to(tl.int64)

    tile = (request * row_tiles + row_tile) * KV_HEADS + kv_head
    size = tl.load(count_ptr + tile)
    if size > largest:
        return

    m = tl.arange(0, HEADS)
    member = m // GROUP_PAD
    local_row = row_tile * ROWS + member
    real = (member < ROWS) & (local_row < n) & (m % GROUP_PAD < GROUP)
    row = request * n + local_row
    d = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    head_place = (row * KV_HEADS + kv_head) * GROUP + m % GROUP_PAD
    q_place = row * q_stride + (kv_head * GROUP + m % GROUP_PAD) * WIDTH
    q = tl.load(q_ptr + q_place[:, None] + d, mask=real[:, None], other=0.0)
    position = tl.load(positions_ptr + row, mask=real, other=-1).to(tl.int32)
    last_position = tl.max(position)
    first_position = tl.min(tl.where(position >= 0, position, 2147483647))
    entries = tile * (ROWS * BUDGET_PAD)
    entry = tl.arange(0, ROWS * BUDGET_PAD)
    listed = tl.load(block_ptr + entries + entry, mask=entry < size, other=0)
    whole = tl.sum(((entry < size) & (listed * UNIT + UNIT - 1 <= first_position)).to(tl.int32)) * TILES
    count = size * TILES

    m_i = tl.full([HEADS], LOWEST, tl.float32)
    l_i = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    at = key[:, None] * WIDTH + d
    block = tl.load(block_ptr + entries, mask=count > 0, other=0)
    page = tl.load(page_ptr + entries, mask=count > 0, other=0).to(tl.int64)
    rows = tl.load(rows_ptr + entries, mask=count > 0, other=0)
    for i in range(whole):
        start = (block * UNIT + i % TILES * KEYS) % BLOCK_SIZE
        place = (page * KV_HEADS + kv_head) * BLOCK_SIZE + start
        if DESCRIPTORS:
            k = k_rows.load([place.to(tl.int32), 0])
            v = v_rows.load([place.to(tl.int32), 0])
        else:
            k = tl.load(k_ptr + place * WIDTH + at)
            v = tl.load(v_ptr + place * WIDTH + at)
        chooses = (rows >> member & 1) != 0
        following = entries + (i + 1) // TILES
        block = tl.load(block_ptr + following, mask=i + 1 < count, other=0)
        page = tl.load(page_ptr + following, mask=i + 1 < count, other=0).to(tl.int64)
        rows = tl.load(rows_ptr + following, mask=i + 1 < count, other=0)
        m_i, l_i, acc = _attend_tile(q, k, v, m_i, l_i, acc, scale, chooses, position, key, False)
    for i in range(whole, count):
        start = block * UNIT + i % TILES * KEYS
        place = ((page * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE) * WIDTH
        k = tl.load(k_ptr + place + at)
        v = tl.load(v_ptr + place + at, mask=key[:, None] <= last_position - start, other=0.0)
        chooses = (rows >> member & 1) != 0
        following = entries + (i + 1) // TILES
        block = tl.load(block_ptr + following, mask=i + 1 < count, other=0)
        page = tl.load(page_ptr + following, mask=i + 1 < count, other=0).to(tl.int64)
        rows = tl.load(rows_ptr + following, mask=i + 1 < count, other=0)
        m_i, l_i, acc = _attend_tile(q, k, v, m_i, l_i, acc, scale, chooses, position - start, key, True)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out_ptr + head_place[:, None] * WIDTH + d, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
