"""How CPU kernels are compiled by Numba, and the exponential that they share.

Signatures are given, so that loading a module compiles its kernels: once per machine, as the result is kept in a folder
named after the sources. `reassociate` lets sums be vectorised. Their order then follows from their length alone, so a
row's bits do not depend on other rows; without it every sum goes in the order in which it is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

LOG = logging.getLogger("skipstone.kernels")
F32 = np.float32
LOG2_E, LN2_HIGH, LN2_LOW = F32(1.4426950408889634), F32(0.693359375), F32(-2.12194440e-4)
ROUND = F32(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits


@cache
def cache_folder() -> str | None:
    """Where compiled kernels of these very sources are kept; None: nowhere, as no home can be written."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipstone"
        folder = root / f"kernels-{digest.hexdigest()[:16]}"
        known = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        LOG.warning("compiling kernels for this processor, at every start, as they cannot be kept: %s", error)
        return None
    if not known:
        LOG.warning("compiling kernels for this processor, once; this takes some 10 seconds")
    return str(folder)


def kernel(*signatures: str, reassociate: bool = False) -> Callable[..., Any]:
    """Compile a function now, for these types, or load what an earlier process compiled."""
    flags = {"contract", "nsz"} | ({"reassoc"} if reassociate else set())
    config: Any = numba.config

    def build(function: Callable[..., Any]) -> Any:
        folder, before = cache_folder(), config.CACHE_DIR
        config.CACHE_DIR = folder or before
        try:
            options: Any = {"fastmath": flags, "nogil": True, "error_model": "numpy", "cache": folder is not None}
            return numba.njit(list(signatures), **options)(function)
        finally:
            config.CACHE_DIR = before

    return build


@numba.njit(fastmath={"contract"}, error_model="numpy")  # its own arithmetic, wherever it is inlined
def exp(x):
    """e^x of a float32 by a polynomial, to about 1 ulp: 0 from about -87.5 downwards, infinity from 88.4 upwards."""
    x = min(max(x, F32(-88.0)), F32(88.5))
    shifted = x * LOG2_E + ROUND
    power = F32(shifted).view(np.int32)
    whole = shifted - ROUND
    rest = x - whole * LN2_HIGH
    rest = rest - whole * LN2_LOW
    total = F32(1.9875691500e-4)
    total = total * rest + F32(1.3981999507e-3)
    total = total * rest + F32(8.3334519073e-3)
    total = total * rest + F32(4.1665795894e-2)
    total = total * rest + F32(1.6666665459e-1)
    total = total * rest + F32(5.0000001201e-1)
    total = total * rest * rest + rest + F32(1.0)
    return total * np.int32((power << 23) + np.int32(0x3F800000)).view(np.float32)


def result(*shape: int, dtype: Any = np.float32) -> tuple[Tensor, np.ndarray]:
    """What an op returns, not filled yet, as a tensor and as an array; `array` knows the tensor again."""
    values = np.empty(shape, dtype)
    tensor = torch.from_numpy(values)
    tensor.__dict__["array"] = values
    return tensor, values


def array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array. Making one takes as long as a small op, so what `result` made is kept with its tensor."""
    values: np.ndarray | None = tensor.__dict__.get("array")
    return tensor.numpy() if values is None else values


def kept(tensor: Tensor) -> np.ndarray:
    """The same for a contiguous tensor that stays, a weight or a cache: its array is made once.

    The array does not own the memory, as the two would keep each other alive.
    """
    address = tensor.data_ptr()
    known: tuple[int, np.ndarray] | None = tensor.__dict__.get("kept")
    if known is None or known[0] != address:
        if not tensor.is_contiguous():
            raise ValueError(f"a weight or cache of shape {list(tensor.shape)} is not contiguous")
        kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
        memory: Any = (ctypes.c_byte * tensor.nbytes).from_address(address)
        known = (address, np.frombuffer(memory, kind).reshape(tensor.shape))
        tensor.__dict__["kept"] = known
    return known[1]
