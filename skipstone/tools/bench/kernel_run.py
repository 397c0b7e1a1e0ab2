"""Measures one cell of `skipstone bench kernels`: right first, then timed, exact and fast."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

import torch

from skipstone.kernels.ops import OP_NAMES
from skipstone.registry import KERNELS
from skipstone.tools.bench.gpu_timing import Timing, time_calls
from skipstone.tools.bench.kernel_cells import Cell
from skipstone.tools.bench.kernel_peer import Peer
from skipstone.tools.doctor.op_cases import OP_CASES, OpCase
from skipstone.tools.doctor.op_inputs import RELEASES, Inputs
from skipstone.tools.doctor.op_run import arguments, compare, import_kernels, in_words, make_case, tensors_in

ROTATED = 180e6  # bytes that a turn through the inputs reads at the least: three times what the L2 of an H200 holds
MOST_INPUTS = 64
ROOM = 20e9  # bytes for all inputs of a cell
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")


class Ceilings(NamedTuple):
    """What this GPU reaches: bytes copied and operations of matrix products, per second."""

    bytes: float
    flops: float


class Measured(NamedTuple):
    """One line of the report. Times in microseconds; `share` is the floor over the exact time."""

    name: str
    has_exact: bool
    exact_us: float | None = None
    fast_us: float | None = None
    floor_us: float = 0.0
    share: float = 0.0
    bound: str = ""
    spread: float = 0.0
    error: float = 0.0
    peer_us: float | None = None
    failure: str | None = None


def _make(cell: Cell, seed: int) -> OpCase:
    inputs = Inputs(RELEASES, cell.shape, DTYPE, DEVICE, seed, whole=False)
    return OP_CASES[cell.op](inputs, **dict(cell.options))


def _rotation(cell: Cell) -> list[OpCase]:
    """As many inputs as it takes to read more than the L2 holds."""
    first = _make(cell, 0)
    held = sum(tensor.nbytes for tensor in tensors_in(first.args))
    count = min(MOST_INPUTS, math.ceil(ROTATED / max(first.num_bytes, 1.0)), int(ROOM // max(held, 1)))
    return [first, *(_make(cell, seed) for seed in range(1, count))]


@cache
def check(cell: Cell) -> tuple[float, str | None]:
    """Relative error of a smaller call, and what is wrong with it."""
    sizes, shape = cell.check_sizes()
    case = make_case(cell.op, sizes, shape, DTYPE, DEVICE, **dict(cell.options))
    found = compare(cell.op, case, KERNELS.load(f"{cell.op}/triton"))
    failures = [text for item in found if (text := item.failure(DTYPE))]
    return max(item.error for item in found), failures[0] if failures else None


def compile_all(cells: list[Cell], threads: int) -> None:
    """Compile the kernels of cells side by side; what fails here fails again, with its reason, when it is measured."""

    def first(cell: Cell) -> None:
        with suppress(Exception):
            case, op = _make(cell, 0), KERNELS.load(f"{cell.op}/triton")
            for exact in (True, False):
                op(*arguments(case, exact))

    import_kernels(f"{op}/triton" for op in OP_NAMES)
    small = [cell for cell in cells if cell.op != "experts_forward"]  # whose weights fill the memory
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(first, small))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure(cell: Cell, limits: Ceilings, rounds: int, peer: Peer | None) -> Measured:
    """One cell. A kernel that fails gives its reason, and the next one is measured."""
    try:
        return _measure(cell, limits, rounds, peer)
    except Exception as fault:  # of a kernel or of its compiler; the report says which
        return Measured(cell.name, False, failure=in_words(fault))
    finally:
        torch.cuda.empty_cache()


def _measure(cell: Cell, limits: Ceilings, rounds: int, peer: Peer | None) -> Measured:
    error, failure = check(cell._replace(name="", quick=False, shape=cell.check_sizes()[1]))
    cases, op = _rotation(cell), KERNELS.load(f"{cell.op}/triton")
    case = cases[0]

    def time_mode(exact: bool) -> Timing:
        return time_calls([partial(op, *arguments(each, exact)) for each in cases], rounds)

    fast = time_mode(False)
    exact = time_mode(True) if case.has_exact else fast
    least = (case.num_bytes / limits.bytes * 1e6, case.flops / limits.flops * 1e6)
    peer_us, peer_failure = None, None
    try:
        theirs = peer.calls(cell.op, cases) if peer is not None else None
        peer_us = time_calls(theirs, rounds).us if theirs else None
    except Exception as fault:  # of the peer; ours is measured all the same
        peer_failure = f"peer: {' '.join(str(fault).split())[:200]}"
    floor, bound = max(least), "memory" if least[0] >= least[1] else "compute"
    times = (exact.us, fast.us, floor, floor / exact.us, bound, max(exact.spread, fast.spread))
    return Measured(cell.name, case.has_exact, *times, error, peer_us, failure or peer_failure)
