"""Full causal attention over paged K/V."""

from __future__ import annotations

from torch import Tensor

from skipstone.attention.backend import AttentionBackend, by_span
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache


class DenseBackend(AttentionBackend):
    """Grouped-query attention of every row over all earlier positions of its request."""

    features = frozenset({"advance", "in_block"})

    def run(self, metadata: Batch, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D]."""
        keys, values, settings = cache.get(layer, "k"), cache.get(layer, "v"), (self.scale, self.exact)
        attend = self.ops.dense_attention
        return by_span(metadata, lambda span: attend(q[span.rows], keys, values, span, *settings))
