"""The noise: Gumbel by distribution, independent between positions, tokens, seeds and choices, always finite."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.statistics import chi_square, correlation, gumbel_cumulative, kolmogorov_smirnov
from torch import Tensor

from skipstone.kernels.reference.decode import coins, uniforms
from skipstone.kernels.reference.sampling import derive_seed, gumbel_noise

UNLIKELY = 1e-5


def mix(value: int) -> int:
    """David Stafford's variant 13 of MurmurHash3's finalizer, on whole numbers below 2^64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return value ^ (value >> 31)


def plain_noise(seed: int, position: int, token: int) -> float:
    """One value by its definition. A seed's text is the same in every release as long as this holds."""
    row = mix((mix(seed ^ 0x6A09E667F3BCC908) + position) % 2**64)
    bits = mix(row ^ mix(token + 1)) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))


def by(what: str, count: int, vocab: int, start: int = 0) -> Tensor:
    """[count, vocab] noise of neighbouring seeds, positions, or of rows that differ in both."""
    steps, fixed = torch.arange(start, start + count), torch.full((count,), 42)
    seeds = steps if what in ("seed", "both") else fixed
    positions = steps if what in ("position", "both") else fixed
    return gumbel_noise(seeds, positions, vocab)


@pytest.mark.parametrize("what", ["seed", "position", "both"])
def test_gumbel_distribution(what: str) -> None:
    """Over tokens and rows together, for one token, and for one row."""
    noise = by(what, 2000, 200)
    assert noise.dtype == torch.float32
    for values in (noise.flatten(), noise[:, 0], noise[:, 199], noise[1000], by(what, 1, 100_000)[0]):
        ordered = values.sort().values
        assert kolmogorov_smirnov(ordered, gumbel_cumulative(ordered)) > UNLIKELY


def test_kolmogorov_smirnov_notices_a_wrong_distribution() -> None:
    ordered = by("both", 2000, 200).flatten().sort().values
    for wrong in (ordered * 1.02, ordered + 0.02):
        assert kolmogorov_smirnov(wrong, gumbel_cumulative(wrong)) < UNLIKELY


def test_tails_are_finite_and_complete() -> None:
    """Ten million values: none infinite, and as many beyond the far quantiles as there should be."""
    high = low = 0
    for start in range(0, 10_000, 1000):
        noise = by("position", 1000, 1000, start)
        assert torch.isfinite(noise).all()
        high += int((noise > 12).sum())
        low += int((noise < -2.5).sum())
    assert 30 < high < 100  # 61 expected
    assert 20 < low < 90  # 51 expected


