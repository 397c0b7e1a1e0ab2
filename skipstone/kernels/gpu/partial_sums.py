"""Attention over parts of a row's keys, and how parts are put together: first to last, whoever computed them.

A part has its highest score as a power of two, the sum of its weights relative to that, and the weighted sum of values.
Weights are added up as a product with ones: matrix units add in one order, however rows lie on warps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
ONES = tl.constexpr(16)  # columns of ones: the narrowest product that every target has
LOWEST = tl.constexpr(-1e30)  # finite, as the difference of two infinities is NaN
CHUNK = 128  # dims of a value that one program combines


class Parts(NamedTuple):
    """Scratch for the parts of T rows, H heads and `parts` places."""

    m_i: Tensor  # [T, H, parts] float32
    l_i: Tensor  # [T, H, parts] float32
    acc: Tensor  # [T, H, parts, D] float32


def empty_parts(rows: int, heads: int, parts: int, width: int, device: torch.device) -> Parts:
    """Scratch whose contents are not defined."""
    m_i, l_i = torch.empty(2, rows, heads, parts, dtype=torch.float32, device=device)
    return Parts(m_i, l_i, torch.empty(rows, heads, parts, width, dtype=torch.float32, device=device))


@triton.jit
def combine(m_i, l_i, acc, part_m, part_l, part_acc):
    """Add one more part to a row's running maximum [M], sum of weights [M, .] and sum of values [M, .].

    Fused multiply-adds are written out: left to the compiler, the roundings could differ from kernel to kernel.
    """
    new_m = tl.maximum(m_i, part_m)
    keep = tl.exp2(m_i - new_m)[:, None]
    add = tl.exp2(part_m - new_m)[:, None]
    return new_m, tl.fma(part_l, add, l_i * keep), tl.fma(part_acc, add, acc * keep)


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    m_ptr,  # [T, HEADS, parts] float32
    l_ptr,  # [T, HEADS, parts] float32
    acc_ptr,  # [T, HEADS, parts, D] float32
    counts_ptr,  # [T, GROUPS] keys of each row and group of heads, less `missing`
    out_ptr,  # [T, HEADS, D]
    parts,
    missing,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * HEADS + tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    group = tl.program_id(1) * GROUPS // HEADS
    count = tl.cdiv(tl.load(counts_ptr + row * GROUPS + group).to(tl.int32) + missing, KEYS)
    m_i = tl.full([1], LOWEST, tl.float32)
    l_i = tl.zeros([1, 1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, count, UNROLL):
        for index in tl.static_range(UNROLL):
            # Past the last part it is read again, without any weight.
            part = first + index + tl.arange(0, 1)
            source = place * parts + tl.minimum(part, count - 1)
            part_m = tl.where(part < count, tl.load(m_ptr + source), LOWEST)
            part_l = tl.load(l_ptr + source)[:, None]
            part_acc = tl.load(acc_ptr + source[:, None] * D + dim, mask=dim < D, other=0.0)
            m_i, l_i, acc = combine(m_i, l_i, acc, part_m, part_l, part_acc)
    out = tl.where(l_i > 0, acc / l_i, 0.0)
    tl.store(out_ptr + place * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)


def combine_parts(parts: Parts, counts: Tensor, missing: int, keys: int, out: Tensor) -> None:
    """Fill out [T, H, D]. A row and group has counts [T, G] + missing keys, `keys` to a part; no part behind is read.

    G groups share the heads evenly; counts is contiguous.
    """
    rows, heads, places, width = parts.acc.shape
    block = min(triton.next_power_of_2(width), CHUNK)
    _combine_kernel[(rows, heads, triton.cdiv(width, block))](
        parts.m_i, parts.l_i, parts.acc, counts, out, places, missing, HEADS=heads, GROUPS=counts.numel() // rows,
        D=width, BLOCK_D=block, KEYS=keys, UNROLL=8, num_warps=1,
    )  # fmt: skip
