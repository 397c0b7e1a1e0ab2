"""The report of `skipstone bench serve`: numbers under vLLM's JSON keys, a table, and a page that needs no other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from skipstone.errors import ConfigError
from skipstone.tools.bench.serve_client import Drafts, Sample
from skipstone.tools.report import console, table_of

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between events",
    "e2el": "time to the end",
}
ROWS = (  # words, key of a run, format
    ("requests answered", "completed", "d"),
    ("requests failed", "failed", "d"),
    ("seconds", "duration", ".2f"),
    ("prompt tokens", "total_input_tokens", "d"),
    ("output tokens", "total_output_tokens", "d"),
    ("requests/s", "request_throughput", ".2f"),
    ("output tokens/s", "output_throughput", ".1f"),
)
Run = Mapping[str, Any]
Values = Mapping[str, Sequence[float]]  # of every metric, in milliseconds


def parse_goals(text: str | None) -> dict[str, float]:
    """Read `ttft:200,tpot:40`, in milliseconds. Raises ConfigError."""
    goals: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, limit = part.strip().partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ConfigError(
                f"--goodput {text}: {part!r} is no limit; write ttft:200,tpot:40 (milliseconds)"
            ) from None
        if name not in METRICS or name == "itl":
            raise ConfigError(f"--goodput {text}: {name!r} is no metric of a request; there are ttft, tpot, e2el")
    return goals


def meets(sample: Sample, goals: Mapping[str, float]) -> bool:
    """Whether a request was answered within every limit."""
    if sample.error is not None:
        return False
    own = {"ttft": sample.first, "tpot": sample.per_token or 0.0, "e2el": sample.seconds}
    return all(1e3 * own[name] <= limit for name, limit in goals.items())


def values_of(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Milliseconds of every metric, over the samples that were answered."""
    answered = [sample for sample in samples if sample.error is None]
    per_token = [sample.per_token for sample in answered]
    return {
        "ttft": [1e3 * sample.first for sample in answered],
        "tpot": [1e3 * value for value in per_token if value is not None],
        "itl": [1e3 * gap for sample in answered for gap in sample.gaps],
        "e2el": [1e3 * sample.seconds for sample in answered],
    }


