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
from skipstone.runtime.batch_builder import build_rows

from skipstone import LLM, SamplingParams
from skipstone.core.observer import EmittedRun, Observer
from skipstone.core.plan import ScheduledRequest, StepPlan
from skipstone.core.request import Request
from skipstone.runtime.runner import ModelRunner

LENGTHS = (1, 9, 40, 150)


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Rows of steps, and rows that their last layers computed."""
    counts: Counter = Counter()
    model = llm.engine.model
    forward = model.forward

    def counted(batch: Any, attention: Any, taps: tuple[int, ...] = (), kept: Any = None) -> Any:
        hidden = forward(batch, attention, taps, kept)
        rows = len(batch.input_ids)
        expected = rows if kept is None else len(kept.rows)
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
    monkeypatch.setattr(ModelRunner, "_needs_every_row", lambda self: True)
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
    monkeypatch.setattr(ModelRunner, "_needs_every_row", lambda self: True)
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


def request(length: int, prompt_logprobs: int | None = None) -> Request:
    """A prompt of `length` tokens in blocks of its own."""
    params = SamplingParams(max_tokens=4, prompt_logprobs=prompt_logprobs)
    made = Request(f"r{length}", list(range(length)), params, 0, length + 4, num_prompt_tokens=length)
    made.block_ids = list(range(2, 2 + -(-length // 8)))
    return made


def test_kept_rows_are_a_batch_of_their_own() -> None:
    """A whole prompt, a chunk that yields nothing, and a decoding row among them."""
    items = [
        ScheduledRequest(request(20), 0, 19, 1, 0),
        ScheduledRequest(request(30), 0, 0, 30, 0),
        ScheduledRequest(request(50), 0, 8, 30, 0),
    ]
    step = build_rows(StepPlan(items), 8, every_row=False)
    assert step.kept is not None
    assert step.kept.rows.tolist() == step.batch.logits_indices.tolist() == [0, 30]
    kept = step.kept.batch
    assert kept.logits_indices.tolist() == [0, 1]
    for name in ("input_ids", "positions", "slot_block", "slot_offset"):
        assert torch.equal(getattr(kept, name), getattr(step.batch, name)[step.kept.rows]), name
    assert kept.seq_lens.tolist() == [20, 30]
    assert build_rows(StepPlan(items), 8).kept is None


def test_a_step_without_logits_keeps_one_row() -> None:
    step = build_rows(StepPlan([ScheduledRequest(request(50), 0, 0, 30, 0)]), 8, every_row=False)
    assert step.kept is not None
    assert step.kept.rows.tolist() == [29]
    assert step.kept.batch.logits_indices.tolist() == []


@pytest.mark.parametrize("asked", [None, 1])
def test_nothing_is_left_out_where_most_rows_are_wanted(asked: int | None) -> None:
    """Steps that decode, and prompts whose log-probabilities are asked for."""
    length = 1 if asked is None else 30
    step = build_rows(StepPlan([ScheduledRequest(request(30, asked), 0, 30 - length, length, 0)]), 8, every_row=False)
    assert step.kept is None


def test_an_observer_that_wants_runs_sees_every_row(folder: Callable[[str], Path]) -> None:
    watcher = Watcher()
    llm = LLM(model=str(folder("m3")), dtype="float32", observer=watcher)
    llm.generate([list(range(40))], SamplingParams(max_tokens=2, temperature=0), progress=False)
    assert watcher.rows == {40, 1}
