"""The report of `skipstone check` for people: a table, each first difference, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from skipstone.tools.check.compare import NEAR_TIE, Difference
from skipstone.tools.check.run import Cell, CheckReport
from skipstone.tools.report import console, table_of

SHOWN = 5  # differences of one cell; the JSON report has all
POSITIONS, GRAPHS = "accepted, by position", "equal texts as graphs"
HEADINGS = (
    "proposer", "k", "equal texts", "bit-equal logits", "largest difference", "steps", "acceptance length", POSITIONS,
)  # fmt: skip


def render(report: CheckReport) -> None:
    """Print it."""
    out, graphs = console(), report.ran_as_graphs
    title = f"{report.model}: against k = 0, {report.reference_steps} steps"
    table = table_of(title, [*HEADINGS, *([GRAPHS] if graphs else [])], ("proposer", POSITIONS))
    for cell in report.cells:
        unwatched = [] if cell.unwatched is None else [_share(cell.unwatched, len(report.texts), True)]
        table.add_row(*_row(cell, report.exact), *unwatched)
    out.print(table)
    for cell in report.cells:
        if cell.refused:
            out.print(f"{cell.proposer}, k = {cell.k} was not run: {escape(cell.refused)}")
        for difference in cell.differences[:SHOWN]:
            out.print(_described(difference, cell, report))
        if len(cell.differences) > SHOWN:
            more = len(cell.differences) - SHOWN
            out.print(f"  and {more} more of {cell.proposer}, k = {cell.k}; --json FILE has all")
    out.print(f"[bold {'green' if report.equal else 'red'}]{_verdict(report)}[/]")


def _verdict(report: CheckReport) -> str:
    counted = ("texts", "equal_texts", "rows", "equal_rows")
    texts, equal, rows, same = (sum(getattr(result, name) for result in report.ran) for name in counted)
    largest = max(result.max_logit_difference for result in report.ran)
    logits = f"logits of {same:,} of {rows:,} rows bit-equal"
    if report.equal:
        why = logits if report.exact else f"{logits}, none differs by more than {largest:.2g}"
        why += "; so are all texts of steps that run as graphs" if report.ran_as_graphs else ""
        return f"EQUAL: all {texts} texts of {len(report.ran)} runs are those of k = 0; {why}"
    kinds = [found.kind for cell in report.cells for found in cell.differences]
    ties = kinds.count(NEAR_TIE)
    counts = f"{len(kinds) - ties} logic errors, {ties} near ties"
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
    colour = "green" if part == whole else "red"
    return f"[{colour}]{text}[/]" if must_be_all else text


def _described(found: Difference, cell: Cell, report: CheckReport) -> str:
    def token(token_id: int | None) -> str:
        if token_id is None:
            return "the end"
        known = report.token_texts.get(token_id)
        return str(token_id) if known is None else f"{token_id} {escape(repr(known))}"

    def top(likeliest: Sequence[tuple[int, float]]) -> str:
        return ", ".join(f"{token(token_id)} {logit:.6g}" for token_id, logit in likeliest)

    text = next(text for text in report.texts if text.request_id == found.request_id)
    where = f"{escape(text.prompt)} at temperature {text.temperature:g}, token {found.position}"
    colour = "yellow" if found.kind == NEAR_TIE else "red"
    lines = [
        f"[{colour}]{cell.proposer}, k = {cell.k}: {found.kind}[/] in {where}: {escape(found.why)}",
        f"  expected {token(found.expected)}, got {token(found.got)} ({found.origin})",
    ]
    if found.expected_top:
        lines.append(f"  two likeliest at k = 0: {top(found.expected_top)}")
        differ = f"logits differ by {found.logit_difference:.2g}"
        lines.append(f"  two likeliest here:     {top(found.got_top)}; {differ}")
    return "\n".join(lines)
