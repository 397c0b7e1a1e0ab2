"""The contract between models and attention kernels: plan once per step and cache group, then write, select and run.

A layer's caches form one or two groups: what attention reads (K/V or latents), and index keys. Every group has its own
kind of metadata; `AttentionGroups.plan` builds each once per step and hands it out per layer. Draft layers use the same
contract with groups of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import Batch, Selection, Span
from skipstone.core.kv_cache import CacheSpec, KVCache
from skipstone.core.observer import Observer
from skipstone.errors import UnsupportedError
from skipstone.kernels.ops import Ops, load_ops
from skipstone.kernels.reference.index_rows import IndexCache, KeyNorm
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import Rotary
from skipstone.kernels.reference.select import select_all
from skipstone.registry import ATTENTION, PREFERRED

# What a proposer's loop may ask of a group's metadata. "advance": follow a request row by row through the draft steps.
# "in_block": rows of one request see each other in both directions (block diffusion).
Feature = Literal["advance", "in_block"]


class CacheRows(NamedTuple):
    """What this step's rows add to a layer's caches; each is [T, heads, width] or None where the layer has none."""

    k: Tensor | None = None
    v: Tensor | None = None
    latent: Tensor | None = None


class IndexQuery(NamedTuple):
    """Queries of the indexer branch: q [T, heads, width]; weights [T, heads] float32 where heads are summed.

    In the dtype of the cached index keys; scales of FP8 queries are part of the weights.
    """

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

    @property
    def text(self) -> str:
        """The budget in words."""
        kept = f"the first {self.init_units} and the last {self.local_units} always"
        blocks = f" ({self.budget} blocks of {self.unit} for each of {self.groups} KV heads, {kept})"
        return f"a row reads at most {self.budget * self.unit:,} tokens{blocks if self.unit > 1 else ''}"


class GroupBackend:
    """One kind of cache group. Keeps nothing of a step: what a step needs is in the metadata that `plan` returns."""

    features: ClassVar[frozenset[Feature]] = frozenset({"advance"})

    def __init__(self, scale: float, exact: bool, sparse: SparseSettings | None, ops: Ops) -> None:
        """`scale`: factor on attention scores; `sparse` None: no layer of the model selects."""
        self.scale, self.exact, self.ops = scale, exact, ops
        self.sparse: Any = sparse

    @classmethod
    def refusal(cls, caches: list[dict[str, Tensor]], sparse: SparseSettings | None, exact: bool) -> str | None:
        """Why it cannot serve layers with these caches on their device."""
        return None

    def plan(self, batch: Batch) -> Any:
        """This step's metadata, a pure function of the batch."""
        return batch


