"""Where the reports of these commands go: JSON to a file or standard output, else tables for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from skipstone.cli.output import check_writable, writing

if TYPE_CHECKING:  # rich is imported when something is printed
    from rich.console import Console, OverflowMethod
    from rich.table import Table

WIDTH_ELSEWHERE = 160  # of what is no terminal
STDOUT = "-"
Report = TypeVar("Report")


def check_target(target: str | None) -> None:
    """Find out before the work whether `publish` can write. Raises ConfigError."""
    if target not in (None, STDOUT):
        check_writable(target)


def publish(report: Report, target: str | None, render: Callable[[Report], None], indent: int = 2) -> None:
    """Write JSON to the file `target`, and print the report for people; - as a target prints the JSON instead."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=indent)
    if target == STDOUT:
        print(encoded.decode())
        return
    if target:
        with writing(target):
            Path(target).write_bytes(encoded + b"\n")
    render(report)


def console() -> Console:
    """Where results go: standard output, wide enough for tables when it is no terminal."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else WIDTH_ELSEWHERE
    return Console(width=wide, highlight=False, soft_wrap=False)


def table_of(
    title: str | None, headings: Sequence[str], left: Container[str], overflow: OverflowMethod = "ellipsis"
) -> Table:
    """An empty table; columns named in `left` are aligned to the left, the others to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow=overflow)
    return table
