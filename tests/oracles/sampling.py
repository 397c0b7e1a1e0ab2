"""How one row of logits becomes a distribution, by plain Python loops in float64.

The order is the contract: bias and bans, penalties, temperature, top-k, top-p, min-p. Works on one row; does not know
how the engine lays out a batch of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEVER = -math.inf


@dataclass
class Row:
    """The sampling settings of one row, and the tokens before it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def softmax(logits: list[float]) -> list[float]:
    """Probabilities; a forbidden token has none."""
    top = max(logits)
    weights = [0.0 if x == NEVER else math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def ranking(values: list[float]) -> list[int]:
    """Ids from the highest value down, equal values by lower id."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def penalised(logits: list[float], row: Row) -> list[float]:
    """Bias, then repetition over prompt and output, then presence and frequency over the output."""
    out = [value + row.bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in set(row.prompt) | set(row.output):
        out[token] = out[token] / row.repetition if out[token] > 0 else out[token] * row.repetition
    for token in set(row.output):
        out[token] -= row.presence + row.frequency * row.output.count(token)
    return out


def keep_only(logits: list[float], kept: set[int]) -> list[float]:
    """Forbid every other token."""
    return [value if token in kept else NEVER for token, value in enumerate(logits)]


def top_k(logits: list[float], k: int) -> list[float]:
    """Exactly k tokens stay."""
    return keep_only(logits, set(ranking(logits)[:k])) if k > 0 else logits


def top_p(logits: list[float], p: float) -> list[float]:
    """The fewest likeliest tokens whose probabilities reach p."""
    if p >= 1:
        return logits
    probabilities, kept, total = softmax(logits), set(), 0.0
    for token in ranking(probabilities):
        if total >= p:
            break
        kept.add(token)
        total += probabilities[token]
    return keep_only(logits, kept)


def min_p(logits: list[float], fraction: float) -> list[float]:
    """Tokens at least `fraction` as likely as the likeliest."""
    if fraction <= 0:
        return logits
    probabilities = softmax(logits)
    limit = fraction * max(probabilities)
    return keep_only(logits, {token for token, p in enumerate(probabilities) if p >= limit})


def process(logits: list[float], row: Row) -> list[float]:
    """The logits of the distribution that the row samples from; temperature 0 leaves only its likeliest token."""
    out = penalised(logits, row)
    if row.temperature == 0:
        return keep_only(out, {ranking(out)[0]})
    out = [value / row.temperature for value in out]
    return min_p(top_p(top_k(out, row.top_k), row.top_p), row.min_p)
