"""Counters of speculation: of one request, or of all."""

from __future__ import annotations

from itertools import zip_longest

import msgspec


class SpeculationStats(msgspec.Struct, kw_only=True):
    """`steps` counts verify steps with at least one draft; the lists count by the draft's place in its run.

    `simulated`: acceptance came from given rates, not from the model; the text then means nothing.
    """

    steps: int = 0
    drafted_per_position: list[int] = []
    accepted_per_position: list[int] = []
    simulated: bool = False

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_per_position)

    @property
    def accepted(self) -> int:
        """Drafts that were emitted."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step, the bonus or recovered token included; None before the first."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def acceptance_rates(self) -> list[float]:
        """Per position: the share of verify steps with a draft there in which it was accepted."""
        return [a / d for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """The counters of both together."""
        drafted = zip_longest(self.drafted_per_position, other.drafted_per_position, fillvalue=0)
        accepted = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationStats(
            steps=self.steps + other.steps,
            drafted_per_position=[a + b for a, b in drafted],
            accepted_per_position=[a + b for a, b in accepted],
            simulated=self.simulated or other.simulated,
        )

    def record(self, drafted: int, accepted: int) -> None:
        """Count one verify step."""
        if not drafted:
            return
        self.steps += 1
        missing = drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for i in range(drafted):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < accepted

    def retract(self, accepted: int, emitted: int) -> None:
        """Of the `accepted` drafts of one verify step, only those among its first `emitted` tokens count."""
        for i in range(emitted, accepted):
            self.accepted_per_position[i] -= 1
