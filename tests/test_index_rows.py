"""The op that makes index queries and keys of a step's rows: its numbers, its FP8 bytes, and where they go."""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import pytest
import torch
from oracles import fp8
from oracles.kernels import DEVICE, TOLERANCE, Kernel, error, fresh_slots, same_bits
from test_kernels_rows import DTYPES, FLOAT, HALF, assert_rows_alone, randn, rotary, rotated, take
from torch import Tensor

from skipstone.core.batch import SPARE_BLOCK
from skipstone.kernels.reference.fp8 import FP8, quantise, widen
from skipstone.kernels.reference.index_rows import IndexCache, KeyNorm
from skipstone.kernels.reference.pointwise import Rotary

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)

BLOCKS, BLOCK_SIZE = 5, 8
WEIGHT_SCALE = 0.3
SHAPES = [(4, 32), (3, 40), (64, 128)]  # heads and width: the demo's, odd ones, the release's


class Projected(NamedTuple):
    """What the projections of some rows give."""

    q: Tensor  # [T, HI, D]
    k: Tensor  # [T, D]
    weights: Tensor  # [T, HI]
    norm: KeyNorm
    angles: Rotary

    def rows(self, rows: list[int]) -> Projected:
        """Some of them; row -1 is NaN."""
        q, k, weights, norm, angles = self
        angles = Rotary(take(angles.cos, rows), take(angles.sin, rows), angles.partner)
        return Projected(take(q, rows), take(k, rows), take(weights, rows), norm, angles)


class Made(NamedTuple):
    """What the op returned, and what it left in the rows' slots."""

    q: Tensor
    weights: Tensor
    key: Tensor  # [T, D]
    scale: Tensor | None  # [T, 1]


def project(rows: int, heads: int, width: int, dtype: torch.dtype = HALF, kind: str = "part") -> Projected:
    norm = KeyNorm(randn(4, width), randn(5, width), 1e-6)
    q, k = randn(1, rows, heads, width, dtype=dtype) * 3, randn(2, rows, width, dtype=dtype) + 2
    return Projected(q, k, randn(3, rows, heads), norm, rotary(kind, width, rows))


def empty_cache(width: int, dtype: torch.dtype, in_fp8: bool) -> IndexCache:
    """NaN everywhere."""
    keys = torch.full((BLOCKS, 1, BLOCK_SIZE, width), math.nan, dtype=FP8 if in_fp8 else dtype)
    return IndexCache(keys, torch.full((BLOCKS, 1, BLOCK_SIZE, 1), math.nan) if in_fp8 else None)


