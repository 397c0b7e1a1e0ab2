"""The report of `skipstone check` for people: a table, each first difference, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from skipstone.tools.check.compare import NEAR_TIE, Difference
from skipstone.tools.check.run import Cell, CheckReport
from skipstone.tools.progress import console

SHOWN = 5  # differences of one cell; the JSON report has all


def render(report: CheckReport) -> None:
    """Print it."""
    out = console()
    table = Table(title=f"{report.model}: against k = 0, {report.reference_steps} steps", title_justify="left")
    for heading in (
        "proposer",
        "k",
        "equal texts",
        "bit-equal logits",
        "largest difference",
        "steps",
        "acceptance length",
    ):
        table.add_column(heading, justify="left" if heading == "proposer" else "right")
    table.add_column("accepted, by position")
    if any(cell.unwatched is not None for cell in report.cells):
        table.add_column("equal texts as graphs", justify="right")
    for cell in report.cells:
        graphs = [] if cell.unwatched is None else [_share(cell.unwatched, len(report.texts), True)]
        table.add_row(*_row(cell, report.exact), *graphs)
    out.print(table)
    for cell in report.cells:
        if cell.refused:
            out.print(f"{cell.proposer}, k = {cell.k} was not run: {escape(cell.refused)}")
        for difference in cell.differences[:SHOWN]:
            out.print(_described(difference, cell, report))
        if len(cell.differences) > SHOWN:
            more = len(cell.differences) - SHOWN
            out.print(f"  and {more} more of {cell.proposer}, k = {cell.k}; --json FILE has all")
    out.print(f"[bold {'green' if report.equal else 'red'}]{verdict(report)}[/]")


def verdict(report: CheckReport) -> str:
    """The last line."""
    results = report.ran
    texts, rows = sum(result.texts for result in results), sum(result.rows for result in results)
    equal, same = sum(result.equal_texts for result in results), sum(result.equal_rows for result in results)
    found = [difference for result in results for difference in result.differences]
    largest = max(result.max_logit_difference for result in results)
    logits = f"logits of {same:,} of {rows:,} rows bit-equal"
    if report.equal:
        why = logits if report.exact else f"{logits}, none differs by more than {largest:.2g}"
        if any(cell.unwatched is not None for cell in report.cells):
            why += "; so are all texts of steps that run as graphs"
        return f"EQUAL: all {texts} texts of {len(results)} runs are those of k = 0; {why}"
    ties = sum(difference.kind == NEAR_TIE for difference in found)
    counts = f"{len(found) - ties} logic errors, {ties} near ties"
    return f"DIFFERENT: {texts - equal} of {texts} texts ({counts}); {logits}, largest difference {largest:.2g}"


def _row(cell: Cell, exact: bool) -> list[str]:
    result = cell.comparison
    if result is None:
        return [cell.proposer, str(cell.k), "[dim]not run[/]", "", "", "", "", ""]
    return [
        cell.proposer,
        str(cell.k),
        _share(result.equal_texts, result.texts, True),
        _share(result.equal_rows, result.rows, exact),
        f"{result.max_logit_difference:.2g}",
        str(cell.steps),
        "-" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
        " ".join(f"{rate:.2f}" for rate in cell.acceptance_rates),
    ]


def _share(part: int, whole: int, must_be_all: bool) -> str:
    text = f"{part:,}/{whole:,}"
    if not must_be_all:
        return text
    return f"[green]{text}[/]" if part == whole else f"[red]{text}[/]"


def _described(found: Difference, cell: Cell, report: CheckReport) -> str:
    text = next(text for text in report.texts if text.request_id == found.request_id)
    where = f"{escape(text.prompt)} at temperature {text.temperature:g}, token {found.position}"
    colour = "yellow" if found.kind == NEAR_TIE else "red"
    lines = [
        f"[{colour}]{cell.proposer}, k = {cell.k}: {found.kind}[/] in {where}: {escape(found.why)}",
        f"  expected {_token(found.expected, report)}, got {_token(found.got, report)} ({found.origin})",
    ]
    if found.expected_top:
        lines.append(f"  two likeliest at k = 0: {_top(found.expected_top, report)}")
        lines.append(
            f"  two likeliest here:     {_top(found.got_top, report)}; logits differ by {found.logit_difference:.2g}"
        )
    return "\n".join(lines)


def _token(token: int | None, report: CheckReport) -> str:
    if token is None:
        return "the end"
    return f"{token} {escape(repr(report.token_texts[token]))}" if token in report.token_texts else str(token)


def _top(top: Sequence[tuple[int, float]], report: CheckReport) -> str:
    return ", ".join(f"{_token(token, report)} {logit:.6g}" for token, logit in top)
