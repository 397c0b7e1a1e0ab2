"""Block-sparse grouped-query attention with a block indexer (MiniMax-M3)."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import CacheRows, IndexQuery, SparseSettings, store_rows
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.reference.attention import block_sparse_attention
from skipstone.kernels.reference.index_scores import block_scores
from skipstone.kernels.reference.select import select_all, select_blocks


class BlockSparseBackend:
    """Each row and KV head attends to the `budget` blocks that its index head scores highest."""

    batch: Batch

    def __init__(self, scale: float, exact: bool, settings: SparseSettings) -> None:
        self.scale = scale
        self.exact = exact
        self.settings = settings

    def plan(self, batch: Batch) -> None:
        """Keep the step's spans."""
        self.batch = batch

    def write(self, layer: int, rows: CacheRows, cache: KVCache) -> None:
        """Store k, v and index_k."""
        store_rows(layer, rows, cache, self.batch.slot_mapping)

    def select(self, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Blocks of each row and KV head: indices [T, G, budget]."""
        unit, budget, init, local, groups, _ = self.settings
        parts = []
        for span in self.batch.spans:
            if span.max_seq_len <= unit * budget:
                chosen = select_all(span.positions, unit, groups, budget)
            else:
                scores = block_scores(index.q[span.rows], cache.get(layer, "index_k"), span, unit, self.exact)
                chosen = select_blocks(scores, span.positions, unit, budget, init, local)
            parts.append(chosen.flatten(0, 1))
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), unit)

    def run(self, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the selected blocks."""
        assert selection is not None
        return block_sparse_attention(
            q,
            cache.get(layer, "k"),
            cache.get(layer, "v"),
            selection.indices,
            selection.unit,
            self.batch.positions,
            self.batch.row_block_table,
            self.scale,
            self.exact,
        )
