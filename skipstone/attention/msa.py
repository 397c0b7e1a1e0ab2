"""Block-sparse grouped-query attention with a block indexer (MiniMax-M3)."""

from __future__ import annotations

from torch import Tensor

from skipstone.attention.backend import AttentionBackend, IndexBackend, IndexQuery, by_span
from skipstone.core.batch import Batch, Selection, Span
from skipstone.core.kv_cache import KVCache


class BlockIndexBackend(IndexBackend):
    """Each row and KV head chooses the `budget` blocks that its index head scores highest."""

    def select_span(self, index: IndexQuery, caches: dict[str, Tensor], span: Span) -> Tensor:
        """Blocks of each row and KV head: [T, G, budget]."""
        unit, budget, init, local, _, _ = self.sparse
        return self.ops.block_select(index.q[span.rows], caches["index_k"], span, unit, budget, init, local, self.exact)


class BlockSparseBackend(AttentionBackend):
    """Attention of each row and KV head over its selected blocks."""

    def run(self, metadata: Batch, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the selected blocks."""
        assert selection is not None
        keys, values, (indices, unit) = cache.get(layer, "k"), cache.get(layer, "v"), selection
        settings, attend = (self.scale, self.exact), self.ops.sparse_gqa
        return by_span(
            metadata, lambda span: attend(q[span.rows], keys, values, indices[span.rows], unit, span, *settings)
        )
