"""Selection kernels: scores and choice in one call, against plain loops over scores that are exact, ties and all."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from oracles.kernels import DEVICE, Call, Kernel, Requests, Row, assert_same_rows, cases
from oracles.selection import choose
from torch import Tensor

from skipstone.core.batch import PAD

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


class Shape(NamedTuple):
    """Geometry of one indexer; `init` and `local` are for blocks only, `fp8` (in place of any dtype) for tokens."""

    op: str
    heads: int
    width: int
    block_size: int
    unit: int
    budget: int
    init: int = 0
    local: int = 0
    fp8: bool = False


SHAPES = {
    "demo blocks": Shape("block_select", 2, 32, 32, 32, 8, 0, 1),
    "two units a block": Shape("block_select", 3, 40, 32, 16, 3, 1, 1),
    "many units a block": Shape("block_select", 1, 16, 128, 16, 5, 2, 2),
    "m3 blocks": Shape("block_select", 4, 128, 128, 128, 16, 0, 1),
    "small m3 blocks": Shape("block_select", 4, 128, 128, 128, 3, 1, 1),
    "no forced blocks": Shape("block_select", 2, 32, 16, 16, 4, 0, 0),
    "demo tokens": Shape("token_select", 4, 32, 64, 1, 24),
    "odd tokens": Shape("token_select", 3, 24, 16, 1, 5),
    "v3.2 tokens": Shape("token_select", 16, 128, 64, 1, 64),
    "demo fp8": Shape("token_select", 4, 32, 64, 1, 24, fp8=True),
    "odd fp8": Shape("token_select", 3, 24, 16, 1, 5, fp8=True),
    "v3.2 fp8": Shape("token_select", 16, 128, 64, 1, 64, fp8=True),
}
NAMES = list(SHAPES)
QUICK = ("two units a block", "odd tokens", "odd fp8")  # one of each kind; the interpreter is slow
USUAL = (*QUICK, "no forced blocks", "demo tokens", "demo fp8")
FLOAT, HALF, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


def lengths(shape: Shape) -> list[int]:
    """One key, less than a block, budgets not reached, reached, and exceeded."""
    room = shape.budget * shape.unit
    return [1, shape.unit + 2, max(room - shape.unit, 3), room, room + 1, room + 3 * shape.block_size + 5]


def world(
    name: str,
    draw: str = "small",
    dtype: torch.dtype = FLOAT,
    some: list[int] | None = None,
) -> Requests:
    shape = SHAPES[name]
    requests = Requests(some or lengths(shape), shape.block_size, 3, FP8 if shape.fp8 else dtype)
    values = getattr(requests, draw)
    if shape.fp8:  # powers of two keep what is exact exact
        requests.add_cache("scale", 1, 1, lambda *size: values(*size).exp2(), FLOAT)
    requests.add_cache("k", 1, shape.width, values)
    requests.add_query("q", shape.heads, shape.width, draw=values)
    weights = requests.small if draw == "small" else requests.randn
    requests.add_query("w", shape.heads, draw=weights, dtype=FLOAT)
    return requests


def rows_of(name: str, call: Call, exact: bool, replace: Callable[[Tensor], Tensor] | None = None) -> dict[Row, Tensor]:
    """Ids that the kernel chooses, by row; padding rows must be PAD."""
    shape, q = SHAPES[name], call.query("q")
    if replace is not None:
        q = replace(q)
    kernel, cache, scale = Kernel(shape.op), call.world.caches["k"], call.world.caches.get("scale")
    if shape.op == "block_select":
        out = kernel(q, cache, call.span, shape.unit, shape.budget, shape.init, shape.local, exact)
    else:
        out = kernel(q, call.query("w"), cache, scale, call.span, shape.budget, exact)
    groups = shape.heads if shape.op == "block_select" else 1
    assert out.dtype == torch.int32
    assert list(out.shape) == [len(q), groups, shape.budget]
    return call.by_row(out, padding=PAD)


def scores_of(shape: Shape, requests: Requests, row: Row) -> Tensor:
    """Scores of the units that a row sees, in float64: [groups, units]."""
    request, position = row
    keys = requests.keys["k"][request][: position + 1, 0].double()
    dots = requests.queries["q"][request][position].double() @ keys.T  # [heads, position + 1]
    if shape.op == "token_select":
        scores = (dots.relu() * requests.queries["w"][request][position].double()[:, None]).sum(dim=0, keepdim=True)
        scales = requests.keys["scale"][request][: position + 1, 0, 0].double() if shape.fp8 else 1.0
        return scores * scales
    return torch.stack([part.amax(dim=1) for part in dots.split(shape.unit, dim=1)], dim=1)


def check(name: str, call: Call, exact: bool) -> None:
    """Every row of the call has exactly what the loops choose. Needs scores that are exact in any order."""
    shape = SHAPES[name]
    for row, ids in rows_of(name, call, exact).items():
        for group, scores in enumerate(scores_of(shape, call.world, row)):
            expected = choose(scores.tolist(), row[1], shape.unit, shape.budget, shape.init, shape.local)
            assert ids[group].tolist() == expected, f"(request, position) {row}, group {group}"


def check_close(name: str, call: Call, exact: bool, slack: float) -> None:
    """Ids are well formed, forced ones are there, and nothing left out scores more than what was chosen, give or take.

    For scores that depend on the order of their sums.
    """
    shape = SHAPES[name]
    for row, groups in rows_of(name, call, exact).items():
        visible = row[1] // shape.unit + 1
        for ids, scores in zip(groups.tolist(), scores_of(shape, call.world, row), strict=True):
            chosen = [i for i in ids if i != PAD]
            assert ids == sorted(set(chosen)) + [PAD] * (shape.budget - len(set(chosen)))
            assert len(chosen) == min(shape.budget, visible) and all(0 <= i < visible for i in chosen)
            forced = {i for i in range(visible) if i < shape.init or i >= visible - shape.local}
            assert forced <= set(chosen)
            free, left = sorted(set(chosen) - forced), sorted(set(range(visible)) - set(chosen))
            if free and left:
                assert float(scores[free].min()) >= float(scores[left].max()) - slack * float(scores.abs().max())


def some_last_rows(name: str, n: int, dtype: torch.dtype, exact: bool) -> bool:
    small = name in USUAL and (n, dtype, exact) in ((1, HALF, True), (4, FLOAT, True), (8, HALF, False))
    return small or (name in ("small m3 blocks", "v3.2 tokens", "v3.2 fp8") and (n, dtype, exact) == (4, HALF, True))


@pytest.mark.parametrize(
    ("name", "n", "dtype", "exact"), cases(NAMES, [1, 2, 4, 8], [FLOAT, HALF], [False, True], quick=some_last_rows)
)
def test_last_rows_with_many_ties(name: str, n: int, dtype: torch.dtype, exact: bool) -> None:
    check(name, world(name, dtype=dtype).last(n), exact)


@pytest.mark.parametrize(
    ("name", "dtype", "exact"),
    cases(NAMES, [FLOAT, HALF], [False, True], quick=lambda name, dtype, exact: name in USUAL and dtype == HALF),
)
def test_random_scores(name: str, dtype: torch.dtype, exact: bool) -> None:
    # Hopper adds up products of FP8 with about 14 bits.
    slack = 5e-4 if SHAPES[name].fp8 and DEVICE == "cuda" else 1e-5
    check_close(name, world(name, "randn", dtype).last(2), exact, slack)


@pytest.mark.parametrize(("name", "exact"), cases(NAMES, [False, True], quick=lambda name, exact: name in QUICK))
def test_chunks_of_prompts(name: str, exact: bool) -> None:
    """Many rows of one request, at its start, across its budget, and all of its rows."""
    shape = SHAPES[name]
    room = shape.budget * shape.unit
    requests = world(name, some=[room + 40])
    check(name, requests.call([0], [list(range(20))]), exact)
    check(name, requests.call([0], [list(range(room - 11, room + 13))]), exact)
    if room < 100:
        check(name, requests.last(room + 40), exact)


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_all_scores_equal(name: str) -> None:
    """Zero queries: the lowest ids, and the forced ones."""
    requests = world(name)
    for part in requests.queries["q"]:
        part.zero_()
    check(name, requests.last(2), True)


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_negative_scores(name: str) -> None:
    """All scores negative, and both zeros: a key that a row may not see never wins by being zero."""
    requests = world(name)
    for q, k, w in zip(requests.queries["q"], requests.keys["k"], requests.queries["w"], strict=True):
        q.fill_(-1)
        k.abs_()
        k[..., 0] = 1
        w.neg_()
        if SHAPES[name].op == "token_select":
            q.abs_()
            w.copy_(-w.abs() - 1)
    requests.set_cache("k", requests.keys["k"])
    check(name, requests.last(2), True)


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_scores_that_are_not_a_number(name: str) -> None:
    """A NaN query makes every score of its row NaN: equal, below every number, above what the row does not see."""
    shape = SHAPES[name]
    requests = world(name)
    call = requests.last(2)
    got = rows_of(name, call, True, lambda q: torch.full_like(q, math.nan))
    for row, groups in got.items():
        units = row[1] // shape.unit + 1
        expected = choose([math.nan] * units, row[1], shape.unit, shape.budget, shape.init, shape.local)
        assert groups.tolist() == [expected] * len(groups)


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_keys_that_are_not_a_number(name: str) -> None:
    """Units whose every key is NaN come after all numbers, and before nothing at all; other rows do not notice."""
    shape = SHAPES[name]
    requests = world(name, some=[(shape.budget + 3) * shape.unit, shape.unit * 2])
    poisoned = [1, 2]
    for unit in poisoned:
        requests.keys["k"][0][unit * shape.unit : (unit + 1) * shape.unit] = math.nan
    requests.set_cache("k", requests.keys["k"])
    check(name, requests.last(2), True)


@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        [name for name in NAMES if SHAPES[name].op == "block_select"],
        [math.nan, math.inf, -math.inf],
        quick=lambda name, value: name in QUICK,
    ),
)
def test_one_broken_key_in_a_block(name: str, value: float) -> None:
    """As the plain-torch twin has it: a block with a NaN score counts as NaN; infinities are the largest numbers."""
    shape = SHAPES[name]
    requests = world(name, some=[(shape.budget + 3) * shape.unit])
    requests.keys["k"][0][shape.unit + 3, 0, 0] = value
    requests.keys["k"][0][2 * shape.unit + 1, 0, 0] = value
    for q in requests.queries["q"]:
        q[..., 0] = 1
    requests.set_cache("k", requests.keys["k"])
    check(name, requests.last(2), True)


@pytest.mark.parametrize(("name", "dtype"), cases(NAMES, [FLOAT, HALF], quick=lambda name, dtype: name in QUICK))
def test_infinite_scores(name: str, dtype: torch.dtype) -> None:
    """Products that overflow are equal to each other, whatever lies beyond the largest number."""
    shape = SHAPES[name]
    requests = world(name, dtype=dtype, some=[(shape.budget + 5) * shape.unit])
    large = 448.0 if shape.fp8 else 1e30  # FP8 keys are multiplied by a scale, which is what overflows
    for i, k in enumerate(requests.keys["k"][0]):
        k.fill_((large if shape.fp8 else large * (1 + i % 3)) if i // shape.unit % 2 else 0.5)
        if shape.fp8:
            requests.keys["scale"][0][i] = 1e36 * (1 + i % 3) if i // shape.unit % 2 else 0.5
    for q, w in zip(requests.queries["q"], requests.queries["w"], strict=True):
        q.fill_(large)
        w.fill_(1)
    if shape.fp8:
        requests.set_cache("scale", requests.keys["scale"])
    requests.set_cache("k", requests.keys["k"])
    call = requests.last(1)
    (row,) = [row for row in call.rows if row is not None]
    capped = scores_of(shape, requests, row).clamp(max=3.4e38)
    expected = [choose(s.tolist(), row[1], shape.unit, shape.budget, shape.init, shape.local) for s in capped]
    assert rows_of(name, call, True)[row].tolist() == expected


@pytest.mark.parametrize(("name", "exact"), cases(NAMES, [False, True], quick=lambda name, exact: name in QUICK))
def test_padding(name: str, exact: bool) -> None:
    """Requests of padding anywhere, padding before and after real rows, wide tables: real rows choose the same."""
    shape = SHAPES[name]
    requests = world(name, "randn", some=[shape.budget * shape.unit + 20, shape.unit + 3, 9])
    expected = rows_of(name, requests.last(4), exact)
    padded = requests.last(4, [-1, 0, -1, 1, 2, -1], extra_columns=6)
    assert_same_rows(rows_of(name, padded, exact), expected, "with padding")
    long = requests.lengths[0]
    cut = requests.call([0, 1], [[long - 4, long - 3, -1, -1], [-1, shape.unit, shape.unit + 1, -1]])
    assert_same_rows(rows_of(name, cut, exact), expected, "with rows of padding behind")
    assert rows_of(name, requests.last(2, [-1, -1]), exact) == {}


@pytest.mark.parametrize(
    ("name", "dtype"), cases(NAMES, [FLOAT, HALF], quick=lambda name, dtype: name in USUAL and dtype == HALF)
)
def test_exact_in_any_company(name: str, dtype: torch.dtype) -> None:
    """Alone, in batches of 3 and 6, shuffled, 1 or 4 or 21 rows at a time: random scores, the same ids."""
    requests = world(name, "randn", dtype)
    everyone = rows_of(name, requests.last(4), True)
    for chosen in ([5], [2, 5, 4], [3, 5, 0, 4, 2, 1]):
        assert_same_rows(rows_of(name, requests.last(4, chosen), True), everyone, f"requests {chosen}")
    assert_same_rows(rows_of(name, requests.last(1), True), everyone, "1 row against 4")
    assert_same_rows(rows_of(name, requests.last(21, [5]), True), everyone, "21 rows against 4")


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_shuffled_requests(name: str) -> None:
    requests = world(name, "randn")
    expected = rows_of(name, requests.last(2), False)
    assert_same_rows(rows_of(name, requests.last(2, [4, 0, 2, 5, 1, 3]), False), expected, "shuffled requests")


@pytest.mark.parametrize("name", cases(NAMES, quick=QUICK.__contains__))
def test_index_tensors_of_32_bits(name: str) -> None:
    call = world(name).last(2)
    call.span = call.span._replace(positions=call.span.positions.int(), block_table=call.span.block_table.int())
    check(name, call, True)


@pytest.mark.parametrize("name", ["demo blocks", "demo tokens"])
def test_long_contexts(name: str) -> None:
    """Many parts of a context, by one row and by four, beside a short one."""
    requests = world(name, some=[(100 if SHAPES[name].unit > 1 else 20) * SHAPES[name].block_size + 5, 3])
    check(name, requests.last(1), True)
    check(name, requests.last(4), False)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is reserved and never touched")
@pytest.mark.parametrize("name", cases(["two units a block", "m3 blocks", "demo tokens"], quick=USUAL.__contains__))
def test_offsets_beyond_32_bits(name: str) -> None:
    """A cache whose last blocks lie more than 2^31 elements from its start. Only blocks in use are ever touched."""
    requests = world(name, dtype=HALF, some=[2 * SHAPES[name].block_size + 3, 5])
    cache = requests.caches["k"]
    blocks = 2**31 // cache[0].numel() + len(cache) + 1
    requests.caches["k"] = torch.empty((blocks, *cache.shape[1:]), dtype=HALF)
    requests.caches["k"][:2] = cache[:2]
    requests.caches["k"][blocks - len(cache) + 2 :] = cache[2:]
    requests.tables = [[block + blocks - len(cache) for block in table] for table in requests.tables]
    check(name, requests.last(2), True)
