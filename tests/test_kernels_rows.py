"""Kernels that work row by row: norms, rotary embedding, cache inserts, activations, products, experts, sampling."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.kernels import DEVICE, TOLERANCE, Kernel, cases, error, fresh_slots, same_bits
from oracles.rows import to_rows
from oracles.sampling import NEVER, Row
from torch import Tensor

from skipstone.core.batch import SPARE_BLOCK
from skipstone.kernels.reference import sampling as reference_sampling
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import GatedActivation, Rotary
from skipstone.layers.rotary import RotaryTable, rotary_table
from skipstone.registry import KERNELS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)

FLOAT, HALF = torch.float32, torch.bfloat16
DTYPES = [FLOAT, HALF]
PRODUCT = {FLOAT: 1e-5, HALF: 4e-3}  # sums in float32, rounded once


def randn(seed: int, *shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_alone(op: Callable[..., Any], arguments: Callable[[list[int]], tuple[Any, ...]], rows: int) -> None:
    """Rows have the same bits alone, in threes, shuffled, and beside NaN rows when `arguments` makes them: row -1."""
    whole = op(*arguments(list(range(rows))))
    parts = whole if isinstance(whole, tuple) else (whole,)
    shuffled = [(7 * i + 3) % rows for i in range(rows)]
    groups = [[0], [rows - 1], [rows // 2, 0, rows - 1], shuffled, [-1, 1, -1, 2], [*range(rows), -1, -1]]
    for chosen in groups:
        got = op(*arguments(chosen))
        for part, mine in zip(parts, got if isinstance(got, tuple) else (got,), strict=True):
            real = [i for i, row in enumerate(chosen) if row >= 0]
            assert same_bits(mine[real], part[[chosen[i] for i in real]]), f"rows {chosen}"


def take(x: Tensor, rows: list[int]) -> Tensor:
    """These rows; row -1 is NaN, or any integer."""
    out = x[rows].clone()
    out[[i for i, row in enumerate(rows) if row < 0]] = torch.nan if x.is_floating_point() else 0
    return out


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 160), (3, 6144), (1, 256), (4, 3, 80), (2, 8, 128), (7, 1), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gain = randn(1, *shape, dtype=dtype) * 3, randn(2, shape[-1]).abs() + 0.1
    if len(shape) == 3:
        gain = randn(2, *shape[1:]).abs() + 0.1
    got = Kernel("rms_norm")(x, gain, 1e-6)
    x64 = x.double()
    expected = x64 / (x64.square().sum(-1, keepdim=True) + 1e-6 * shape[-1]).sqrt() * gain.double()
    assert got.dtype == dtype and got.shape == x.shape
    assert error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [160, 256, 6144])
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual = randn(1, 3, width, dtype=dtype), 5 * randn(2, 3, width, dtype=dtype)
    gain = randn(3, width).abs() + 0.1
    total, normed = Kernel("add_rms_norm")(x, residual, gain, 1e-6)
    assert same_bits(total, x + residual)
    exact = total.double()
    expected = exact / (exact.square().sum(-1, keepdim=True) + 1e-6 * width).sqrt() * gain.double()
    assert total.dtype == normed.dtype == dtype
    assert error(normed, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_norms_of_odd_rows(value: float) -> None:
    """Zeros stay zero; what is no number stays in its row."""
    x = randn(1, 3, 64)
    x[1] = value
    gain = torch.ones(64)
    got = Kernel("rms_norm")(x, gain, 1e-6)
    assert got[[0, 2]].isfinite().all()
    assert not got[1].any() if value == 0 else got[1].isnan().all()


def test_norms_row_by_row() -> None:
    x, residual, gain = randn(1, 9, 160), randn(2, 9, 160), randn(3, 160)
    assert_rows_alone(Kernel("rms_norm"), lambda r: (take(x, r), gain, 1e-6), 9)
    assert_rows_alone(Kernel("add_rms_norm"), lambda r: (take(x, r), take(residual, r), gain, 1e-6), 9)


def test_norms_of_views() -> None:
    """Rows that are parts of wider rows, as slices of a projection are."""
    wide, gain = randn(1, 5, 200), randn(2, 64)
    part = wide[:, 40:104]
    assert same_bits(Kernel("rms_norm")(part, gain, 1e-6), Kernel("rms_norm")(part.contiguous(), gain, 1e-6))
    heads = wide.view(5, 5, 40)[:, 1:3]
    gain = randn(3, 2, 40)
    assert same_bits(Kernel("rms_norm")(heads, gain, 1e-6), Kernel("rms_norm")(heads.contiguous(), gain, 1e-6))


# Rotary embedding and inserts


def rotary(kind: str, width: int, rows: int) -> Rotary:
    """Angles of rows at positions of all sizes: whole heads or a part of them, in halves or in pairs."""
    positions = torch.tensor([0, 1, 17, 300, 1000, 5, 9, 41, 77, 3, 2][:rows])
    dim = width if kind == "whole" else width // 2
    first = width - dim if kind == "pairs at the end" else 0
    return RotaryTable(rotary_table(dim, 10000.0, 1001), width, kind == "pairs at the end", first)(positions)


def rotated(x: Tensor, angles: Rotary) -> Tensor:
    """In float64, written with the partner of each dim."""
    x64 = x.double()
    return x64 * angles.cos.double() + x64[..., angles.partner] * angles.sin.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whole", "part", "pairs at the end"])
@pytest.mark.parametrize(("heads", "width"), [(8, 32), (3, 80), (2, 128), (1, 16)])
def test_rotate(heads: int, width: int, kind: str, dtype: torch.dtype) -> None:
    x, angles = randn(1, 5, heads, width, dtype=dtype), rotary(kind, width, 5)
    got = Kernel("rotate")(x, angles)
    assert got.dtype == dtype and got.shape == x.shape
    assert error(got, rotated(x, angles)) < TOLERANCE[dtype]
    view = randn(2, 5, heads + 3, width, dtype=dtype)[:, 2 : 2 + heads]
    assert same_bits(Kernel("rotate")(view, angles), Kernel("rotate")(view.contiguous(), angles))


def test_rotate_row_by_row() -> None:
    x, angles = randn(1, 9, 4, 32), rotary("part", 32, 9)

    def arguments(rows: list[int]) -> tuple[Tensor, Rotary]:
        return take(x, rows), Rotary(take(angles.cos, rows), take(angles.sin, rows), angles.partner)

    assert_rows_alone(Kernel("rotate"), arguments, 9)


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(1, 80), (4, 128), (2, 32), (3, 40)])
def test_store(heads: int, width: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Rows reach their slots, padding reaches the spare block, and nothing else changes."""
    rows = randn(1, 9, heads, width, dtype=dtype)
    rows[[3, 7]] = math.nan
    cache = randn(2, 6, heads, 16, width, dtype=cache_dtype)
    block, offset = fresh_slots(9, 6, 16, seed=heads, padding=[3, 7])
    expected, got = cache.clone(), cache.clone()
    for i in range(9):
        expected[block[i], :, offset[i]] = rows[i].to(cache_dtype)
    Kernel("store", writes=True)(rows, got, block, offset)
    assert same_bits(got[SPARE_BLOCK + 1 :], expected[SPARE_BLOCK + 1 :])
    touched = torch.zeros(16, dtype=torch.bool)
    touched[0] = True
    assert same_bits(got[SPARE_BLOCK][:, ~touched], cache[SPARE_BLOCK][:, ~touched])
    wide = torch.cat([rows, rows], dim=1)[:, heads : 2 * heads]
    Kernel("store", writes=True)(wide, cache, block, offset)
    assert same_bits(cache[SPARE_BLOCK + 1 :], expected[SPARE_BLOCK + 1 :])


