"""Full causal attention over paged K/V."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skipstone.attention.backend import Feature, SparseSettings
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.ops import Ops


class DenseMetadata(NamedTuple):
    """Rows by request: positions limit what each row sees."""

    batch: Batch


class DenseBackend:
    """Grouped-query attention of every row over all earlier positions of its request."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance", "in_block"})

    def __init__(self, scale: float, exact: bool, settings: SparseSettings | None, ops: Ops) -> None:
        self.scale = scale
        self.exact = exact
        self.ops = ops

    def plan(self, batch: Batch) -> DenseMetadata:
        """Keep the step's spans."""
        return DenseMetadata(batch)

    def run(
        self, metadata: DenseMetadata, layer: int, q: Tensor, selection: Selection | None, cache: KVCache
    ) -> Tensor:
        """q [T, H, D] -> [T, H, D]."""
        keys, values = cache.get(layer, "k"), cache.get(layer, "v")
        spans = metadata.batch.spans
        parts = [self.ops.dense_attention(q[span.rows], keys, values, span, self.scale, self.exact) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
