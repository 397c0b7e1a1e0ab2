"""Block-sparse attention as ordinary paged attention: compact tables of 16-token pages, one per row and KV head.

Keys carry their positions (RoPE is applied before the cache), so the order in which a row reads its blocks is free. A
table therefore lists the blocks that lie wholly before the row first and the row's own, partial block last. The number
of keys to read is then the whole causal mask, and any paged decode kernel computes sparse attention. Requests without
rows, padding rows and ids that are no block of the row need no branch: they add nothing to a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.errors import ShapeError, UnsupportedError
from skipstone.kernels.reference.attention import HIDDEN, fused_attention

PAGE_SIZE = 16


class PageTable(NamedTuple):
    """The pages of each row, in reading order, and how many keys of them it reads. Pages past those keys are masked."""

    pages: Tensor  # [T, G, S * unit // 16] int32 physical page ids, 0 where unused
    context_lens: Tensor  # [T, G] int32


def pages_per_unit(unit: int) -> int:
    """Pages of a selected block of `unit` tokens. Raises UnsupportedError when they do not fill it exactly."""
    if unit % PAGE_SIZE:
        raise UnsupportedError(
            f"sparse blocks of {unit} tokens cannot be read through pages of {PAGE_SIZE}: the block must be a multiple"
            " of the page; use the attention backend msa"
        )
    return unit // PAGE_SIZE


def check_verify_rows(indices: Tensor, block_table: Tensor, seq_lens: Tensor, query_len: int) -> None:
    """Raise ShapeError unless indices has `query_len` rows per request and block_table a row for each."""
    rows, requests = indices.shape[0], seq_lens.shape[0]
    if rows != requests * query_len:
        raise ShapeError(
            f"indices has {rows} rows, expected requests * query_len = {requests} * {query_len}"
            f" = {requests * query_len}; pass the rows of requests with equal query_len only, padding rows included"
        )
    if block_table.shape[0] < requests:
        raise ShapeError(f"block_table has {block_table.shape[0]} rows for {requests} requests; pass one per seq_len")


def check_prefill_rows(indices: Tensor, request_ids: Tensor, positions: Tensor) -> None:
    """Raise ShapeError unless every row has a request and a position."""
    if not indices.shape[0] == request_ids.shape[0] == positions.shape[0]:
        raise ShapeError(
            f"indices has {indices.shape[0]} rows, request_ids {request_ids.shape[0]}, positions {positions.shape[0]};"
            " pass one of each per row"
        )


def check_groups(table: PageTable, rows: int, kv_heads: int) -> None:
    """Raise ShapeError unless the table has one group per KV head for each of the rows."""
    if table.pages.shape[:2] != (rows, kv_heads):
        raise ShapeError(
            f"the page table has [rows, groups] = {list(table.pages.shape[:2])}, q and the pages have"
            f" [{rows}, {kv_heads}]; build it with one group per KV head"
        )


def verify_page_table(
    indices: Tensor, block_table: Tensor, seq_lens: Tensor, query_len: int, unit: int, page_stride: int
) -> PageTable:
    """Tables of requests with `query_len` rows each, the last tokens of their sequences: one token and its drafts.

    indices [R * query_len, G, S] int32, seq_lens [R]. Row = request * query_len + i sits at position
    seq_len - query_len + i; rows that this puts before the sequence are padding. The rest is as in
    `prefill_page_table`.
    """
    check_verify_rows(indices, block_table, seq_lens, query_len)
    requests = seq_lens.shape[0]
    request = torch.arange(requests, device=indices.device)
    place = torch.arange(query_len, device=indices.device)
    positions = seq_lens[:, None] - query_len + place  # [R, query_len]
    request_ids = request[:, None].expand(-1, query_len)
    return prefill_page_table(indices, block_table, request_ids.flatten(), positions.flatten(), unit, page_stride)


def prefill_page_table(
    indices: Tensor, block_table: Tensor, request_ids: Tensor, positions: Tensor, unit: int, page_stride: int
) -> PageTable:
    """Tables of rows anywhere in their requests, at absolute `positions` [T] of `request_ids` [T].

    indices [T, G, S] int32, of any strides, holds blocks of `unit` tokens counted from the start of the request. Those
    before the row's own block come first, in the order given, then its own; ids that are negative, ahead of the row or
    past the block table are skipped, wherever they stand. Ids must be unique: a block given twice is read twice.
    block_table [R, blocks] of an integer type maps them to physical blocks of `unit` tokens, and block b has the pages
    b * page_stride + 0 .. unit / 16 - 1: a stride of unit / 16 where keys and values lie in separate planes, of twice
    that where each block holds its keys and then its values. Rows at negative positions, or of a request that the
    block table lacks, are padding: they read no key.
    """
    check_prefill_rows(indices, request_ids, positions)
    requests, blocks = block_table.shape
    rows, groups, budget = indices.shape
    per_unit = pages_per_unit(unit)
    ids, row_position = indices.long(), positions.long()[:, None]  # [T, G, S], [T, 1]
    request = request_ids.long()[:, None, None]  # [T, 1, 1]
    own = torch.div(row_position, unit, rounding_mode="floor")  # [T, 1] the row's block, negative for padding
    known = (ids >= 0) & (ids < blocks) & (request >= 0) & (request < requests)  # [T, G, S]
    full = known & (ids < own[:, :, None])
    tail = known & (ids == own[:, :, None])
    num_full = full.sum(dim=-1)  # [T, G]

    # What is skipped gets a spare entry of the block table and lands in a spare place of the row.
    entries = F.pad(block_table.flatten(), (0, 1))  # [R * blocks + 1]
    physical = entries[torch.where(full | tail, request * blocks + ids, requests * blocks)].long()  # [T, G, S]
    place = torch.where(full, full.cumsum(dim=-1) - 1, torch.where(tail, num_full[:, :, None], budget))
    page = physical[..., None] * page_stride + torch.arange(per_unit, device=indices.device)  # [T, G, S, per_unit]
    pages = torch.zeros(rows, groups, budget + 1, per_unit, dtype=torch.int32, device=indices.device)
    pages.scatter_(2, place[..., None].expand_as(page), page.int())

    length = row_position + 1
    with_tail = num_full * unit + length - own * unit
    context_lens = torch.where(tail.any(dim=-1), with_tail, torch.minimum(num_full * unit, length.clamp(min=0)))
    return PageTable(pages[:, :, :budget].flatten(2), context_lens.int())


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, scale: float, exact: bool) -> Tensor:
    """Attention of each row and KV head over the first `context_lens` keys of its pages, one table per KV head.

    q [T, H, D], pages [num_pages, Hkv, 16, D] of any strides, overlapping ones included. Returns [T, H, D]; a row
    without keys gives zeros. Neither masked keys nor unused pages reach a result, whatever they hold. With `exact` the
    bits of a row do not depend on the other rows: the sums always run over all places of a table.
    """
    rows, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    check_groups(table, rows, kv_heads)
    head = torch.arange(kv_heads, device=q.device)[:, None]
    pages = table.pages.long()  # [T, Hkv, P]
    keys = k_pages[pages, head].view(rows * kv_heads, -1, width)  # [T * Hkv, P * 16, D]
    values = v_pages[pages, head].view(rows * kv_heads, -1, width)
    hidden = torch.arange(keys.shape[1], device=q.device) >= table.context_lens.view(-1, 1)  # [T * Hkv, P * 16]
    for read in (keys, values):
        read.masked_fill_(hidden[:, :, None], 0)  # weight zero does not silence a NaN
    bias = torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, HIDDEN)[:, None, None]
    queries = q.reshape(rows * kv_heads, 1, -1, width)
    return fused_attention(queries, keys[:, None], values[:, None], bias, scale).reshape(rows, heads, width)
