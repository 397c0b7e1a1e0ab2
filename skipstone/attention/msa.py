"""Block-sparse grouped-query attention with a block indexer (MiniMax-M3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skipstone.attention.backend import Feature, IndexQuery, SparseSettings
from skipstone.core.batch import Batch, Selection, Span
from skipstone.core.kv_cache import KVCache
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.attention import (
    BlockPlaces,
    SelectedBlocks,
    block_places,
    block_sparse_attention,
    locate_blocks,
)
from skipstone.kernels.reference.select import select_all


class BlockIndexMetadata(NamedTuple):
    """Which requests must choose, and what a row selects that sees no more blocks than it may: all of them.

    `everything` is the selection that all layers share when no request must choose. `choosing` are the requests that
    must, where others need not: spans whose `rows` index into the batch. None where all must, or nobody looked.
    """

    batch: Batch
    everything: Selection | None
    choosing: list[tuple[Tensor, Span]] | None = None


@dataclass
class SelectedBlocksMetadata:
    """What layers share: `places` of the step's rows, and where the last selection's keys lie."""

    batch: Batch
    places: BlockPlaces | None = None
    located: tuple[Selection, SelectedBlocks] | None = None


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
        choosing = None
        if batch.max_seq_len > unit * budget:
            # On a GPU a look at positions would wait for it.
            choosing = _choosing(batch, unit * budget) if batch.positions.is_cpu and len(batch.seq_lens) > 1 else None
            if choosing is None:
                return BlockIndexMetadata(batch, None)
        everything = Selection(select_all(batch.positions[None], unit, groups, budget)[0].contiguous(), unit)
        return BlockIndexMetadata(batch, everything, choosing)

    def select(self, metadata: BlockIndexMetadata, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """Blocks of each row and KV head: indices [T, G, budget]."""
        unit, budget, init, local, _, _ = self.settings
        keys, settings = cache.get(layer, "index_k"), (unit, budget, init, local, self.exact)
        if metadata.everything is not None:
            if metadata.choosing is None:
                return metadata.everything
            indices = metadata.everything.indices.clone()
            for rows, span in metadata.choosing:
                indices[rows] = self.ops.block_select(index.q[rows], keys, span, *settings)
            return Selection(indices, unit)
        parts = [self.ops.block_select(index.q[span.rows], keys, span, *settings) for span in metadata.batch.spans]
        return Selection(parts[0] if len(parts) == 1 else torch.cat(parts), unit)


def _choosing(batch: Batch, budget: int) -> list[tuple[Tensor, Span]] | None:
    """Rows and spans of the requests that see more than `budget` tokens; None where those are all."""
    chosen, number = [], 0
    for span in batch.spans:
        requests = (span.positions.amax(dim=1) >= budget).nonzero()[:, 0]
        number += len(requests)
        if len(requests):
            rows = (span.rows.start + requests[:, None] * span.query_len + torch.arange(span.query_len)).flatten()
            part = span._replace(positions=span.positions[requests], block_table=span.block_table[requests])
            chosen.append((rows, part))
    return None if number == len(batch.seq_lens) else chosen


class BlockSparseBackend:
    """Attention of each row and KV head over its selected blocks."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance"})

    def __init__(self, scale: float, exact: bool, settings: SparseSettings, ops: Ops) -> None:
        self.scale = scale
        self.exact = exact
        self.ops = ops

    def plan(self, batch: Batch) -> SelectedBlocksMetadata:
        """Keep the step's block tables."""
        return SelectedBlocksMetadata(batch)

    def run(
        self, metadata: SelectedBlocksMetadata, layer: int, q: Tensor, selection: Selection | None, cache: KVCache
    ) -> Tensor:
        """q [T, H, D] -> [T, H, D] over the selected blocks."""
        assert selection is not None
        keys, values = cache.get(layer, "k"), cache.get(layer, "v")
        if not self.ops.is_reference:
            parts = []
            for span in metadata.batch.spans:
                indices, settings = selection.indices[span.rows], (selection.unit, span, self.scale, self.exact)
                parts.append(self.ops.sparse_gqa(q[span.rows], keys, values, indices, *settings))
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if metadata.places is None:
            batch, layout = metadata.batch, (selection.unit, cache.block_size, keys.shape[1])
            metadata.places = block_places(batch.positions, batch.row_block_table, *layout)
        if metadata.located is None or metadata.located[0] is not selection:
            metadata.located = (selection, locate_blocks(selection.indices, metadata.places))
        return block_sparse_attention(q, keys, values, metadata.located[1], selection.unit, self.scale)
