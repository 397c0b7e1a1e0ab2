"""MiniMax-M3's sparse attention through the page-16 paged attention of AMD's package aiter, on ROCm.

Every row and KV head is a sequence of its own: one KV head, one query, and a table of the 16-token pages that it
selected. Keys and values of these layers lie in the order within a page that the package reads; this file therefore
also writes them. Not run on hardware yet: nobody had any at hand. The way in is checked at start-up; where it does not
fit, the layers are left to `msa`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skipstone.attention.backend import SparseSettings
from skipstone.attention.msa_paged import PagedBlockSparseBackend
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.block_table import PAGE_SIZE, PageTable
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import Rotary

PARTITION = 256  # keys of one split, as the package's kernels are tuned for
MOST_SPLITS = 8
VECTOR = 16  # bytes that the package loads at once
# What is passed, all of it by name.
PARAMETERS = (
    "output", "query", "key_cache", "value_cache", "context_lengths", "block_tables", "softmax_scale", "query_length",
    "max_context_partition_num", "context_partition_size", "compute_type", "query_scale", "key_scale", "value_scale",
    "exp_sums", "max_logits", "temporary_output", "alibi_slopes", "sinks", "sliding_window", "ps",
)  # fmt: skip


def load_paged_attention() -> Callable[..., Any]:
    """The package's function. Raises ImportError."""
    from aiter.ops.triton.gluon.pa_decode_gluon import pa_decode_gluon

    return pa_decode_gluon


def signature_refusal(function: Callable[..., Any]) -> str | None:
    """What is different from the call that is made here."""
    found = inspect.signature(function).parameters
    unknown = [name for name in PARAMETERS if name not in found]
    needed = [p.name for p in found.values() if p.default is p.empty and p.name not in PARAMETERS]
    if not unknown and not needed:
        return None
    parts = [f"has no parameter {', '.join(unknown)}"] if unknown else []
    parts += [f"needs {', '.join(needed)}"] if needed else []
    return f"aiter's pa_decode_gluon {' and '.join(parts)}: this version of the package is not known"


def platform_refusal(device: torch.device) -> str | None:
    """Why the package cannot run on this device."""
    served = torch.version.hip is not None and device.type == "cuda"
    return None if served else "it needs an AMD GPU and torch for ROCm"


def aiter_refusal(device: torch.device) -> str | None:
    """Why this machine has no paged attention of aiter; None: it has."""
    refusal = platform_refusal(device)
    if refusal is not None:
        return refusal
    try:
        function = load_paged_attention()
    except ImportError as error:
        return f"aiter cannot be imported: {error}"
    return signature_refusal(function)


def cache_refusal(caches: list[dict[str, Tensor]], sparse: SparseSettings) -> str | None:
    """Why these caches cannot be read by it."""
    if sparse.unit % PAGE_SIZE:
        return f"blocks of {sparse.unit} tokens are not made of pages of {PAGE_SIZE}"
    for keys in (layer["k"] for layer in caches):
        if keys.dtype not in (torch.bfloat16, torch.float16):
            return f"it reads bfloat16 and float16, and these caches are {keys.dtype}"
        if keys.shape[3] & (keys.shape[3] - 1):
            return f"heads of {keys.shape[3]} are no power of two"
    return None


