"""Notices when drafts stop being accepted: the last minute against the time before it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from skipstone.core.speculation import SpeculationStats

WINDOW_S = 60.0
INTERVAL_S = 1.0
FEWEST_STEPS = 100  # verify steps from which on a rate says something
FALL = 0.5  # a recent rate under this share of the earlier one is a collapse
LOWEST_RATE = 0.05  # and so is one under this, whatever was before


class Reading(NamedTuple):
    """The engine's counters of drafts at one time."""

    time: float
    steps: int
    drafted: int
    accepted: int


class AcceptanceWatch:
    """Looks at the engine's counters after every step; keeps a reading per second."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque([Reading(float("-inf"), 0, 0, 0)])
        self._now = self._readings[0]

    def observe(self, now: float, stats: SpeculationStats) -> None:
        """Take a reading if the last one is a second old."""
        if now - self._now.time < INTERVAL_S:
            return
        self._now = Reading(now, stats.steps, stats.drafted, stats.accepted)
        self._readings.append(self._now)
        while len(self._readings) > 1 and self._readings[1].time <= now - WINDOW_S:
            self._readings.popleft()

    @property
    def recent_length(self) -> float | None:
        """Tokens per verify step in the window; None without any."""
        start = self._readings[0]
        steps = self._now.steps - start.steps
        return 1 + (self._now.accepted - start.accepted) / steps if steps else None

    @property
    def collapsed(self) -> bool:
        """Whether far fewer drafts are accepted than before."""
        start = self._readings[0]
        drafted = self._now.drafted - start.drafted
        if self._now.steps - start.steps < FEWEST_STEPS or not drafted:
            return False
        recent = (self._now.accepted - start.accepted) / drafted
        earlier = start.accepted / start.drafted if start.steps >= FEWEST_STEPS else 0.0
        return recent < max(FALL * earlier, LOWEST_RATE)