def test_slots_of_32_bits() -> None:
    rows, block, offset = randn(1, 9, 2, 32), *fresh_slots(9, 6, 16, seed=1)
    expected, got = torch.zeros(6, 2, 16, 32), torch.zeros(6, 2, 16, 32)
    Kernel("store", writes=True)(rows, expected, block, offset)
    Kernel("store", writes=True)(rows, got, block.int(), offset.int())
    assert expected.any() and same_bits(got, expected)


@pytest.mark.parametrize("by", ["triton", "reference"])
def test_store_of_quantised_rows(by: str) -> None:
    """FP8 rows keep every bit, NaN's too, and their scales are tensors of width 1."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 1, 32)
    block, offset = fresh_slots(8, 6, 16, seed=1)
    for rows, width in ((codes.view(torch.float8_e4m3fn), 32), (randn(1, 8, 1, 1), 1)):
        cache = torch.zeros(6, 1, 16, width, dtype=rows.dtype)
        store = Kernel("store", writes=True) if by == "triton" else KERNELS.load("store/reference")
        store(rows, cache, block, offset)
        assert same_bits(cache[block, :, offset], rows)
        assert int(cache.any(dim=-1).sum()) == 8


# name: heads of the projection, normed ones, width, (first, heads) of each store
INSERTS = {
    "m3": (16 + 1 + 4 + 1 + 1, 16 + 1 + 4 + 1, 128, [(16, 1), (21, 1), (22, 1)]),
    "q and k, then v": (8 + 2 + 2, 10, 32, [(8, 2), (10, 2)]),
    "q, k, index q, index k, v": (4 + 2 + 2 + 1 + 2, 9, 32, [(4, 2), (8, 1), (9, 2)]),
    "one cache": (3, 3, 80, [(2, 1)]),
    "no cache": (5, 5, 40, []),
    "many rows of one head": (1, 1, 128, [(0, 1)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("name", list(INSERTS))
def test_norm_rotate_store(name: str, kind: str, dtype: torch.dtype) -> None:
    """Norm and rotation of the first heads, stored heads at their slots and nowhere else."""
    heads, normed, width, places = INSERTS[name]
    rows, block_size = 7, 8
    projected, gain = randn(1, rows, heads, width, dtype=dtype), randn(2, normed, width).abs() + 0.5
    angles = rotary(kind, width, rows)
    projected[4] = math.nan
    caches = [randn(3 + i, 5, count, block_size, width, dtype=dtype) for i, (_, count) in enumerate(places)]
    stores = tuple(HeadStore(first, count, cache.clone()) for (first, count), cache in zip(places, caches, strict=True))
    block, offset = fresh_slots(rows, 5, block_size, seed=normed, padding=[4])
    out = Kernel("norm_rotate_store", writes=True)(projected, gain, 1e-6, angles, stores, block, offset)
    assert out.dtype == dtype and list(out.shape) == [rows, normed, width]

    x64 = projected[:, :normed].double()
    whole = x64 / (x64.square().sum(-1, keepdim=True) + 1e-6 * width).sqrt() * gain.double()
    expected = torch.cat([rotated(whole, angles), projected[:, normed:].double()], dim=1)
    real = [i for i in range(rows) if i != 4]
    stored = {head for first, count in places for head in range(first, first + count)}
    free = [head for head in range(normed) if head not in stored]
    tolerance = {FLOAT: 1e-5, HALF: 6e-3}[dtype]  # rounded behind the norm and behind the rotation
    if free:
        assert error(out[real][:, free], expected[real][:, free]) < tolerance
    for (first, count), before, store in zip(places, caches, stores, strict=True):
        filled = torch.zeros(store.cache.shape[0], block_size, dtype=torch.bool)
        filled[block, offset] = True
        got = store.cache[block[real], :, offset[real]]
        limit = 1e-30 if first >= normed else tolerance  # what is not normed is copied
        assert error(got, expected[real][:, first : first + count]) < limit
        untouched = (~filled)[:, None, :, None].expand_as(before)
        assert same_bits(store.cache[untouched], before[untouched])


def test_norm_rotate_store_row_by_row() -> None:
    heads, normed, width = 8, 6, 32
    projected, gain, angles = randn(1, 9, heads, width), randn(2, normed, width), rotary("part", width, 9)
    block, offset = fresh_slots(9, 6, 16, seed=2)

    def insert(rows: list[int]) -> tuple[Tensor, Tensor]:
        """The free heads, and what the slots of these rows hold."""
        store = HeadStore(4, 2, torch.zeros(6, 2, 16, width))
        spare = torch.tensor(rows) < 0
        at, to = block[rows].masked_fill(spare, SPARE_BLOCK), offset[rows].masked_fill(spare, 0)
        turned = Rotary(take(angles.cos, rows), take(angles.sin, rows), angles.partner)
        op = Kernel("norm_rotate_store", writes=True)
        out = op(take(projected, rows), gain, 1e-6, turned, (store,), at, to)
        return out[:, :4], store.cache[at, :, to]

    assert_rows_alone(insert, lambda rows: (rows,), 9)


# Activations

ACTIVATIONS = [GatedActivation(), GatedActivation(1.702, 7.0, 1.0), GatedActivation(1.0, 2.0, 0.5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [160, 3072, 7])
def test_gated(width: int, activation: GatedActivation, dtype: torch.dtype) -> None:
    x = randn(1, 3, 2 * width, dtype=dtype) * 6
    got = Kernel("gated")(x, activation)
    expected = activation(x.double().to(torch.float64).float()).double()
    assert got.dtype == dtype and list(got.shape) == [3, width]
    assert error(got, expected) < TOLERANCE[dtype]


def test_gated_of_views() -> None:
    wide = randn(1, 3, 640)[:, 160:480]
    assert same_bits(Kernel("gated")(wide, ACTIVATIONS[1]), Kernel("gated")(wide.contiguous(), ACTIVATIONS[1]))


def test_gated_at_the_ends() -> None:
    """Large numbers of both signs, infinities and NaN: as the plain-torch twin has them."""
    values = [0.0, -0.0, 100.0, -100.0, 3e38, -3e38, math.inf, -math.inf, math.nan]
    pairs = torch.tensor([[a, b] for a in values for b in values])
    for activation in ACTIVATIONS:
        got, expected = Kernel("gated")(pairs, activation), activation(pairs)
        assert torch.equal(got.isnan(), expected.isnan())
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_gated_row_by_row() -> None:
    x = randn(1, 9, 320)
    assert_rows_alone(Kernel("gated"), lambda rows: (take(x, rows), ACTIVATIONS[1]), 9)


# Products


PRODUCTS = [(33, 17), (64, 128), (320, 16), (256, 320), (160, 256), (1024, 96), (8, 2049)]


@pytest.mark.parametrize(
    ("shape", "dtype", "exact"),
    cases(PRODUCTS, DTYPES, [False, True], quick=lambda shape, dtype, exact: shape in PRODUCTS[:3]),
)
def test_linear(shape: tuple[int, int], dtype: torch.dtype, exact: bool) -> None:
    k, n = shape
    weight = randn(1, k, n, dtype=dtype) / k**0.5
    for rows in (1, 5, 70):
        x = randn(rows, rows, k)
        got = Kernel("linear")(x if exact or rows < 70 else x.to(dtype), weight, exact)
        assert got.dtype == dtype and list(got.shape) == [rows, n]
        assert error(got, x.to(dtype).double() @ weight.double()) < PRODUCT[dtype]
    assert list(Kernel("linear")(torch.zeros(0, k, dtype=dtype), weight, exact).shape) == [0, n]


@pytest.mark.parametrize(
    ("shape", "dtype"), cases(PRODUCTS, DTYPES, quick=lambda shape, dtype: shape in PRODUCTS[:3] and dtype == HALF)
)
def test_rows_of_linear_are_exact(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The bits of a row for any number of rows, few or many, and beside rows of NaN."""
    k, n = shape
    weight, x = randn(1, k, n, dtype=dtype), randn(2, 140, k, dtype=dtype)
    whole = Kernel("linear")(x, weight, True)
    for count in (1, 3, 4, 8, 16, 17, 64, 65, 128):
        start = (17 * count) % (141 - count)
        part = slice(start, start + count)
        assert same_bits(Kernel("linear")(x[part].contiguous(), weight, True), whole[part]), f"{count} rows"
    assert_rows_alone(Kernel("linear"), lambda rows: (take(x[:9], rows), weight, True), 9)


