"""The few statistical tests that the sampling tests need. All return a p-value; no third-party package."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How often counts as uneven as these come from the given probabilities. Rare outcomes are pooled into one."""
    counts, expected = counts.double(), probabilities.double() * counts.sum()
    if counts[probabilities == 0].any():
        return 0.0
    rare = expected < 10
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), statistic / 2))


def kolmogorov_smirnov(values: Tensor, cumulative: Tensor) -> float:
    """P-value of sorted `values` under the distribution whose cumulative function at them is `cumulative`."""
    n = len(values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((steps[1:] - cumulative).max(), (cumulative - steps[:-1]).max()))
    scaled = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    series = sum((-1) ** (j - 1) * math.exp(-2 * j * j * scaled * scaled) for j in range(1, 101))
    return min(1.0, max(0.0, 2 * series))


def gumbel_cumulative(values: Tensor) -> Tensor:
    """P(G <= x) of the standard Gumbel distribution, float64."""
    return torch.exp(-torch.exp(-values.double()))


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation in units of its standard deviation under independence: beyond 5 is no accident."""
    a, b = a.double().flatten(), b.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(len(a))
