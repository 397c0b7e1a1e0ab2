"""Products of few rows, that add up in the order of the BLAS library which serves many rows.

BLAS cuts K into segments, adds up each from its first value to its last, and then the segments. How long they are is
found out on this machine, per weight shape, by comparing bits. Where a length is found, few rows need no padding (see
`kernels.reference.gemm`), and a weight is read once, as it lies, and not repacked.

Few rows wait for the weights to be read. Most checkpoints hold bfloat16 numbers, so of such a weight a copy of half the
size is made: a step of one row takes two thirds of the time, and its numbers are the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache, lru_cache

import numba
import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from skipstone.kernels.cpu.jit import F32, array, kept, kernel, result
from skipstone.kernels.reference import gemm as reference

# Above, BLAS is as fast. It loses more by repacking a large weight, and by reading twice as much of a small one.
MOST_ROWS, MOST_ROWS_WIDE = 4, 16
WIDE_BYTES = 1 << 20
NARROW = 32  # columns; BLAS has an order of its own for these, so any number of rows is ours
LONGEST_SEGMENT = 512
TRIED_COLUMNS = 64

part = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")


def _wide(value):
    """A weight as float32: what it is, or the upper bits of it."""
    raise NotImplementedError("only compiled code calls it")


@overload(_wide)
def _wide_of(value):
    if isinstance(value, numba.types.Float):
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@part
def _one_row(x, row, weight, first, last, sums):
    """sums[0, n] = the sum over k from `first` to `last`, in order, of x[row, k] * _wide(weight[k, n])."""
    columns = weight.shape[1]
    for n in range(columns):
        sums[0, n] = F32(0)
    k = first
    while k + 4 <= last:
        a, b, c, d = x[row, k], x[row, k + 1], x[row, k + 2], x[row, k + 3]
        for n in range(columns):
            total = sums[0, n] + a * _wide(weight[k, n])
            total = total + b * _wide(weight[k + 1, n])
            total = total + c * _wide(weight[k + 2, n])
            sums[0, n] = total + d * _wide(weight[k + 3, n])
        k += 4
    for rest in range(k, last):
        a = x[row, rest]
        for n in range(columns):
            sums[0, n] += a * _wide(weight[rest, n])


@part
def _four_rows(x, r0, r1, r2, r3, weight, first, last, sums):
    """The same for four rows of x."""
    columns = weight.shape[1]
    for r in range(4):
        for n in range(columns):
            sums[r, n] = F32(0)
    k = first
    while k + 4 <= last:
        a0, a1, a2, a3 = x[r0, k], x[r0, k + 1], x[r0, k + 2], x[r0, k + 3]
        b0, b1, b2, b3 = x[r1, k], x[r1, k + 1], x[r1, k + 2], x[r1, k + 3]
        c0, c1, c2, c3 = x[r2, k], x[r2, k + 1], x[r2, k + 2], x[r2, k + 3]
        d0, d1, d2, d3 = x[r3, k], x[r3, k + 1], x[r3, k + 2], x[r3, k + 3]
        for n in range(columns):
            w0, w1, w2, w3 = (
                _wide(weight[k, n]),
                _wide(weight[k + 1, n]),
                _wide(weight[k + 2, n]),
                _wide(weight[k + 3, n]),
            )
            sums[0, n] = (((sums[0, n] + a0 * w0) + a1 * w1) + a2 * w2) + a3 * w3
            sums[1, n] = (((sums[1, n] + b0 * w0) + b1 * w1) + b2 * w2) + b3 * w3
            sums[2, n] = (((sums[2, n] + c0 * w0) + c1 * w1) + c2 * w2) + c3 * w3
            sums[3, n] = (((sums[3, n] + d0 * w0) + d1 * w1) + d2 * w2) + d3 * w3
        k += 4
    for rest in range(k, last):
        a0, b0, c0, d0 = x[r0, rest], x[r1, rest], x[r2, rest], x[r3, rest]
        for n in range(columns):
            w0 = _wide(weight[rest, n])
            sums[0, n] += a0 * w0
            sums[1, n] += b0 * w0
            sums[2, n] += c0 * w0
            sums[3, n] += d0 * w0


@kernel(
    "(float32[:, ::1], int64[::1], int64[::1], float32[:, :, ::1], int64, float32[:, ::1])",
    "(float32[:, ::1], int64[::1], int64[::1], uint16[:, :, ::1], int64, float32[:, ::1])",
)
def grouped_product(x, rows, starts, weights, segment, out):
    """Rows starts[e] to starts[e + 1] of x[rows] [P, K] times weights[e] of [E, K, N]: out [P, N]."""
    experts, inner, columns = weights.shape
    sums = np.empty((4, columns), np.float32)
    for e in range(experts):
        weight, end = weights[e], starts[e + 1]
        for start in range(starts[e], end, 4):
            count = min(end - start, 4)
            r0 = rows[start]  # stands in for missing rows
            r1 = rows[start + 1] if count > 1 else r0
            r2 = rows[start + 2] if count > 2 else r0
            r3 = rows[start + 3] if count > 3 else r0
            for first in range(0, inner, segment):
                last = min(first + segment, inner)
                if count == 1:
                    _one_row(x, r0, weight, first, last, sums)
                else:
                    _four_rows(x, r0, r1, r2, r3, weight, first, last, sums)
                for i in range(count):
                    for n in range(columns):
                        if first:
                            out[start + i, n] += sums[i, n]
                        else:
                            out[start + i, n] = sums[i, n]


def small(weight: Tensor) -> np.ndarray:
    """The upper bits of a weight, uint16, where the lower ones are all zero; else the float32 weight itself."""
    whole = kept(weight)
    version = 0 if weight.is_inference() else weight._version
    known: tuple[int, np.ndarray, np.ndarray] | None = weight.__dict__.get("small")
    if known is None or known[0] != version or known[1] is not whole:
        bits = whole.view(np.uint32)
        known = (version, whole, whole if (bits & 0xFFFF).any() else (bits >> 16).astype(np.uint16))
        weight.__dict__["small"] = known
    return known[2]


@lru_cache(maxsize=64)
def _one_group(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`rows` and `starts` of grouped_product for one weight and all rows."""
    return np.arange(rows), np.array([0, rows])