def test_linear_of_views() -> None:
    """Transposed weights, and rows that are parts of wider rows."""
    x, weight = randn(1, 5, 96), randn(2, 48, 64)
    expected = Kernel("linear")(x[:, 16:64].contiguous(), weight, True)
    assert same_bits(Kernel("linear")(x[:, 16:64], weight, True), expected)
    assert same_bits(Kernel("linear")(x[:, 16:64], weight.t().contiguous().t(), True), expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "k", "n"), [(8, 32, 64), (4, 64, 32), (3, 33, 17), (1, 128, 512)])
def test_bmm(b: int, k: int, n: int, dtype: torch.dtype, exact: bool) -> None:
    """Also with factors that are permuted views, as the heads of a projection are."""
    right = randn(1, b, k, n, dtype=dtype) / k**0.5
    for rows in (1, 4, 19):
        left = randn(2, rows, b, k, dtype=dtype).transpose(0, 1)
        got = Kernel("bmm")(left, right, exact)
        assert got.dtype == dtype and list(got.shape) == [b, rows, n]
        assert error(got.flatten(0, 1), (left.double() @ right.double()).flatten(0, 1)) < PRODUCT[dtype]
        turned = right.mT.contiguous().mT
        assert error(Kernel("bmm")(left, turned, exact).flatten(0, 1), got.flatten(0, 1)) < PRODUCT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_bmm_are_exact(dtype: torch.dtype) -> None:
    left, right = randn(1, 6, 70, 64, dtype=dtype), randn(2, 6, 64, 48, dtype=dtype)
    whole = Kernel("bmm")(left, right, True)
    for batch, count in ((1, 1), (6, 1), (2, 4), (6, 16), (3, 17), (6, 65)):
        got = Kernel("bmm")(left[:batch, :count].contiguous(), right[:batch], True)
        assert same_bits(got, whole[:batch, :count]), f"{count} rows in a batch of {batch}"


