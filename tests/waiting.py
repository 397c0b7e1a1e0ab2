"""Waits and bounds for a machine that may be slow, or busy with other programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

PATIENCE_S = 300.0  # for anything that must happen; only what never does takes so long
TRIES = 20
LOOP_S = 0.010  # processor time of `_loop` where the limits of these tests were set


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait until it holds; fail when it does not come to hold."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def below(limit: float, measure: Callable[[], float]) -> None:
    """A measured time must be below a limit, which is longer on a slower machine.

    Other programs make a time longer, never shorter, so one that is short enough is enough.
    """
    limit *= slowness()
    times: list[float] = []
    while not times or (times[-1] >= limit and len(times) < TRIES):
        times.append(measure())
    assert times[-1] < limit, f"{times} are all above {limit:.3g}"


@cache
def slowness() -> float:
    """How many times slower this machine is than the one where the limits were set; at least 1."""
    return max(1.0, min(_loop() for _ in range(5)) / LOOP_S)


def _loop() -> float:
    begun, total = time.process_time(), 0
    for i in range(300_000):
        total += i % 7
    return time.process_time() - begun
