"""`skipstone check` finds nothing where nothing is wrong, and every fault that is put in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.tiny import Tiny, write_folder
from oracles.tiny_heads import with_mtp, write_head

from skipstone.cli import main as cli
from skipstone.config import make_config
from skipstone.core.batch import SamplingRows
from skipstone.core.plan import PlanItem
from skipstone.core.request import Request
from skipstone.errors import ConfigError
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import Accepted
from skipstone.models.minimax_m3 import MiniMaxM3
from skipstone.runtime.scheduler import Scheduler
from skipstone.spec.verify import Drafted, Verifier
from skipstone.tools.check.compare import LOGIC_ERROR, NEAR_TIE
from skipstone.tools.check.run import CheckReport, check
from skipstone.tools.flags import choose_prompts

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 60)), [9, 8] * 20, [11], list(range(100, 20, -3)) * 2]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MiniMax-M3 with an MTP module and an EAGLE-3 head beside it."""
    root = tmp_path_factory.mktemp("check")
    target = with_mtp(tiny("m3"), 1)
    write_head("eagle3", target, root / "m3-eagle3")
    return write_folder(target, root / "m3")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt_token_ids": ids, "kind": "test"}) for ids in PROMPTS))
    return file


def checked(model: Path, prompts: Path, proposers: str | None = "mtp,ngram", **options: object) -> CheckReport:
    """Greedy and, hot enough that random heads guess right at times, sampled."""
    config = make_config(model=str(model), **options)
    return check(config, [1, 3], proposers, [0.0, 5.0], str(prompts), 12, 16)


class FirstDraftAlways(Verifier):
    """Keeps the first draft whether it is right or not."""

    def verify(self, logits: torch.Tensor, rows: SamplingRows, drafted: Drafted, ops: Ops) -> Accepted:
        right = super().verify(logits, rows, drafted, ops)
        if drafted.token_ids.shape[1] < 2:
            return right
        first = drafted.token_ids[:, 1]
        wrong = (right.num_accepted == 0) & (first >= 0) & (drafted.newest + 1 < drafted.end)
        emitted = right.emitted.clone()
        emitted[:, 1] = torch.where(wrong, right.emitted[:, 0], emitted[:, 1])
        emitted[:, 0] = torch.where(wrong, first, emitted[:, 0])
        following = torch.where(wrong[:, None] & (torch.arange(emitted.shape[1]) > 0), emitted[:, 1:2], right.following)
        following[:, 0] = torch.where(wrong, first, following[:, 0])
        return Accepted(right.num_accepted + wrong, emitted, following, right.start + wrong)


def test_nothing_differs_in_exact_mode(model: Path, prompts: Path) -> None:
    report = checked(model, prompts)
    assert report.equal
    assert [(cell.proposer, cell.k) for cell in report.cells] == [("mtp", 1), ("mtp", 3), ("ngram", 1), ("ngram", 3)]
    for result in report.ran:
        assert result.texts == result.equal_texts == 2 * len(PROMPTS)
        assert result.rows == result.equal_rows == report.reference_rows > 100
        assert result.max_logit_difference == 0
    assert all(cell.acceptance_length and cell.acceptance_length > 1 for cell in report.cells[:2]), report.cells
    assert len(report.cells[1].acceptance_rates) == 3