# Experts


def routed(logits: list[float], bias: list[float], top_k: int, scaling: float, groups: int, kept: int) -> Any:
    """One row by plain loops: ids, the likeliest first, and weights."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    biased = torch.tensor([s + b for s, b in zip(scores, bias, strict=True)], dtype=torch.float32).tolist()
    size = len(scores) // groups
    sums = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    open_groups = sorted(range(groups), key=lambda g: (-sums[g], g))[:kept] if groups > 1 else range(groups)
    allowed = [e for e in range(len(scores)) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
    total = sum(scores[e] for e in chosen) + 1e-20
    return chosen, [scores[e] / total * scaling for e in chosen]


ROUTERS = [(8, 2, 1, 1), (128, 4, 1, 1), (8, 2, 4, 2), (32, 8, 8, 4), (12, 3, 3, 2), (5, 5, 1, 1)]


@pytest.mark.parametrize("shared", [None, "last"])
@pytest.mark.parametrize(("experts", "top_k", "groups", "kept"), ROUTERS)
def test_route(experts: int, top_k: int, groups: int, kept: int, shared: str | None) -> None:
    logits, bias = randn(1, 6, experts), randn(2, experts) * 0.1
    extra = experts if shared else None
    ids, weights = Kernel("route")(logits, bias, top_k, 2.5, groups, kept, extra)
    assert ids.dtype in (torch.int32, torch.int64) and weights.dtype == FLOAT
    assert list(ids.shape) == list(weights.shape) == [6, top_k + (shared is not None)]
    for row in range(6):
        chosen, expected = routed(logits[row].tolist(), bias.tolist(), top_k, 2.5, groups, kept)
        if shared:
            chosen, expected = [*chosen, experts], [*expected, 1.0]
        assert ids[row].tolist() == chosen
        torch.testing.assert_close(weights[row].double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("experts", "top_k", "groups", "kept"), ROUTERS)
def test_route_with_ties(experts: int, top_k: int, groups: int, kept: int) -> None:
    """Equal scores: the lower id first, and the lower group."""
    logits = torch.zeros(3, experts)
    logits[1, experts // 2 :] = 1.0
    logits[2] = torch.arange(experts) % 3
    ids, _ = Kernel("route")(logits, torch.zeros(experts), top_k, 1.0, groups, kept, None)
    for row in range(3):
        assert ids[row].tolist() == routed(logits[row].tolist(), [0.0] * experts, top_k, 1.0, groups, kept)[0]


@pytest.mark.parametrize(("experts", "top_k", "groups", "kept"), ROUTERS)
def test_routes_row_by_row(experts: int, top_k: int, groups: int, kept: int) -> None:
    """Whatever a row of NaN gets, its ids are experts, as weights are read for them."""
    logits, bias = randn(1, 9, experts), randn(2, experts) * 0.1
    assert_rows_alone(Kernel("route"), lambda r: (take(logits, r), bias, top_k, 1.0, groups, kept, None), 9)
    ids, _ = Kernel("route")(torch.full((2, experts), math.nan), bias, top_k, 1.0, groups, kept, None)
    assert bool(((ids >= 0) & (ids < experts)).all())


# hidden, intermediate, experts, taken
SMALL = (40, 24, 3, 2)
MIXTURES = [SMALL, (256, 160, 8, 2), (64, 32, 16, 4)]


def mixture(hidden: int, inner: int, experts: int, top_k: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, chosen experts, weights, gate_up, down."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k, generator=generator) + 0.1
    gate_up = randn(3, experts, hidden, 2 * inner, dtype=dtype) / hidden**0.5
    return randn(4, rows, hidden, dtype=dtype), chosen, weights, gate_up, randn(5, experts, inner, hidden, dtype=dtype)


def mixed(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation
) -> Tensor:
    """Row by row in float64, rounded to the weights' dtype where the twin stores something between."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            wide = (x[row].double() @ gate_up[expert].double()).float()[None]
            inner = activation(wide)[0].to(down.dtype).double()
            out[row] += weight * (inner @ down[expert].double())
    return out


