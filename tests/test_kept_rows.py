"""The last layer leaves out rows whose states nobody wants, and no bit of an answer shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.speculation import WAYS, Folders, load, run, tiny_jobs
from oracles.tiny import VOCAB, engine_options

from skipstone import LLM, SamplingParams
from skipstone.core.observer import EmittedRun, Observer
from skipstone.core.plan import Admission, PlanItem
from skipstone.core.sequence_table import SequenceTable
from skipstone.runtime.layout import Layout, make_layout
from skipstone.runtime.step import Step

LENGTHS = (1, 9, 40, 150)


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Rows of steps, and rows that their last layers computed."""
    counts: Counter = Counter()
    model = llm.engine.model
    forward = model.forward

    def counted(batch: Any, attention: Any, taps: tuple[int, ...] = ()) -> Any:
        hidden = forward(batch, attention, taps)
        rows, (*others, last) = len(batch.input_ids), attention.values()
        assert all(layer.kept_rows is None for layer in others)
        expected = rows if last.kept_rows is None else len(last.kept_rows)
        assert hidden.final.shape[0] == expected
        assert all(tap.shape[0] == rows for tap in hidden.taps)
        counts.update(rows=rows, computed=expected, steps=1)
        return hidden

    monkeypatch.setattr(model, "forward", counted)
    return counts


def answers(llm: LLM, prompt_logprobs: int | None = None) -> list[tuple]:
    """Everything that is said about prompts of several lengths."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB - 3, (n,), generator=generator).tolist() for n in LENGTHS]
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=6, logprobs=3, prompt_logprobs=prompt_logprobs)
        for n in LENGTHS
    ]
    outs = llm.generate(prompts, params, progress=False)
    return [(list(o.outputs[0].token_ids), repr(o.outputs[0].logprobs), repr(o.prompt_logprobs)) for o in outs]


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("name", ["m3", "dsa", "dsa_fp8"])
def test_no_bit_depends_on_it(
    name: str, chunk: int, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "exact": True, "prefix_caching": False, "max_num_seqs": 4}
    options |= {"spec": "off", "max_num_batched_tokens": chunk, **engine_options(folder(name))}
    llm = LLM(model=str(folder(name)), **options)
    counts = watch(llm, monkeypatch)
    found = answers(llm)
    assert counts["computed"] < counts["rows"] / 2
    asked = answers(llm, prompt_logprobs=2)
    monkeypatch.setattr(Step, "needs_every_row", True)
    before = counts.copy()
    assert answers(llm) == found
    assert counts["computed"] - before["computed"] == counts["rows"] - before["rows"]
    assert answers(llm, prompt_logprobs=2) == asked
    assert [one[:2] for one in asked] == [one[:2] for one in found]


@pytest.mark.parametrize("proposer", ["mtp", "eagle3", "dflash", "draft", "ngram"])
def test_proposers_are_fed(proposer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States after the last layer are computed for all rows where the proposer reads them, and only there."""
    folders, way = Folders(tmp_path), WAYS[proposer]
    llm = load(folders.target("m3", way.modules), folders.spec(way, "m3", 2), max_num_seqs=4)
    counts = watch(llm, monkeypatch)
    jobs = [job for job in tiny_jobs() if job[1].prompt_logprobs is None][::6]
    found = run(llm, jobs)
    reads_last = proposer == "mtp" or llm.engine.model.config.num_layers in llm.engine.runner.proposer.needs.taps
    assert (counts["computed"] == counts["rows"]) == reads_last
    assert found.drafted > 0
    monkeypatch.setattr(Step, "needs_every_row", True)
    again = run(llm, jobs)
    assert (again.results, again.drafted, again.accepted) == (found.results, found.drafted, found.accepted)


class Watcher(Observer):
    """Wants to see everything."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def on_selection(self, layer: int, selection: Any) -> None:
        self.rows.add(len(selection.indices))

    def on_runs(self, runs: list[EmittedRun]) -> None:
        assert runs


def layout(*items: tuple[int, int, bool], every_row: bool = False, asked: tuple[int, int] = (0, 0)) -> Layout:
    """The layout of requests with (start, rows, whether they sample) each; `asked`: prompt rows of all of them."""
    table = SequenceTable(len(items), 64, 8, 0, torch.device("cpu"))
    made = [
        PlanItem(slot, slot, start, rows, 0, samples, 0, False, asked)
        for slot, (start, rows, samples) in enumerate(items)
    ]
    params = SamplingParams()
    table.admit([Admission(i.slot, i.slot, [7] * 60, 60, i.start, 64, 0, params, [], []) for i in made])
    return make_layout(made, table, every_row)


def test_kept_rows_are_a_layout_of_their_own() -> None:
    """A decoding row, a whole prompt, and a chunk that yields nothing among them."""
    items = ((19, 1, True), (0, 30, True), (8, 30, False))
    found = layout(*items)
    assert found.kept is not None and found.logit_rows is not None
    assert found.kept.rows.tolist() == found.first_rows.tolist() == [0, 30]
    assert (found.kept.items.tolist(), found.kept.counts.tolist()) == ([0, 1], [1, 1])
    assert found.logit_rows.tolist() == [0, 1]  # of those that are kept
    whole = layout(*items, every_row=True)
    assert whole.kept is None and whole.logit_rows is not None
    assert whole.logit_rows.tolist() == [0, 30]


def test_a_step_without_logits_keeps_one_row() -> None:
    found = layout((0, 30, False))
    assert found.kept is not None and found.logit_rows is not None
    assert found.kept.rows.tolist() == [29]
    assert found.logit_rows.tolist() == []


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_left_out_where_most_rows_are_wanted(asked: bool) -> None:
    """Steps that decode, and prompts whose log-probabilities are asked for."""
    found = layout((0, 30, True), asked=(0, 29)) if asked else layout((29, 1, True))
    assert found.kept is None


def test_an_observer_that_wants_runs_sees_every_row(folder: Callable[[str], Path]) -> None:
    watcher = Watcher()
    llm = LLM(model=str(folder("m3")), dtype="float32", observer=watcher)
    llm.generate([list(range(40))], SamplingParams(max_tokens=2, temperature=0), progress=False)
    assert watcher.rows == {40, 1}
