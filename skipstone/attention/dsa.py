"""Token-sparse latent attention with the lightning indexer (DeepSeek-V3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.attention.backend import CacheRows, IndexQuery, SparseSettings, store_rows
from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.reference.attention import SelectedKeys, locate_tokens, token_sparse_attention
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
        """Keep the step's spans. When every row sees no more tokens than it may select, all layers share one answer."""
        self.batch = batch
        self._everything: Selection | None = None
        if batch.max_seq_len <= self.settings.budget:
            self._everything = Selection(select_all(batch.positions[None], 1, 1, self.settings.budget)[0], 1)
        self._located: SelectedKeys | None = None

    def write(self, layer: int, rows: CacheRows, cache: KVCache) -> None:
        """Store latent and index_k."""
        store_rows(layer, rows, cache, self.batch)

    def select(self, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Tokens of each row: indices [T, 1, budget]."""
        if self._everything is not None:
            return self._everything
        assert index.weights is not None
        parts = []
        for span in self.batch.spans:
            index_k = cache.get(layer, "index_k")
            scores = token_scores(index.q[span.rows], index.weights[span.rows], index_k, span, self.exact)
            parts.append(select_tokens(scores, span.positions, self.settings.budget).flatten(0, 1))
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), 1)

    def run(self, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """Absorbed queries [T, H, latent width] -> [T, H, value width] over the selected latents."""
        assert selection is not None
        located = self._locate(selection, cache.block_size)
        latents = cache.get(layer, "latent")
        return token_sparse_attention(q, latents, located, self.settings.value_width, self.scale, self.exact)

    def _locate(self, selection: Selection, block_size: int) -> SelectedKeys:
        if selection is self._everything and self._located is not None:
            return self._located
        located = locate_tokens(selection.indices[:, 0], self.batch.row_block_table, block_size)
        if selection is self._everything:
            self._located = located
        return located
