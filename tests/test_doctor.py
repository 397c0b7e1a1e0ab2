"""`skipstone doctor`: its table of cases covers every op, and it finds kernels that compute something else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.cli import main as cli
from skipstone.errors import UnsupportedError
from skipstone.kernels import dispatch
from skipstone.kernels.ops import OP_NAMES, load_ops
from skipstone.registry import KERNELS
from skipstone.tools.doctor import report as doctor_report
from skipstone.tools.doctor.op_cases import OP_CASES
from skipstone.tools.doctor.op_inputs import SMALL, Shape
from skipstone.tools.doctor.op_run import Verdict, alone, examine, make_case, map_tensors, results

CPU = torch.device("cpu")


@pytest.fixture
def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Have an op's Triton entry be another function."""

    def replace(op: str, function: Callable[..., Any]) -> None:
        load = KERNELS.load
        monkeypatch.setattr(KERNELS, "load", lambda name: function if name == f"{op}/triton" else load(name))

    return replace


def test_every_op_has_a_case() -> None:
    assert set(OP_CASES) == set(OP_NAMES), "give each op a case in skipstone/tools/doctor/op_cases.py"


@pytest.fixture
def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.usefixtures("without_interpreter")
def test_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["op"] for item in found["ops"]] == list(OP_NAMES)
    assert all(item["failure"] is None and item["error"] < 1e-5 for item in found["ops"])
    assert {"torch", "Triton", "processor", "GPU", "msa_aiter", "ops"} <= found["facts"].keys()
    assert found["facts"]["msa_aiter"].startswith("not used: ")
    assert cli.run(["doctor"]) == 0
    assert "every op computes what it should" in capsys.readouterr().out


@pytest.mark.usefixtures("without_interpreter")
def test_a_broken_op_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failures = {"bmm": "error 0.5"}
    monkeypatch.setattr(doctor_report, "examine", lambda op, *rest: Verdict(op, 0.5, True, failures.get(op)))
    assert cli.run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"1 of {len(OP_NAMES)} ops are broken here" in out and "FAIL: error 0.5" in out


def test_the_interpreter_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(doctor_report, "examine", lambda op, kind, *rest: asked.append(kind) or Verdict(op, 0.0, None))
    for module in (doctor_report, dispatch):
        monkeypatch.setattr(module, "triton_refusal", lambda device: None)
    monkeypatch.setattr(
        dispatch, "load_ops", lambda kind: load_ops("reference").__class__(kind, *[None] * len(OP_NAMES))
    )
    doctor_report.report()
    assert set(asked) == {"triton"}


def test_a_machine_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "skipstone.tools.doctor.report", None)
    assert cli.run(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("error: torch cannot be imported")


def test_wrong_numbers_are_found(replace_kernel: Callable[[str, Callable[..., Any]], None]) -> None:
    right = KERNELS.load("rms_norm/reference")
    replace_kernel("rms_norm", lambda x, gain, eps: right(x, gain, eps) * 1.001)
    assert "is above" in str(examine("rms_norm", "triton", torch.float32, CPU).failure)
    replace_kernel("rms_norm", lambda x, gain, eps: right(x, gain, eps).fill_(torch.nan))
    assert "is above" in str(examine("rms_norm", "triton", torch.float32, CPU).failure)
    replace_kernel("rms_norm", lambda x, gain, eps: 1 / 0)
    assert "ZeroDivisionError" in str(examine("rms_norm", "triton", torch.float32, CPU).failure)


def test_wrong_ids_are_found(replace_kernel: Callable[[str, Callable[..., Any]], None]) -> None:
    right = KERNELS.load("block_select/reference")

    def other(*args: Any) -> Tensor:
        ids = right(*args)
        ids[0, 0, 0] += 1
        return ids

    replace_kernel("block_select", other)
    assert "of the ids differ" in str(examine("block_select", "triton", torch.float32, CPU).failure)


def test_other_choices_among_fp8_keys_alone_are_found(replace_kernel: Callable[..., None]) -> None:
    """Scales that are left out: without FP8 nothing is wrong."""
    own = KERNELS.load("token_select/reference")
    replace_kernel("token_select", lambda q, w, k, scale, *rest: own(q, w, k, None, *rest))
    assert "of the ids differ" in str(examine("token_select", "triton", torch.float32, CPU).failure)


def test_wrong_caches_are_found(replace_kernel: Callable[[str, Callable[..., Any]], None]) -> None:
    right = KERNELS.load("store/reference")
    replace_kernel("store", lambda rows, cache, block, offset: right(rows, cache, block, (offset + 1) % cache.shape[2]))
    assert "is above" in str(examine("store", "triton", torch.float32, CPU).failure)


def test_rows_that_depend_on_others_are_found(replace_kernel: Callable[[str, Callable[..., Any]], None]) -> None:
    right = KERNELS.load("linear/reference")
    replace_kernel("linear", lambda x, weight, exact: right(x, weight, exact) * (1 + len(x) * 1e-7))
    verdict = examine("linear", "triton", torch.float32, CPU)
    assert verdict.same_alone is False and "row alone" in str(verdict.failure)


@pytest.mark.parametrize("op", [op for op in OP_NAMES if op not in ("sample", "index_rows")])
def test_cases_in_bfloat16(op: str) -> None:
    assert examine(op, "reference", torch.bfloat16, CPU).failure is None


def test_one_row_of_a_case_is_that_row() -> None:
    case = make_case("sparse_gqa", SMALL, Shape(2, 3, 300), torch.float32, CPU)
    span, cut = case.args[5], alone(case, 4).args
    assert torch.equal(cut[0], case.args[0][4:5]) and cut[1] is case.args[1]
    assert cut[5].positions.tolist() == [[int(span.positions[1, 1])]]
    assert torch.equal(cut[5].block_table, span.block_table[1:])


def test_what_an_op_writes_stays_as_it_was() -> None:
    case = make_case("store", SMALL, Shape(1, 3, 9), torch.float32, CPU)
    results(case, KERNELS.load("store/reference"), False)
    assert not case.written[0].any()
    assert map_tensors((torch.ones(1), 2), lambda tensor: tensor + 1)[0] == 2


def test_exact_mode_needs_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    with pytest.raises(UnsupportedError, match=r"exact=True and kernels='reference'.*--no-exact"):
        dispatch.choose_ops(gpu, "reference", exact=True)
    assert dispatch.choose_ops(gpu, "reference").ops.is_reference
    assert dispatch.choose_ops(CPU, "reference", exact=True).ops.is_reference
    monkeypatch.setattr(dispatch, "triton_refusal", lambda device: "the package triton is not installed")
    with pytest.raises(UnsupportedError, match="triton is not installed"):
        dispatch.choose_ops(gpu, "auto", exact=True)