@pytest.mark.parametrize(
    ("sizes", "rows", "dtype", "exact"),
    cases(MIXTURES, [1, 4, 33, 70], DTYPES, [False, True], quick=lambda sizes, rows, dtype, exact: sizes == SMALL),
)
def test_experts(sizes: tuple[int, ...], rows: int, dtype: torch.dtype, exact: bool) -> None:
    hidden, inner, experts, top_k = sizes
    activation = ACTIVATIONS[rows % 3]
    arguments = mixture(hidden, inner, experts, top_k, rows, dtype)
    got = Kernel("experts_forward")(*arguments, activation, exact)
    assert got.dtype == FLOAT and list(got.shape) == [rows, hidden]
    assert error(got, mixed(*arguments, activation)) < {FLOAT: 1e-5, HALF: 8e-3}[dtype]
    cast = Kernel("experts_forward")(*arguments, activation, exact, dtype)
    assert same_bits(cast, got.to(dtype))


@pytest.mark.parametrize(
    ("sizes", "dtype"), cases(MIXTURES, DTYPES, quick=lambda sizes, dtype: sizes == SMALL and dtype == HALF)
)
def test_rows_of_experts_are_exact(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whoever shares a row's experts: few rows or many, rows of NaN, all at one expert."""
    hidden, inner, experts, top_k = sizes
    x, chosen, weights, gate_up, down = mixture(hidden, inner, experts, top_k, 70, dtype)
    op, activation = Kernel("experts_forward"), ACTIVATIONS[1]

    def arguments(rows: list[int]) -> tuple[Any, ...]:
        return take(x, rows), take(chosen, rows), take(weights, rows), gate_up, down, activation, True

    whole = op(*arguments(list(range(70))))
    for rows in (range(1), range(4), range(5, 12), range(20, 37), range(65)):
        assert same_bits(op(*arguments(list(rows))), whole[list(rows)]), f"{len(rows)} rows"
    x, chosen, weights = x[:9], chosen[:9], weights[:9]
    assert_rows_alone(op, arguments, 9)


# Sampling


def sampled(logits: Tensor, rows: Any) -> Tensor:
    """By the kernel, which must be the reference's choice, bit for bit."""
    waits = DEVICE == "cpu" and not (rows.top_k is None and rows.top_p is None)
    sampler = Kernel("sample").op() if waits else Kernel("sample")
    got = sampler(logits, rows)
    assert got.dtype == torch.int64 and list(got.shape) == [len(logits)]
    assert torch.equal(got, reference_sampling.sample(logits.float(), rows))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [57, 1000, 4097])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    """With ties, which bfloat16 has many of: the lowest id."""
    sampled(randn(vocab, 5, vocab, dtype=dtype).round(decimals=1), to_rows([Row(temperature=0.0)] * 5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_odd_logits(temperature: float) -> None:
    """NaN counts as -inf; infinities tie; a row without a possible token gives token 0."""
    logits = randn(1, 8, 300)
    logits[0, 5:] = math.nan
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3, [7, 200, 299]] = math.inf
    logits[4, 100:], logits[4, :100] = -0.0, 0.0
    logits[5] = torch.where(torch.arange(300) % 2 == 0, math.nan, -math.inf)
    logits[6] = 3e38
    got = sampled(logits, to_rows([Row(temperature=temperature)] * 8))
    assert got[[1, 2, 5]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [57, 1000, 4097])
def test_noise(vocab: int, dtype: torch.dtype) -> None:
    """Rows of all temperatures, greedy ones among them, with seeds and positions of all sizes."""
    rows = [Row(temperature=t) for t in (0.0, 1.0, 0.7, 1e-7, 30.0, 1.0, 0.0, 2.0)]
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1, 5, 12345])
    positions = torch.tensor([0, 1, 2, 2**31, 2**40, 7, 8, 9])
    sampled(randn(vocab, 8, vocab, dtype=dtype), to_rows(rows, seeds, positions))


