"""Page tables in Triton equal the plain-torch builders, which are held to plain loops; attention through them."""

from __future__ import annotations

import random

import pytest
import torch
from oracles.block_table import attend, verify_rows
from oracles.kernels import TOLERANCE, Kernel, cases, error, same_bits
from torch import Tensor

from skipstone.kernels.reference import block_table as reference
from skipstone.kernels.reference.block_table import PageTable

pytest.importorskip("triton")

FLOAT, HALF = torch.float32, torch.bfloat16
WILD = [-2, -128, -(2**31), 2**31 - 1, 2**25, 2**28, 1000]


def ids(rng: random.Random, position: int, budget: int, unit: int) -> list[int]:
    """Distinct blocks in any order, some in the future, and ids that name no block."""
    blocks = max(position, 0) // unit + 4
    chosen = rng.sample(range(blocks), k=min(rng.randint(0, budget), blocks))
    chosen += [-1 if rng.random() < 0.6 else rng.choice(WILD) for _ in range(budget - len(chosen))]
    rng.shuffle(chosen)
    return chosen


def selection(rng: random.Random, positions: list[int], groups: int, budget: int, unit: int) -> Tensor:
    rows = [[ids(rng, position, budget, unit) for _ in range(groups)] for position in positions]
    return torch.tensor(rows, dtype=torch.int32)


def table(rng: random.Random, requests: int, blocks: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([[rng.randrange(2**24) for _ in range(blocks)] for _ in range(requests)], dtype=dtype)


def same_table(got: PageTable, expected: PageTable) -> None:
    assert got.pages.dtype == got.context_lens.dtype == torch.int32
    assert got.context_lens.tolist() == expected.context_lens.tolist()
    assert got.pages.tolist() == expected.pages.tolist()


def some_verify_rows(shape: tuple[int, ...], query_len: int, index_dtype: torch.dtype) -> bool:
    return (query_len in (1, 4)) == (index_dtype == torch.int64) and (shape[0] < 128 or query_len == 4)


@pytest.mark.parametrize(
    ("shape", "query_len", "index_dtype"),
    cases(
        [(16, 7, 3), (32, 8, 2), (128, 16, 4), (128, 5, 1)],
        [1, 2, 4, 8],
        [torch.int32, torch.int64],
        quick=some_verify_rows,
    ),
)
def test_verify_rows(shape: tuple[int, ...], query_len: int, index_dtype: torch.dtype) -> None:
    """Requests without rows, shorter than query_len, with partial and whole last blocks."""
    unit, budget, groups = shape
    rng = random.Random(query_len + 100 * unit + 7 * budget)
    seq_lens = [0, 1, query_len - 1, query_len, unit, unit + 1, 9 * unit, rng.randint(1, 9 * unit)]
    indices = selection(rng, [p for _, p in verify_rows(seq_lens, query_len)], groups, budget, unit)
    blocks, lengths = table(rng, len(seq_lens), 9, index_dtype), torch.tensor(seq_lens, dtype=index_dtype)
    for stride in (unit // 16, unit // 8):
        arguments = (indices, blocks, lengths, query_len, unit, stride)
        same_table(Kernel("verify_page_table")(*arguments), reference.verify_page_table(*arguments))


@pytest.mark.parametrize(("unit", "budget", "groups"), [(16, 7, 3), (128, 16, 4)])
def test_prefill_rows(unit: int, budget: int, groups: int) -> None:
    """Rows of several requests in any order, padding rows, rows of no request, views of indices."""
    rng = random.Random(unit + budget)
    positions = [-1, 0, unit - 1, unit, 9 * unit - 1, *(rng.randrange(9 * unit) for _ in range(12)), -1, 40, 50]
    request_ids = [*(rng.randrange(4) for _ in positions[3:]), -1, 4, 2]
    indices = selection(rng, positions, groups, budget, unit)
    rest = (table(rng, 4, 9), torch.tensor(request_ids), torch.tensor(positions), unit, unit // 16)
    expected = reference.prefill_page_table(indices, *rest)
    same_table(Kernel("prefill_page_table")(indices, *rest), expected)
    turned = indices.transpose(0, 2).contiguous().transpose(0, 2)
    same_table(Kernel("prefill_page_table")(turned, *rest), expected)


def paged(rows: int, groups: int, pages: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, PageTable]:
    """Pages full of NaN but for those in use, up to each row's context length."""
    rng, generator = random.Random(rows), torch.Generator().manual_seed(rows)
    lengths = [[rng.choice([0, 1, 16, 17, rng.randint(1, pages * 16)]) for _ in range(groups)] for _ in range(rows)]
    total = rows * groups * pages + 3
    free = rng.sample(range(1, total), rows * groups * pages)
    ids = torch.zeros(rows, groups, pages, dtype=torch.int32)
    k, v = (torch.full((total, groups, 16, width), torch.nan, dtype=dtype) for _ in range(2))
    for row in range(rows):
        for group in range(groups):
            for place in range(-(-lengths[row][group] // 16)):
                page, count = free.pop(), min(lengths[row][group] - 16 * place, 16)
                ids[row, group, place] = page
                for cache in (k, v):
                    cache[page, group, :count] = torch.randn(count, width, generator=generator).to(dtype)
    return k, v, PageTable(ids, torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize(
    ("dtype", "shape", "exact"),
    cases([FLOAT, HALF], [(8, 2, 32, 6), (16, 1, 128, 8)], [False, True], quick=lambda _, shape, exact: shape[0] == 8),
)
def test_paged_attention(dtype: torch.dtype, shape: tuple[int, ...], exact: bool) -> None:
    heads, groups, width, pages = shape
    k, v, tables = paged(7, groups, pages, width, dtype)
    q = torch.randn(7, heads, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = Kernel("paged_attention")(q, k, v, tables, width**-0.5, exact)
    assert got.dtype == dtype and got.shape == q.shape
    for row in range(7):
        for group in range(groups):
            length = int(tables.context_lens[row, group])
            chosen = tables.pages[row, group].long()
            keys, values = (x[chosen, group].flatten(0, 1)[:length] for x in (k, v))
            part = slice(group * heads // groups, (group + 1) * heads // groups)
            expected = attend(q[row, part], keys, values, width**-0.5)
            if length == 0:
                assert not got[row, part].any()
            else:
                assert error(got[row, part], expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_rows_of_paged_attention_are_exact(dtype: torch.dtype) -> None:
    k, v, tables = paged(7, 2, 6, 32, dtype)
    q = torch.randn(7, 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = Kernel("paged_attention")(q, k, v, tables, 0.2, True)
    for rows in ([3], [6, 1, 4], [5, 0, 6, 2, 1, 3, 4]):
        part = PageTable(tables.pages[rows], tables.context_lens[rows])
        assert same_bits(Kernel("paged_attention")(q[rows], k, v, part, 0.2, True), whole[rows])
