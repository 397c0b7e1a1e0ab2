"""Attention kernels against float64, row by row: paged caches full of NaN, padding, exact bits in any company."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from oracles.block_table import attend, selected_tokens
from oracles.kernels import (
    DEVICE,
    TOLERANCE,
    Call,
    Kernel,
    Requests,
    Row,
    assert_same_rows,
    cases,
    error,
    same_bits,
)
from torch import Tensor

from skipstone.core.batch import Span
from skipstone.kernels.reference import attention as reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


class Shape(NamedTuple):
    """Geometry of one attention op. `unit` 0: dense; `value_width` 0: keys and values lie apart."""

    op: str
    heads: int
    kv_heads: int
    width: int
    block_size: int
    unit: int = 0
    budget: int = 0
    value_width: int = 0


SHAPES = {
    "small dense": Shape("dense_attention", 4, 2, 32, 16),
    "demo dense": Shape("dense_attention", 8, 2, 32, 32),
    "draft head": Shape("dense_attention", 8, 4, 32, 16),
    "m3 dense": Shape("dense_attention", 32, 2, 128, 128),
    "odd dense": Shape("dense_attention", 3, 1, 40, 64),
    "demo blocks": Shape("sparse_gqa", 8, 2, 32, 32, 32, 5),
    "two units a block": Shape("sparse_gqa", 6, 2, 32, 32, 16, 3),
    "m3 blocks": Shape("sparse_gqa", 32, 2, 128, 128, 128, 4),
    "demo tokens": Shape("sparse_mla", 8, 1, 80, 64, 1, 40, 64),
    "v3.2 tokens": Shape("sparse_mla", 16, 1, 160, 64, 1, 96, 128),
}
NAMES = list(SHAPES)
SPARSE = [name for name in NAMES if SHAPES[name].unit]
QUICK = ("small dense", "two units a block", "demo tokens")  # one of each op; the interpreter is slow
LARGE = ("demo dense", "m3 blocks", "v3.2 tokens")
FLOAT, HALF = torch.float32, torch.bfloat16


def lengths(shape: Shape) -> list[int]:
    """One key, parts of a block, a whole one, one more, many."""
    size = shape.block_size
    return [1, 2, size - 3, size, size + 1, 3 * size + 7, 5 * size]


def world(name: str, dtype: torch.dtype = FLOAT, some: list[int] | None = None, seed: int = 1) -> Requests:
    shape = SHAPES[name]
    requests = Requests(some or lengths(shape), shape.block_size, seed, dtype)
    requests.add_cache("k", shape.kv_heads, shape.width)
    if not shape.value_width:
        requests.add_cache("v", shape.kv_heads, shape.width)
    requests.add_query("q", shape.heads, shape.width)
    return requests


def scale_of(shape: Shape) -> float:
    return shape.width**-0.5


def run(op: Callable[..., Tensor], shape: Shape, call: Call, exact: bool, indices: Tensor | None = None) -> Tensor:
    """The op on a call's rows, whichever of the three it is."""
    q, caches, scale = call.query("q"), call.world.caches, scale_of(shape)
    if indices is None and shape.unit:
        indices = call.select(shape.kv_heads, shape.unit, shape.budget)
    if not shape.unit:
        return op(q, caches["k"], caches["v"], call.span, scale, exact)
    if shape.value_width:
        return op(q, caches["k"], indices, call.span, shape.value_width, scale, exact)
    return op(q, caches["k"], caches["v"], indices, shape.unit, call.span, scale, exact)


def rows_of(name: str, call: Call, exact: bool, indices: Tensor | None = None) -> dict[Row, Tensor]:
    """Results of the kernel by row; padding rows must be zero."""
    shape = SHAPES[name]
    return call.by_row(run(Kernel(shape.op), shape, call, exact, indices), padding=0.0)


