"""`skipstone tune`: the planner against brute force, measuring under a clock of our own, the files it writes."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracles.tiny import Tiny, write_folder
from oracles.tiny_heads import with_mtp

from skipstone import LLM
from skipstone.cli import main as cli
from skipstone.config import make_config
from skipstone.core.plan import StepPlan
from skipstone.errors import ConfigError, install_hint
from skipstone.runtime.runner import ModelRunner, StepHandle
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.tools import workload
from skipstone.tools.progress import announce
from skipstone.tools.tune import measure
from skipstone.tools.tune import run as tune_run
from skipstone.tools.tune.planner import OFF, Acceptance, Costs, Grid, best, k_ranges, predict
from skipstone.tools.tune.run import TuneOptions, draw, plan, plot, tune

KS, BATCHES, CONTEXTS = [0, 1, 3, 7], [1, 4, 16], [100, 1000]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(with_mtp(tiny("m3"), 1), tmp_path_factory.mktemp("tune") / "m3")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [[(7 * i + j * j) % 120 for j in range(20 + 5 * i)] for i in range(6)]
    file.write_text("\n".join(json.dumps({"prompt_token_ids": row}) for row in rows))
    return file


def grid(cost: Callable[[int, int, int], float]) -> Grid:
    values = [[[cost(context, batch, k) for k in KS] for batch in BATCHES] for context in CONTEXTS]
    return Grid(contexts=CONTEXTS, batches=BATCHES, ks=KS, values=values)


class Machine:
    """Random step costs and acceptance, and tokens per second by the formula of the planner's specification."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.fixed, self.per_row, self.per_token = draw.uniform(5, 20), draw.uniform(0.05, 3), draw.uniform(0, 0.01)
        self.first, self.first_row = draw.uniform(0.2, 3), draw.uniform(0.01, 0.3)
        self.step, self.step_row = draw.uniform(0.2, 4), draw.uniform(0.01, 0.5)
        conditional = draw.uniform(0.2, 0.95)
        self.rates = [conditional ** (i + 1) for i in range(7)]
        self.costs = Costs(step=grid(self.target), draft={"mtp": grid(self.draft)})
        self.acceptance = {"mtp": Acceptance(drafted=[1.0] * 7, accepted=self.rates)}

    def target(self, context: int, batch: int, k: int) -> float:
        return self.fixed + batch * (k + 1) * (self.per_row + self.per_token * context / 100)

    def draft(self, context: int, batch: int, k: int) -> float:
        steps = max(k - 1, 0) * (self.step + self.step_row * batch)
        return self.first + self.first_row * batch * (k + 1) + steps

    def speed(self, context: int, batch: int, k: int) -> float:
        length = 1 + sum(self.rates[:k])
        return batch * length / (self.target(context, batch, k) + self.draft(context, batch, k))


@pytest.mark.parametrize("seed", range(12))
def test_the_chosen_k_is_that_of_brute_force(seed: int) -> None:
    machine, context = Machine(seed), 370
    ranges = k_ranges(machine.costs, machine.acceptance, "mtp", context)
    chosen = {batch: k for first, last, k in ranges for batch in range(first, last + 1)}
    assert sorted(chosen) == list(range(1, 17)), "the table ends with what was measured"
    for batch in range(1, 17):
        speeds = [machine.speed(context, batch, k) for k in range(8)]
        assert chosen[batch] == speeds.index(max(speeds)), batch
        predicted = predict(machine.costs, machine.acceptance, "mtp", 5, batch, context)
        assert predicted.tokens_per_second == pytest.approx(machine.speed(context, batch, 5))
    assert all(a[2] != b[2] and a[1] + 1 == b[0] for a, b in itertools.pairwise(ranges))


def test_a_proposer_that_often_finds_nothing_is_charged_for_its_rows_only() -> None:
    machine = Machine(3)
    machine.acceptance["mtp"] = Acceptance(drafted=[0.25] * 4, accepted=[0.2, 0.1, 0.1, 0.0])
    found = predict(machine.costs, machine.acceptance, "mtp", 4, 4, 100)
    rows = machine.target(100, 4, 0) + 4 * 1.0 * (machine.per_row + machine.per_token)
    assert found.seconds_per_step == pytest.approx(rows + machine.draft(100, 4, 4))
    assert found.tokens_per_step == pytest.approx(1.4)


def test_no_speculation_wins_where_drafts_are_worthless() -> None:
    machine = Machine(1)
    machine.acceptance["mtp"] = Acceptance(drafted=[1.0] * 7, accepted=[0.0] * 7)
    report = plan(make_config(model="x"), machine.costs, machine.acceptance, {"mtp": "mtp"}, 100)
    assert all(report.best_at(batch).proposer == OFF for batch in BATCHES)
    assert report.table.num_speculative_tokens_per_batch_size == [(1, 16, 0)]


