"""What `skipstone check` does: one engine without drafts, then one per proposer and k, each compared with the first.

Its report for people is a table, each first difference, and the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.markup import escape

from skipstone.config import EngineConfig
from skipstone.errors import ConfigError, SkipstoneError, UnsupportedError
from skipstone.kernels.dispatch import choose_device, choose_dtype
from skipstone.models.loader import read_model_info
from skipstone.models.locate import locate
from skipstone.outputs import RequestOutput
from skipstone.text.tokenizer import Tokenizer
from skipstone.tools.check.compare import NEAR_TIE, Comparer, Comparison, Difference, Reference
from skipstone.tools.flags import choose_prompts
from skipstone.tools.progress import Progress, announce
from skipstone.tools.report import console, table_of
from skipstone.tools.workload import Job, job, label, pace, proposer_specs, run_jobs, with_spec

SEED = 1234
SHOWN = 5  # differences of one cell; the JSON report has all
POSITIONS, GRAPHS = "accepted, by position", "equal texts as graphs"
HEADINGS = (
    "proposer", "k", "equal texts", "bit-equal logits", "largest difference", "steps", "acceptance length", POSITIONS,
)  # fmt: skip


class PairReport(msgspec.Struct, kw_only=True):
    """One proposer and number of drafts."""

    proposer: str
    spec: str
    k: int
    refused: str | None = None  # why this pair cannot run
    comparison: Comparison | None = None
    unwatched: int | None = None  # GPU: equal texts of a run that nothing watches, so its steps are graphs
    acceptance_length: float | None = None
    acceptance_rates: list[float] = []
    steps: int = 0

    @property
    def differences(self) -> list[Difference]:
        """The first one of each text that differs."""
        return self.comparison.differences if self.comparison else []


class Text(msgspec.Struct, kw_only=True):
    """One prompt at one temperature, as a difference names it."""

    request_id: str
    prompt: str
    temperature: float


class CheckReport(msgspec.Struct, kw_only=True):
    """Everything that check found."""

    model: str
    exact: bool
    dtype: str
    max_tokens: int
    texts: list[Text]
    reference_rows: int
    reference_steps: int
    cells: list[PairReport]
    token_texts: dict[int, str] = {}  # of the tokens that differences name

    @property
    def ran(self) -> list[Comparison]:
        """What became of the pairs that were not refused."""
        return [cell.comparison for cell in self.cells if cell.comparison is not None]

    @property
    def ran_as_graphs(self) -> bool:
        """Whether engines ran that nothing watches as well."""
        return any(cell.unwatched is not None for cell in self.cells)

    @property
    def equal(self) -> bool:
        """Whether every text was the same, and in exact mode every logit."""
        same = all(result.equal_texts == result.texts for result in self.ran)
        same = same and all(cell.unwatched in (None, len(self.texts)) for cell in self.cells)
        return same and (not self.exact or all(result.equal_rows == result.rows for result in self.ran))


def check(
    config: EngineConfig,
    ks: Sequence[int],
    proposers: str | None,
    temperatures: Sequence[float],
    file: str | None,
    num_prompts: int,
    max_tokens: int,
) -> CheckReport:
    """Run all of it, with a progress bar. Raises a SkipstoneError for bad options, or when nothing could run."""
    specs = proposer_specs(read_model_info(locate(config.model)), proposers)
    prompts = choose_prompts(file, num_prompts)
    jobs = [job(prompt, t, SEED + number, max_tokens) for t in temperatures for number, prompt in enumerate(prompts)]
    pairs = [(spec, k) for spec in specs for k in ks if k > 0]
    if not pairs:
        raise ConfigError("there is nothing to compare; --k needs a number above 0, and --proposers a proposer")
    on_gpu = choose_device(config.device).type != "cpu"
    engines = (len(pairs) + 1) * (1 + on_gpu)
    announce(engines * sum(pace(config, jobs)))
    with Progress("checking", engines * len(jobs)) as bar:
        bar.say("k = 0")
        reference = Reference()
        plain = run_jobs(with_spec(config, "off", 0), jobs, reference, bar.tick)
        reference.close(plain.outputs)
        cells = [_check_pair(config, spec, k, jobs, reference, bar) for spec, k in pairs]
        if on_gpu:
            cells.insert(0, PairReport(proposer="none", spec="off", k=0))
            for cell in cells:
                bar.say(f"{cell.proposer}, k = {cell.k}, as graphs")
                cell.unwatched = None if cell.refused else _equal_texts(config, cell, jobs, plain.outputs, bar)
    if all(cell.refused for cell in cells if cell.k):
        raise ConfigError(str(cells[0].refused))
    texts = [
        Text(request_id=output.request_id, prompt=prompt.name, temperature=params.temperature)
        for output, (prompt, params) in zip(plain.outputs, jobs, strict=True)
    ]
    return CheckReport(
        model=config.model,
        exact=config.exact,
        dtype=_dtype(config),
        max_tokens=max_tokens,
        texts=texts,
        reference_rows=sum(map(len, reference.tokens.values())),
        reference_steps=plain.steps,
        cells=cells,
        token_texts=_token_texts(config, [found for cell in cells for found in cell.differences]),
    )


def _check_pair(
    config: EngineConfig, spec: str, k: int, jobs: Sequence[Job], reference: Reference, bar: Progress
) -> PairReport:
    """One proposer and k; a pair that the engine refuses is reported, not run."""
    cell, comparer = PairReport(proposer=label(spec), spec=spec, k=k), Comparer(reference)
    bar.say(f"{cell.proposer}, k = {k}")
    try:
        done = run_jobs(with_spec(config, spec, k), jobs, comparer, bar.tick)
    except (ConfigError, UnsupportedError) as error:
        bar.tick(len(jobs))
        cell.refused = str(error)
        return cell
    cell.comparison, cell.steps = comparer.close(done.outputs, config.exact, _dtype(config)), done.steps
    stats = done.speculation
    cell.acceptance_length, cell.acceptance_rates = stats.acceptance_length, stats.acceptance_rates
    return cell


def _equal_texts(
    config: EngineConfig, cell: PairReport, jobs: Sequence[Job], expected: list[RequestOutput], bar: Progress
) -> int:
    """How many texts of an engine that nothing watches are the expected ones."""
    done = run_jobs(with_spec(config, cell.spec, cell.k), jobs, None, bar.tick)
    got, wanted = ([output.outputs[0].token_ids for output in outputs] for outputs in (done.outputs, expected))
    return sum(ours == theirs for ours, theirs in zip(got, wanted, strict=True))


def _dtype(config: EngineConfig) -> str:
    return str(choose_dtype(config.dtype, choose_device(config.device))).removeprefix("torch.")


def _token_texts(config: EngineConfig, differences: Sequence[Difference]) -> dict[int, str]:
    folder = locate(config.model)
    if not differences or not (folder / "tokenizer.json").exists():
        return {}
    try:
        tokenizer = Tokenizer(folder)
    except SkipstoneError:
        return {}
    ids = {token for found in differences for token in (found.expected, found.got) if token is not None}
    ids |= {token for found in differences for token, _ in (*found.expected_top, *found.got_top)}
    return {token: tokenizer.token_text(token) for token in sorted(ids)}


def render(report: CheckReport) -> None:
    """Print the report."""
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


def _row(cell: PairReport, exact: bool) -> list[str]:
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


def _described(found: Difference, cell: PairReport, report: CheckReport) -> str:
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