def expected_row(shape: Shape, requests: Requests, row: Row, sees: int, chosen: Tensor | None) -> Tensor:
    """One row in float64: every query head over the keys that its group reads, up to position `sees`."""
    request, position = row
    group = shape.heads // shape.kv_heads
    out = []
    for head in range(shape.kv_heads):
        tokens = list(range(sees + 1))
        if chosen is not None:
            tokens = selected_tokens(chosen[head].tolist(), sees, shape.unit)
        keys = requests.keys["k"][request][tokens, head]
        values = keys[:, : shape.value_width] if shape.value_width else requests.keys["v"][request][tokens, head]
        q = requests.queries["q"][request][position, head * group : (head + 1) * group]
        found = attend(q, keys, values, scale_of(shape))
        out.append(found if tokens else found[:, : values.shape[1]])
    return torch.cat(out)


def check(name: str, call: Call, exact: bool, indices: Tensor | None = None, tolerance: float | None = None) -> None:
    """Every row of the call equals its own computation in float64."""
    shape = SHAPES[name]
    if shape.unit and indices is None:
        indices = call.select(shape.kv_heads, shape.unit, shape.budget)
    got = rows_of(name, call, exact, indices)
    sees = call.span.positions.flatten().tolist()
    expected = {
        row: expected_row(shape, call.world, row, sees[i], None if indices is None else indices[i])
        for i, row in enumerate(call.rows)
        if row is not None
    }
    if not expected:
        return
    assert all(out.dtype == call.world.dtype for out in got.values())
    worst = error(torch.stack([got[row] for row in expected]), torch.stack(list(expected.values())))
    assert worst < (tolerance or TOLERANCE[call.world.dtype]), f"relative error {worst:.2e}"


def some_last_rows(name: str, n: int, dtype: torch.dtype, exact: bool) -> bool:
    small = name in QUICK and (n, dtype, exact) in (
        (1, HALF, True),
        (4, FLOAT, True),
        (2, HALF, False),
        (8, HALF, False),
    )
    return small or (name in LARGE and (n, dtype, exact) == (4, HALF, True))


@pytest.mark.parametrize(
    ("name", "n", "dtype", "exact"), cases(NAMES, [1, 2, 4, 8], [FLOAT, HALF], [False, True], quick=some_last_rows)
)
def test_last_rows(name: str, n: int, dtype: torch.dtype, exact: bool) -> None:
    """Decoding and verifying; requests shorter than n begin with padding."""
    check(name, world(name, dtype).last(n), exact)


@pytest.mark.parametrize(
    ("name", "dtype", "exact"),
    cases(NAMES, [FLOAT, HALF], [False, True], quick=lambda name, dtype, exact: name in QUICK and dtype == HALF),
)
def test_chunks_of_prompts(name: str, dtype: torch.dtype, exact: bool) -> None:
    """Many rows of one request: from its start on, and at its end; later keys are there and hidden."""
    size = SHAPES[name].block_size
    requests = world(name, dtype, [2 * size + 20])
    check(name, requests.call([0], [list(range(21))]), exact)
    check(name, requests.last(37), exact)


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_whole_prompt(name: str) -> None:
    size = min(SHAPES[name].block_size, 48)
    requests = world(name, some=[size + 1])
    check(name, requests.last(size + 1), False)


@pytest.mark.parametrize(("name", "exact"), cases(NAMES, [False, True], quick=lambda name, exact: name in QUICK))
def test_padding(name: str, exact: bool) -> None:
    """Requests of nothing but padding, anywhere; padding before and after real rows; a table wider than any request.

    Real rows keep their bits.
    """
    size = SHAPES[name].block_size
    requests = world(name, some=[2 * size + 5, size - 1, 9])
    plain = requests.last(4)
    expected = rows_of(name, plain, exact)
    check(name, plain, exact)
    padded = requests.last(4, [-1, 0, 1, -1, 2, -1, -1], extra_columns=3)
    assert_same_rows(rows_of(name, padded, exact), expected, "with requests of padding")
    long = requests.lengths[0]
    cut = requests.call([0, 1], [[long - 4, long - 3, -1, -1], [-1, 5, 6, 7]])
    check(name, cut, exact)
    wide = requests.last(4, extra_columns=9)
    assert_same_rows(rows_of(name, wide, exact), expected, "with a wide block table")


