"""What the server watches of the engine's steps: their times, and on request what the sparse layers chose to read."""

from __future__ import annotations

import time

from skipstone.core.batch import PAD, Selection
from skipstone.core.observer import EmittedRun, Observer, Phase
from skipstone.core.request import Request
from skipstone.server.generation import LayerRead


class StepObserver(Observer):
    """Lives on the engine's thread. Looks at selections only while a request is traced."""

    wants_phases = False  # steps that overlap are worth more than the times of their parts

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {"target": 0.0, "verify": 0.0, "draft": 0.0}
        """Spent in each part of the steps."""
        self._last = 0.0
        self._traced: dict[str, list[LayerRead]] = {}
        self._selections: dict[int, Selection] = {}  # of the running step

    def begin_step(self) -> None:
        """Start the clock of a step's first part."""
        self._last = time.perf_counter()

    def on_phase(self, phase: Phase) -> None:
        """Count the time since the part before."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    @property
    def wants_runs(self) -> bool:  # type: ignore[override]
        """While a request is traced; steps cannot overlap then."""
        return bool(self._traced)

    def begin_trace(self, request: Request) -> None:
        """Keep what is read for this request's next token."""
        self._traced[request.request_id] = []

    def end_trace(self, request: Request) -> list[LayerRead]:
        """Stop it; returns what was kept."""
        return self._traced.pop(request.request_id, [])

    def on_selection(self, layer: int, selection: Selection) -> None:
        """Keep it until the step's tokens are known."""
        if self._traced:
            self._selections[layer] = selection

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """Attribute the selections to the rows behind the traced tokens."""
        for run in runs:
            if run.request.request_id in self._traced:
                self._traced[run.request.request_id] = self._reads(run.rows[0])
        self._selections = {}

    def _reads(self, row: int) -> list[LayerRead]:
        reads = []
        for layer, selection in sorted(self._selections.items()):
            chosen = [[unit for unit in group if unit != PAD] for group in selection.indices[row].tolist()]
            reads.append(LayerRead(layer=layer, unit=selection.unit, selected=chosen))
        return reads
