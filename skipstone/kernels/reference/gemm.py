"""Matrix products whose rows do not depend on how many other rows are in the call.

CPU BLAS libraries pick another kernel for 1 row than for 4, and the kernels add up in another order, so the same row
gets other bits. Exact mode pads the rows to a count from which on all counts agree. Which counts agree is measured on
this machine, per weight shape, at the first use: bit-equality of every small count and of some large ones with a call
of many rows. On x86 with MKL: 4 rows, and 8 and above; `bench/decode.py` measures what it costs.

Weights are stored as [in, out]: with weights that are not in the CPU's cache, 4 rows then take half the time that they
take with [out, in] (34 against 68 us for 256 x 320 on AVX2), as BLAS streams them in their own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_PROBED = 16  # counts above are taken to agree when the samples below do
LARGE_SAMPLES = (17, 20, 24, 31, 33, 64, 100)
PROBED_BATCHES = (1, 2, 5)


class InexactMatmulError(RuntimeError):
    """No row count up to LARGEST_PROBED agrees with larger ones: this BLAS cannot serve exact mode."""


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Run a block on `count` threads."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


@cache
def padded_rows(k: int, n: int, dtype: torch.dtype, batched: bool, threads: int) -> tuple[int, ...]:
    """For each row count 0..LARGEST_PROBED the count to pad to, for a [rows, k] x [k, n] product.

    `batched` probes torch.bmm, else torch.mm. BLAS splits work by threads, so the products on `threads` threads must
    also equal those on one, which small steps use.
    """
    generator = torch.Generator().manual_seed(k * 1_000_003 + n)
    many = max(LARGE_SAMPLES)
    x = torch.randn(many, k, generator=generator).to(dtype)
    weight = torch.randn(k, n, generator=generator).to(dtype)

    def products(rows: Tensor) -> list[Tensor]:
        if not batched:
            return [torch.mm(rows, weight)]
        # A batch of one takes another path in BLAS than a larger one.
        return [torch.bmm(rows.expand(b, -1, -1), weight.expand(b, -1, -1))[-1] for b in PROBED_BATCHES]

    with cpu_threads(1):
        expected = products(x)[-1]

    def agrees(count: int) -> bool:
        starts = {0, 1, min(5, many - count), many - count}
        rows = [(s, x[s : s + count].contiguous()) for s in starts]
        equal = True
        for used in {1, threads}:
            with cpu_threads(used):
                equal = equal and all(
                    torch.equal(out, expected[s : s + count]) for s, part in rows for out in products(part)
                )
        return equal

    good = [count for count in range(1, LARGEST_PROBED + 1) if agrees(count)]
    if LARGEST_PROBED not in good or not all(agrees(count) for count in LARGE_SAMPLES):
        raise InexactMatmulError(f"rows of a [rows, {k}] x [{k}, {n}] product in {dtype} depend on their number here")
    return tuple(min(g for g in good if g >= count) for count in range(LARGEST_PROBED + 1))


def _pad_count(x: Tensor, n: int, batched: bool) -> int:
    """Rows to add to x [..., rows, k] before a product with n columns."""
    rows, k = x.shape[-2:]
    if rows > LARGEST_PROBED or not x.is_cpu:
        return 0
    return padded_rows(k, n, x.dtype, batched, torch.get_num_threads())[rows] - rows


@cache
def padded_rows_of_both(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """For each row count the smallest one from it on to which both of two products pad."""
    good = [count for count in range(len(first)) if first[count] == count == second[count]]
    return tuple(min(g for g in good if g >= count) for count in range(len(first)))


def linear(x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """x [T, K] times weight [K, N]: [T, N] in the weight's dtype. With `exact`, a row's bits do not depend on T."""
    x = x.to(weight.dtype)
    rows = x.shape[0]
    extra = _pad_count(x, weight.shape[1], batched=False) if exact else 0
    if not extra:
        return torch.mm(x, weight)
    padded = x.expand(rows + extra, -1) if rows == 1 else F.pad(x, (0, 0, 0, extra))
    return torch.mm(padded, weight)[:rows]


def bmm(a: Tensor, b: Tensor, exact: bool) -> Tensor:
    """a [B, M, K] times b [B, K, N]: [B, M, N]. With `exact`, a row's bits do not depend on B or M."""
    rows = a.shape[1]
    extra = _pad_count(a, b.shape[2], batched=True) if exact else 0
    if not extra:
        return torch.bmm(a, b)
    return torch.bmm(F.pad(a, (0, 0, 0, extra)), b)[:, :rows].contiguous()
