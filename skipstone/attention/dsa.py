"""Token-sparse latent attention with the lightning indexer (DeepSeek-V3.2)."""

from __future__ import annotations

from torch import Tensor

from skipstone.attention.backend import AttentionBackend, IndexBackend, IndexQuery, by_span
from skipstone.core.batch import Batch, Selection, Span
from skipstone.core.kv_cache import KVCache


class TokenIndexBackend(IndexBackend):
    """Each row chooses, for all its heads, the `budget` tokens that the lightning indexer scores highest."""

    def select_span(self, index: IndexQuery, caches: dict[str, Tensor], span: Span) -> Tensor:
        """Tokens of each row: [T, 1, budget]."""
        assert index.weights is not None
        queries, keys = (index.q[span.rows], index.weights[span.rows]), (caches["index_k"], caches.get("index_k_scale"))
        return self.ops.token_select(*queries, *keys, span, self.sparse.budget, self.exact)


class TokenSparseBackend(AttentionBackend):
    """Latent attention of each row, with all its heads, over its selected tokens."""

    def run(self, metadata: Batch, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """Absorbed queries [T, H, latent width] -> [T, H, value width] over the selected latents."""
        assert selection is not None
        latents, indices = cache.get(layer, "latent"), selection.indices
        settings, attend = (self.sparse.value_width, self.scale, self.exact), self.ops.sparse_mla
        return by_span(metadata, lambda span: attend(q[span.rows], latents, indices[span.rows], span, *settings))
