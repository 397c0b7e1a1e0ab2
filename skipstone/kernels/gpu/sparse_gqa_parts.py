"""Partial results of attention to one block, and how a row adds them up: the same numbers in every kernel.

A block has its highest score as a power of two, the sum of its weights relative to that, and the weighted sum of
values.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(m_i):
    """A maximum to subtract, which is no infinity."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def weigh(scores, m_i, scale):
    """Weights relative to a maximum."""
    return tl.exp2(tl.fma(scores, scale, -tl.expand_dims(finite_or_zero(m_i), len(m_i.shape))))


@triton.jit
def add_up(weights, ONES: tl.constexpr):
    """Sum over keys."""
    ones = tl.full([weights.shape[1], ONES], 1.0, weights.dtype)
    return tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)


@triton.jit
def add_tile(q, k, v, m_i, l_i, acc, limit, key, scale, fresh, MASKED: tl.constexpr, ONES: tl.constexpr):
    """Add one tile of keys to the partial result of its block; with `fresh` it is the block's first.

    Keys past `limit` are hidden if MASKED.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
    new_m = tl.max(scores, axis=1) * scale
    new_m = tl.where(fresh, new_m, tl.maximum(m_i, new_m))
    weights = weigh(scores, new_m, scale).to(v.dtype)
    old = tl.exp2(m_i - finite_or_zero(new_m))
    l_i = tl.where(fresh, 0.0, l_i * old) + add_up(weights, ONES)
    acc = tl.where(fresh, 0.0, acc * old[:, None])
    return new_m, l_i, tl.dot(weights, v, acc, input_precision="ieee")


@triton.jit
def add_pair(q, k, first_v, second_v, limit, key, scale, ONES: tl.constexpr):
    """Partial result of a block of two tiles: the numbers of `add_tile` for one after the other, in fewer steps."""
    KEYS: tl.constexpr = first_v.shape[0]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
    scores = tl.reshape(scores, [q.shape[0], 2, KEYS])
    first, second = tl.split(tl.max(scores, axis=2) * scale)
    m_i = tl.maximum(first, second)
    # Not joined: behind that, operands of a product get another layout.
    tops = tl.where(tl.arange(0, 2)[None, :] == 0, first[:, None], m_i[:, None])
    weights = weigh(scores, tops, scale)
    first_weights, second_weights = tl.split(tl.permute(weights.to(k.dtype), (0, 2, 1)))
    old = tl.exp2(first - finite_or_zero(m_i))
    l_i = add_up(first_weights, ONES) * old + add_up(second_weights, ONES)
    acc = tl.dot(first_weights, first_v, input_precision="ieee") * old[:, None]
    return m_i, l_i, tl.dot(second_weights, second_v, acc, input_precision="ieee")


@triton.jit
def add_block(m_i, l_i, acc, part_max, part_sum, part):
    """Add a partial result to a row. Fused operations are spelled out, so that every kernel rounds alike."""
    new_m = tl.maximum(m_i, part_max)
    old = tl.exp2(m_i - finite_or_zero(new_m))
    new = tl.exp2(part_max - finite_or_zero(new_m))
    l_i = tl.fma(l_i, old, part_sum * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), part * new[:, None])
    return new_m, l_i, acc
