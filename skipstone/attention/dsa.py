"""Token-sparse latent attention with the lightning indexer (DeepSeek-V3.2)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skipstone.attention.backend import Feature, IndexQuery, SparseSettings
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.select import select_all


class TokenIndexMetadata(NamedTuple):
    """`everything`: the selection that all layers share when every row sees no more tokens than it may select."""

    batch: Batch
    everything: Selection | None


class TokenIndexBackend:
    """Each row chooses, for all its heads, the `budget` tokens that the lightning indexer scores highest."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance"})

    def __init__(self, scale: float, exact: bool, settings: SparseSettings, ops: Ops) -> None:
        self.exact = exact
        self.settings = settings
        self.ops = ops

    def plan(self, batch: Batch) -> TokenIndexMetadata:
        """Everything is selected when all of it fits the budget."""
        everything = None
        if batch.max_seq_len <= self.settings.budget:
            everything = Selection(select_all(batch.positions[None], 1, 1, self.settings.budget)[0].contiguous(), 1)
        return TokenIndexMetadata(batch, everything)

    def select(self, metadata: TokenIndexMetadata, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Tokens of each row: indices [T, 1, budget]."""
        if metadata.everything is not None:
            return metadata.everything
        assert index.weights is not None
        keys = (cache.get(layer, "index_k"), cache.layers[layer].get("index_k_scale"))
        parts = []
        for span in metadata.batch.spans:
            queries = (index.q[span.rows], index.weights[span.rows])
            parts.append(self.ops.token_select(*queries, *keys, span, self.settings.budget, self.exact))
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), 1)


class TokenSparseBackend:
    """Latent attention of each row, with all its heads, over its selected tokens."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance"})

    def __init__(self, scale: float, exact: bool, settings: SparseSettings, ops: Ops) -> None:
        self.scale = scale
        self.exact = exact
        self.settings = settings
        self.ops = ops

    def plan(self, batch: Batch) -> Batch:
        """Spans are all that is needed."""
        return batch

    def run(self, metadata: Batch, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """Absorbed queries [T, H, latent width] -> [T, H, value width] over the selected latents."""
        assert selection is not None
        latents, parts = cache.get(layer, "latent"), []
        for span in metadata.spans:
            indices, settings = selection.indices[span.rows], (span, self.settings.value_width, self.scale, self.exact)
            parts.append(self.ops.sparse_mla(q[span.rows], latents, indices, *settings))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
