"""Random tensors for calls of ops, at the sizes of the releases and at small ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.core.batch import FIRST_BLOCK, PAD, SPARE_BLOCK, ZERO_BLOCK, Span
from skipstone.kernels.reference.pointwise import Rotary

LARGEST_CACHE = 4 << 30  # bytes; requests share blocks of a cache that would be larger


class Sizes(NamedTuple):
    """Dimensions of a block-sparse model, and of a token-sparse one (the fields from `latent_heads` on)."""

    hidden: int = 6144
    inner: int = 3072
    vocab: int = 200064
    experts: int = 128
    top_k: int = 4
    heads: int = 64
    kv_heads: int = 4
    width: int = 128
    rotary: int = 64
    index_heads: int = 4
    unit: int = 128
    budget: int = 16
    block_size: int = 128
    latent_heads: int = 128
    latent: int = 576
    value: int = 512
    token_heads: int = 64
    token_width: int = 128
    token_budget: int = 2048
    token_block: int = 64


RELEASES = Sizes()  # MiniMax-M3 and DeepSeek-V3.2
SMALL = Sizes(
    128, 96, 1000, 8, 2, 8, 2, 32, 16, 2, 32, 4, 32,
    latent_heads=4, latent=48, value=32, token_heads=4, token_width=32, token_budget=64, token_block=32,
)  # fmt: skip


class Shape(NamedTuple):
    """R requests with n rows each at the end of `context` tokens; T = R * n."""

    requests: int
    n: int
    context: int
    overlap: bool = True  # neighbouring rows select the same blocks but one; else every row for itself
    padding: bool = False  # the last request is padding

    @property
    def rows(self) -> int:
        """T, over all requests."""
        return self.requests * self.n


class Inputs:
    """Random tensors of one dtype on one device. `whole`: small whole numbers, whose products and sums are exact."""

    def __init__(self, sizes: Sizes, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, whole: bool):
        self.sizes, self.shape, self.dtype, self.device, self.whole = sizes, shape, dtype, device, whole
        self.generator = torch.Generator(device).manual_seed(seed)
        self.item = dtype.itemsize

    def randn(self, *shape: int, dtype: torch.dtype | None = None, whole: bool = False) -> Tensor:
        """Normal numbers, or -1, 0 and 1."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if whole:
            return out.copy_(self.integers(-1, 2, *shape))
        return out.normal_(generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from `low` to `high` - 1, int64."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Values of a size that keeps products of rows near 1."""
        return self.randn(*shape, dtype=dtype).mul_(shape[-2] ** -0.5)

    def _positions(self) -> Tensor:  # [R, n]: the last n places of each request
        requests, n, context, _, padding = self.shape
        last = torch.full((requests, 1), context, device=self.device)
        if padding:  # requests of other lengths, and one of none
            last[1:] -= self.integers(0, max(context // 4, 1), requests - 1, 1)
        positions = last - n + torch.arange(n, device=self.device)
        if padding:
            positions[-1] = PAD
        return positions

    def span(self, block_size: int, row_bytes: int) -> tuple[Span, int]:
        """A span over blocks in random order, and how many blocks its caches have, of `row_bytes` per token."""
        requests, n, context = self.shape[:3]
        columns = -(-context // block_size)
        owned = min(requests * columns, max(LARGEST_CACHE // (row_bytes * block_size), columns))
        order = torch.randperm(owned, generator=self.generator, device=self.device) + FIRST_BLOCK
        table = order[torch.arange(requests * columns, device=self.device) % owned].view(requests, columns)
        span = Span(slice(0, requests), slice(0, requests * n), n, self._positions(), table)
        return span, owned + FIRST_BLOCK

    def cache(self, blocks: int, heads: int, block_size: int, width: int) -> Tensor:
        """Keys in every block; what nothing may read is NaN."""
        cache = self.randn(blocks, heads, block_size, width, whole=self.whole)
        cache[SPARE_BLOCK], cache[ZERO_BLOCK] = torch.nan, 0
        return cache

    def slots(self, block_size: int) -> tuple[Tensor, Tensor, int]:
        """A slot for every row: blocks, offsets, and how many blocks there are."""
        rows = self.shape.rows
        blocks = FIRST_BLOCK + -(-rows // block_size)
        place = torch.randperm((blocks - FIRST_BLOCK) * block_size, generator=self.generator, device=self.device)[:rows]
        return place // block_size + FIRST_BLOCK, place % block_size, blocks

    def choose(self, positions: Tensor, groups: int, unit: int, budget: int) -> Tensor:
        """Units of every row and group, its own among them: [T, groups, budget] int32 ascending, then PAD."""
        own = positions.div(unit, rounding_mode="floor")[:, :, None, None]  # [R, n, 1, 1]
        requests, n = positions.shape
        units = -(-self.shape.context // unit)
        place = torch.arange(units, device=self.device)
        if self.shape.overlap:  # a window over the units in random order, which moves on by one from row to row
            order = torch.rand(requests, 1, groups, units, generator=self.generator, device=self.device).argsort(-1)
            score = (order - torch.arange(n, device=self.device)[:, None, None]) % units
        else:
            score = torch.rand(requests, n, groups, units, generator=self.generator, device=self.device)
        score = torch.where(place == own, -1.0, score.float()).masked_fill(place > own, torch.inf)
        best = score.topk(min(budget, units), dim=-1, largest=False)
        chosen = torch.where(best.values < torch.inf, best.indices, units).sort(dim=-1).values
        chosen = F.pad(chosen.masked_fill(chosen == units, PAD), (0, max(budget - units, 0)), value=PAD)
        return chosen.flatten(0, 1).int()

    def rotary(self, width: int, rotated: int) -> Rotary:
        """Angles of the rows."""
        rows, half = self.shape.rows, rotated // 2
        angle = self.randn(rows, 1, half, dtype=torch.float32)
        cos, sin = torch.ones(rows, 1, width, device=self.device), torch.zeros(rows, 1, width, device=self.device)
        cos[..., :rotated] = angle.cos().repeat(1, 1, 2)
        sin[..., :half], sin[..., half:rotated] = -angle.sin(), angle.sin()
        partner = torch.arange(width, device=self.device)
        partner[:rotated] = partner[:rotated].roll(half)
        return Rotary(cos, sin, partner)


def keys_seen(positions: Tensor) -> float:
    """Keys that all rows together see."""
    return float((positions + 1).sum())


def distinct(indices: Tensor, requests: int, units: int) -> float:
    """Different units of each request and group, summed over both."""
    rows, groups, _ = indices.shape
    chosen = torch.zeros(requests, groups, units + 1, dtype=torch.bool, device=indices.device)
    flat = indices.long().view(requests, rows // requests, groups, -1).transpose(1, 2).flatten(2)
    return float(chosen.scatter_(2, torch.where(flat < 0, units, flat), True)[..., :units].sum())
