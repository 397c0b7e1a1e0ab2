"""Selection against plain loops: total order, forced blocks, rows that see little, rows that are padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.host_batch import QueryRows, build_batch
from oracles.selection import choose, choose_all
from torch import Tensor

from skipstone.attention.backend import IndexQuery, SparseSettings
from skipstone.attention.msa import BlockIndexBackend
from skipstone.core.kv_cache import CacheMemory, CacheSpec, CacheTensorSpec, KVCache
from skipstone.kernels.ops import Implementation, load_ops
from skipstone.kernels.reference.select import select_blocks, select_tokens

ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 3.4e38, -3.4e38, 1e-45, -1e-45]


def check_blocks(scores: Tensor, positions: Tensor, unit: int, budget: int, init: int, local: int) -> None:
    """select_blocks equals the loops, and is well formed."""
    got = select_blocks(scores, positions, unit, budget, init, local)
    expected = choose_all(scores.tolist(), positions.tolist(), unit, budget, init, local)
    assert got.dtype == torch.int32
    assert tuple(got.shape) == (*scores.shape[:3], budget)
    assert got.tolist() == expected


def check_tokens(scores: Tensor, positions: Tensor, budget: int) -> None:
    """select_tokens equals the loops with units of one token and one group."""
    got = select_tokens(scores, positions, budget)
    expected = choose_all(scores[:, :, None].tolist(), positions.tolist(), 1, budget)
    assert got.dtype == torch.int32
    assert tuple(got.shape) == (*scores.shape[:2], 1, budget)
    assert got.tolist() == expected


def random_scores(generator: torch.Generator, shape: tuple[int, ...], kind: str) -> Tensor:
    """Scores of one kind: all different, many equal, or full of values that break comparisons."""
    scores = torch.randn(shape, generator=generator)
    if kind == "ties":
        scores = torch.randint(-1, 2, shape, generator=generator) * torch.where(scores > 0, 1.0, -1.0)
    if kind == "odd":
        odd = torch.tensor(ODD)[torch.randint(0, len(ODD), shape, generator=generator)]
        scores = torch.where(torch.rand(shape, generator=generator) < 0.7, odd, scores)
    return scores.float()


@pytest.mark.parametrize("kind", ["different", "ties", "odd"])
@pytest.mark.parametrize(("init", "local"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3)])
@pytest.mark.parametrize(("unit", "budget", "blocks"), [(8, 5, 13), (128, 16, 40), (8, 6, 3)])
def test_blocks(kind: str, init: int, local: int, unit: int, budget: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(1000 * init + 100 * local + len(kind) + unit)
    scores = random_scores(generator, (3, 4, 2, blocks), kind)
    positions = torch.randint(-1, blocks * unit, (3, 4), generator=generator)
    positions[0, :3] = torch.tensor([-1, 0, blocks * unit - 1])
    check_blocks(scores, positions, unit, budget, init, local)


@pytest.mark.parametrize("kind", ["different", "ties", "odd"])
@pytest.mark.parametrize(("budget", "tokens"), [(16, 70), (16, 16), (16, 5), (1, 9)])
def test_tokens(kind: str, budget: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens + budget + len(kind))
    scores = random_scores(generator, (3, 4, tokens), kind)
    positions = torch.randint(-1, tokens, (3, 4), generator=generator)
    positions[0, :3] = torch.tensor([-1, 0, tokens - 1])
    check_tokens(scores, positions, budget)


@settings(max_examples=150)
@given(st.data())
def test_blocks_any(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 3, 8]))
    blocks = data.draw(st.integers(1, 7))
    init, local = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    budget = data.draw(st.integers(max(1, init + local), 8))
    value = st.one_of(st.sampled_from([*ODD, 1.0, -1.0]), st.floats(width=32))
    scores = data.draw(st.lists(value, min_size=blocks, max_size=blocks))
    position = data.draw(st.integers(-1, blocks * unit - 1))
    check_blocks(torch.tensor([[[scores]]]), torch.tensor([[position]]), unit, budget, init, local)


@settings(max_examples=100)
@given(st.data())
def test_tokens_any(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 9))
    value = st.one_of(st.sampled_from([*ODD, 1.0, -1.0]), st.floats(width=32))
    scores = data.draw(st.lists(value, min_size=tokens, max_size=tokens))
    position = data.draw(st.integers(-1, tokens - 1))
    check_tokens(torch.tensor([[scores]]), torch.tensor([[position]]), data.draw(st.integers(1, 10)))


def test_padding_row_reads_nothing() -> None:
    scores = torch.full((1, 2, 2, 4), math.inf)
    got = select_blocks(scores, torch.tensor([[-1, 9]]), 8, 3, 1, 1)
    assert got[0, 0].tolist() == [[-1] * 3] * 2
    assert got[0, 1].tolist() == [[0, 1, -1]] * 2


def test_what_a_row_cannot_see_does_not_matter() -> None:
    """The contents past the visible units change nothing, whatever they are."""
    generator = torch.Generator().manual_seed(5)
    positions = torch.randint(0, 48, (2, 6), generator=generator)
    scores = torch.randn(2, 6, 2, 8, generator=generator)
    hidden = torch.arange(8) > (positions // 8)[:, :, None, None]
    expected = select_blocks(scores, positions, 8, 4, 1, 1)
    for value in (math.nan, math.inf, -math.inf, 3e38):
        assert torch.equal(select_blocks(scores.masked_fill(hidden, value), positions, 8, 4, 1, 1), expected)
    unseen = torch.arange(48) > positions[:, :, None]
    scores = torch.randn(2, 6, 48, generator=generator)
    expected = select_tokens(scores, positions, 7)
    for value in (math.nan, math.inf, -math.inf, 3e38):
        assert torch.equal(select_tokens(scores.masked_fill(unseen, value), positions, 7), expected)


def test_arguments_are_left_alone() -> None:
    scores, positions = torch.randn(1, 3, 2, 4), torch.tensor([[5, -1, 30]])
    before = scores.clone()
    select_blocks(scores, positions, 8, 2, 0, 1)
    assert torch.equal(scores, before)
    tokens = torch.randn(1, 3, 31)
    before = tokens.clone()
    select_tokens(tokens, positions, 4)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize(
    ("scores", "position", "init", "local", "expected"),
    [
        ([1.0, 5.0, 3.0, 4.0, 2.0], 39, 0, 0, [1, 2, 3]),  # the three highest, ascending
        ([1.0, 5.0, 3.0, 4.0, 2.0], 39, 0, 1, [1, 3, 4]),  # the own block is always kept
        ([1.0, 5.0, 3.0, 4.0, 2.0], 39, 1, 1, [0, 1, 4]),  # and the first
        ([1.0, math.inf, math.inf, math.inf, 2.0], 39, 0, 2, [1, 3, 4]),  # forced beats infinity
        ([7.0, 7.0, 7.0, 7.0, 7.0], 39, 0, 0, [0, 1, 2]),  # equal: lower ids
        ([-0.0, 0.0, -0.0, 0.0, -0.0], 39, 0, 0, [0, 1, 2]),  # both zeros are equal
        ([math.nan, -3e38, math.nan, -1.0, math.nan], 39, 0, 0, [0, 1, 3]),  # NaN after every number
        ([math.nan, -math.inf, 1.0, math.nan, 0.0], 39, 0, 0, [0, 2, 4]),  # NaN counts as -inf
        ([math.nan, math.nan, 9.0, 9.0, 9.0], 15, 0, 0, [0, 1, -1]),  # but visible: NaN before blocks not seen
        ([1.0, 2.0, 9.0, 9.0, 9.0], 8, 0, 1, [0, 1, -1]),  # fewer visible than the budget
        ([1.0, 2.0, 9.0, 9.0, 9.0], 7, 0, 1, [0, -1, -1]),  # last token of block 0
        ([1.0, 2.0, 3.0, 4.0, 5.0], -1, 1, 1, [-1, -1, -1]),
    ],
)
def test_worked_examples(scores: list[float], position: int, init: int, local: int, expected: list[int]) -> None:
    """Written by hand: they hold the loops to the contract as well as the engine."""
    assert choose(scores, position, 8, 3, init, local) == expected
    got = select_blocks(torch.tensor([[[scores]]]), torch.tensor([[position]]), 8, 3, init, local)
    assert got[0, 0, 0].tolist() == expected


@pytest.mark.parametrize("lengths", [(40, 5, 33, 200), (40, 5), (200, 90), (32, 33)])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("table", ["reference", "numba"])
def test_requests_select_together_what_they_select_alone(
    lengths: tuple[int, ...], query_len: int, table: Implementation
) -> None:
    """Short requests, which see no more than the budget, and long ones."""
    unit, budget, groups, width, block = 8, 4, 2, 16, 16
    generator = torch.Generator().manual_seed(sum(lengths))
    spec = CacheSpec(0, "index keys", "msa_index", (CacheTensorSpec("index_k", 1, width),))
    cache = KVCache([spec], CacheMemory(80, block, torch.float32, torch.device("cpu")))
    cache.get(0, "index_k").normal_(generator=generator)
    backend = BlockIndexBackend(1.0, True, SparseSettings(unit, budget, 0, 1, groups), load_ops(table))
    blocks = iter(range(2, 80))
    rows = [QueryRows([1] * query_len, n - query_len, [next(blocks) for _ in range(-(-n // block))]) for n in lengths]
    q = torch.randn(len(rows) * query_len, groups, width, generator=generator)
    together = backend.select(backend.plan(build_batch(rows, block)), 0, IndexQuery(q), cache)
    for i, row in enumerate(rows):
        part = slice(i * query_len, (i + 1) * query_len)
        alone = backend.select(backend.plan(build_batch([row], block)), 0, IndexQuery(q[part]), cache)
        assert torch.equal(together.indices[part], alone.indices)