def product(x: Tensor, weight: Tensor, segment: int) -> Tensor:
    """x [T, K] times weight [K, N], adding up segments of K."""
    out, values = result(x.shape[0], weight.shape[1])
    grouped_product(array(x), *_one_group(x.shape[0]), small(weight)[None], segment, values)
    return out


@cache
def blas_segment(k: int, n: int, threads: int) -> int | None:
    """The length of BLAS's segments for a [rows, k] x [k, n] float32 product; None: no length gives its bits.

    Compared are all numbers of rows that exact mode pads to, and some large ones.
    """
    generator = torch.Generator().manual_seed(k * 1_000_003 + n)
    x = torch.randn(max(reference.LARGE_SAMPLES), k, generator=generator)
    weight = torch.randn(k, n, generator=generator)
    try:
        padded = reference.padded_rows(k, n, torch.float32, False, threads)
    except reference.InexactMatmulError:
        return None
    with reference.cpu_threads(1):
        blas = {count: torch.mm(x[:count], weight) for count in {*padded[1:], *reference.LARGE_SAMPLES}}
    some, columns = min(blas), weight[:, :TRIED_COLUMNS].contiguous()
    longest = min(k, LONGEST_SEGMENT)
    equal_parts = (k // parts for parts in range(2, 9) if 0 < k // parts <= longest)
    for segment in dict.fromkeys((longest, *equal_parts, *range(16, longest, 16))):
        if torch.equal(product(x[:some], columns, segment), blas[some][:, :TRIED_COLUMNS]) and all(
            torch.equal(product(x[:count], weight, segment), expected) for count, expected in blas.items()
        ):
            return segment
    return None


def linear(x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """See the plain-torch twin, which also does what is not float32."""
    if weight.dtype == torch.float32 and x.dtype == torch.float32 and weight.is_contiguous():
        k, n = weight.shape
        if n <= NARROW:
            return product(x.contiguous(), weight, k)
        narrow = weight.nbytes < WIDE_BYTES and small(weight).dtype != np.uint16
        few = MOST_ROWS if narrow else MOST_ROWS_WIDE
        segment = blas_segment(k, n, torch.get_num_threads()) if x.shape[0] <= few else None
        if segment is not None:
            return product(x.contiguous(), weight, segment)
    return reference.linear(x, weight, exact)


def bmm(a: Tensor, b: Tensor, exact: bool) -> Tensor:
    """See the plain-torch twin. K is added up in one piece, for any number of rows."""
    batch, rows, inner = a.shape
    out, values = result(batch, rows, b.shape[2])
    places = (np.arange(batch * rows), np.arange(batch + 1) * rows)
    flat = (array(a.contiguous()).reshape(-1, inner), *places, array(b.contiguous()))
    grouped_product(*flat, inner, values.reshape(batch * rows, -1))
    return out
