"""What `skipstone trace` does: one prompt through an engine whose steps are watched, shown token by token."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import msgspec
from rich.markup import escape

from skipstone.cli.generate import encoded
from skipstone.cli.options import Settings
from skipstone.cli.output import speculation_line
from skipstone.cli.prompts import Prompt
from skipstone.config import EngineConfig
from skipstone.core.batch import PAD, Selection
from skipstone.core.observer import EmittedRun, Observer
from skipstone.core.speculation import SpeculationStats
from skipstone.llm import LLM
from skipstone.tools.check.compare import origin, top_two
from skipstone.tools.report import console, table_of

PROMPT = "prompt"
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


class LayerRead(msgspec.Struct, kw_only=True):
    """What one sparse layer chose for a row: ids of units, a list per group of heads."""

    layer: int
    unit: int  # tokens of a unit
    selected: list[list[int]]


class TracedToken(msgspec.Struct, kw_only=True):
    """One token. Those of the prompt have nothing but position, id, text and origin."""

    position: int
    token_id: int
    text: str = ""
    origin: str
    step: int | None = None
    draft: int | None = None  # which draft of its step stood here, from 1; None: none did
    replaced: int | None = None  # the draft that was rejected in its favour
    replaced_text: str | None = None
    logit: float | None = None
    top: list[tuple[int, float]] = []  # the two likeliest of the row that emitted it
    top_texts: list[str] = []
    reads: list[LayerRead] = []


class TraceReport(msgspec.Struct, kw_only=True):
    """A whole answer."""

    model: str
    speculation: str
    simulated: bool
    tokens: list[TracedToken]
    finish_reason: str | None
    stats: SpeculationStats | None
    dense_layers: list[int]

    @property
    def generated(self) -> list[TracedToken]:
        """The tokens after the prompt."""
        return [token for token in self.tokens if token.origin != PROMPT]


class Tracer(Observer):
    """Collects the tokens of one request, with the selections of the rows that emitted them."""

    def __init__(self) -> None:
        self.tokens: list[TracedToken] = []
        self.steps = 0
        self._selections: dict[int, Selection] = {}  # of the running step

    def on_selection(self, layer: int, selection: Selection) -> None:
        """Keep it until the step's tokens are known."""
        self._selections[layer] = selection

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """Attribute the selections of the rows that emitted something; those of rejected drafts are dropped."""
        self.steps += 1
        for run in runs:
            for i, token in enumerate(run.token_ids):
                kind = origin(run, i)
                self.tokens.append(
                    TracedToken(
                        position=run.start + i,
                        token_id=token,
                        origin=kind,
                        step=self.steps,
                        draft=i + 1 if i < len(run.drafts) else None,
                        replaced=run.drafts[i] if kind == "recovered" else None,
                        logit=float(run.logits[i, token]),
                        top=top_two(run.logits[i]),
                        reads=self._reads(run.rows[i]),
                    )
                )
        self._selections = {}

    def _reads(self, row: int) -> list[LayerRead]:
        reads = []
        for layer, selection in sorted(self._selections.items()):
            chosen = [[unit for unit in group if unit != PAD] for group in selection.indices[row].tolist()]
            reads.append(LayerRead(layer=layer, unit=selection.unit, selected=chosen))
        return reads


def trace(config: EngineConfig, prompt: Prompt, settings: Settings) -> TraceReport:
    """Complete the prompt; every token of prompt and answer. Raises RequestError for a prompt that does not fit."""
    tracer = Tracer()
    with LLM(config=config, observer=tracer) as llm:
        params = settings.with_checkpoint(llm.default_params).sampling_params()
        ids = encoded(llm, prompt)
        output = llm.generate([ids], params, progress=False)[0].outputs[0]
        generated = tracer.tokens[: len(output.token_ids)]  # a run may reach past the end of the text
        tokens = [TracedToken(position=i, token_id=token, origin=PROMPT) for i, token in enumerate(ids)] + generated
        if llm.tokenizer is not None:
            text_of = llm.tokenizer.token_text
            for token in tokens:
                token.text = text_of(token.token_id)
                token.replaced_text = None if token.replaced is None else text_of(token.replaced)
                token.top_texts = [text_of(other) for other, _ in token.top]
        layers = {spec.layer for spec in llm.engine.model.cache_specs()}
        return TraceReport(
            model=config.model,
            speculation=llm.engine.speculation.description,
            simulated=llm.engine.speculation.simulated,
            tokens=tokens,
            finish_reason=output.finish_reason,
            stats=output.speculation,
            dense_layers=sorted(layers - {read.layer for token in generated for read in token.reads}),
        )


def render(report: TraceReport) -> None:
    """Print the report."""
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
