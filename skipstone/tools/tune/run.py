"""What `skipstone tune` does: costs of steps, acceptance of each proposer, predictions, and a check of some of them.

Its report for people has a table of each, and there is a picture of the predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skipstone.config import EngineConfig
from skipstone.errors import ConfigError, install_hint
from skipstone.kernels.dispatch import choose_device
from skipstone.llm import LLM
from skipstone.models.loader import read_model_info
from skipstone.models.locate import locate
from skipstone.runtime.engine import ROWS
from skipstone.runtime.k_table import KTable
from skipstone.tools.flags import choose_prompts
from skipstone.tools.progress import Progress, announce
from skipstone.tools.report import console, table_of
from skipstone.tools.tune import measure
from skipstone.tools.tune.measure import Axes
from skipstone.tools.tune.planner import OFF, Acceptance, Costs, Grid, Prediction, best, k_ranges, largest_k, predict
from skipstone.tools.workload import Job, encode_jobs, job, label, pace, proposer_specs, with_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

SEED = 99
ROOM = 256  # tokens that measuring may add to a context
DEFAULT_CONTEXTS = (128, 768)


class TuneOptions(msgspec.Struct, kw_only=True):
    """What the command line asks of tune."""

    ks: list[int]
    batches: list[int]
    contexts: list[int]  # none: DEFAULT_CONTEXTS, as far as the model goes
    proposers: str | None
    prompts: str | None
    num_prompts: int
    max_tokens: int
    temperature: float
    context: int | None
    rates: dict[str, list[float]]  # by proposer: acceptance that is given, not measured
    validate: bool


class Validation(msgspec.Struct):
    """A predicted cell and what was measured.

    `speed` is that of the machine during the run, from steps of known cost between those that count: 1 while costs were
    taken. `error` of the prediction is relative to what would have been measured at speed 1.
    """

    predicted: Prediction
    context: float
    measured: float
    speed: float
    error: float


class TuneReport(msgspec.Struct):
    """Everything that tune found."""

    model: str
    context: float
    costs: Costs
    acceptance: dict[str, Acceptance]
    specs: dict[str, str]
    predictions: list[Prediction]
    table: KTable
    validation: list[Validation] = []

    def best_at(self, batch: int) -> Prediction:
        """The fastest way to serve so many requests."""
        return best([p for p in self.predictions if p.batch == batch])

    def off_at(self, batch: int) -> Prediction:
        """So many requests without speculation."""
        return next(p for p in self.predictions if (p.batch, p.proposer) == (batch, OFF))

    @property
    def median_error(self) -> float:
        """Of the validated cells."""
        return statistics.median(abs(cell.error) for cell in self.validation)


def tune(config: EngineConfig, options: TuneOptions) -> TuneReport:
    """Measure and predict, with a progress bar. Raises a SkipstoneError for options that do not fit the model."""
    names = proposer_specs(read_model_info(locate(config.model)), options.proposers)
    specs = {label(spec): spec for spec in names}
    if len(specs) < len(set(names)):
        raise ConfigError(f"--proposers {options.proposers}: one proposer with two folders; tune one of them at a time")
    for proposer in options.rates:
        if proposer not in specs:
            raise ConfigError(f"--profile has rates of {proposer!r}, which is not measured; known: {', '.join(specs)}")
    ks = sorted({0, *options.ks})
    config = _roomy(config, options.batches[-1], ks[-1])
    prompts = choose_prompts(options.prompts, options.num_prompts)
    jobs = [job(prompt, options.temperature, SEED, options.max_tokens) for prompt in prompts]
    texts, context = _texts(config, jobs, options)
    axes = Axes(texts, options.batches, ks)
    announce(_estimate(config, options, axes, jobs, len(specs)))
    cells = len(texts) * len(options.batches)
    with Progress("measuring", cells + len(specs) * (cells + 1)) as bar:
        bar.say("steps of the target")
        step = measure.measure_steps(config, axes, bar.tick)
        draft: dict[str, Grid] = {}
        acceptance: dict[str, Acceptance] = {}
        for name, spec in specs.items():
            bar.say(name)
            rates = options.rates.get(name)
            draft[name], found = measure.measure_proposer(config, spec, axes, jobs if rates is None else [], bar.tick)
            given = None if rates is None else Acceptance(drafted=[1.0] * len(rates), accepted=rates)
            acceptance[name] = given or found
    report = plan(config, Costs(step=step, draft=draft), acceptance, specs, context)
    if options.validate:
        report.validation = validate(config, report, jobs)
    return report


def _estimate(config: EngineConfig, options: TuneOptions, axes: Axes, jobs: Sequence[Job], proposers: int) -> float:
    """Seconds that all of it will take, from a few steps without a proposer; drafting is taken to cost nothing."""
    known, batches, shortest = pace(config, jobs), axes.batches, min(axes.texts)
    with measure.with_dummies(config, axes.ks[-1]) as llm:
        number_of_tokens = sum(map(len, encode_jobs(llm, jobs)))
        few = Axes({shortest: axes.texts[shortest]}, sorted({batches[0], batches[-1]}), axes.ks)
        trial = measure.measure_grid(llm, few, measure.plain_step, lambda: None, turns=1)
    once = sum(trial.at(shortest, batch, k) for batch in batches for k in axes.ks)
    steps = once * measure.STEPS_PER_CELL * len(axes.texts)
    prompts = known.prompts / number_of_tokens * sum(axes.texts) * batches[-1]
    measuring = (1 + proposers) * (known.load + prompts + steps)
    acceptance = (proposers - len(options.rates)) * (known.prompts + known.tokens)
    groups = [-(-len(jobs) // batch) * options.max_tokens * trial.at(shortest, batch, 0) for batch in batches]
    validating = 2 * (len(batches) * (known.load + known.prompts) + sum(groups)) if options.validate else 0.0
    return measuring + acceptance + validating


def plan(
    config: EngineConfig, costs: Costs, acceptance: dict[str, Acceptance], specs: dict[str, str], context: float
) -> TuneReport:
    """Predictions for the measured batch sizes, and the table of the proposer that gains most over all of them."""
    batches = costs.step.batches
    without = [predict(costs, acceptance, OFF, 0, batch, context) for batch in batches]
    predictions, gains = list(without), dict.fromkeys(acceptance, 1.0)
    for name in acceptance:
        for batch, off in zip(batches, without, strict=True):
            ks = range(1, largest_k(costs, acceptance, name) + 1)
            own = [predict(costs, acceptance, name, k, batch, context) for k in ks]
            predictions += own
            gains[name] *= best(own).tokens_per_second / off.tokens_per_second
    winner = max(gains, key=gains.__getitem__)
    table = KTable(
        spec=specs[winner],
        num_speculative_tokens_per_batch_size=k_ranges(costs, acceptance, winner, context),
        model=config.model,
        notes=f"predicted for a context of {context:.0f} tokens; more than {batches[-1]} requests were not measured",
    )
    return TuneReport(config.model, context, costs, acceptance, specs, predictions, table)


def validate(config: EngineConfig, report: TuneReport, jobs: Sequence[Job]) -> list[Validation]:
    """Run without drafts, and the best cell of each batch size; acceptance that was given cannot be validated."""
    cells = []
    for batch in report.costs.step.batches:
        own = [p for p in report.predictions if p.batch == batch]
        real = [p for p in own if p.proposer != OFF and report.acceptance[p.proposer].steps]
        cells += [p for p in own if p.proposer == OFF] + ([best(real)] if real else [])
    found = []
    with Progress("validating", len(cells)) as bar:
        for cell in cells:
            bar.say(f"{cell.proposer}, k = {cell.k}, {cell.batch} requests")
            spec = report.specs.get(cell.proposer, OFF)
            run = measure.throughput(config, spec, cell.k, cell.batch, jobs, bar.tick)
            # Predicted anew for the context that the run had.
            again = predict(report.costs, report.acceptance, cell.proposer, cell.k, cell.batch, run.context)
            known = report.costs.step.at(run.context, cell.batch, measure.yardstick_k(spec))
            if cell.proposer != OFF:
                known += report.costs.draft[cell.proposer].at(run.context, cell.batch, 0)
            speed = known / run.yardstick if run.yardstick else 1.0
            error = again.tokens_per_second * speed / run.tokens_per_second - 1
            found.append(Validation(again, run.context, run.tokens_per_second, speed, error))
    return found


def _roomy(config: EngineConfig, requests: int, k: int) -> EngineConfig:
    """The engine with room for every cell in one step."""
    rows = config.max_num_batched_tokens or ROWS[choose_device(config.device).type]
    return msgspec.structs.replace(
        config, max_num_seqs=max(config.max_num_seqs, requests), max_num_batched_tokens=max(rows, requests * (k + 1))
    )


def _texts(config: EngineConfig, jobs: Sequence[Job], options: TuneOptions) -> tuple[dict[int, list[list[int]]], float]:
    """Token ids for each context to measure, and the mean context of the prompts, half of their answers included."""
    with LLM(config=with_spec(config, OFF, 0)) as llm:
        ids = encode_jobs(llm, jobs)
        more = ROOM + options.ks[-1]  # tokens
        longest = llm.engine.caches.max_model_len - more
    contexts = options.contexts or sorted({min(context, longest) for context in DEFAULT_CONTEXTS})
    if contexts[-1] > longest >= 1:
        raise ConfigError(
            f"--contexts {contexts[-1]} is too long: measuring takes {more} of max_model_len={longest + more} tokens "
            f"besides; it must be at most {longest}"
        )
    if longest < 1:
        raise ConfigError(f"max_model_len leaves no room for measuring; it needs {1 - longest} tokens more")
    mean = sum(map(len, ids)) / len(ids) + options.max_tokens / 2
    return measure.cut_texts(ids, contexts, options.batches[-1]), float(options.context or mean)


def render(report: TuneReport) -> None:
    """Print the report."""
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
