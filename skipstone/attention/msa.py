"""Block-sparse grouped-query attention with a block indexer (MiniMax-M3)."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import CacheRows, IndexQuery, SparseSettings, store_rows
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.reference.attention import SelectedKeys, block_sparse_attention, locate_blocks
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
        """Keep the step's spans. When every row sees no more blocks than it may select, all layers share one answer."""
        self.batch = batch
        self._everything: Selection | None = None
        unit, budget, _, _, groups, _ = self.settings
        if batch.max_seq_len <= unit * budget:
            self._everything = Selection(select_all(batch.positions[None], unit, groups, budget)[0], unit)
        self._located: SelectedKeys | None = None

    def write(self, layer: int, rows: CacheRows, cache: KVCache) -> None:
        """Store k, v and index_k."""
        store_rows(layer, rows, cache, self.batch)

    def select(self, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Blocks of each row and KV head: indices [T, G, budget]."""
        if self._everything is not None:
            return self._everything
        unit, budget, init, local, _, _ = self.settings
        parts = []
        for span in self.batch.spans:
            scores = block_scores(index.q[span.rows], cache.get(layer, "index_k"), span, unit, self.exact)
            parts.append(select_blocks(scores, span.positions, unit, budget, init, local).flatten(0, 1))
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), unit)

    def run(self, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the selected blocks."""
        assert selection is not None
        keys, values = cache.get(layer, "k"), cache.get(layer, "v")
        located = self._locate(selection, cache.block_size)
        return block_sparse_attention(q, keys, values, located, selection.unit, self.scale, self.exact)

    def _locate(self, selection: Selection, block_size: int) -> SelectedKeys:
        if selection is self._everything and self._located is not None:
            return self._located
        batch = self.batch
        located = locate_blocks(selection.indices, selection.unit, batch.positions, batch.row_block_table, block_size)
        if selection is self._everything:
            self._located = located
        return located
