"""Block-sparse grouped-query attention with a block indexer (MiniMax-M3)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skipstone.attention.backend import Feature, IndexQuery, SparseSettings
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.select import select_all


class BlockIndexMetadata(NamedTuple):
    """`everything`: the selection that all layers share when every row sees no more blocks than it may select."""

    batch: Batch
    everything: Selection | None


class BlockIndexBackend:
    """Each row and KV head chooses the `budget` blocks that its index head scores highest."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance"})

    def __init__(self, scale: float, exact: bool, settings: SparseSettings, ops: Ops) -> None:
        self.exact = exact
        self.settings = settings
        self.ops = ops

    def plan(self, batch: Batch) -> BlockIndexMetadata:
        """Everything is selected when all of it fits the budget."""
        unit, budget, _, _, groups, _ = self.settings
        everything = None
        if batch.max_seq_len <= unit * budget:
            everything = Selection(select_all(batch.positions[None], unit, groups, budget)[0].contiguous(), unit)
        return BlockIndexMetadata(batch, everything)

    def select(self, metadata: BlockIndexMetadata, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Blocks of each row and KV head: indices [T, G, budget]."""
        unit, budget, init, local, _, _ = self.settings
        keys, settings = cache.get(layer, "index_k"), (unit, budget, init, local, self.exact)
        if metadata.everything is not None:
            return metadata.everything
        parts = [self.ops.block_select(index.q[span.rows], keys, span, *settings) for span in metadata.batch.spans]
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), unit)


class BlockSparseBackend:
    """Attention of each row and KV head over its selected blocks."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance"})

    def __init__(self, scale: float, exact: bool, settings: SparseSettings, ops: Ops) -> None:
        self.scale = scale
        self.exact = exact
        self.ops = ops

    def plan(self, batch: Batch) -> Batch:
        """Spans are all that is needed."""
        return batch

    def run(self, metadata: Batch, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the selected blocks."""
        assert selection is not None
        keys, values = cache.get(layer, "k"), cache.get(layer, "v")
        parts = []
        for span in metadata.spans:
            indices, settings = selection.indices[span.rows], (selection.unit, span, self.scale, self.exact)
            parts.append(self.ops.sparse_gqa(q[span.rows], keys, values, indices, *settings))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