class Clock:
    """A clock that only moves where a cost is injected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slowness = 0.0, 1.0
        self.stalls: Callable[[StepPlan], float] = lambda step: 0.0
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: self.now))
        start, propose = ModelRunner.start, HiddenStateProposer.propose

        def slow_start(runner: ModelRunner, plan: StepPlan) -> StepHandle:
            self.now += self.slowness * (0.010 + 0.001 * plan.num_rows) + self.stalls(plan)
            return start(runner, plan)

        def slow_propose(proposer: HiddenStateProposer, step: Any) -> Any:
            self.now += self.slowness * (0.002 + 0.0005 * len(step.batch.input_ids) + 0.003 * max(step.k - 1, 0))
            return propose(proposer, step)

        monkeypatch.setattr(ModelRunner, "start", slow_start)
        monkeypatch.setattr(HiddenStateProposer, "propose", slow_propose)


def options(prompts: Path, **changes: Any) -> TuneOptions:
    return TuneOptions(
        **{
            "ks": [0, 1, 3], "batches": [1, 2], "contexts": [16, 60], "proposers": "mtp", "prompts": str(prompts),
            "num_prompts": 6, "max_tokens": 40, "temperature": 5.0, "context": None, "rates": {}, "validate": True,
        } | changes
    )  # fmt: skip


def test_measured_costs_and_throughput_are_the_injected_ones(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    report = tune(make_config(model=str(model)), options(prompts))
    for batch in (1, 2):
        for k in (0, 1, 3):
            assert report.costs.step.at(16, batch, k) == pytest.approx(0.010 + 0.001 * batch * (k + 1))
            drafting = 0.002 + 0.0005 * batch * (k + 1) + 0.003 * max(k - 1, 0)
            assert report.costs.draft["mtp"].at(60, batch, k) == pytest.approx(drafting)
    assert report.acceptance["mtp"].drafted == pytest.approx([1.0] * 3, abs=0.02)
    assert report.acceptance["mtp"].accepted[0] > 0.2
    assert [cell.predicted.proposer for cell in report.validation] == [OFF, "mtp", OFF, "mtp"]
    assert all(abs(cell.error) < 0.1 for cell in report.validation), report.validation
    assert all(abs(cell.error) < 1e-6 for cell in report.validation if cell.predicted.proposer == OFF), (
        report.validation
    )


@pytest.mark.parametrize(("rows", "count"), [(2, 5), (2, 9), (1, 9), (8, 9)])
def test_steps_that_the_machine_held_up_decide_nothing(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, rows: int, count: int
) -> None:
    """Some steps of that many rows take half a second more: most of a cell's, or all that it has at first."""
    clock, seen = Clock(monkeypatch), 0

    def stalls(step: StepPlan) -> float:
        nonlocal seen
        decoding = all(item.start > 16 for item in step.items)
        seen += decoding and step.num_rows == rows
        return 0.5 if decoding and step.num_rows == rows and seen <= count else 0.0

    clock.stalls = stalls
    texts = {16: [[5 + i for i in range(16)]] * 2}
    grid = measure.measure_steps(make_config(model=str(model)), measure.Axes(texts, [1, 2], [0, 1, 3]), lambda: None)
    assert seen > count
    for batch, k in itertools.product((1, 2), (0, 1, 3)):
        assert grid.at(16, batch, k) == pytest.approx(0.010 + 0.001 * batch * (k + 1)), (batch, k)


def test_a_grid_without_noise_is_not_doubted() -> None:
    for seed in range(12):
        machine = Machine(seed)
        assert machine.costs.step.doubtful() == []
    spoilt = grid(Machine(0).target)
    spoilt.values[1][0][2] *= 50
    assert (1, 0) in spoilt.doubtful()