def summarize(samples: Sequence[Sample], seconds: float, rate: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Everything but the single requests."""
    answered = [sample for sample in samples if sample.error is None]
    prompt, output = sum(s.prompt_tokens for s in answered), sum(s.output_tokens for s in answered)
    result: dict[str, Any] = {
        "request_rate": rate if rate < float("inf") else "inf",
        "duration": seconds,
        "completed": len(answered),
        "failed": len(samples) - len(answered),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(answered) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "request_goodput": sum(meets(sample, goals) for sample in samples) / seconds if goals else None,
        "max_wait_ms": 1e3 * max(sample.sent - sample.due for sample in samples),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
    }
    for name, own in values_of(samples).items():
        values = np.array(own or [0.0])
        result |= {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(np.median(values))}
        result[f"std_{name}_ms"] = float(values.std())
        shares = np.percentile(values, PERCENTILES).tolist()
        result |= {f"p{share}_{name}_ms": value for share, value in zip(PERCENTILES, shares, strict=True)}
    return result | _acceptance([sample.drafts for sample in answered if sample.drafts is not None])


def _acceptance(drafts: Sequence[Drafts]) -> dict[str, Any]:
    """Over all requests that told of theirs; position i counts steps with more than i accepted drafts."""
    steps = sum(each.num_spec_steps for each in drafts)
    if not steps:
        return {}
    drafted, accepted = (sum(getattr(d, f"num_{kind}_tokens") for d in drafts) for kind in ("draft", "accepted_draft"))
    longest = max(len(each.acceptance_histogram) for each in drafts)
    reached = [sum(sum(each.acceptance_histogram[i + 1 :]) for each in drafts) for i in range(longest - 1)]
    return {
        "spec_decode_num_drafts": steps,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,  # percent, as vLLM has it
        "spec_decode_acceptance_length": 1 + accepted / steps,
        "spec_decode_per_position_acceptance_rates": [count / steps for count in reached],
    }


def _table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]], list[str]]:
    """Names of the runs, rows (what each is, then a cell for every run), and errors in words."""
    names = ["all at once" if run["request_rate"] == "inf" else f"{run['request_rate']:g}/s" for run in runs]
    rows = list(ROWS)
    if runs[0]["request_goodput"] is not None:
        rows.append(("requests/s within the limits", "request_goodput", ".2f"))
    for name, words in METRICS.items():
        rows.append((f"{words}, ms: mean", f"mean_{name}_ms", ".1f"))
        rows += [(f"  {name} p{share}", f"p{share}_{name}_ms", ".1f") for share in PERCENTILES]
    if any(run["max_wait_ms"] > 1 for run in runs):
        rows.append(("longest wait before sending, ms", "max_wait_ms", ".1f"))
    drafted = any("spec_decode_num_drafts" in run for run in runs)
    if drafted:
        rows.append(("tokens per verify step", "spec_decode_acceptance_length", ".2f"))
    cells = [[words, *(f"{run[key]:{form}}" if key in run else "" for run in runs)] for words, key, form in rows]
    if drafted:
        rates = [run.get("spec_decode_per_position_acceptance_rates", []) for run in runs]
        cells.append(["drafts kept by position", *(" ".join(f"{rate:.2f}" for rate in each) for each in rates)])
    counts = [(name, run["errors"].items()) for name, run in zip(names, runs, strict=True)]
    errors = [f"{name}: {count} times: {text}" for name, own in counts for text, count in own]
    return names, cells, errors


def render(runs: Sequence[Run]) -> None:
    """Print the report."""
    names, rows, errors = _table(runs)
    table = table_of(None, ["", *names], ("",))
    table.box, table.pad_edge = None, False
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print(table)
    for error in errors:
        out.print(error, markup=False)


COLORS = ("#0b6bcb", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0e7490", "#a16207", "#be185d")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 520, 260, 52, 34, 14
SHARES = [*range(100), 99.5, 99.9, 100]
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width"><style>
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #8884; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
td, th { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--faint) }
td:first-child, th:first-child { text-align: left }
figure { margin: 0 } .charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) }
svg { width: 100%; height: auto } svg text { fill: var(--ink); font-size: 11px } svg .grid { stroke: var(--faint) }
</style><h1>{{ title }}</h1><p>{{ facts }}</p>
<div class="wide"><table><thead><tr><th></th>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table></div>
{% for error in errors %}<p>{{ error }}</p>{% endfor %}
<h2>Share of the requests within a time</h2><div class="charts">{% for chart in charts if chart %}
<figure><svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ chart.title }}">
{% for y, share in chart.shares %}<path class="grid" d="M{{ left }},{{ y }}H{{ width - 8 }}"/>
<text x="4" y="{{ y }}">{{ share }} %</text>{% endfor %}
{% for x, value in chart.ticks %}<path class="grid" d="M{{ x }},{{ bottom }}V{{ top }}"/>
<text x="{{ x }}" y="{{ height - 16 }}">{{ value }}</text>{% endfor %}
{% for name, points in chart.curves %}{% set color = colors[loop.index0 % colors|length] %}
<polyline points="{{ points }}" fill="none" stroke="{{ color }}" stroke-width="2"/>
<text x="{{ left + 6 }}" y="{{ top + 12 + 14 * loop.index0 }}" style="fill:{{ color }}">{{ name }}</text>{% endfor %}
</svg><figcaption>{{ chart.title }}</figcaption></figure>{% endfor %}</div></html>
"""


def page(title: str, facts: Mapping[str, Any], runs: Sequence[Run], values: Sequence[Values]) -> str:
    """The whole HTML file."""
    names, rows, errors = _table(runs)
    charts = [_chart(f"{words}, ms", names, [each[name] for each in values]) for name, words in METRICS.items()]
    places = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP, "bottom": HEIGHT - BOTTOM, "colors": COLORS}
    template = jinja2.Environment(autoescape=True).from_string(PAGE)
    words = "; ".join(f"{key}: {value}" for key, value in facts.items())
    return template.render(places, title=title, facts=words, names=names, rows=rows, errors=errors, charts=charts)


def _chart(title: str, names: Sequence[str], lines: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Cumulative curves, logarithmic in time: what the template draws, and where; nothing without values."""
    every = [value for line in lines for value in line]
    if not every:
        return {}
    low, high = math.log10(max(min(every), 0.01)), math.log10(max(*every, 0.02))
    span = max(high - low, 0.05)

    def x(value: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 8) * (math.log10(max(value, 10**low)) - low) / span:.1f}"

    def y(share: float) -> str:
        return f"{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share / 100:.1f}"

    def curve(line: Sequence[float]) -> str:
        times = np.percentile(line, SHARES) if line else ()
        return " ".join(f"{x(time)},{y(share)}" for time, share in zip(times, SHARES, strict=False))

    ticks = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in (1, 2, 5)]
    return {
        "title": title,
        "shares": [(y(share), share) for share in (0, 25, 50, 75, 100)],
        "ticks": [(x(tick), f"{tick:g}") for tick in ticks if low <= math.log10(tick) <= high],
        "curves": [(name, curve(line)) for name, line in zip(names, lines, strict=True)],
    }
