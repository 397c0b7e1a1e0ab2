"""The trace of an answer for people: the text coloured by origin, and a table with a line per token."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from rich.markup import escape

from skipstone.cli.output import speculation_line
from skipstone.tools.report import console, table_of
from skipstone.tools.trace.run import PROMPT, TracedToken, TraceReport

HEADINGS = ("#", "step", "token", "origin", "instead of", "two likeliest", "read by the sparse layers")
COLOURS = {
    PROMPT: "dim", "accepted": "green", "recovered": "red", "bonus": "cyan", "sampled": "white",
}  # fmt: skip
MEANING = {
    "accepted": "a draft that the target agreed with",
    "recovered": "the target's token in place of a draft",
    "bonus": "one more after all drafts were accepted",
    "sampled": "made without drafts",
}


def render(report: TraceReport) -> None:
    """Print it."""
    out = console()
    texts = [(COLOURS[token.origin], escape(token.text or f" {token.token_id}")) for token in report.tokens]
    out.print("".join(f"[{colour}]{text}[/]" for colour, text in texts))
    out.print(f"\nspeculation: {escape(report.speculation)}")
    table = table_of(None, HEADINGS, HEADINGS[2:], overflow="fold")
    for _, tokens in groupby(report.generated, key=lambda token: token.step):
        for token in tokens:
            table.add_row(*_row(token))
        table.add_section()
    out.print(table)
    counts = Counter(token.origin for token in report.generated)
    for name, meaning in MEANING.items():
        if counts[name]:
            out.print(f"[{COLOURS[name]}]{name:<10}[/]{counts[name]:>5}  {meaning}")
    if report.dense_layers:
        out.print(f"layers that read everything: {', '.join(map(str, report.dense_layers))}")
    if report.stats is not None:
        out.print(f"speculation: {speculation_line(report.stats)}")


def _row(token: TracedToken) -> list[str]:
    colour = COLOURS[token.origin]
    place = f" {token.draft}" if token.origin == "accepted" else ""
    replaced = "" if token.replaced is None else _token(token.replaced, token.replaced_text)
    texts = [*token.top_texts, None, None]
    top = ", ".join(f"{_token(one, text)} {logit:.2f}" for (one, logit), text in zip(token.top, texts, strict=False))
    name = _token(token.token_id, token.text or None)
    return [
        str(token.position), str(token.step), f"[{colour}]{name}[/]", f"[{colour}]{token.origin}{place}[/]", replaced,
        top, summary(token),
    ]  # fmt: skip


def summary(token: TracedToken) -> str:
    """How much of its context the row read: the range over layers of the units that any of a layer's heads chose."""
    if not token.reads:
        return "no sparse layer"
    unit = token.reads[0].unit
    visible = -(-token.position // unit)  # the row stands one position before its token
    counts = [len({one for group in read.selected for one in group}) for read in token.reads]
    span = "-".join(map(str, sorted({min(counts), max(counts)})))
    what = "tokens" if unit == 1 else f"blocks of {unit}"
    return f"{span} of {visible} {what}"


def _token(token_id: int, text: str | None) -> str:
    return str(token_id) if text is None else escape(repr(text))
