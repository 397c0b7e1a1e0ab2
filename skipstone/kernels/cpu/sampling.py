"""Sampling: the noise of `kernels.reference.sampling` and the choice, in one pass over the vocabulary."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import SamplingRows
from skipstone.kernels.cpu.jit import F32, array, kernel, result
from skipstone.kernels.reference.sampling import GUMBEL_STREAM, LARGEST, MIN_TEMPERATURE, process_logits

U64 = np.uint64
STREAM, FIRST, SECOND = U64(GUMBEL_STREAM), U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB)
COLDEST, HIGHEST, LOWEST = F32(MIN_TEMPERATURE), F32(LARGEST), -F32(np.inf)
SQRT_2, LN_2 = np.sqrt(2.0), np.log(2.0)
part = numba.njit(fastmath={"contract"}, error_model="numpy")


@part
def _mix64(value):
    """See the reference's function of this name."""
    value = (value ^ (value >> U64(30))) * FIRST
    value = (value ^ (value >> U64(27))) * SECOND
    return value ^ (value >> U64(31))


@part
def _log(x):
    """Of a normal positive float64, to about an ulp: the exponent's, and the series of 2 artanh((m - 1) / (m + 1))."""
    bits = np.float64(x).view(np.int64)
    power = (bits >> 52) - 1023
    mantissa = np.int64((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    large = mantissa > SQRT_2
    mantissa = mantissa * 0.5 if large else mantissa
    power = power + 1 if large else power
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = 1.0 / 21
    for odd in (19, 17, 15, 13, 11, 9, 7, 5, 3):
        series = series * z + 1.0 / odd
    return np.float64(power) * LN_2 + 2.0 * (s + s * z * series)


@cache
def _token_keys(vocab_size: int) -> np.ndarray:
    """The part of the noise's key that a token's id makes, [V] uint64."""
    return _keys(vocab_size)


@kernel("uint64[::1](int64)")
def _keys(vocab_size):
    keys = np.empty(vocab_size, np.uint64)
    for token in range(vocab_size):
        keys[token] = _mix64(U64(token + 1))
    return keys


@kernel("(float32[:, :], int64[:], int64[:], float32[:], boolean, uint64[::1], int64[::1])", reassociate=True)
def _sample(logits, seed, position, temperature, divide, keys, tokens):
    """With `divide` the logits are not divided by the temperature yet."""
    rows, vocab_size = logits.shape
    scores = np.empty(vocab_size, np.float32)
    for row in range(rows):
        greedy = temperature[row] == F32(0)
        divisor = F32(1) if greedy or not divide else max(temperature[row], COLDEST)
        for token in range(vocab_size):
            value = logits[row, token]
            value = LOWEST if value != value else min(value, HIGHEST)
            scores[token] = min(value / divisor, HIGHEST)
        if not greedy:
            row_key = _mix64(_mix64(U64(seed[row]) ^ STREAM) + U64(position[row]))
            for token in range(vocab_size):
                bits = np.int64(_mix64(row_key ^ keys[token]) >> U64(12))
                uniform = (np.float64(bits) + 0.5) * 2.0**-52
                scores[token] += F32(-_log(-_log(uniform)))
        best = LOWEST
        for token in range(vocab_size):
            best = max(best, scores[token])
        chosen = 0
        while scores[chosen] != best:
            chosen += 1
        tokens[row] = chosen


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See the plain-torch twin."""
    parts = (rows.top_k, rows.top_p, rows.min_p, rows.penalties, rows.bias, rows.allowed)
    plain = all(part is None for part in parts)
    scores = logits.to(torch.float32) if plain else process_logits(logits, rows)
    tokens, chosen = result(len(logits), dtype=np.int64)
    settings = (array(rows.seed), array(rows.position), array(rows.temperature))
    _sample(array(scores), *settings, plain, _token_keys(logits.shape[1]), chosen)
    return tokens
