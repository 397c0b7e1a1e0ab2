"""What surrounds the model in a step on the device: the places of rows, and which drafts survive. By plain loops."""

from __future__ import annotations

import random

import pytest
import torch
from oracles.kernels import Kernel, same_bits
from torch import Tensor

from skipstone.core.batch import PAD, SPARE_BLOCK, ZERO_BLOCK
from skipstone.kernels.reference import decode as reference

pytest.importorskip("triton")

SIZE = 16


def requests(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_ids [R, n], start, limit [R], block tables [R, 6]: padding, limits before, among and behind the rows."""
    rng = random.Random(n)
    start = [-1, 0, 5, SIZE - 1, SIZE, 3 * SIZE - 2, 40, -1, 60]
    limit = [0, 1, 5 + n, SIZE, SIZE + 2, 96, 39, 96, 61]
    tokens = [[rng.choice([PAD, rng.randrange(1000)]) if i else 7 for i in range(n)] for _ in start]
    table = [[rng.choice([ZERO_BLOCK, *range(2, 50)]) for _ in range(6)] for _ in start]
    return torch.tensor(tokens), torch.tensor(start), torch.tensor(limit), torch.tensor(table)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_rows(n: int) -> None:
    token_ids, start, limit, table = requests(n)
    got = Kernel("step_rows")(token_ids, None, start, limit, table, None, None, SIZE)
    for request in range(len(start)):
        seen = []
        for i in range(n):
            row, position = request * n + i, int(start[request]) + i
            real = int(start[request]) >= 0 and position < int(limit[request])
            place = position if real else 0
            block = int(table[request, place // SIZE])
            assert int(got.input_ids[row]) == max(int(token_ids[request, i]), 0)
            assert int(got.positions[row]) == place and int(got.slot_offset[row]) == place % SIZE
            assert int(got.slot_block[row]) == (block if real and block != ZERO_BLOCK else SPARE_BLOCK)
            seen.append(position if real else PAD)
        assert got.seen[request * n :][:n].tolist() == seen
        assert int(got.seq_lens[request]) == max(seen) + 1
    assert all(map(same_bits, got, reference.step_rows(token_ids, None, start, limit, table, None, None, SIZE)))


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_any_lengths(seed: int) -> None:
    rng = random.Random(seed)
    _, start, limit, table = requests(3)
    counts = [rng.choice([1, 2, 4, 30]) for _ in start]
    tokens = torch.tensor([[rng.randrange(PAD, 900) for _ in range(128)] for _ in range(12)], dtype=torch.int32)
    slots = torch.tensor(rng.sample(range(12), len(start)))
    end = torch.minimum(limit, start + torch.tensor(counts))
    item = torch.tensor([i for i, count in enumerate(counts) for _ in range(count)])
    offset = torch.tensor([j for count in counts for j in range(count)])
    got = Kernel("step_rows")(tokens, slots, start, end, table, item, offset, SIZE)
    for row, (i, j) in enumerate(zip(item.tolist(), offset.tolist(), strict=True)):
        position = int(start[i]) + j
        real = int(start[i]) >= 0 and position < int(end[i])
        place = position if real else 0
        block = int(table[i, place // SIZE])
        token = max(int(tokens[slots[i], place]), 0) if real else 0
        assert int(got.input_ids[row]) == token and int(got.positions[row]) == place
        assert int(got.seen[row]) == (position if real else PAD) and int(got.slot_offset[row]) == place % SIZE
        assert int(got.slot_block[row]) == (block if real and block != ZERO_BLOCK else SPARE_BLOCK)
    for i in range(len(start)):
        assert int(got.seq_lens[i]) == (int(end[i]) if int(start[i]) >= 0 else 0)
    args = (tokens, slots, start, end, table, item, offset, SIZE)
    assert all(map(same_bits, got, reference.step_rows(*args)))


@pytest.mark.parametrize("rates", [None, [0.5], [1.0, 0.0, 0.9], [0.3, 0.6, 0.9, 0.1, 0.2, 0.3, 0.4, 0.5]])
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_accepted_drafts(n: int, rates: list[float] | None) -> None:
    """The twin, for drafts that match at first, all, or none; and the loops where no coin is thrown."""
    token_ids, start, limit, _ = requests(n)
    rng = random.Random(n)
    samples = token_ids.roll(-1, dims=1).clamp(min=0)
    for request in range(0, len(samples), 2):
        samples[request, rng.randrange(n)] = 1001
    seed = torch.tensor([0, 1, -1, 2**62, -(2**63), 5, 6, 7, 8])
    arguments = (samples, token_ids, start, limit, seed, rates and torch.tensor(rates, dtype=torch.float64))
    got = Kernel("accept")(*arguments)
    assert all(map(same_bits, got, reference.accept(*arguments)))
    if rates is not None:
        return
    for request, (first, end) in enumerate(zip(start.tolist(), limit.tolist(), strict=True)):
        count = 0
        while count < n - 1 and first + count + 1 < end:
            if int(token_ids[request, count + 1]) != int(samples[request, count]):
                break
            count += 1
        assert int(got.num_accepted[request]) == count
        assert got.emitted[request].tolist() == samples[request].tolist()
        assert got.following[request].tolist() == [int(samples[request, min(i, count)]) for i in range(n)]
        assert int(got.start[request]) == (first + count + 1 if first >= 0 else PAD)


def test_views_of_a_state() -> None:
    """Columns of one matrix, as the device's state is kept, with rows of any stride."""
    token_ids, start, limit, table = requests(4)
    state = torch.cat([table, token_ids, start[:, None], limit[:, None]], dim=1)
    views = state[:, 6:10], state[:, 10], state[:, 11], state[:, :6]
    expected = Kernel("step_rows")(token_ids, None, start, limit, table, None, None, SIZE)
    assert all(map(same_bits, Kernel("step_rows")(views[0], None, *views[1:], None, None, SIZE), expected))
    samples = torch.randint(0, 9, (9, 4), generator=torch.Generator().manual_seed(1))
    arguments = (samples, views[0], views[1], views[2], start, None)
    assert all(map(same_bits, Kernel("accept")(*arguments), reference.accept(*arguments)))
