"""Paged caches: tensors per layer, laid out per cache group; every layer shares the request's one block table.

A group is a set of layers whose caches have the same layout: dense K/V, sparse K/V, latents, index keys. Block ids
belong to `runtime.block_pool`; a block id names the same slots in every tensor here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import FIRST_BLOCK
from skipstone.errors import UnsupportedError


@dataclass(frozen=True)
class CacheTensorSpec:
    """One cached quantity: `heads` vectors of `width` values a token, stored as [blocks, heads, block_size, width]."""

    name: str  # "k", "v", "latent", "index_k", "index_k_scale"
    heads: int
    width: int
    dtype: torch.dtype | None = None  # None: that of the other caches


@dataclass(frozen=True)
class CacheSpec:
    """One cache group of one layer: what it caches, and the attention backend that reads it."""

    layer: int
    group: str
    backend: str
    tensors: tuple[CacheTensorSpec, ...]

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in this layer; `dtype` is that of tensors without one of their own."""
        return sum(tensor.heads * tensor.width * (tensor.dtype or dtype).itemsize for tensor in self.tensors)


class CacheMemory(NamedTuple):
    """Where caches are made, and how large: what target and draft layers have in common."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


def movable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where it holds FP8: torch and Triton move bytes on every device, FP8 on some."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class KVCache:
    """The tensors of all layers, zero at first; the first two blocks have special roles, see `core.batch`."""

    def __init__(self, specs: list[CacheSpec], memory: CacheMemory) -> None:
        """Raises UnsupportedError for a layer with two tensors of one name."""
        num_blocks, block_size, dtype, device = memory
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layers: dict[int, dict[str, Tensor]] = {}
        for spec in specs:
            tensors = self.layers.setdefault(spec.layer, {})
            for t in spec.tensors:
                if t.name in tensors:
                    raise UnsupportedError(f"layer {spec.layer} caches {t.name!r} in two groups; rename one of them")
                shape = (num_blocks, t.heads, block_size, t.width)
                tensors[t.name] = torch.zeros(shape, dtype=t.dtype or dtype, device=device)

    def get(self, layer: int, name: str) -> Tensor:
        """[num_blocks, heads, block_size, width] of one layer."""
        return self.layers[layer][name]

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks [N] int64 in every layer; all are read before any is written."""
        for tensors in self.layers.values():
            for tensor in map(movable, tensors.values()):
                tensor[destinations] = tensor[sources]

    def fill(self, value: float) -> None:
        """Overwrite every block that requests can own; tests poison unwritten slots with NaN this way."""
        for tensors in self.layers.values():
            for tensor in tensors.values():
                movable(tensor)[FIRST_BLOCK:] = movable(torch.tensor(value).to(tensor))
