"""A progress bar on a terminal; elsewhere a line at every quarter. Always on standard error."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from skipstone.cli.output import note


class Progress(Bar):
    """Counts `total` pieces of work; a context in which the bar is shown."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self.terminal = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=Console(stderr=True), disable=not self.terminal, transient=True)
        self.task = self.add_task(title, total=total)

    def say(self, what: str) -> None:
        """Name the piece that is being worked on."""
        self.update(self.task, description=f"{self.title}: {what}")

    def tick(self, count: int = 1) -> None:
        """Count pieces that are done."""
        before, self.done = self.done, self.done + count
        self.advance(self.task, count)
        quarter = self.done * 4 // self.total
        if not self.terminal and quarter > before * 4 // self.total:
            note(f"{self.title}: {quarter * 25} %")


def announce(seconds: float) -> None:
    """Say how long something will take; an estimate, so in round numbers."""
    size, unit = (3600, "h") if seconds >= 5400 else (60, "min") if seconds >= 90 else (1, "s")
    note(f"this takes about {max(seconds / size, 1):.0f} {unit} here")