def made(parts: Projected, in_fp8: bool, slots: tuple[Tensor, Tensor] | None = None) -> Made:
    """Run the op on an empty cache; slots that belong to no row must stay as they were."""
    cache = empty_cache(parts.k.shape[1], parts.k.dtype, in_fp8)
    block, offset = slots or fresh_slots(len(parts.k), BLOCKS, BLOCK_SIZE, seed=1)
    args = (*parts[:3], WEIGHT_SCALE, parts.norm, parts.angles, cache, block, offset)
    q, weights = Kernel("index_rows", writes=True)(*args)
    others = torch.ones(BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    others[block, offset] = False
    assert bool(cache.keys[:, 0][others].isnan().all())
    assert cache.scales is None or bool(cache.scales[:, 0][others].isnan().all())
    scale = None if cache.scales is None else cache.scales[block, 0, offset]
    return Made(q, weights, cache.keys[block, 0, offset], scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_numbers(heads: int, width: int, kind: str, dtype: torch.dtype) -> None:
    """Without FP8, against float64."""
    parts = project(5, heads, width, dtype, kind)
    got = made(parts, in_fp8=False)
    assert (got.q.dtype, got.weights.dtype) == (dtype, FLOAT)
    assert error(got.q, rotated(parts.q, parts.angles)) < TOLERANCE[dtype]
    assert error(got.weights, parts.weights.double() * WEIGHT_SCALE) < 1e-6
    weight, bias, eps = parts.norm
    normed = torch.nn.functional.layer_norm(parts.k.double(), (width,), weight.double(), bias.double(), eps)
    expected = rotated(normed[:, None], parts.angles)[:, 0]
    assert error(got.key, expected) < 3 * TOLERANCE[dtype]  # rounded behind the norm and behind the rotation


def assert_bytes(got: Tensor, scale: Tensor, values: Tensor) -> None:
    """got [..., D] and scale [..., 1] are those of values [..., D], by the plain-torch twin and by the oracle."""
    expected, expected_scale = quantise(values)
    whole = expected_scale[..., 0].isfinite()
    assert got.dtype == FP8
    assert same_bits(got[whole], expected[whole])
    assert torch.equal(scale[whole], expected_scale[whole])
    assert bool(scale[~whole].isfinite().logical_not().all())
    assert torch.equal(widen(got[~whole]).isnan(), widen(expected[~whole]).isnan())
    vectors, codes = values[whole][:9].float().tolist(), got[whole][:9].view(torch.uint8).tolist()
    assert [fp8.quantise(vector)[0] for vector in vectors] == codes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_bytes_are_those_of_the_twin(heads: int, width: int, dtype: torch.dtype) -> None:
    """FP8 is `quantise` of what the op makes without FP8, bit by bit; query scales are in the weights."""
    parts = project(5, heads, width, dtype)
    plain, small = made(parts, in_fp8=False), made(parts, in_fp8=True)
    assert small.scale is not None
    assert_bytes(small.key, small.scale, plain.key)
    q_scale = quantise(plain.q)[1]
    assert_bytes(small.q, q_scale, plain.q)
    assert torch.equal(small.weights, plain.weights * q_scale[..., 0])


def test_bytes_at_the_edges() -> None:
    """Zeros, vectors below the least scale, subnormal bytes, values half way between two bytes, no numbers.

    Nothing rotates here, and keys are the bias of their norm, so that queries and keys are what is written below.
    """
    ties = [448.0, *((1 + (i + 0.5) / 8) * 2.0**e for e in (-6, 0, 7) for i in range(7))]
    small = [448.0, -448.0, *((i + 0.5) * 2.0**-9 for i in range(16))]
    rows = [ties, small, [0.0], [-0.0, 0.0], [1e-5, -1e-6, 1e-7], [1e-4, -1e-4], [1e30, -3e38, 1.0]]
    rows += [[-448.0, 447.9, 432.0, -440.0], [1e-38, 2e-39], [math.nan, 1.0]]
    values = torch.tensor([row + [0.0] * (32 - len(row)) for row in rows])[None]  # [1, rows, 32]
    still = Rotary(torch.ones(1, 1, 32), torch.zeros(1, 1, 32), torch.arange(32))
    for i in range(len(rows)):
        norm = KeyNorm(torch.zeros(32), values[0, i], 1e-6)
        parts = Projected(values, randn(1, 1, 32), torch.ones(1, len(rows)), norm, still)
        got = made(parts, in_fp8=True)
        assert got.scale is not None
        assert_bytes(got.key, got.scale, values[:, i])
        assert_bytes(got.q, quantise(values)[1], values)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_row_by_row(in_fp8: bool) -> None:
    parts = project(9, 6, 32, FLOAT)
    block, offset = fresh_slots(9, BLOCKS, BLOCK_SIZE, seed=2)

    def make(rows: list[int]) -> tuple[Tensor, ...]:
        spare = torch.tensor(rows) < 0
        slots = block[rows].masked_fill(spare, SPARE_BLOCK), offset[rows].masked_fill(spare, 0)
        return tuple(part for part in made(parts.rows(rows), in_fp8, slots) if part is not None)

    assert_rows_alone(make, lambda rows: (rows,), 9)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_parts_of_projections(in_fp8: bool) -> None:
    """Queries and keys that are views of wider rows; and no rows at all."""
    parts = project(5, 4, 32)
    wide_q = torch.cat([randn(7, 5, 1, 32, dtype=HALF), parts.q], dim=1)
    wide_k = torch.cat([randn(8, 5, 16, dtype=HALF), parts.k, parts.k], dim=1)
    view = parts._replace(q=wide_q[:, 1:], k=wide_k[:, 16:48], weights=parts.weights.t().contiguous().t())
    for a, b in zip(made(parts, in_fp8), made(view, in_fp8), strict=True):
        assert (a is None and b is None) or same_bits(a, b)
    nothing, cos, sin = torch.zeros(0, dtype=torch.int64), *(part[:0] for part in parts.angles[:2])
    empty = Projected(parts.q[:0], parts.k[:0], parts.weights[:0], parts.norm, Rotary(cos, sin, parts.angles.partner))
    assert made(empty, in_fp8, (nothing, nothing)).q.shape == (0, 4, 32)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is reserved and never touched")
def test_slots_beyond_32_bits() -> None:
    """Keys more than 2^31 elements from the cache's start."""
    parts, blocks = project(2, 4, 32), 2**31 // (16 * 32) + 3
    cache = IndexCache(torch.empty(blocks, 1, 16, 32, dtype=FP8), torch.empty(blocks, 1, 16, 1))
    block, offset = torch.tensor([blocks - 1, blocks - 2]), torch.tensor([15, 0])
    args = (*parts[:3], WEIGHT_SCALE, parts.norm, parts.angles, cache, block, offset)
    Kernel("index_rows", writes=True)(*args)
    expected = made(parts, in_fp8=True)
    assert cache.scales is not None and expected.scale is not None
    assert same_bits(cache.keys[block, 0, offset], expected.key)
    assert same_bits(cache.scales[block, 0, offset], expected.scale)
