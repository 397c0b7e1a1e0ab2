"""Full causal attention over paged K/V."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import CacheRows, IndexQuery, SparseSettings, store_rows
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.reference.attention import dense_attention


class DenseBackend:
    """Grouped-query attention of every row over all earlier positions of its request."""

    batch: Batch

    def __init__(self, scale: float, exact: bool, settings: SparseSettings | None = None) -> None:
        self.scale = scale
        self.exact = exact

    def plan(self, batch: Batch) -> None:
        """Keep the step's spans."""
        self.batch = batch

    def write(self, layer: int, rows: CacheRows, cache: KVCache) -> None:
        """Store k and v."""
        store_rows(layer, rows, cache, self.batch)

    def select(self, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Dense layers read everything; asking for a selection is a bug in the model file."""
        raise NotImplementedError(f"layer {layer} is dense and has no indexer")

    def run(self, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D]."""
        keys, values = cache.get(layer, "k"), cache.get(layer, "v")
        parts = [dense_attention(q[span.rows], keys, values, span, self.scale, self.exact) for span in self.batch.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
