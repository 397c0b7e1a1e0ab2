"""Acceptance of the demos' own drafters on fixed prompts, against recorded values.

Two percentage points, about three drafts of a position, leave room for other last bits on other machines; a wrong
convention (states of another layer, another norm, one position off) costs far more. With the package installed,
`python tests/test_acceptance_regression.py` records the values anew; it refuses a drafter whose acceptance length has
fallen below 1.3.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone import LLM, SamplingParams
from skipstone.core.speculation import SpeculationStats
from skipstone.models.base import HiddenStates
from skipstone.models.locate import locate

RECORDED = Path(__file__).parent / "data" / "acceptance.json"
DRAFTERS = [("demo", "mtp:3"), ("demo", "eagle3:3"), ("demo", "dflash:7"), ("demo-dsa", "mtp:3")]
NUM_PROMPTS, NUM_TOKENS = 8, 48
TOLERANCE, SHORTEST = 0.02, 1.3
Record = dict[str, Any]


def name_of(model: str, spec: str) -> str:
    return f"{model} {spec}"


@cache
def prompts() -> list[str]:
    """Every 25th of those that come with the demos: code and prose alike."""
    file = locate("demo").parent / "prompts.jsonl"
    lines = file.read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // NUM_PROMPTS][:NUM_PROMPTS]]


def start(model: str, spec: str) -> LLM:
    return LLM(model, spec=spec, exact=True, dtype="float32", max_model_len=1024, prefix_caching=False, num_threads=1)


def texts_and_counts(llm: LLM) -> tuple[list[list[int]], SpeculationStats]:
    """Greedy continuations of all prompts at once, and what became of the drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert llm.tokenizer is not None
    cut = [llm.tokenizer.encode(prompt)[:200] for prompt in prompts()]
    outs = llm.generate(cut, params, progress=False)
    stats = SpeculationStats()
    for out in outs:
        stats = stats.plus(out.outputs[0].speculation or SpeculationStats())
    return [out.outputs[0].token_ids for out in outs], stats


def measure(model: str, spec: str, change: Callable[[LLM], None] = lambda llm: None) -> Record:
    """Per position: the share of steps in which the drafts up to it were kept."""
    llm = start(model, spec)
    change(llm)
    _, stats = texts_and_counts(llm)
    length = stats.acceptance_length
    assert length is not None
    rates = [round(rate, 4) for rate in stats.acceptance_rates]
    return {"acceptance_rates": rates, "acceptance_length": round(length, 4), "steps": stats.steps}


def refusal(name: str, record: Record) -> str | None:
    """Why a measurement may not become the recorded one."""
    if record["acceptance_length"] < SHORTEST:
        return f"{name}: acceptance length {record['acceptance_length']} is below {SHORTEST}; something is broken"
    return None


def write(file: Path, records: dict[str, Record]) -> None:
    """Record all, or none when one is refused."""
    reasons = [reason for name, record in records.items() if (reason := refusal(name, record))]
    if reasons:
        raise SystemExit("\n".join(reasons))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(records, indent=1) + "\n")


def differences(record: Record, recorded: Record) -> list[str]:
    """Positions whose rates are too far from the recorded ones, and a length that is."""
    pairs = zip(record["acceptance_rates"], recorded["acceptance_rates"], strict=True)
    return [f"position {i + 1}: {a} against {b}" for i, (a, b) in enumerate(pairs) if abs(a - b) > TOLERANCE]


def shuffle_states(llm: LLM) -> None:
    """The drafter is fed the states of other rows; its own work stays as it is."""
    proposer = llm.engine.runner.proposer
    propose, draw = proposer.propose, random.Random(1)

    def shuffled(step: Any) -> Any:
        order = list(range(len(step.hidden.final)))
        draw.shuffle(order)
        hidden = HiddenStates(step.hidden.final[order], tuple(tap[order] for tap in step.hidden.taps))
        return propose(replace(step, hidden=hidden))

    proposer.propose = shuffled


@pytest.mark.parametrize(("model", "spec"), DRAFTERS)
def test_acceptance_is_as_recorded(model: str, spec: str) -> None:
    """Per position, within two points; the drafts of shuffled states are far off."""
    recorded = json.loads(RECORDED.read_text())[name_of(model, spec)]
    found = measure(model, spec)
    assert differences(found, recorded) == []
    assert refusal(name_of(model, spec), found) is None
    assert found["steps"] > 80
    assert abs(found["acceptance_length"] - recorded["acceptance_length"]) < 3 * TOLERANCE
    control = measure(model, spec, shuffle_states)
    assert differences(control, recorded)
    assert control["acceptance_length"] < found["acceptance_length"] - 0.2


@pytest.mark.long
@pytest.mark.parametrize("model", ["demo", "demo-dsa"])
def test_texts_are_those_without_drafts(model: str) -> None:
    """So that the recorded values belong to one text for all drafters of a model."""
    expected, _ = texts_and_counts(start(model, "off"))
    for spec in [spec for name, spec in DRAFTERS if name == model]:
        assert texts_and_counts(start(model, spec))[0] == expected


def test_all_drafters_are_recorded_with_rates_that_make_sense() -> None:
    """Rates never rise, and the length is one more than their sum in steps with all drafts."""
    records = json.loads(RECORDED.read_text())
    assert set(records) == {name_of(*drafter) for drafter in DRAFTERS}
    for name, record in records.items():
        rates = record["acceptance_rates"]
        assert len(rates) == int(name.rpartition(":")[2])
        assert all(a >= b - 0.05 for a, b in itertools.pairwise(rates))
        assert 1 + 0.9 * sum(rates) < record["acceptance_length"] <= 1 + sum(rates) + 1e-3
        assert record["acceptance_length"] >= SHORTEST


def test_a_broken_drafter_is_not_recorded(tmp_path: Path) -> None:
    """The file stays as it was when one of the measurements is too low."""
    file = tmp_path / "data" / "acceptance.json"
    good = {"acceptance_rates": [0.4], "acceptance_length": 1.4, "steps": 100}
    bad = good | {"acceptance_length": 1.29}
    write(file, {"demo mtp:1": good})
    before = file.read_text()
    with pytest.raises(SystemExit, match=r"other: acceptance length 1\.29 is below 1\.3"):
        write(file, {"demo mtp:1": good, "other": bad})
    assert file.read_text() == before
    assert json.loads(before) == {"demo mtp:1": good}


def test_a_difference_of_more_than_two_points_is_found() -> None:
    recorded = {"acceptance_rates": [0.6, 0.4, 0.3]}
    assert differences({"acceptance_rates": [0.615, 0.385, 0.3]}, recorded) == []
    assert len(differences({"acceptance_rates": [0.63, 0.37, 0.3]}, recorded)) == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(RECORDED, {name_of(*drafter): measure(*drafter) for drafter in DRAFTERS})
    sys.stdout.write(RECORDED.read_text())