def test_every_feature() -> None:
    """Bias, bans, penalties, top-k, top-p and min-p, alone and together, beside plain rows."""
    features = [
        Row(temperature=0.8, bias={3: 5.0, 4: NEVER}),
        Row(temperature=0.0, repetition=1.3, presence=0.5, frequency=0.2, prompt=[1, 2], output=[3, 3, 5]),
        Row(temperature=1.0, min_p=0.2),
        Row(temperature=1.0),
        Row(temperature=0.0),
    ]
    logits = randn(1, 5, 200) * 3
    sampled(logits, to_rows(features))
    full = list(features)
    full[2] = Row(temperature=1.5, top_k=5, top_p=0.8, min_p=0.01)
    sampled(logits, to_rows(full))
    allowed = randn(2, 5, 200) > 0
    sampled(logits, to_rows(features)._replace(allowed=allowed))
    sampled(logits, to_rows([Row(temperature=0.0)] * 5)._replace(allowed=allowed))


def test_sampling_row_by_row() -> None:
    """A row's token, whatever the other rows: NaN rows, greedy ones, other seeds."""
    logits = randn(1, 9, 500)
    seeds, positions = torch.arange(9) * 77, torch.arange(9) + 3

    def arguments(rows: list[int]) -> tuple[Any, ...]:
        temperature = [0.0 if row % 3 == 2 else 1.0 for row in rows]
        settings = to_rows([Row(temperature=t) for t in temperature], seeds[rows], positions[rows])
        return take(logits, rows), settings

    assert_rows_alone(Kernel("sample"), arguments, 9)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is reserved and never touched")
