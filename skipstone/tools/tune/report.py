"""The report of `skipstone tune` for people: costs, acceptance, predictions, and a picture of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skipstone.errors import install_hint
from skipstone.tools.report import console, table_of
from skipstone.tools.tune.planner import OFF
from skipstone.tools.tune.run import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


def render(report: TuneReport) -> None:
    """Print it."""
    out = console()
    out.print(_costs(report))
    for name, known in report.acceptance.items():
        rates = " ".join(f"{rate:.2f}" for rate in known.accepted)
        drafted = " ".join(f"{share:.2f}" for share in known.drafted)
        source = f"{known.steps} steps" if known.steps else "given"
        often = "" if min(known.drafted) > 0.99 else f"; a draft stood there in {drafted}"
        out.print(f"{name}: kept per step, by position ({source}): {rates}{often}")
    out.print(_predictions(report))
    for batch in report.costs.step.batches:
        top = report.best_at(batch)
        gain = top.tokens_per_second / report.off_at(batch).tokens_per_second
        what = "no speculation" if top.proposer == OFF else f"{top.proposer}, k = {top.k}: {gain:.2f}x"
        out.print(f"best for {batch} request{'s' if batch > 1 else ''}: [bold]{what}[/]")
    ranges = report.table.num_speculative_tokens_per_batch_size
    out.print(f"table of {report.table.spec}, as first request, last request, k: {ranges}", markup=False)
    most = report.costs.step.batches[-1]
    out.print(f"more than {most} requests were not measured and take the last k; --batch LIST measures more of them")
    if report.validation:
        out.print(_validation(report))
        out.print("speed: of the machine during the run, 1 while costs were taken; the error is at equal speed")
        out.print(f"median error of the predictions: {report.median_error:.1%}")


def plot(report: TuneReport, target: str) -> str:
    """Draw tokens per second against k; returns what was done, in words."""
    try:
        figure = draw(report)
    except ImportError as error:
        return f"no picture was drawn, it needs matplotlib ({error}); run {install_hint('tune')}"
    figure.savefig(Path(target), dpi=120, format="png")
    return f"drew {target}"


def draw(report: TuneReport) -> Figure:
    """The picture, one panel per batch size. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    batches = report.costs.step.batches
    figure = Figure(figsize=(4.2 * len(batches), 3.6), layout="constrained")
    for panel, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        panel.axhline(report.off_at(batch).tokens_per_second, color="grey", linestyle="--", label="off")
        for name in report.acceptance:
            line = [p for p in report.predictions if (p.batch, p.proposer) == (batch, name)]
            panel.plot([p.k for p in line], [p.tokens_per_second for p in line], marker="o", label=name)
        top = report.best_at(batch)
        panel.plot([top.k], [top.tokens_per_second], marker="*", markersize=16, color="black")
        panel.set(title=f"{batch} request{'s' if batch > 1 else ''}", xlabel="drafts per step, k")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylim(0, 1.1 * top.tokens_per_second)
    figure.axes[0].set_ylabel("tokens per second, predicted")
    figure.axes[0].legend()
    return figure


def _costs(report: TuneReport) -> Table:
    """Milliseconds at the context of the predictions."""
    step = report.costs.step
    title = f"ms per step at a context of {report.context:.0f}"
    table = table_of(title, ["requests", "part", *(f"k = {k}" for k in step.ks)], ("part",))
    for batch in step.batches:
        for name, grid in {"target": step, **report.costs.draft}.items():
            shown = [f"{grid.at(report.context, batch, k) * 1e3:.2f}" for k in step.ks if k <= grid.ks[-1]]
            table.add_row(str(batch) if grid is step else "", name, *shown)
        table.add_section()
    return table


def _predictions(report: TuneReport) -> Table:
    most = max(p.k for p in report.predictions)
    headings = ["requests", "proposer", *(f"k = {k}" for k in range(most + 1))]
    table = table_of("tokens per second, predicted; * best", headings, ("proposer",))
    for batch in report.costs.step.batches:
        top = report.best_at(batch)
        for name in (OFF, *report.acceptance):
            cells = [""] * (most + 1)
            for p in report.predictions:
                if (p.batch, p.proposer) == (batch, name):
                    text = f"{p.tokens_per_second:.0f}"
                    cells[p.k] = f"[bold green]{text} *[/]" if p == top else text
            table.add_row(str(batch) if name == OFF else "", name, *cells)
        table.add_section()
    return table


def _validation(report: TuneReport) -> Table:
    headings = ("requests", "proposer", "k", "context", "predicted", "measured", "speed", "error")
    table = table_of("predicted and measured tokens per second", headings, ("proposer",))
    for cell in report.validation:
        p = cell.predicted
        numbers = (f"{cell.context:.0f}", f"{p.tokens_per_second:.0f}", f"{cell.measured:.0f}", f"{cell.speed:.2f}")
        table.add_row(str(p.batch), p.proposer, str(p.k), *numbers, f"{cell.error:+.1%}")
    return table
