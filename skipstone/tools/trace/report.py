"""The trace of an answer for people: the text coloured by origin, and a table with a line per token."""

from __future__ import annotations

from collections import Counter

from rich.markup import escape
from rich.table import Table

from skipstone.cli.output import speculation_line
from skipstone.tools.progress import console
from skipstone.tools.trace.run import PROMPT, TracedToken, TraceReport

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
    out.print("".join(f"[{COLOURS[token.origin]}]{escape(_shown(token))}[/]" for token in report.tokens))
    out.print(f"\nspeculation: {escape(report.speculation)}")
    table = Table(title_justify="left")
    for heading in ("#", "step", "token", "origin", "instead of", "two likeliest", "read by the sparse layers"):
        table.add_column(heading, justify="right" if heading in ("#", "step") else "left", overflow="fold")
    last_step = None
    for token in report.generated:
        if last_step is not None and token.step != last_step:
            table.add_section()
        last_step = token.step
        table.add_row(*_row(token))
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
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"
    what = "tokens" if unit == 1 else f"blocks of {unit}"
    return f"{span} of {visible} {what}"


def _token(token_id: int, text: str | None) -> str:
    return str(token_id) if text is None else escape(repr(text))


def _shown(token: TracedToken) -> str:
    return token.text or f" {token.token_id}"
