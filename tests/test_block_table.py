"""Page tables against plain loops, and attention through them against the tokens that the selection names."""

from __future__ import annotations

import math
import random
import re
from typing import NamedTuple

import pytest
import torch
from oracles.block_table import PAGE, attend, page_row, page_rows, selected_tokens, verify_rows
from torch import Tensor

from skipstone.errors import ShapeError, SkipstoneError
from skipstone.kernels.reference.block_table import (
    PAGE_SIZE,
    PageTable,
    paged_attention,
    prefill_page_table,
    verify_page_table,
)

# Never valid. Times 16, 32 or 128 the powers of two wrap around to small numbers in 32 bits.
WILD = [-2, -3, -128, -(2**31), 2**31 - 1, 2**25, 2**27, 2**28, 2**30, 1000]


def random_ids(rng: random.Random, budget: int, blocks: int) -> list[int]:
    """A row's ids in any order: distinct blocks, some of them in the future, and ids that name no block."""
    ids = rng.sample(range(blocks + 3), k=min(rng.randint(0, budget), blocks + 3))
    ids += [-1 if rng.random() < 0.6 else rng.choice(WILD) for _ in range(budget - len(ids))]
    rng.shuffle(ids)
    return ids


def random_indices(rng: random.Random, positions: list[int], groups: int, budget: int, unit: int) -> list:
    """Ids [T][G][S] that fit the rows' positions."""
    return [[random_ids(rng, budget, max(p, 0) // unit + 1) for _ in range(groups)] for p in positions]


def random_block_table(rng: random.Random, requests: int, max_blocks: int) -> list[list[int]]:
    """Any block ids, large ones included; what no row sees must not show."""
    return [[rng.randrange(2**26) for _ in range(max_blocks)] for _ in range(requests)]


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(got: PageTable, indices: list, blocks: list[list[int]], positions: list[int], unit: int, stride: int) -> None:
    """The table equals the loops. `blocks` and `positions` are those of each row."""
    pages, context_lens = page_rows(indices, blocks, positions, unit, stride)
    assert got.pages.dtype == got.context_lens.dtype == torch.int32
    assert got.pages.tolist() == pages
    assert got.context_lens.tolist() == context_lens


def same(a: PageTable, b: PageTable) -> bool:
    return torch.equal(a.pages, b.pages) and torch.equal(a.context_lens, b.context_lens)


EXAMPLE_SEQ_LENS = [260, 132, 0]
EXAMPLE_BLOCKS = [[5, 7, 11], [13, 17, 19], [0, 0, 0]]
EXAMPLE_ROWS: list[tuple[list[int], list[int], int]] = [  # ids, first page of each block at stride 8, context length
    ([2, 0, 1, -1], [40, 56, 88], 257),
    ([0, 2, -1, -1], [40, 88], 130),
    ([1, 0, 2, -1], [56, 40, 88], 259),
    ([2, 1, -1, 0], [56, 40, 88], 260),
    ([1, 0, -1, -1], [104, 136], 129),
    ([0, 1, -1, -1], [104, 136], 130),
    ([1, -1, 0, -1], [104, 136], 131),
    ([1, -1, -1, -1], [136], 4),
    ([0, -1, -1, -1], [], 0),
    ([-1, -1, -1, -1], [], 0),
    ([0, 1, 2, -1], [], 0),
    ([-1, -1, -1, -1], [], 0),
]


def spread(firsts: list[int], stride: int, budget: int) -> list[int]:
    """All pages of blocks of 128 tokens, from their first pages at stride 8."""
    pages = [first * stride // 8 + j for first in firsts for j in range(8)]
    return pages + [0] * (8 * budget - len(pages))


@pytest.mark.parametrize("stride", [8, 16])
def test_the_worked_example(stride: int) -> None:
    indices = int32([[ids] for ids, _, _ in EXAMPLE_ROWS])
    got = verify_page_table(indices, int32(EXAMPLE_BLOCKS), int32(EXAMPLE_SEQ_LENS), 4, 128, stride)
    assert got.pages[:, 0].tolist() == [spread(firsts, stride, 4) for _, firsts, _ in EXAMPLE_ROWS]
    assert got.context_lens[:, 0].tolist() == [context for _, _, context in EXAMPLE_ROWS]


def test_the_worked_example_holds_the_loops_as_well() -> None:
    for (ids, firsts, context), (request, position) in zip(EXAMPLE_ROWS, verify_rows(EXAMPLE_SEQ_LENS, 4), strict=True):
        expected = spread(firsts, 8, 4), context
        assert page_row(ids, EXAMPLE_BLOCKS[request], position, 128, 8) == expected


@pytest.mark.parametrize(
    ("position", "ids", "firsts", "context"),
    [
        (259, [0, 0, 2, -1], [40, 40, 88], 260),  # a full block named twice takes two places
        (259, [1, 0, -1, -1], [56, 40], 256),  # the own block is not selected
        (200, [2, 1, 0, -1], [40, 56], 201),  # block 2 lies in the future
        (0, [0, -1, -1, -1], [40], 1),
        (127, [0, -1, -1, -1], [40], 128),
        (128, [0, 1, -1, -1], [40, 56], 129),
        (259, [2, 3, 0, -1], [40, 88], 132),  # block 3 exists, but not yet for this row
        (300, [-1, -1, -1, -1], [], 0),
    ],
)
def test_single_rows(position: int, ids: list[int], firsts: list[int], context: int) -> None:
    blocks = [5, 7, 11, 23]
    assert page_row(ids, blocks, position, 128, 8) == (spread(firsts, 8, 4), context)
    got = verify_page_table(int32([[ids]]), int32([blocks]), int32([position + 1]), 1, 128, 8)
    assert got.pages.tolist() == [[spread(firsts, 8, 4)]]
    assert got.context_lens.tolist() == [[context]]


def test_a_tail_named_twice_counts_once() -> None:
    got = verify_page_table(int32([[[2, 0, 2, -1]]]), int32([[5, 7, 11, 23]]), int32([260]), 1, 128, 8)
    assert got.pages[0, 0, :16].tolist() == [*range(40, 48), *range(88, 96)]
    assert got.context_lens.tolist() == [[132]]


def test_fewer_tokens_than_rows() -> None:
    got = verify_page_table(int32([[[0]]] * 4), int32([[9]]), int32([2]), 4, 128, 8)
    assert got.context_lens.flatten().tolist() == [0, 0, 1, 2]
    assert got.pages[:, 0].tolist() == [[0] * 8, [0] * 8, [*range(72, 80)], [*range(72, 80)]]


def test_prompt_rows() -> None:
    indices = int32([[[0, -1, -1]], [[0, -1, -1]], [[0, 1, -1]], [[2, 0, 1]], [[1, 2, -1]]])
    positions, request_ids = torch.tensor([126, 127, 128, 300, 301]), torch.tensor([0, 0, 0, 1, 1])
    got = prefill_page_table(indices, int32([[5, 7, 11], [13, 17, 19]]), request_ids, positions, 128, 8)
    assert got.context_lens.flatten().tolist() == [127, 128, 129, 301, 174]
    firsts = [[40], [40], [40, 56], [104, 136, 152], [136, 152]]
    assert got.pages[:, 0].tolist() == [spread(first, 8, 3) for first in firsts]


@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
@pytest.mark.parametrize(("unit", "budget", "groups"), [(16, 7, 3), (32, 1, 1), (32, 6, 2), (128, 16, 4), (128, 5, 1)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_verify_rows(query_len: int, unit: int, budget: int, groups: int, interleaved: bool) -> None:
    rng = random.Random(query_len + 100 * unit + 7 * budget)
    stride = unit // PAGE * (2 if interleaved else 1)
    max_blocks = 9
    seq_lens = [0, 1, query_len - 1, query_len, unit - 1, unit, unit + 1, unit + query_len, max_blocks * unit]
    seq_lens += [rng.randint(1, max_blocks * unit) for _ in range(12)]
    blocks = random_block_table(rng, len(seq_lens), max_blocks)
    rows = verify_rows(seq_lens, query_len)
    positions = [position for _, position in rows]
    indices = random_indices(rng, positions, groups, budget, unit)
    got = verify_page_table(int32(indices), int32(blocks), int32(seq_lens), query_len, unit, stride)
    check(got, indices, [blocks[request] for request, _ in rows], positions, unit, stride)


@pytest.mark.parametrize(("unit", "budget", "groups"), [(16, 7, 3), (32, 1, 1), (128, 16, 4), (128, 5, 1)])
def test_prefill_rows(unit: int, budget: int, groups: int) -> None:
    """Rows of several requests in any order, among them padding at position -1, of some request or of none."""
    rng = random.Random(unit + budget)
    blocks = random_block_table(rng, 4, 9)
    positions = [-1, 0, unit - 1, unit, 9 * unit - 1, *(rng.randrange(9 * unit) for _ in range(40)), -1]
    request_ids = [*(rng.randrange(4) for _ in positions[1:]), -1]
    indices = random_indices(rng, positions, groups, budget, unit)
    got = prefill_page_table(
        int32(indices), int32(blocks), torch.tensor(request_ids), torch.tensor(positions), unit, unit // PAGE
    )
    check(got, indices, [blocks[request] for request in request_ids], positions, unit, unit // PAGE)


def test_rows_of_no_request_read_nothing() -> None:
    request_ids, positions = torch.tensor([-1, 0, 2, 1]), torch.full((4,), 20)
    got = prefill_page_table(int32([[[0, 1]]] * 4), int32([[3, 4], [5, 6]]), request_ids, positions, 16, 1)
    assert got.pages[:, 0].tolist() == [[0, 0], [3, 4], [0, 0], [5, 6]]
    assert got.context_lens.flatten().tolist() == [0, 21, 0, 21]


@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
def test_the_three_builders_agree(query_len: int) -> None:
    rng = random.Random(query_len)
    seq_lens = [0, 1, 3, 16, 17, 77, 144]
    rows = verify_rows(seq_lens, query_len)
    request_ids, positions = torch.tensor(rows).T
    indices = int32(random_indices(rng, positions.tolist(), 2, 5, 16))
    blocks = int32(random_block_table(rng, len(seq_lens), 9))
    verified = verify_page_table(indices, blocks, int32(seq_lens), query_len, 16, 1)
    assert same(verified, prefill_page_table(indices, blocks, request_ids, positions, 16, 1))
    last = slice(query_len - 1, None, query_len)
    decoded = verify_page_table(indices[last], blocks, int32(seq_lens), 1, 16, 1)
    assert same(decoded, PageTable(verified.pages[last], verified.context_lens[last]))


def test_one_row_per_request_is_decoding() -> None:
    rng = random.Random(5)
    seq_lens = [0, 1, 40, 128, 129, 1000]
    indices = int32(random_indices(rng, [n - 1 for n in seq_lens], 4, 6, 128))
    blocks, lengths = int32(random_block_table(rng, 6, 8)), int32(seq_lens)
    verified = verify_page_table(indices, blocks, lengths, 1, 128, 16)
    positions = lengths - 1
    assert same(verified, prefill_page_table(indices, blocks, torch.arange(6), positions, 128, 16))
    assert int(verified.context_lens.max()) > 0


def test_a_selected_block_without_an_entry_in_the_block_table_is_skipped() -> None:
    """Position 90 stands in block 5 of units of 16, but the table knows blocks 0 to 2 only."""
    got = prefill_page_table(
        int32([[[5, 1, 4, 3, 2]]]), int32([[6, 7, 8]]), torch.tensor([0]), torch.tensor([90]), 16, 1
    )
    assert got.pages.tolist() == [[[7, 8, 0, 0, 0]]]
    assert got.context_lens.tolist() == [[32]]


def test_arguments_may_be_strided_and_of_either_integer_type() -> None:
    rng = random.Random(6)
    seq_lens = [0, 5, 16, 50, 140]
    rows = verify_rows(seq_lens, 3)
    indices = int32(random_indices(rng, [position for _, position in rows], 2, 5, 16))
    blocks, lengths = int32(random_block_table(rng, 5, 9)), int32(seq_lens)
    expected = verify_page_table(indices, blocks, lengths, 3, 16, 2)
    wide = torch.full((15, 4, 12), 77, dtype=torch.int32)
    wide[:, 1:3, 1:11:2] = indices
    table = torch.full((9, 10), 2**20, dtype=torch.int32)
    table[:, ::2] = blocks.T
    spaced = torch.stack([lengths, lengths + 9], dim=1)[:, 0]
    assert same(verify_page_table(wide[:, 1:3, 1:11:2], table.T[::2], spaced, 3, 16, 2), expected)
    head_major = indices.transpose(0, 1).contiguous().transpose(0, 1)
    assert same(verify_page_table(head_major, blocks.long(), lengths.long(), 3, 16, 2), expected)


def test_arguments_are_left_alone() -> None:
    rng = random.Random(7)
    arguments = int32(random_indices(rng, [19] * 4, 2, 3, 16)), int32([[4, 5], [6, 7]]), int32([20, 20])
    before = [argument.clone() for argument in arguments]
    verify_page_table(*arguments, 2, 16, 1)
    verify_page_table(arguments[0][:2], *arguments[1:], 1, 16, 1)
    prefill_page_table(*arguments[:2], torch.tensor([0, 0, 1, 1]), torch.tensor([19] * 4), 16, 1)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_no_requests() -> None:
    got = verify_page_table(torch.zeros(0, 2, 3).int(), torch.zeros(0, 4).int(), torch.zeros(0).int(), 4, 32, 2)
    assert tuple(got.pages.shape) == (0, 2, 6)
    assert tuple(got.context_lens.shape) == (0, 2)


@pytest.mark.parametrize(("rows", "query_len"), [(5, 4), (19, 4), (21, 4), (25, 4), (4, 1), (6, 1)])
def test_a_wrong_number_of_rows_is_refused(rows: int, query_len: int) -> None:
    indices = torch.zeros(rows, 1, 2).int()
    with pytest.raises(ShapeError) as refused:
        verify_page_table(indices, torch.zeros(5, 3).int(), torch.full((5,), 40).int(), query_len, 16, 1)
    numbers = re.findall(r"\d+", str(refused.value))
    assert str(rows) in numbers
    assert str(5 * query_len) in numbers


@pytest.mark.parametrize("rows", [4, 6, 10])
def test_decoding_takes_one_row_per_request(rows: int) -> None:
    with pytest.raises(ShapeError):
        verify_page_table(torch.zeros(rows, 1, 2).int(), torch.zeros(5, 3).int(), torch.full((5,), 40).int(), 1, 16, 1)


@pytest.mark.parametrize("rows", [(4, 4, 3), (4, 1, 4), (3, 4, 4)])
def test_prompt_rows_have_one_request_and_one_position_each(rows: tuple[int, int, int]) -> None:
    indices, request_ids, positions = torch.zeros(rows[0], 1, 2), torch.zeros(rows[1]), torch.zeros(rows[2])
    with pytest.raises(ShapeError):
        prefill_page_table(indices.int(), torch.zeros(1, 3).int(), request_ids.long(), positions.long(), 16, 1)


@pytest.mark.parametrize("unit", [1, 8, 24, 100])
def test_units_that_are_not_whole_pages_are_refused(unit: int) -> None:
    with pytest.raises(SkipstoneError, match=str(unit)):
        verify_page_table(torch.zeros(1, 1, 2).int(), torch.zeros(1, 3).int(), torch.tensor([40]), 1, unit, 2)


class World(NamedTuple):
    """Verify rows of some requests and what they select, with the keys and values of every token."""

    q: Tensor  # [T, H, D]
    keys: list[Tensor]  # per request [seq_len, Hkv, D]
    values: list[Tensor]
    indices: list  # [T][G][S]
    rows: list[tuple[int, int]]  # request and position
    blocks: list[list[int]]
    table: PageTable
    unit: int
    interleaved: bool


BLOCKS = 40
WIDTH = 16


def make_world(
    seed: int,
    unit: int,
    query_len: int,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    kv_heads: int = 2,
) -> World:
    """Three requests, the last one shorter than its rows where there are several."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    seq_lens = [rng.randint(3 * unit, 8 * unit), rng.randint(unit + 1, 3 * unit), max(query_len - 1, 1)]
    rows = verify_rows(seq_lens, query_len)
    indices = random_indices(rng, [position for _, position in rows], kv_heads, 5, unit)
    for groups, (_, position) in zip(indices, rows, strict=True):
        if position >= 0 and rng.random() < 0.7:
            groups[0] = [*(block for block in groups[0] if block != position // unit), position // unit][-5:]
    physical = rng.sample(range(1, BLOCKS), k=24)
    blocks = [physical[8 * r : 8 * r + 8] for r in range(3)]
    stride = unit // PAGE * (2 if interleaved else 1)
    table = verify_page_table(int32(indices), int32(blocks), int32(seq_lens), query_len, unit, stride)
    keys, values = (
        [torch.randn(n, kv_heads, WIDTH, generator=generator).to(dtype) for n in seq_lens] for _ in ("keys", "values")
    )
    q = torch.randn(len(rows), 3 * kv_heads, WIDTH, generator=generator).to(dtype)
    return World(q, keys, values, indices, rows, blocks, table, unit, interleaved)


def make_pages(world: World, readers: range) -> tuple[Tensor, Tensor]:
    """Pages of keys and of values that hold NaN, except in the tokens that the rows `readers` read.

    Interleaved: the pages of a block's keys are followed by those of its values, and the view of the values begins
    that many pages later.
    """
    per_block = world.unit // PAGE
    kv_heads = world.keys[0].shape[1]
    pages = torch.full((BLOCKS * 2 * per_block, kv_heads, PAGE, WIDTH), math.nan, dtype=world.q.dtype)
    k_pages, v_pages = pages.chunk(2)
    if world.interleaved:
        k_pages, v_pages = pages[:-per_block], pages[per_block:]
    stride = per_block * (2 if world.interleaved else 1)
    for row in readers:
        request, position = world.rows[row]
        for group, ids in enumerate(world.indices[row]):
            for token in selected_tokens(ids, position, world.unit):
                block, offset = divmod(token, world.unit)
                page = world.blocks[request][block] * stride + offset // PAGE
                k_pages[page, group, offset % PAGE] = world.keys[request][token, group]
                v_pages[page, group, offset % PAGE] = world.values[request][token, group]
    return k_pages, v_pages


def expected_attention(world: World) -> Tensor:
    """[T, H, D] float64, from the tokens that each row's selection names."""
    out = torch.zeros(world.q.shape, dtype=torch.float64)
    heads = world.q.shape[1] // world.keys[0].shape[1]
    for row, (request, position) in enumerate(world.rows):
        for group, ids in enumerate(world.indices[row]):
            part = slice(group * heads, (group + 1) * heads)
            tokens = selected_tokens(ids, position, world.unit)
            keys, values = world.keys[request][tokens, group], world.values[request][tokens, group]
            out[row, part] = attend(world.q[row, part], keys, values, 0.3)
    return out


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("unit", "query_len", "kv_heads"), [(16, 1, 2), (16, 4, 1), (32, 8, 3), (128, 1, 4), (128, 3, 2)]
)
def test_attention_through_pages_reads_what_was_selected(
    unit: int, query_len: int, kv_heads: int, interleaved: bool, exact: bool
) -> None:
    world = make_world(unit + query_len, unit, query_len, interleaved=interleaved, kv_heads=kv_heads)
    got = paged_attention(world.q, *make_pages(world, range(len(world.q))), world.table, 0.3, exact)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected_attention(world), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_attention_in_half_precision(exact: bool) -> None:
    world = make_world(3, 32, 4, torch.bfloat16)
    got = paged_attention(world.q, *make_pages(world, range(len(world.q))), world.table, 0.3, exact)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected_attention(world), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("unit", "kv_heads"), [(16, 1), (16, 2), (128, 1), (128, 4)])
def test_a_row_alone_has_the_bits_it_has_among_nine(unit: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Alone, and in pages where everything else is NaN, what the other rows read included."""
    world = make_world(40 + unit, unit, 3, dtype, kv_heads=kv_heads)
    assert len(world.q) == 9
    batch = paged_attention(world.q, *make_pages(world, range(9)), world.table, 0.3, exact=True)
    for row in range(9):
        part = slice(row, row + 1)
        table = PageTable(world.table.pages[part], world.table.context_lens[part])
        alone = paged_attention(world.q[part], *make_pages(world, range(row, row + 1)), table, 0.3, exact=True)
        assert torch.equal(alone, batch[part]), row


@pytest.mark.parametrize("exact", [False, True])
def test_rows_without_keys_give_zeros(exact: bool) -> None:
    """Padding rows, and a group of heads that selected nothing, in pages full of NaN."""
    pages = torch.full((9, 2, 16, 8), math.nan)
    pages[5, 1, :3] = 1.0
    indices = int32([[[0, -1], [0, -1]], [[-1, 7], [0, -1]]])
    table = verify_page_table(indices, int32([[5, 6]]), int32([3]), 2, 16, 1)
    padding = verify_page_table(indices, int32([[0, 0], [0, 0]]), int32([0, 0]), 1, 16, 1)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(paged_attention(q, pages, pages, padding, 1.0, exact), torch.zeros(2, 4, 8))
    got = paged_attention(q[1:], pages, pages, PageTable(table.pages[1:], table.context_lens[1:]), 1.0, exact)
    assert torch.equal(got[:, :2], torch.zeros(1, 2, 8))
    torch.testing.assert_close(got[:, 2:], torch.ones(1, 2, 8))


def test_attention_leaves_its_arguments_alone() -> None:
    world = make_world(8, 16, 4)
    pages = make_pages(world, range(len(world.q)))
    arguments = [world.q, *pages, *world.table]
    before = [argument.clone() for argument in arguments]
    paged_attention(world.q, *pages, world.table, 0.3, True)
    for argument, kept in zip(arguments, before, strict=True):
        torch.testing.assert_close(argument, kept, rtol=0, atol=0, equal_nan=True)


def test_pages_hold_sixteen_tokens() -> None:
    assert PAGE_SIZE == PAGE == 16
