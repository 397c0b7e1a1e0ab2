"""The report of `skipstone tune` for people: costs, acceptance, predictions, and a picture of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from skipstone.errors import install_hint
from skipstone.tools.progress import console
from skipstone.tools.tune.planner import OFF, Grid, Prediction, best
from skipstone.tools.tune.run import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        off = next(p for p in report.predictions if (p.batch, p.proposer) == (batch, OFF))
        gain = top.tokens_per_second / off.tokens_per_second
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
        own = [p for p in report.predictions if p.batch == batch]
        off = next(p for p in own if p.proposer == OFF)
        panel.axhline(off.tokens_per_second, color="grey", linestyle="--", label="off")
        for name in report.acceptance:
            line = [p for p in own if p.proposer == name]
            panel.plot([p.k for p in line], [p.tokens_per_second for p in line], marker="o", label=name)
        top = best(own)
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
    table = Table(title=f"ms per step at a context of {report.context:.0f}", title_justify="left")
    for heading in ("requests", "part", *(f"k = {k}" for k in step.ks)):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for batch in step.batches:
        table.add_row(str(batch), "target", *_milliseconds(step, step.ks, report.context, batch))
        for name, grid in report.costs.draft.items():
            shown = _milliseconds(grid, [k for k in step.ks if k <= grid.ks[-1]], report.context, batch)
            table.add_row("", name, *shown, end_section=name == list(report.costs.draft)[-1])
    return table


def _milliseconds(grid: Grid, ks: list[int], context: float, batch: int) -> list[str]:
    return [f"{grid.at(context, batch, k) * 1e3:.2f}" for k in ks]


def _predictions(report: TuneReport) -> Table:
    most = max(p.k for p in report.predictions)
    table = Table(title="tokens per second, predicted; * best", title_justify="left")
    for heading in ("requests", "proposer", *(f"k = {k}" for k in range(most + 1))):
        table.add_column(heading, justify="left" if heading == "proposer" else "right")
    for batch in report.costs.step.batches:
        top = report.best_at(batch)
        for name in (OFF, *report.acceptance):
            row = {p.k: p for p in report.predictions if (p.batch, p.proposer) == (batch, name)}
            cells = [_cell(row[k], top) if k in row else "" for k in range(most + 1)]
            table.add_row(str(batch) if name == OFF else "", name, *cells, end_section=name == [*report.acceptance][-1])
    return table


def _cell(prediction: Prediction, top: Prediction) -> str:
    text = f"{prediction.tokens_per_second:.0f}"
    return f"[bold green]{text} *[/]" if prediction == top else text


def _validation(report: TuneReport) -> Table:
    table = Table(title="predicted and measured tokens per second", title_justify="left")
    for heading in ("requests", "proposer", "k", "context", "predicted", "measured", "speed", "error"):
        table.add_column(heading, justify="left" if heading == "proposer" else "right")
    for cell in report.validation:
        p = cell.predicted
        numbers = (f"{cell.context:.0f}", f"{p.tokens_per_second:.0f}", f"{cell.measured:.0f}", f"{cell.speed:.2f}")
        table.add_row(str(p.batch), p.proposer, str(p.k), *numbers, f"{cell.error:+.1%}")
    return table
