"""From step costs and acceptance to tokens per second, and to the number of drafts that pays: arithmetic only.

A step of B requests with k drafts each takes the target's time for B * (k + 1) rows and the proposer's for catching up
and drafting; it yields B * (1 + the share of steps in which draft 1 is kept + that of draft 2 + ...) tokens. A proposer
that finds no draft in some steps, as prompt lookup does, has fewer rows on average and is charged for those.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from skipstone.runtime.k_table import Ranges

OFF = "off"
SLACK = 1.5  # by which neighbours in a grid may differ beyond what their sizes explain


class Acceptance(msgspec.Struct, kw_only=True):
    """Of one proposer, per position: shares of all decoding steps in which a draft stood there, and was kept."""

    drafted: list[float]
    accepted: list[float]
    steps: int = 0  # that it was measured over; 0: given


class Grid(msgspec.Struct, kw_only=True):
    """Seconds measured at some contexts, batch sizes and k; values[context][batch][k]. Linear in between."""

    contexts: list[int]
    batches: list[int]
    ks: list[int]
    values: list[list[list[float]]]

    def at(self, context: float, batch: float, k: float) -> float:
        """Seconds at any point. Outside of what was measured the nearest measurement counts."""
        planes = [
            np.interp(batch, self.batches, [np.interp(k, self.ks, row) for row in plane]) for plane in self.values
        ]
        return float(np.interp(context, self.contexts, planes))

    def doubtful(self) -> list[tuple[int, int]]:
        """Rows [context][batch] to measure again: more work takes no less time, and no more than in proportion."""
        growth = [[high / low for low, high in itertools.pairwise(sizes)] for sizes in (self.contexts, self.batches)]
        growth.append([(high + 1) / max(low, 1) for low, high in itertools.pairwise(self.ks)])  # of rows, or of drafts
        found: set[tuple[int, int]] = set()
        for c, b, k in itertools.product(*(range(len(sizes)) for sizes in (self.contexts, self.batches, self.ks))):
            for axis, at in enumerate((c, b, k)):
                if at < len(growth[axis]):
                    next_c, next_b = c + (axis == 0), b + (axis == 1)
                    less, more = self.values[c][b][k], self.values[next_c][next_b][k + (axis == 2)]
                    if less > SLACK * more:
                        found.add((c, b))
                    if more > SLACK * growth[axis][at] * less:
                        found.add((next_c, next_b))
        return sorted(found)


class Costs(msgspec.Struct, kw_only=True):
    """`step`: a whole step whose drafts cost nothing. `draft`: what each proposer adds, after making k drafts."""

    step: Grid
    draft: dict[str, Grid]


class Prediction(msgspec.Struct):
    """One proposer, k and batch size."""

    proposer: str
    k: int
    batch: int
    tokens_per_second: float
    seconds_per_step: float
    tokens_per_step: float  # of one request


def predict(
    costs: Costs, acceptance: dict[str, Acceptance], proposer: str, k: int, batch: int, context: float
) -> Prediction:
    """Tokens per second of all requests together. k = 0 with a proposer: its caches are kept up to date."""
    if proposer == OFF:
        length, seconds = 1.0, costs.step.at(context, batch, 0)
    else:
        known = acceptance[proposer]
        length = 1 + sum(known.accepted[:k])
        seconds = costs.step.at(context, batch, sum(known.drafted[:k])) + costs.draft[proposer].at(context, batch, k)
    return Prediction(proposer, k, batch, batch * length / seconds, seconds, length)


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest; of equally fast ones that with the fewest drafts."""
    return max(predictions, key=lambda p: (p.tokens_per_second, -p.k))


def largest_k(costs: Costs, acceptance: dict[str, Acceptance], proposer: str) -> int:
    """The most drafts that a proposer was measured with, and for which acceptance is known."""
    return min(costs.draft[proposer].ks[-1], len(acceptance[proposer].accepted))


def k_ranges(costs: Costs, acceptance: dict[str, Acceptance], proposer: str, context: float) -> Ranges:
    """The best k of one proposer for every batch size up to the largest measured: [first, last, k] runs of equal k."""
    ks = range(largest_k(costs, acceptance, proposer) + 1)

    def best_k(batch: int) -> int:
        return best([predict(costs, acceptance, proposer, k, batch, context) for k in ks]).k

    runs = [(k, list(run)) for k, run in itertools.groupby(range(1, costs.step.batches[-1] + 1), key=best_k)]
    return [(run[0], run[-1], k) for k, run in runs]
