"""The contract between models and attention kernels: plan once per step, then write, select and run once per layer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from skipstone.core.batch import Batch, Selection
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.reference.kv_store import store


class CacheRows(NamedTuple):
    """What this step's rows add to a layer's caches; each is [T, heads, width] or None where the layer has none."""

    k: Tensor | None = None
    v: Tensor | None = None
    latent: Tensor | None = None
    index_k: Tensor | None = None


class IndexQuery(NamedTuple):
    """Queries of the indexer branch: q [T, heads, width]; weights [T, heads] float32 where heads are summed."""

    q: Tensor
    weights: Tensor | None = None


class SparseSettings(NamedTuple):
    """What a sparse backend needs to know of the model. A budget counts units of `unit` tokens."""

    unit: int
    budget: int
    init_units: int = 0
    local_units: int = 0
    groups: int = 1
    value_width: int = 0


class AttentionBackend(Protocol):
    """One kind of attention. `scale` is the softmax scale; bits of a row never depend on other rows when `exact`."""

    def plan(self, batch: Batch) -> None:
        """Build this step's metadata. Called once per step, before any layer."""

    def write(self, layer: int, rows: CacheRows, cache: KVCache) -> None:
        """Store the rows' keys and values in the layer's caches, at the batch's slots."""

    def select(self, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Choose the keys each row reads. Not called by dense layers."""

    def run(self, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """Attention output [T, heads, value width] of q [T, heads, width]."""


Backends = dict[str, AttentionBackend]


def store_rows(layer: int, rows: CacheRows, cache: KVCache, batch: Batch) -> None:
    """Write whatever of `rows` is present; shared by every backend, as all caches have one layout."""
    from_names = zip(("k", "v", "latent", "index_k"), rows, strict=True)
    for name, values in from_names:
        if values is not None:
            store(values, cache.get(layer, name), batch.slot_block, batch.slot_offset)
