"""Truncation by sorting keeps what the exact rules keep, ties included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skipstone.kernels.reference.truncation import truncate


def kept(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The rules in words: the k likeliest; of these the fewest whose mass reaches p; those above min_p of the best."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = order[:top_k] if top_k > 0 else order
    weights = torch.tensor([scores[i] for i in order], dtype=torch.float64).softmax(dim=0).tolist()
    chosen, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if chosen and top_p < 1 and mass >= top_p:
            break
        chosen.append(token)
        mass += weight
    threshold = max(scores) + (float(torch.tensor(min_p).log()) if min_p > 0 else -float("inf"))
    return {token for token in chosen if scores[token] >= threshold and scores[token] > -float("inf")}


def rows(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 50, generator=generator) * 2
    scores[1] = scores[1].round()  # many ties
    scores[2] = 0.0
    scores[3, 10:] = -torch.inf
    scores[4, 7] = 40.0
    return scores


@pytest.mark.parametrize("seed", range(8))
def test_against_the_rules(seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    scores = rows(seed)
    top_k = torch.randint(0, 60, (6,), generator=generator)
    top_p = (torch.rand(6, generator=generator) * 1.3).clamp(0.05, 1.0)
    min_p = (torch.rand(6, generator=generator) * 0.3 - 0.1).clamp(min=0.0)
    got = scores.clone()
    truncate(got, top_k, top_p, min_p)
    for i in range(6):
        expected = kept(scores[i].tolist(), int(top_k[i]), float(top_p[i]), float(min_p[i]))
        assert set((got[i] > -torch.inf).nonzero()[:, 0].tolist()) == expected, i


def test_a_row_does_not_depend_on_the_others() -> None:
    scores = rows(3)
    settings = (torch.full((6,), 20), torch.full((6,), 0.7), torch.full((6,), 0.02))
    together = scores.clone()
    truncate(together, *settings)
    for i in range(6):
        alone = scores[i : i + 1].clone()
        truncate(alone, *(value[i : i + 1] for value in settings))
        assert torch.equal(alone[0], together[i])


def test_off_changes_nothing() -> None:
    scores = rows(5)
    got = scores.clone()
    truncate(got, torch.zeros(6, dtype=torch.int64), torch.ones(6), torch.zeros(6))
    assert torch.equal(got, scores)
