"""Which keys a row may read, by plain loops: the contract between indexers and attention for both models.

A unit is one token (DeepSeek-V3.2) or one block of tokens (MiniMax-M3). A row at position p sees units 0 to p // unit.
Order of preference: forced units, then by score, NaN counting as the lowest number, equal scores by lower id.
What is chosen is listed in ascending order of id and filled up with -1.
"""

from __future__ import annotations

import math

LARGEST = (2 - 2**-23) * 2.0**127


def preference(score: float) -> float:
    """The score as it counts: infinities are the largest float32 values, NaN the lowest, and -0.0 is 0.0."""
    return -LARGEST if math.isnan(score) else min(max(score, -LARGEST), LARGEST) + 0.0


def choose(scores: list[float], position: int, unit: int, budget: int, init: int = 0, local: int = 0) -> list[int]:
    """The units one row reads, padded to `budget`. `scores` beyond the visible units may hold anything."""
    if position < 0:
        return [-1] * budget
    visible = position // unit + 1
    forced = [block for block in range(visible) if block < init or block >= visible - local]
    chosen = forced[:]
    while len(chosen) < min(budget, visible):
        best = None
        for block in range(visible):
            if block in chosen:
                continue
            if best is None or preference(scores[block]) > preference(scores[best]):
                best = block
        chosen.append(best)
    return sorted(chosen) + [-1] * (budget - len(chosen))


def choose_all(
    scores: list[list[list[list[float]]]],
    positions: list[list[int]],
    unit: int,
    budget: int,
    init: int = 0,
    local: int = 0,
) -> list[list[list[list[int]]]]:
    """`choose` for scores [R][n][G][units] and positions [R][n]."""
    return [
        [
            [choose(group, position, unit, budget, init, local) for group in row]
            for row, position in zip(rows, row_positions, strict=True)
        ]
        for rows, row_positions in zip(scores, positions, strict=True)
    ]
