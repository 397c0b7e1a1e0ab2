"""`skipstone trace`: every token with its origin, and the selections of the row that emitted it and of no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from oracles.tiny import Tiny, write_folder
from oracles.tiny_heads import with_mtp

from skipstone.cli import main as cli
from skipstone.cli.options import Settings
from skipstone.cli.prompts import Prompt
from skipstone.config import make_config
from skipstone.core.request import SamplingParams
from skipstone.tools.trace.run import PROMPT, TracedToken, TraceReport, summary, trace

PROMPT_IDS = [(11 * i + i * i) % 120 for i in range(90)]  # far more than a sparse layer may read


@pytest.fixture(scope="module", params=["m3", "dsa"])
def model(
    request: pytest.FixtureRequest, tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tiny(request.param)
    target = with_mtp(target, 1) if request.param == "m3" else target
    return write_folder(target, tmp_path_factory.mktemp("trace") / request.param)


def traced(model: Path, spec: str, **options: object) -> TraceReport:
    params = SamplingParams(temperature=5.0, seed=8, max_tokens=40, ignore_eos=True)
    values = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    sources = dict.fromkeys(values, "--flag")
    config = make_config(model=str(model), spec=spec, max_num_batched_tokens=32, **options)
    return trace(config, Prompt("0", "test", token_ids=PROMPT_IDS), Settings(values, sources))


def test_tokens_logits_and_selections_are_those_without_drafts(model: Path) -> None:
    plain, drafted = traced(model, "off"), traced(model, "mtp:4")
    assert {token.origin for token in plain.generated} == {"sampled"}
    assert {"accepted", "recovered"} <= {token.origin for token in drafted.generated}
    assert len(drafted.generated) == 40
    for ours, theirs in zip(drafted.generated, plain.generated, strict=True):
        assert (ours.position, ours.token_id, ours.logit, ours.top) == (
            theirs.position, theirs.token_id, theirs.logit, theirs.top,
        )  # fmt: skip
        assert ours.reads == theirs.reads and ours.reads


def test_origins_agree_with_the_counters(model: Path) -> None:
    report = traced(model, "mtp:4")
    origins = [token.origin for token in report.generated]
    assert report.stats is not None
    assert origins.count("accepted") == report.stats.accepted
    for token in report.generated:
        assert (token.replaced is not None) == (token.origin == "recovered")
        assert token.replaced != token.token_id
        if token.origin in ("accepted", "recovered"):
            assert token.draft and 1 <= token.draft <= 4
    by_step: dict[int, list[str]] = {}
    for token in report.generated:
        by_step.setdefault(token.step or 0, []).append(token.origin)
    for step in by_step.values():  # a run: accepted drafts, then one more token
        assert set(step[:-1]) <= {"accepted"}


def test_selections_lie_in_the_past_and_within_the_budget(model: Path, tiny: Callable[[str], Tiny]) -> None:
    report = traced(model, "mtp:3")
    budget = tiny(model.name).budget
    assert [token.token_id for token in report.tokens[:90]] == PROMPT_IDS
    assert {token.origin for token in report.tokens[:90]} == {PROMPT}
    for token in report.generated:
        for read in token.reads:
            assert read.layer not in report.dense_layers
            for group in read.selected:
                assert group == sorted(set(group)) and len(group) * read.unit <= budget
                assert group[-1] * read.unit < token.position
    assert report.dense_layers == ([0] if model.name == "m3" else [])


def test_the_summary_of_a_row() -> None:
    token = TracedToken(position=65, token_id=1, origin="sampled")
    assert summary(token) == "no sparse layer"


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["trace", str(model)]) == 2
    assert "trace takes one prompt" in capsys.readouterr().err
    assert cli.run(["trace", str(model), "-p", "x", "--n", "2"]) == 2
    assert "n=2 cannot be traced" in capsys.readouterr().err
    assert cli.run(["trace", str(model), "-p", "x", "--json", "/nowhere/x.json"]) == 2
    assert "/nowhere" in capsys.readouterr().err
    assert cli.run(["trace", str(model), "-p", "x"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err


@pytest.mark.skipif(
    not any((Path(__file__).parent.parent / "checkpoints/demo").glob("*.safetensors")), reason="no demo"
)
def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "trace",
        "demo",
        "-p",
        "The history of",
        "--max-tokens",
        "24",
        "--temperature",
        "0",
        "--spec",
        "ngram:3",
    ]
    assert cli.run([*arguments, "--json", str(tmp_path / "trace.json")]) == 0
    out = capsys.readouterr().out
    assert "two likeliest" in out and "speculation: ngram, k = 3" in out
    report = json.loads((tmp_path / "trace.json").read_text())
    assert len(report["tokens"]) > 24 and report["tokens"][-1]["reads"][0]["selected"]
    assert "".join(token["text"] for token in report["tokens"]).startswith("<|bos|>The history of")
    assert cli.run([*arguments, "--spec", "mtp:2", "--simulate-acceptance", "1,1", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] and report["tokens"][-2]["origin"] in ("accepted", "bonus")
