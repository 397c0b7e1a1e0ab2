"""Speculation on the command line: its statistics, vLLM's flag, and what inspect says of it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from oracles.tiny import Tiny, write_folder
from oracles.tiny_heads import with_mtp

from skipstone.cli import main as cli
from skipstone.core.speculation import SpeculationStats

ROOT = Path(__file__).resolve().parent.parent
HAS_DEMO = any((ROOT / "checkpoints" / "demo").glob("*.safetensors"))
needs_demo = pytest.mark.skipif(not HAS_DEMO, reason="the demo checkpoint's weights are not here")


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(with_mtp(tiny("m3"), 1), tmp_path_factory.mktemp("spec") / "m3")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt_token_ids": [3, 4, 5 + i], "kind": "code", "reference": "?"} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_generate_reports_acceptance(model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(model), "-f", str(prompts), "--max-tokens", "20", "--temperature", "5", "--seed", "1"]
    arguments += ["--ignore-eos", "--stats", "--json", "-"]
    assert cli.run([*arguments, "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']) == 0
    out, err = capsys.readouterr()
    assert "speculation: mtp: " in err and "tokens per verify step; " in err and "by position 0." in err
    objects = [json.loads(line) for line in out.splitlines()]
    assert all(len(found["speculation"]["acceptance_rates"]) == 2 for found in objects)
    assert cli.run([*arguments, "--spec", "off"]) == 0
    plain, err = capsys.readouterr()
    assert "tokens per verify step" not in err
    assert [json.loads(line)["token_ids"] for line in plain.splitlines()] == [found["token_ids"] for found in objects]
    assert "speculation" not in json.loads(plain.splitlines()[0])
    assert cli.run([*arguments, "--spec", "mtp:2", "--simulate-acceptance", "1,1"]) == 0
    assert "speculation: mtp: SIMULATED acceptance, the text means nothing: 3.00" in capsys.readouterr().err


def test_a_request_may_ask_for_fewer(model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(model), "-f", str(prompts), "--max-tokens", "20", "--json", "-", "--spec", "mtp:3"]
    assert cli.run([*arguments, "--num-speculative-tokens", "1", "--ignore-eos"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert len(found["speculation"]["drafted_per_position"]) == 1


@needs_demo
def test_chat_reports_each_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\nagain\n")))
    assert cli.run(["chat", "demo", "--max-tokens", "12", "--stats", "--spec", "mtp:2", "--ignore-eos"]) == 0
    assert capsys.readouterr().err.count("speculation, mtp: ") == 2


def test_sums_of_counters() -> None:
    first, second = SpeculationStats(), SpeculationStats(simulated=True)
    first.record(3, 2)
    second.record(1, 1)
    both = first.plus(second)
    assert (both.steps, both.drafted_per_position, both.accepted_per_position) == (2, [2, 1, 1], [2, 1, 0])
    assert both.simulated and both.acceptance_length == 2.5