def test_a_wrong_draft_that_is_kept_is_a_logic_error(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipstone.runtime.speculation.Verifier", FirstDraftAlways)
    for exact in (True, False):
        report = checked(model, prompts, "mtp", exact=exact)
        found = report.cells[0].differences
        assert not report.equal and found
        assert {difference.kind for difference in found} == {LOGIC_ERROR}
        first = found[0]
        assert first.origin == "accepted" and not first.own_sample and first.gap < 0
        assert first.expected_top[0][0] == first.expected and first.got != first.expected


def disturb(
    monkeypatch: pytest.MonkeyPatch,
    with_drafts: Callable[[torch.Tensor], torch.Tensor],
    without: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> None:
    """Change the logits of every step with drafts, that is, of more rows than there are requests."""
    original = MiniMaxM3.compact_logits

    def logits(self: MiniMaxM3, hidden: torch.Tensor) -> torch.Tensor:
        many = len(hidden) > 2 * len(PROMPTS)
        return (with_drafts if many else without)(original(self, hidden))

    monkeypatch.setattr(MiniMaxM3, "compact_logits", logits)


def test_one_unit_in_the_last_place_is_seen(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, lambda logits: torch.nextafter(logits, torch.tensor(torch.inf)))
    report = checked(model, prompts, "mtp")
    assert not report.equal
    result = report.ran[0]
    assert result.equal_rows < result.rows
    assert 0 < result.max_logit_difference < 1e-5
    assert all(difference.kind == NEAR_TIE for difference in result.differences)
    loose = checked(model, prompts, "mtp", exact=False)
    assert loose.equal == (not loose.cells[0].differences)


def with_second(logits: torch.Tensor, ahead: float) -> torch.Tensor:
    """The second likeliest token gets the likeliest one's logit and that much more."""
    top = logits.topk(2, dim=1)
    return logits.scatter(1, top.indices[:, 1:], top.values[:, :1] + ahead)


def test_a_near_tie_is_told_from_an_error(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hair = 2e-5
    disturb(monkeypatch, lambda logits: with_second(logits, hair), lambda logits: with_second(logits, -hair))
    report = checked(model, prompts, "mtp")
    ties = [difference for cell in report.cells for difference in cell.differences]
    assert not report.equal
    assert len(ties) >= len(PROMPTS) and {difference.kind for difference in ties} == {NEAR_TIE}
    assert all(difference.own_sample and 0 <= difference.gap <= 3 * hair for difference in ties)
    monkeypatch.undo()
    disturb(monkeypatch, lambda logits: with_second(logits, 3.0))
    errors = [difference for cell in checked(model, prompts, "mtp").cells for difference in cell.differences]
    assert len(errors) >= len(PROMPTS) and {difference.kind for difference in errors} == {LOGIC_ERROR}


def test_garbage_logits_are_no_near_tie(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, lambda logits: logits.roll(1, dims=1))
    found = checked(model, prompts, "mtp").cells[0].differences
    assert found and all(difference.kind == LOGIC_ERROR for difference in found)


def test_a_text_that_ends_early(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_rows = Scheduler._plan_rows

    def short(self: Scheduler, request: Request, budget: int) -> PlanItem | None:
        item = plan_rows(self, request, budget)
        if item is not None and item.num_drafts:
            request.max_total_tokens = min(request.max_total_tokens, request.num_prompt_tokens + 5)
        return item

    monkeypatch.setattr(Scheduler, "_plan_rows", short)
    found = checked(model, prompts, "mtp").cells[0].differences
    assert found and {(difference.origin, difference.got) for difference in found} == {("end", None)}


def test_a_refused_pair_is_listed(tiny: Callable[[str], Tiny], prompts: Path, tmp_path: Path) -> None:
    two = write_folder(with_mtp(tiny("m3"), 2), tmp_path / "two")
    report = checked(two, prompts, "mtp")
    assert report.equal and len(report.ran) == 1
    assert [cell.refused for cell in report.cells] == [
        None, "spec='mtp:3': k=3 is more than mtp can draft at once; at most 2",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="k=3 is more than mtp can draft"):
        check(make_config(model=str(two)), [3], "mtp", [0.0], str(prompts), 1, 4)


def test_proposers(model: Path, prompts: Path, folder: Callable[[str], Path]) -> None:
    report = checked(model, prompts, None)
    assert {"mtp", "eagle3", "ngram"} <= {cell.proposer for cell in report.cells}
    assert report.equal
    with pytest.raises(ConfigError, match="no proposer 'magic'; known: mtp"):
        checked(model, prompts, "magic")
    with pytest.raises(ConfigError, match="mtp cannot be used here: the files hold 0 MTP modules"):
        checked(folder("m3"), prompts, "mtp")
    with pytest.raises(ConfigError, match="nothing to compare"):
        check(make_config(model=str(model)), [0], None, [0.0], str(prompts), 1, 4)


def test_the_command(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "check",
        str(model),
        "--prompts",
        str(prompts),
        "--max-tokens",
        "8",
        "--k",
        "0,2",
        "--proposers",
        "mtp",
    ]
    assert cli.run([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    out, err = capsys.readouterr()
    assert "EQUAL: all 10 texts of 1 runs are those of k = 0" in out.splitlines()[-1] and "100 %" in err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["cells"][0]["comparison"]["equal_texts"] == 10
    monkeypatch.setattr("skipstone.runtime.speculation.Verifier", FirstDraftAlways)
    assert cli.run(arguments) == 1
    out = capsys.readouterr().out
    assert "logic error" in out and "two likeliest at k = 0" in out and out.splitlines()[-1].startswith("DIFFERENT: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "x"], ["--k x", "whole numbers"]),
        (["--k", "1,99"], ["--k 1,99", "between 0 and 64"]),
        (["--temperature", "hot"], ["--temperature hot", "must list numbers"]),
        (["--prompts", "absent.jsonl"], ["--prompts absent.jsonl cannot be read"]),
        (["--num-prompts", "0"], ["--num-prompts", "at least 1"]),
    ],
)
def test_bad_options(model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    assert cli.run(["check", str(model), *arguments]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_a_line_of_the_file_may_set_how_it_is_sampled(model: Path, tmp_path: Path) -> None:
    line = {"prompt_token_ids": [5, 6, 7, 8], "repetition_penalty": 1.3, "max_tokens": 9, "n": 3, "temperature": 0.1}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line | {"ignore_eos": True}))
    report = checked(model, tmp_path / "lines.jsonl", "mtp")
    assert report.equal and report.reference_rows == 2 * 9


DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
# Measured with this test; AL = 1 + their sum.
DEMO_RATES = [0.676, 0.474, 0.316]


@pytest.mark.long
@pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here")
def test_acceptance_of_the_demo_stays_what_it_is() -> None:
    report = check(make_config(model="demo"), [3], "mtp", [0.0, 1.0], None, 6, 40)
    assert report.equal
    rates = report.cells[0].acceptance_rates
    assert 1 + sum(DEMO_RATES) > 1.3
    assert rates == pytest.approx(DEMO_RATES, abs=0.02)


def test_the_shipped_prompts_are_spread() -> None:
    kinds = [prompt.request_id.split("-")[0] for prompt in choose_prompts(None, 12)]
    assert kinds == ["code"] * 3 + ["prose"] * 3 + ["table"] * 3 + ["dialogue"] * 3