def key_pages(cache: Tensor) -> Tensor:
    """Keys as [pages, 1, D / x, 16, x], x values in VECTOR bytes; pages are numbered as memory has them."""
    x = VECTOR // cache.itemsize
    return cache.view(-1, 1, cache.shape[3] // x, PAGE_SIZE, x)


def value_pages(cache: Tensor) -> Tensor:
    """Values as [pages, 1, 16 / x, D, x]: the tokens of a page are innermost."""
    x = VECTOR // cache.itemsize
    return cache.view(-1, 1, PAGE_SIZE // x, cache.shape[3], x)


def store_keys(rows: Tensor, cache: Tensor, slot_block: Tensor, slot_offset: Tensor) -> None:
    """As the op `store`, in the order of `key_pages`."""
    num_blocks, heads, block_size, width = cache.shape
    x = VECTOR // cache.itemsize
    places = cache.view(num_blocks, heads, block_size // PAGE_SIZE, width // x, PAGE_SIZE, x)
    page, token = slot_offset // PAGE_SIZE, slot_offset % PAGE_SIZE
    places[slot_block.long(), :, page.long(), :, token.long()] = rows.view(-1, heads, width // x, x).to(cache.dtype)


def store_values(rows: Tensor, cache: Tensor, slot_block: Tensor, slot_offset: Tensor) -> None:
    """As the op `store`, in the order of `value_pages`."""
    num_blocks, heads, block_size, width = cache.shape
    x = VECTOR // cache.itemsize
    places = cache.view(num_blocks, heads, block_size // PAGE_SIZE, PAGE_SIZE // x, width, x)
    page, token = slot_offset // PAGE_SIZE, slot_offset % PAGE_SIZE
    places[slot_block.long(), :, page.long(), (token // x).long(), :, (token % x).long()] = rows.to(cache.dtype)


class AiterBlockSparseBackend(PagedBlockSparseBackend):
    """Attention of each row and KV head over its selected blocks, by aiter."""

    @classmethod
    def refusal(cls, caches: list[dict[str, Tensor]], sparse: SparseSettings | None, exact: bool) -> str | None:
        """See GroupBackend."""
        assert sparse is not None
        if exact:
            return "into how many parts it splits a row depends on how many rows there are"
        return aiter_refusal(caches[0]["k"].device) or cache_refusal(caches, sparse)

    def __init__(self, scale: float, exact: bool, settings: SparseSettings, ops: Ops) -> None:
        super().__init__(scale, exact, settings, ops)
        self.function = load_paged_attention()

    def store(self, name: str, rows: Tensor, cache: Tensor, slots: tuple[Tensor, Tensor]) -> None:
        """Keys and values in the order of pages."""
        write: Callable[..., None] = {"k": store_keys, "v": store_values}.get(name, self.ops.store)
        write(rows.contiguous(), cache, *slots)

    def norm_rotate_store(
        self,
        projected: Tensor,
        scaled_gain: Tensor,
        eps: float,
        rotary: Rotary,
        stores: dict[str, HeadStore],
        slots: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Keys and values are stored afterwards, the others with the norm."""
        plain = {name: store for name, store in stores.items() if name not in ("k", "v")}
        heads = super().norm_rotate_store(projected, scaled_gain, eps, rotary, plain, slots)
        for name in ("k", "v"):
            first, count, cache = stores[name]
            source = heads if first < scaled_gain.shape[0] else projected
            self.store(name, source[:, first : first + count], cache, slots)
        return heads

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, tables: PageTable) -> Tensor:
        """Every row and KV head as a sequence of its own."""
        rows, heads, width = q.shape
        kv_heads, block_size = keys.shape[1:3]
        sequences, group = rows * kv_heads, heads // kv_heads
        # Tables count head 0's pages; the same keys of the next head lie a block's pages further on.
        head = torch.arange(kv_heads, device=q.device, dtype=torch.int32)[:, None] * (block_size // PAGE_SIZE)
        pages, lengths = tables
        out = torch.zeros(sequences, group, width, dtype=q.dtype, device=q.device)
        self._call(
            output=out,
            query=q.reshape(sequences, group, width),
            key_cache=key_pages(keys),
            value_cache=value_pages(values),
            context_lengths=lengths.flatten(),
            block_tables=(pages + head).flatten(0, 1),
        )
        # A sequence without keys is not written, or NaN.
        out.masked_fill_((lengths.flatten() == 0)[:, None, None], 0)
        return out.view(rows, heads, width)

    def _call(self, output: Tensor, query: Tensor, **tensors: Tensor) -> None:
        sequences, group, width = query.shape
        splits = num_splits(sequences, query.device)
        parts = (sequences, 1, splits, group)
        peaks, totals = (torch.empty(parts, dtype=torch.float32, device=query.device) for _ in range(2))
        self.function(
            output=output,
            query=query,
            **tensors,
            softmax_scale=self.scale,
            query_length=1,
            max_context_partition_num=splits,
            context_partition_size=PARTITION,
            compute_type=compute_type(query.dtype),
            query_scale=None,
            key_scale=None,
            value_scale=None,
            exp_sums=totals,
            max_logits=peaks,
            temporary_output=torch.empty(*parts, width, dtype=query.dtype, device=query.device),
            alibi_slopes=None,
            sinks=None,
            sliding_window=0,
            ps=True,
        )


def num_splits(sequences: int, device: torch.device) -> int:
    """Programs that share a sequence: enough for two on each compute unit, a number that shapes alone decide."""
    units: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(-(-2 * units // max(sequences, 1)), MOST_SPLITS)


def compute_type(dtype: torch.dtype) -> Any:
    """The same, as Triton names it."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