class AttentionBackend(GroupBackend):
    """Attention over one layer's keys and values; bits of a row never depend on other rows when exact."""

    def run(self, metadata: Any, layer: int, q: Tensor, selection: Selection | None, cache: KVCache) -> Tensor:
        """Attention output [T, heads, value width] of q [T, heads, width]; dense layers get no selection."""
        raise NotImplementedError

    def store(self, name: str, rows: Tensor, cache: Tensor, slots: tuple[Tensor, Tensor]) -> None:
        """Cache rows [T, heads, width] at their slots (block, offset)."""
        self.ops.store(rows, cache, *slots)

    def norm_rotate_store(
        self,
        projected: Tensor,
        scaled_gain: Tensor,
        eps: float,
        rotary: Rotary,
        stores: dict[str, HeadStore],
        slots: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See the op of that name; `stores` by the caches' names."""
        return self.ops.norm_rotate_store(projected, scaled_gain, eps, rotary, tuple(stores.values()), *slots)


class IndexMetadata(NamedTuple):
    """`everything`: the selection that all layers share when every row sees no more than it may select."""

    batch: Batch
    everything: Selection | None


class IndexBackend(GroupBackend):
    """The choice of keys from one layer's index keys."""

    def plan(self, batch: Batch) -> IndexMetadata:
        """Everything is selected when all of it fits the budget."""
        unit, budget, groups = self.sparse.unit, self.sparse.budget, self.sparse.groups
        everything = None
        if batch.max_seq_len <= unit * budget:
            everything = Selection(select_all(batch.positions[None], unit, groups, budget)[0].contiguous(), unit)
        return IndexMetadata(batch, everything)

    def select(self, metadata: IndexMetadata, layer: int, index: IndexQuery, cache: KVCache) -> Selection:
        """The keys that each row reads: indices [T, G, budget]."""
        if metadata.everything is not None:
            return metadata.everything
        caches = cache.layers[layer]
        indices = by_span(metadata.batch, lambda span: self.select_span(index, caches, span))
        return Selection(indices, self.sparse.unit)

    def select_span(self, index: IndexQuery, caches: dict[str, Tensor], span: Span) -> Tensor:
        """The indices of a span's rows, given the layer's caches and the queries of all rows."""
        raise NotImplementedError


def by_span(batch: Batch, of_span: Callable[[Span], Tensor]) -> Tensor:
    """What a function gives for the rows of each span, as one tensor."""
    parts = [of_span(span) for span in batch.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Kept(NamedTuple):
    """The K rows whose final states are wanted; the last layer only caches the keys of the others.

    Rows are independent, so in exact mode no bit changes.
    """

    rows: Tensor  # [K] int64, ascending
    batch: Batch  # of these rows alone


class LayerAttention(NamedTuple):
    """One layer's way to its caches in one step of T rows, K of which it keeps: all, but for a last layer."""

    layer: int
    batch: Batch
    cache: KVCache
    attend: AttentionBackend
    attend_metadata: Any
    indexer: IndexBackend | None
    indexer_metadata: Any
    observer: Observer | None
    kept_rows: Tensor | None  # [K] int64; None: all

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Block and offset that take each row's keys."""
        return self.batch.slot_block, self.batch.slot_offset

    def keep(self, x: Tensor) -> Tensor:
        """x [T, ...] -> [K, ...] of the kept rows."""
        return x if self.kept_rows is None else x[self.kept_rows]

    def write(self, rows: CacheRows) -> None:
        """Store whatever of `rows` is present at the batch's slots; all caches have one layout."""
        for name, values in zip(CacheRows._fields, rows, strict=True):
            if values is not None:
                self.attend.store(name, values, self.cache.get(self.layer, name), self.slots)

    def norm_rotate_store(
        self, projected: Tensor, scaled_gain: Tensor, eps: float, rotary: Rotary, places: dict[str, int]
    ) -> Tensor:
        """Norm and rotate the first heads of projected [T, N, D], and store those that this layer caches.

        `places`: the first head of every branch by name, among them the caches' names. Returns the normed heads; what
        stands there at heads that were stored is not specified.
        """
        caches = self.cache.layers[self.layer]
        stores = {name: HeadStore(places[name], cache.shape[1], cache) for name, cache in caches.items()}
        return self.attend.norm_rotate_store(projected, scaled_gain, eps, rotary, stores, self.slots)

    def index_rows(
        self,
        projected_q: Tensor,
        projected_k: Tensor,
        head_weights: Tensor,
        weight_scale: float,
        norm: KeyNorm,
        rotary: Rotary,
    ) -> IndexQuery:
        """Cache the index keys of the rows, and return their queries; see the op of that name."""
        caches = self.cache.layers[self.layer]
        index = IndexCache(caches["index_k"], caches.get("index_k_scale"))
        args = (projected_q, projected_k, head_weights, weight_scale, norm, rotary)
        return IndexQuery(*self.attend.ops.index_rows(*args, index, *self.slots))

    def select(self, query: IndexQuery) -> Selection:
        """Queries of all rows -> the keys that each kept row reads. Only for layers with an indexer."""
        assert self.indexer is not None
        query = IndexQuery(self.keep(query.q), None if query.weights is None else self.keep(query.weights))
        selection = self.indexer.select(self.indexer_metadata, self.layer, query, self.cache)
        if self.observer is not None:
            self.observer.on_selection(self.layer, selection)
        return selection

    def run(self, q: Tensor, selection: Selection | None) -> Tensor:
        """q [K, heads, width] of the kept rows -> [K, heads, value width]."""
        return self.attend.run(self.attend_metadata, self.layer, q, selection, self.cache)


AttentionStep = dict[int, LayerAttention]  # by layer


class AttentionGroups:
    """The cache groups of one model, target or draft, and the backend of each."""

    observer: Observer | None = None

    def __init__(
        self,
        specs: list[CacheSpec],
        cache: KVCache,
        scale: float,
        sparse: SparseSettings | None,
        exact: bool,
        ops: Ops | None = None,
    ) -> None:
        """Raises UnsupportedError for a group with two backends, and for a layer with two groups of one kind."""
        self.cache, ops = cache, ops or load_ops("reference")
        self.backends: dict[str, Any] = {}
        for group, name in _backend_names(specs).items():
            caches = [cache.layers[spec.layer] for spec in specs if spec.group == group]
            preferred = PREFERRED.get(name)
            if preferred and ATTENTION.load(preferred).refusal(caches, sparse, exact) is None:
                name = preferred
            self.backends[group] = ATTENTION.load(name)(scale, exact, sparse, ops)
        self.layers: dict[int, list[str]] = {}  # of each the group that attends, and the one that selects or ""
        for spec in specs:
            groups = self.layers.setdefault(spec.layer, ["", ""])
            place = isinstance(self.backends[spec.group], IndexBackend)
            if groups[place]:
                raise UnsupportedError(
                    f"layer {spec.layer} has two cache groups that do the same, {groups[place]!r} and {spec.group!r}; "
                    "give a layer one group that attends and at most one that selects"
                )
            groups[place] = spec.group

    def plan(self, batch: Batch, kept: Kept | None = None) -> AttentionStep:
        """Every layer's way to its caches, with one metadata for all layers of a group; the last has the kept rows'."""
        whole = {group: backend.plan(batch) for group, backend in self.backends.items()}
        step, last = {}, max(self.layers)
        for layer, (group, index) in self.layers.items():
            metadata, rows = whole, None
            if kept is not None and layer == last:
                metadata = {name: self.backends[name].plan(kept.batch) for name in (group, index) if name}
                rows = kept.rows
            attend = (self.backends[group], metadata[group], self.backends.get(index), metadata.get(index))
            step[layer] = LayerAttention(layer, batch, self.cache, *attend, self.observer, rows)
        return step


def _backend_names(specs: Iterable[CacheSpec]) -> dict[str, str]:
    """The backend of every group."""
    names: dict[str, str] = {}
    for spec in specs:
        other = names.setdefault(spec.group, spec.backend)
        if other != spec.backend:
            raise UnsupportedError(
                f"cache group {spec.group!r} is given two backends, {other!r} and {spec.backend!r}; give layers with "
                "another backend a group of their own"
            )
    return names


def check_groups(specs: Iterable[CacheSpec], needed: Feature, proposer: str) -> None:
    """Check every layer of a draft's cache groups against what the proposer's loop does with its metadata.

    Raises UnsupportedError that lists every group that cannot serve, its backend, and the backends that can; the
    answer does not depend on the order of layers or groups.
    """
    names = sorted({(spec.group, spec.backend) for spec in specs})
    offending = [(group, name) for group, name in names if needed not in ATTENTION.load(name).features]
    if offending:
        able = ", ".join(sorted(name for name in ATTENTION.entries if needed in ATTENTION.load(name).features))
        listed = "; ".join(f"group {group!r} with backend {name!r}" for group, name in offending)
        raise UnsupportedError(
            f"proposer {proposer!r} needs attention metadata with {needed!r}, which is missing in {listed}; "
            f"backends that have it: {able}. Use another proposer or spec=off"
        )
