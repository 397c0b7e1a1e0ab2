"""How long calls take on a GPU: replays of a graph, so that neither Python nor launches from the host are measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

FEWEST_CALLS = 20  # in one graph
LONG_REPLAY = 20e-3  # seconds; of slower calls a graph has fewer, and at least FEWEST_SLOW_CALLS
FEWEST_SLOW_CALLS = 3


class Timing(NamedTuple):
    """Median time of one call, and by how much a second measurement differed."""

    us: float
    spread: float


def elapsed(call: Callable[[], Any]) -> float:
    """Seconds between two events around a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_calls(calls: Sequence[Callable[[], Any]], rounds: int) -> Timing:
    """Time calls that do the same with other inputs, one after the other, in a graph that is replayed."""
    for call in calls[:2]:  # compiles
        call()
    once = max(elapsed(calls[0]), 1e-7)
    count = max(FEWEST_CALLS, len(calls))
    if once * count > LONG_REPLAY:
        count = min(count, max(FEWEST_SLOW_CALLS, math.ceil(LONG_REPLAY / once)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    first, second = (statistics.median(elapsed(graph.replay) for _ in range(rounds)) for _ in range(2))
    return Timing(min(first, second) / count * 1e6, abs(first - second) / min(first, second))


def copy_rate() -> float:
    """Bytes per second that a large copy reads and writes here: the ceiling of whatever streams memory."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(elapsed(lambda: target.copy_(source)) for _ in range(5))


def matmul_rate(size: int = 8192) -> float:
    """Operations per second of a bfloat16 product of random matrices: the ceiling of whatever computes."""
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    torch.mm(a, b)
    return 2 * size**3 / statistics.median(elapsed(lambda: torch.mm(a, b)) for _ in range(7))
