"""The one matrix product that kernels multiply with, so that bits agree between them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@cache
def is_hip() -> bool:
    """Whether kernels are compiled for AMD."""
    return torch.version.hip is not None


@triton.jit
def dot(a, b, acc):
    """a [M, K] times b [K, N] plus acc [M, N], float32 accumulator.

    The interpreter's float32 products depend on a row's place in the tile; those in float64 do not after rounding.
    """
    if INTERPRETED:
        wide = tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64), out_dtype=tl.float64)
        result = acc + wide.to(tl.float32)
    else:
        result = tl.dot(a, b, acc, input_precision="ieee")
    return result
