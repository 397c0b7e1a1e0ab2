"""Block-sparse attention through page tables: what a paged decode kernel computes for MiniMax-M3, on the CPU.

Same caches, metadata contract and selections as `msa`; only the way from a selection to its keys differs. Keys and
values are reached through page tables alone, so this backend checks the tables that such kernels are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skipstone.attention.backend import AttentionBackend, SparseSettings
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.block_table import PAGE_SIZE, PageTable, pages_per_unit


@dataclass
class PagedBlocksMetadata:
    """`tables` remembers the page tables of the last selection, as layers may share one selection."""

    batch: Batch
    tables: tuple[Selection, PageTable] | None = None


class PagedBlockSparseBackend(AttentionBackend):
    """Attention of each row and KV head over its selected blocks, read as pages of 16 keys."""

    def __init__(self, scale: float, exact: bool, sparse: SparseSettings, ops: Ops) -> None:
        super().__init__(scale, exact, sparse, ops)
        pages_per_unit(sparse.unit)  # refuses, at start-up, blocks that pages do not fill

    def plan(self, batch: Batch) -> PagedBlocksMetadata:
        """Page tables need a selection."""
        return PagedBlocksMetadata(batch)

    def run(
        self, metadata: PagedBlocksMetadata, layer: int, q: Tensor, selection: Selection | None, cache: KVCache
    ) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the selected blocks."""
        assert selection is not None
        keys, values = cache.get(layer, "k"), cache.get(layer, "v")
        if metadata.tables is None or metadata.tables[0] is not selection:
            metadata.tables = (selection, page_tables(selection, metadata.batch, keys, self.ops))
        return self.attend(q, keys, values, metadata.tables[1])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, tables: PageTable) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the pages of caches [blocks, heads, block_size, D]."""
        return self.ops.paged_attention(q, page_view(keys), page_view(values), tables, self.scale, self.exact)


def page_view(cache: Tensor) -> Tensor:
    """A contiguous cache [num_blocks, heads, block_size, D] as pages [num_pages, heads, 16, D], without a copy.

    Page ids count head 0's way through memory. The same keys of the next head lie block_size / 16 pages further on, so
    the heads of this view overlap, and only the ids that `page_tables` gives name the same keys in every head.
    """
    num_blocks, heads, block_size, width = cache.shape
    per_head = block_size // PAGE_SIZE
    num_pages = (num_blocks * heads - heads + 1) * per_head
    return cache.as_strided((num_pages, heads, PAGE_SIZE, width), (PAGE_SIZE * width, block_size * width, width, 1))


def page_tables(selection: Selection, batch: Batch, cache: Tensor, ops: Ops) -> PageTable:
    """The page table of every row for the `page_view` of a cache of this shape.

    Each span is a number of requests with equally many rows that end at seq_lens, be they one token, a token and its
    drafts, or a chunk of a prompt: one builder serves all.
    """
    _, heads, block_size, _ = cache.shape
    unit = selection.unit
    per_head = block_size // unit
    place = torch.arange(per_head, device=cache.device)
    parts = []
    for span in batch.spans:
        units = (span.block_table[:, :, None] * (heads * per_head) + place).flatten(1)  # [R, blocks * per_head]
        seq_lens = batch.seq_lens[span.requests]
        indices = selection.indices[span.rows]
        parts.append(ops.verify_page_table(indices, units, seq_lens, span.query_len, unit, pages_per_unit(unit)))
    if len(parts) == 1:
        return parts[0]
    return PageTable(torch.cat([part.pages for part in parts]), torch.cat([part.context_lens for part in parts]))