def test_store_beyond_32_bits() -> None:
    """Slots more than 2^31 elements from the cache's start."""
    blocks, rows = 2**31 // (2 * 16 * 32) + 3, randn(1, 2, 2, 32, dtype=HALF)
    cache = torch.empty(blocks, 2, 16, 32, dtype=HALF)
    block, offset = torch.tensor([blocks - 1, blocks - 2]), torch.tensor([15, 0])
    Kernel("store", writes=True)(rows, cache, block, offset)
    assert same_bits(cache[block, :, offset], rows)
    stores = (HeadStore(0, 2, cache),)
    angles = rotary("whole", 32, 2)
    rows = torch.cat([rows, rows[:, :1]], dim=1)
    op = Kernel("norm_rotate_store", writes=True)
    op(rows, torch.ones(2, 32), 1e-6, angles, stores, torch.tensor([blocks - 3, blocks - 1]), offset)
    small = (HeadStore(0, 2, torch.empty(3, 2, 16, 32, dtype=HALF)),)
    op(rows, torch.ones(2, 32), 1e-6, angles, small, torch.tensor([0, 2]), offset)
    assert same_bits(cache[blocks - 3, :, 15], small[0].cache[0, :, 15])
    assert same_bits(cache[blocks - 1, :, 0], small[0].cache[2, :, 0])