@pytest.mark.parametrize("lag", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("what", ["seed", "position"])
def test_no_correlation(what: str, lag: int) -> None:
    """Between rows whose seed or position differs by `lag`, and between tokens that far apart."""
    noise = by(what, 1500, 1500)
    assert abs(correlation(noise[lag:], noise[:-lag])) < 5
    assert abs(correlation(noise[:, lag:], noise[:, :-lag])) < 5
    assert abs(correlation(noise[lag:, lag:], noise[:-lag, :-lag])) < 5
    assert abs(correlation(noise[lag:, :-lag], noise[:-lag, lag:])) < 5


def test_correlation_is_noticed() -> None:
    noise = by("seed", 500, 500)
    assert abs(correlation(noise, noise + 40 * by("position", 500, 500))) > 5


@pytest.mark.parametrize("what", ["seed", "position"])
def test_pairs_fill_the_square_evenly(what: str) -> None:
    """Neighbours by row and by token, in 16 x 16 cells of equal probability: dependence that is no correlation."""
    uniform = gumbel_cumulative(by(what, 700, 700))
    cell = (uniform * 16).long().clamp(max=15)
    even = torch.full((256,), 1 / 256)
    for a, b in ((cell[1:], cell[:-1]), (cell[:, 1:], cell[:, :-1]), (cell[350:], cell[:350])):
        counts = torch.bincount((16 * a + b).flatten(), minlength=256)
        assert chi_square(counts, even) > UNLIKELY


def test_every_argument_matters() -> None:
    noise = gumbel_noise(torch.tensor([1, 1, 2, 2]), torch.tensor([1, 2, 1, 2]), 50)
    assert noise.unique().numel() == noise.numel()
    assert not torch.equal(gumbel_noise(torch.tensor([3]), torch.tensor([8]), 9), noise[:1, :9])


def test_extreme_arguments() -> None:
    """The largest seeds and far positions are as good as any, and no two rows meet."""
    seeds = torch.tensor([0, 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 2, 2**63 - 1])
    positions = torch.tensor([0, 1, 2**20, 2**31, 2**32])
    rows = torch.cartesian_prod(seeds, positions)
    noise = gumbel_noise(rows[:, 0].contiguous(), rows[:, 1].contiguous(), 3000)
    assert torch.isfinite(noise).all()
    ordered = noise.flatten().sort().values
    assert kolmogorov_smirnov(ordered, gumbel_cumulative(ordered)) > UNLIKELY
    related = torch.corrcoef(noise.double()).fill_diagonal_(0).abs().max() * 3000**0.5
    assert related < 5


def test_no_state() -> None:
    seed, position = torch.tensor([9]), torch.tensor([10])
    torch.manual_seed(0)
    first = gumbel_noise(seed, position, 64)
    torch.manual_seed(1)
    by("both", 10, 10)
    assert torch.equal(gumbel_noise(seed, position, 64), first)
    assert torch.equal(gumbel_noise(seed, position, 1000)[:, :64], first)


def test_seeds_of_choices() -> None:
    """The choices of a request, and of requests with neighbouring seeds, never share a seed; nothing leaves int63."""
    derived = {(seed, choice): derive_seed(seed, choice) for seed in [*range(60), 2**63 - 1] for choice in range(128)}
    assert len(set(derived.values())) == len(derived)
    assert all(0 <= value < 2**63 for value in derived.values())
    assert derived == {key: derive_seed(*key) for key in derived}
    noise = gumbel_noise(torch.tensor([derive_seed(7, c) for c in range(64)]), torch.full((64,), 3), 2000)
    related = torch.corrcoef(noise.double()).fill_diagonal_(0).abs().max() * 2000**0.5
    assert related < 5


SEEDS = [0, 1, 77, 2**31, 2**53 + 1, 2**63 - 1]


def test_the_noise_is_what_it_has_always_been() -> None:
    rows = [(seed, position) for seed in SEEDS for position in (0, 1, 4095, 2**31)]
    seeds, positions = torch.tensor(rows).unbind(1)
    expected = [[plain_noise(*row, token) for token in range(40)] for row in rows]
    torch.testing.assert_close(gumbel_noise(seeds, positions, 40), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_other_draws_are_what_they_have_always_been() -> None:
    """Seeds of further choices, and the coins of simulated acceptance: streams of their own."""
    for seed in SEEDS:
        derived = [mix((mix(seed ^ 0x3B67AE8584CAA73B) + choice) % 2**64) % 2**63 for choice in range(1, 6)]
        assert [derive_seed(seed, choice) for choice in range(6)] == [seed, *derived]
    expected = [math.exp(-math.exp(-plain_noise(seed ^ 0x1F83D9ABFB41BD6B, 9, 0))) for seed in SEEDS]
    found = uniforms(torch.tensor(SEEDS), torch.full((len(SEEDS),), 9))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7)


def test_the_last_rate_serves_all_further_drafts() -> None:
    """Coins of simulated acceptance, for more drafts than there are rates."""
    seeds, positions = torch.arange(200), torch.arange(5) + torch.arange(200)[:, None]
    for rates, certain in (([1.0], [True] * 5), ([1.0, 0.0], [True, *[False] * 4]), ([0.0, 1.0], [False, *[True] * 4])):
        kept = coins(seeds, positions, torch.tensor(rates, dtype=torch.float64))
        assert torch.equal(kept, torch.tensor(certain).expand(200, 5))
    shares = coins(seeds, positions, torch.tensor([0.9, 0.3], dtype=torch.float64)).double().mean(dim=0)
    assert shares.tolist() == pytest.approx([0.9, 0.3, 0.3, 0.3, 0.3], abs=0.12)
