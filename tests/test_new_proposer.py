"""One row in the table of proposers and one class are all that a proposer takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.cli import main as cli
from skipstone.errors import ConfigError
from skipstone.models.loader import read_model_info
from skipstone.registry import PROPOSERS, ProposerRow
from skipstone.runtime.proposers import Candidate, candidates
from skipstone.spec.ngram import NgramProposer
from skipstone.spec.proposer import DraftStep, ProposerNeeds
from skipstone.spec_config import SpecConfig, parse_spec

ROW = ProposerRow("spec.made_up:EchoProposer", default_k=2, peers=("parrot",))
HEAD_ROW = ProposerRow("spec.made_up:EchoProposer", heads=("EchoHead",))


class EchoProposer(NgramProposer):
    """Drafts that the newest token will be repeated."""

    def __init__(self, spec: SpecConfig, around: object) -> None:
        super().__init__(1, 1)
        self.needs = ProposerNeeds("echo")

    def propose(self, step: DraftStep) -> Tensor | None:
        """See the class."""
        newest = step.table.tokens[step.draft_slots, step.newest.clamp(min=0)]
        return newest[:, None].expand(-1, step.k).to(torch.int64) if step.k else None


@pytest.fixture(autouse=True)
def file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skipstone.spec.made_up", sys.modules[__name__])


def test_a_row_without_a_folder(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROPOSERS, "echo", ROW)
    assert parse_spec("echo:3") == SpecConfig(method="echo", k=3)
    assert parse_spec('{"method": "parrot"}').method == "echo"
    with pytest.raises(ConfigError, match=r"must be .*, echo:K, or"):
        parse_spec("magic")
    with pytest.raises(ConfigError, match="echo takes a number of drafts only"):
        parse_spec("echo:folder:3")
    model = folder("m3")
    assert candidates(read_model_info(model))[-1] == Candidate("echo", "echo", True, "needs no weights")
    assert cli.run(["inspect", str(model)]) == 0
    assert "--spec echo:K" in capsys.readouterr().out
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={7: 100.0})
    with LLM(str(model), spec="echo") as llm:
        assert "echo, k = 2 (as asked)" in llm.engine.speculation.description
        (out,) = llm.generate([[3, 4, 5]], params, progress=False)
        assert list(out.outputs[0].token_ids) == [7] * 12
        stats = out.outputs[0].speculation
        assert stats.accepted_per_position == stats.drafted_per_position == [4, 3]


def test_a_row_with_a_folder(
    folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PROPOSERS, "echo", HEAD_ROW)
    model = tmp_path / "m3"
    model.symlink_to(folder("m3"), target_is_directory=True)
    assert parse_spec("echo:place:3") == SpecConfig(method="echo", folder="place", k=3)
    with pytest.raises(ConfigError, match=r"must be .*, echo:FOLDER:K, or"):
        parse_spec("magic")
    assert candidates(read_model_info(model))[-1].spec == "echo:FOLDER"
    assert cli.run(["generate", str(model), "--spec", "echo", "-p", "x"]) == 2
    assert "spec=echo needs a folder" in capsys.readouterr().err
    beside = folder("m3").with_name("m3-echo")
    beside.mkdir()
    try:
        (beside / "config.json").write_text('{"architectures": ["EchoHead"]}')
        assert candidates(read_model_info(model))[-1] == Candidate("echo", "echo", True, f"in {beside}")
        with pytest.raises(ConfigError, match="use echo:FOLDER:K for it"):
            LLM(str(model), spec=f"eagle3:{beside}:2")
    finally:
        (beside / "config.json").unlink()
        beside.rmdir()