def test_the_time_it_takes_is_said_first(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[float] = []
    monkeypatch.setattr(tune_run, "announce", said.append)
    clock = Clock(monkeypatch)
    monkeypatch.setattr(workload, "time", measure.time)
    started = clock.now
    tune(make_config(model=str(model)), options(prompts, proposers="ngram"))
    assert said[0] == pytest.approx(clock.now - started, rel=0.4)
    monkeypatch.undo()
    capsys.readouterr()
    arguments = ["--prompts", str(prompts), "--num-prompts", "1", "--max-tokens", "2", "--k", "1", "--proposers", "mtp"]
    assert cli.run(["check", str(model), *arguments]) == 0
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"this takes about \d+ (s|min) here", first) and second.startswith("checking: ")


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (200, "3 min"), (9000, "2 h")])
def test_a_time_in_words(seconds: float, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    announce(seconds)
    assert capsys.readouterr().err == f"this takes about {words} here\n"


def test_a_machine_that_became_slower_is_no_error(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes twice as long once costs are taken: half of the tokens are measured, the error stays."""
    clock, validate = Clock(monkeypatch), tune_run.validate
    usual = tune(make_config(model=str(model)), options(prompts))

    def slowly(*arguments: Any) -> Any:
        clock.slowness = 2.0
        return validate(*arguments)

    monkeypatch.setattr(tune_run, "validate", slowly)
    clock.slowness = 1.0
    slow = tune(make_config(model=str(model)), options(prompts))
    for cell, expected in zip(slow.validation, usual.validation, strict=True):
        assert (cell.speed, expected.speed) == (pytest.approx(0.5), pytest.approx(1.0))
        assert cell.measured == pytest.approx(expected.measured / 2)
        assert cell.error == pytest.approx(expected.error, abs=1e-6)


def test_given_rates_are_used_and_modules_limit_k(
    tiny: Callable[[str], Tiny], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    two = write_folder(with_mtp(tiny("m3"), 2), tmp_path / "m3")
    own = options(prompts, rates={"mtp": [0.9, 0.8, 0.7]}, proposers="mtp,ngram", batches=[1], validate=False)
    report = tune(make_config(model=str(two)), own)
    assert report.acceptance["mtp"].accepted == [0.9, 0.8, 0.7] and report.acceptance["mtp"].steps == 0
    assert max(p.k for p in report.predictions if p.proposer == "mtp") == 2
    assert best([p for p in report.predictions if p.proposer == "mtp"]).tokens_per_step == pytest.approx(2.7)
    assert report.table.spec == "mtp"
    with pytest.raises(ConfigError, match="rates of 'eagle3', which is not measured"):
        tune(make_config(model=str(two)), options(prompts, rates={"eagle3": [0.5]}))


def test_the_command_writes_a_table_that_the_engine_reads(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "rates.json").write_text('{"mtp": [0.9, 0.8]}')
    arguments = ["--batch", "1,2", "--k", "1,2", "--contexts", "16", "--max-tokens", "8", "--prompts", str(prompts)]
    arguments += ["--proposers", "mtp", "--profile", str(tmp_path / "rates.json"), "--json", str(tmp_path / "all.json")]
    assert cli.run(["tune", str(model), *arguments, "--output", str(tmp_path / "table.json")]) == 0
    out, err = capsys.readouterr()
    assert "tokens per second, predicted" in out and "best for 1 request: mtp, k = 2" in out
    assert "no picture was drawn, it needs matplotlib (" in err and f"run {install_hint('tune')}" in err
    assert "more than 2 requests were not measured" in " ".join(out.split())
    assert not (tmp_path / "table.png").exists()
    assert json.loads((tmp_path / "all.json").read_text())["acceptance"]["mtp"]["accepted"] == [0.9, 0.8]
    with LLM(str(model), k_table=str(tmp_path / "table.json")) as llm:
        assert llm.engine.speculation.k == 2


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    machine = Machine(2)
    report = plan(make_config(model="x"), machine.costs, machine.acceptance, {"mtp": "mtp"}, 100)
    assert plot(report, str(tmp_path / "a.png")) == f"drew {tmp_path / 'a.png'}"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    ticks = [tick for panel in draw(report).axes for tick in panel.get_xticks()]
    assert ticks and all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], ["--batch 0", "between 1 and 1024"]),
        (["--contexts", "x"], ["--contexts x", "whole numbers"]),
        (["--temperature", "0,1"], ["--temperature 0,1", "one number"]),
        (["--profile", "absent.json"], ["--profile absent.json cannot be read"]),
        (["--output", "/nowhere/table.json"], ["--output /nowhere/table.json", "does not exist"]),
        (["--plot", "/nowhere/a.png"], ["--plot /nowhere/a.png", "does not exist"]),
        (["--proposers", "eagle3:a,eagle3:b"], ["--proposers eagle3:a,eagle3:b", "two folders"]),
        (["--contexts", "16,99999"], ["--contexts 99999 is too long", "it must be at most"]),
    ],
)
def test_bad_options(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli.run(["tune", str(model), "--prompts", str(prompts), *arguments]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_a_bad_profile(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, word in (("[1]", "must hold rates per position"), ('{"mtp": [0.5, 0.6]}', "never rise")):
        (tmp_path / "rates.json").write_text(content)
        assert cli.run(["tune", str(model), "--profile", str(tmp_path / "rates.json")]) == 2
        assert word in capsys.readouterr().err
