"""Token-sparse latent attention with the lightning indexer (DeepSeek-V3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import CacheRows, IndexQuery, SparseSettings, store_rows
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.reference.attention import token_sparse_attention
from skipstone.kernels.reference.index_scores import token_scores
from skipstone.kernels.reference.select import select_all, select_tokens


class TokenSparseBackend:
    """Each row attends, with all its heads, to the `budget` tokens that the indexer scores highest."""

    batch: Batch

    def __init__(self, scale: float, exact: bool, settings: SparseSettings) -> None:
        self.scale = scale
        self.exact = exact
        self.settings = settings

    def plan(self, batch: Batch) -> None:
        """Keep the step's spans."""
        self.batch = batch

    def write(self, layer: int, rows: CacheRows, cache: KVCache) -> None:
        """Store latent and index_k."""
        store_rows(layer, rows, cache, self.batch.slot_mapping)

    def select(self, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Tokens of each row: indices [T, 1, budget]."""
        assert index.weights is not None
        budget = self.settings.budget
        parts = []
        for span in self.batch.spans:
            if span.max_seq_len <= budget:
                chosen = select_all(span.positions, 1, 1, budget)
            else:
                index_k = cache.get(layer, "index_k")
                scores = token_scores(index.q[span.rows], index.weights[span.rows], index_k, span, self.exact)
                chosen = select_tokens(scores, span.positions, budget)
            parts.append(chosen.flatten(0, 1))
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), 1)

    def run(self, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """Absorbed queries [T, H, latent width] -> [T, H, value width] over the selected latents."""
        assert selection is not None
        return token_sparse_attention(
            q,
            cache.get(layer, "latent"),
            selection.indices[:, 0],
            self.batch.row_block_table,
            self.settings.value_width,
            self.scale,
            self.exact,
        )