@pytest.mark.parametrize("name", NAMES)
def test_only_padding(name: str) -> None:
    requests = world(name, some=[7])
    assert rows_of(name, requests.last(2, [-1, -1]), True) == {}


@pytest.mark.parametrize(
    ("name", "exact"),
    cases(sorted(set(NAMES) - set(SPARSE)), [False, True], quick=lambda name, exact: name in QUICK),
)
def test_rows_that_see_ahead(name: str, exact: bool) -> None:
    """All rows of a request see its last position, as in a draft that fills a whole block."""
    requests = world(name, some=[70, 9, 40])
    call = requests.last(6)
    ahead = call.span.positions.amax(dim=1, keepdim=True).expand(-1, 6).contiguous()
    call.span = call.span._replace(positions=ahead)
    check(name, call, exact)


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    cases(NAMES, [1, 4], [FLOAT, HALF], quick=lambda name, n, dtype: name in QUICK and (n, dtype) == (4, HALF)),
)
def test_exact_bits_in_any_company(name: str, n: int, dtype: torch.dtype) -> None:
    """Rows alone, in batches of 3 and 7, in any order, one at a time or 4 or 21 together."""
    requests = world(name, dtype)
    everyone = rows_of(name, requests.last(n), True)
    for chosen in ([5], [6, 3, 5], [3, 6, 5, 0, 4, 2, 1]):
        assert_same_rows(rows_of(name, requests.last(n, chosen), True), everyone, f"requests {chosen}")
    single = rows_of(name, requests.last(1), True)
    assert_same_rows(everyone, single, f"{n} rows against 1")
    chunk = rows_of(name, requests.last(21, [6]), True)
    assert_same_rows(chunk, everyone, f"21 rows against {n}")
    for position in range(requests.lengths[6] - n, requests.lengths[6]):
        one = rows_of(name, requests.call([6], [[position]]), True)
        assert_same_rows(one, everyone, "one row of the call alone")


@pytest.mark.parametrize(
    ("name", "exact"), cases(NAMES, [False, True], quick=lambda name, exact: name in QUICK and not exact)
)
def test_shuffled_requests(name: str, exact: bool) -> None:
    requests = world(name)
    expected = rows_of(name, requests.last(2), exact)
    shuffled = rows_of(name, requests.last(2, [4, 0, 6, 2, 5, 1, 3]), exact)
    assert_same_rows(shuffled, expected, "shuffled requests")


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_index_tensors_of_32_bits(name: str) -> None:
    requests = world(name, some=[90, 3])
    call = requests.last(2)
    expected = rows_of(name, call, True)
    call.span = call.span._replace(positions=call.span.positions.int(), block_table=call.span.block_table.int())
    assert_same_rows(rows_of(name, call, True), expected, "int32 positions and tables")


@pytest.mark.parametrize(("name", "exact"), cases(SPARSE, [False, True], quick=lambda name, exact: name in QUICK))
def test_selections_at_the_edge(name: str, exact: bool) -> None:
    """Nothing selected, one unit, all units in use, the own unit left out."""
    shape = SHAPES[name]
    length = (shape.budget + 2) * shape.unit
    requests = world(name, some=[length, length - 1])
    call = requests.last(2)
    indices = call.select(shape.kv_heads, shape.unit, shape.budget, leave_out_own=True)
    indices[0] = -1
    indices[1, 0], indices[1, 0, 0] = -1, 1
    indices[2] = torch.arange(shape.budget)
    check(name, call, exact, indices)
    got = rows_of(name, call, exact, indices)
    assert not got[0, length - 2].any(), "a row that reads nothing is zero"


