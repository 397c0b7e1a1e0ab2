"""The report of `skipstone bench serve`: a table, and one HTML file with curves that needs nothing else to be read."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from skipstone.tools.bench.load_stats import METRICS, PERCENTILES, percentile
from skipstone.tools.progress import console

Values = Mapping[str, Sequence[float]]  # of every metric, in milliseconds

COLORS = ("#0b6bcb", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0e7490", "#a16207", "#be185d")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 520, 260, 52, 34, 14
SHARES = [*range(100), 99.5, 99.9, 100]
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #8884; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
td, th { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--faint) }
td:first-child, th:first-child { text-align: left }
figure { margin: 0 } .charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) }
svg { width: 100%; height: auto } svg text { fill: var(--ink); font-size: 11px } svg .grid { stroke: var(--faint) }
"""


def name_of(run: Mapping[str, Any]) -> str:
    """A run's rate in words."""
    return "all at once" if run["request_rate"] == "inf" else f"{run['request_rate']:g}/s"


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table: what each row is, then a cell for every run."""
    rows = [
        ["requests answered", *(f"{run['completed']}" for run in runs)],
        ["requests failed", *(f"{run['failed']}" for run in runs)],
        ["seconds", *(f"{run['duration']:.2f}" for run in runs)],
        ["prompt tokens", *(f"{run['total_input_tokens']}" for run in runs)],
        ["output tokens", *(f"{run['total_output_tokens']}" for run in runs)],
        ["requests/s", *(f"{run['request_throughput']:.2f}" for run in runs)],
        ["output tokens/s", *(f"{run['output_throughput']:.1f}" for run in runs)],
    ]
    if runs[0]["request_goodput"] is not None:
        rows.append(["requests/s within the limits", *(f"{run['request_goodput']:.2f}" for run in runs)])
    for name, words in METRICS.items():
        rows.append([f"{words}, ms: mean", *(f"{run[f'mean_{name}_ms']:.1f}" for run in runs)])
        for share in PERCENTILES:
            rows.append([f"  {name} p{share}", *(f"{run[f'p{share}_{name}_ms']:.1f}" for run in runs)])
    if any(run["max_wait_ms"] > 1 for run in runs):
        rows.append(["longest wait before sending, ms", *(f"{run['max_wait_ms']:.1f}" for run in runs)])
    if any("spec_decode_num_drafts" in run for run in runs):
        lengths = [run.get("spec_decode_acceptance_length") for run in runs]
        rates = [run.get("spec_decode_per_position_acceptance_rates", []) for run in runs]
        rows.append(["tokens per verify step", *(f"{length:.2f}" if length else "" for length in lengths)])
        rows.append(["drafts kept by position", *(" ".join(f"{rate:.2f}" for rate in each) for each in rates)])
    return rows


def render(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(name_of(run), justify="right")
    for row in rows_of(runs):
        table.add_row(*row)
    out = console()
    out.print(table)
    for run in runs:
        for error, count in run["errors"].items():
            out.print(f"{name_of(run)}: {count} times: {error}", markup=False)


def page(title: str, facts: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], values: Sequence[Values]) -> str:
    """The whole HTML file."""
    names = [name_of(run) for run in runs]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *names))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows_of(runs))
    lines = [f"{key}: {value}" for key, value in facts.items()]
    charts = [_chart(f"{words}, ms", names, [each[name] for each in values]) for name, words in METRICS.items()]
    errors = [f"{name_of(run)}: {count} times: {text}" for run in runs for text, count in run["errors"].items()]
    return "".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>',
            f"<h1>{html.escape(title)}</h1><p>{html.escape('; '.join(lines))}</p>",
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
            "".join(f"<p>{html.escape(error)}</p>" for error in errors),
            "<h2>Share of the requests within a time</h2>",
            f'<div class="charts">{"".join(charts)}</div></html>\n',
        ]
    )


def _chart(title: str, names: Sequence[str], lines: Sequence[Sequence[float]]) -> str:
    """Cumulative curves as an SVG picture, logarithmic in time."""
    every = [value for line in lines for value in line]
    if not every:
        return ""
    low, high = max(min(every), 0.01), max(*every, 0.02)
    start, span = math.log10(low), max(math.log10(high) - math.log10(low), 0.05)

    def place(value: float, share: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * (math.log10(max(value, low)) - start) / span
        return f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share / 100:.1f}"

    parts = [f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for share in (0, 25, 50, 75, 100):
        x, y = place(low, share).split(",")
        parts.append(f'<path class="grid" d="M{x},{y}H{WIDTH - 8}"/><text x="4" y="{y}">{share} %</text>')
    for value in _ticks(low, high):
        x, y = place(value, 0).split(",")
        parts.append(f'<path class="grid" d="M{x},{y}V{TOP}"/><text x="{x}" y="{HEIGHT - 16}">{value:g}</text>')
    for i, (name, line) in enumerate(zip(names, lines, strict=True)):
        color = COLORS[i % len(COLORS)]
        points = " ".join(place(percentile(line, share), share) for share in SHARES) if line else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 6}" y="{TOP + 12 + 14 * i}" style="fill:{color}">{html.escape(name)}</text>')
    return "".join([*parts, f"</svg><figcaption>{html.escape(title)}</figcaption></figure>"])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within the range: 1, 2, 5 and their tenfolds."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]