@pytest.mark.parametrize(("name", "overlap"), cases(SPARSE, ["all", "none"], quick=lambda name, overlap: name in QUICK))
def test_rows_of_a_request_may_share_their_keys(name: str, overlap: str) -> None:
    """Rows that read the same units, and rows that share none: the same bits as each row alone."""
    shape = SHAPES[name]
    n = 4
    length = (n * shape.budget + 1) * shape.unit
    requests = world(name, some=[length])
    call = requests.last(n)
    first = torch.arange(shape.budget, dtype=torch.int32) * (1 if overlap == "all" else n)
    shift = torch.zeros(n, dtype=torch.int32) if overlap == "all" else torch.arange(n, dtype=torch.int32)
    indices = (first + shift[:, None])[:, None].expand(-1, shape.kv_heads, -1).contiguous()
    check(name, call, True, indices)
    together = rows_of(name, call, True, indices)
    for i in range(n):
        alone = rows_of(name, requests.call([0], [[length - n + i]]), True, indices[i : i + 1])
        assert_same_rows(alone, together, f"row {i} alone")


@pytest.mark.parametrize(("name", "dtype"), cases(NAMES, [FLOAT, HALF], quick=lambda name, dtype: name in QUICK))
def test_large_scores(name: str, dtype: torch.dtype) -> None:
    """Scores whose exponentials overflow alone: one key takes all, and large negative ones are no trouble."""
    shape = SHAPES[name]
    requests = world(name, dtype, [shape.block_size + 9])
    for part in requests.queries["q"]:
        part.mul_(1000)
    got = rows_of(name, requests.last(3), True)
    assert all(bool(out.isfinite().all()) for out in got.values())
    if dtype == FLOAT:
        check(name, requests.last(3), True, tolerance=3e-3)  # float32 keeps four digits of such exponents


@pytest.mark.parametrize("name", ["demo dense", "demo blocks", "demo tokens"])
def test_same_as_the_reference(name: str) -> None:
    """The plain-torch twin computes the same rows, so the oracle here holds both."""
    shape = SHAPES[name]
    requests = world(name, some=[2 * shape.block_size + 5, shape.block_size, 30])
    call = requests.last(4)
    twin = call.by_row(run(getattr(reference, shape.op), shape, call, True))
    got = rows_of(name, call, True)
    assert got.keys() == twin.keys()
    assert error(torch.stack(list(got.values())), torch.stack([twin[row] for row in got])) < TOLERANCE[FLOAT]


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is reserved and never touched")
@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_offsets_beyond_32_bits(name: str) -> None:
    """A cache whose last blocks lie more than 2^31 elements from its start. Only blocks in use are ever touched."""
    shape = SHAPES[name]
    small = world(name, HALF, [2 * shape.block_size + 3, 5])
    expected = rows_of(name, small.last(2), True)
    for cache_name, cache in small.caches.items():
        blocks = 2**31 // cache[0].numel() + len(cache) + 1
        large = torch.empty((blocks, *cache.shape[1:]), dtype=HALF)
        moved = blocks - len(cache)
        large[blocks - len(cache) + 2 :] = cache[2:]
        large[:2] = cache[:2]
        small.caches[cache_name] = large
    small.tables = [[block + moved for block in table] for table in small.tables]
    assert_same_rows(rows_of(name, small.last(2), True), expected, "in a large cache")


def test_the_oracle_notices_single_mistakes() -> None:
    """One key too many, one too few, a wrong scale: each is far outside the tolerance."""
    shape = SHAPES["demo dense"]
    requests = world("demo dense", some=[20])
    right = expected_row(shape, requests, (0, 18), 18, None)
    for wrong in (
        expected_row(shape, requests, (0, 18), 19, None),
        expected_row(shape, requests, (0, 18), 17, None),
        expected_row(shape._replace(width=31), requests, (0, 18), 18, None)[:, :32],
    ):
        assert error(wrong[None], right[None]) > 2 * max(TOLERANCE.values())
    assert not same_bits(torch.zeros(1), torch.ones(1)) and math.isinf(error(right[None] * torch.nan, right[None]))


def test_span_type_is_what_kernels_get() -> None:
    """The tests' spans are the engine's."""
    assert isinstance(world("demo dense", some=[4]).last(1).span, Span)
