"""`skipstone bench kernels`: what it measures and against what; times themselves need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.cli import main as cli
from skipstone.core.batch import FIRST_BLOCK
from skipstone.errors import ConfigError
from skipstone.kernels.ops import OP_NAMES
from skipstone.kernels.reference.attention import sparse_gqa
from skipstone.kernels.reference.select import block_select
from skipstone.registry import KERNELS
from skipstone.tools.bench import kernel_cells, kernel_peer, kernel_run
from skipstone.tools.bench.gpu_timing import Timing
from skipstone.tools.bench.kernel_cells import CELLS, Cell
from skipstone.tools.bench.kernel_peer import Peer, load_peer
from skipstone.tools.bench.kernel_run import Ceilings, Measured
from skipstone.tools.bench.kernels import _line
from skipstone.tools.doctor.op_inputs import SMALL, Inputs, Shape
from skipstone.tools.doctor.op_run import arguments, make_case

CPU = torch.device("cpu")


def small(cell: Cell) -> Shape:
    """The cell's kind of call, for a CPU."""
    requests, n, context, *rest = cell.shape
    return Shape(min(requests, 2), min(n, 5), min(context, 200), *rest)


def test_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "kernels"]) == 2
    assert capsys.readouterr().err == "error: bench kernels needs a GPU, and torch sees none here\n"


def test_names_are_told_apart() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert {cell.op for cell in CELLS} <= set(OP_NAMES)
    assert 0 < sum(cell.quick for cell in CELLS) < len(CELLS) / 2


@pytest.mark.parametrize("cell", {(c.op, c.options, small(c)): c for c in CELLS}.values(), ids=lambda c: c.name)
def test_cells_can_be_made(cell: Cell) -> None:
    if "outputs" in dict(cell.options):
        cell = cell._replace(options=(("outputs", 24), *(item for item in cell.options if item[0] == "weight_dtype")))
    case = make_case(cell.op, SMALL, small(cell), torch.float32, CPU, **dict(cell.options))
    assert case.num_bytes > 0
    KERNELS.load(f"{cell.op}/reference")(*arguments(case, False))


def test_smaller_calls_are_smaller() -> None:
    for cell in CELLS:
        sizes, shape = cell.check_sizes()
        assert sizes.experts == 8 and shape.rows <= 512 and shape.context <= 5000
        assert shape.n > 1 or cell.shape.n == 1


def chosen(indices: Tensor) -> list[list[set[int]]]:
    """Units of every row and group."""
    return [[{unit for unit in group if unit >= 0} for group in row] for row in indices.tolist()]


@pytest.mark.parametrize("overlap", [True, False])
def test_selections(overlap: bool) -> None:
    inputs = Inputs(SMALL, Shape(2, 6, 32 * 40, overlap), torch.float32, CPU, 1, False)
    span, _ = inputs.span(32, 1)
    indices = inputs.choose(span.positions, 2, 32, 8)
    rows = chosen(indices)
    for row, position in zip(rows, span.positions.flatten().tolist(), strict=True):
        assert all(position // 32 in units and len(units) == 8 and max(units) == position // 32 for units in row)
    shared = [len(rows[i][g] & rows[i + 1][g]) for i in (0, 1, 2, 6, 7) for g in range(2)]
    assert min(shared) >= 7 if overlap else sum(shared) < 7 * len(shared) / 2


def test_bytes_of_selected_blocks() -> None:
    case = make_case("sparse_gqa", SMALL, Shape(2, 4, 32 * 40), torch.float32, CPU)
    rows = chosen(case.args[3])
    blocks = sum(len(set.union(*(rows[4 * r + j][g] for j in range(4)))) for r in range(2) for g in range(2))
    q = case.args[0]
    assert case.num_bytes == blocks * 32 * 2 * 32 * 4 + 2 * q.numel() * 4
    selected = 2 * 4 * 2 * 4 * 32  # requests, rows, groups, blocks, keys
    assert case.flops == selected * 4 * 4 * 32


def test_requests_have_their_own_blocks() -> None:
    span, blocks = Inputs(SMALL, Shape(3, 1, 100), torch.float32, CPU, 1, False).span(32, 4)
    assert sorted(span.block_table.flatten().tolist()) == list(range(FIRST_BLOCK, blocks)) and blocks == 14


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cells measured here, with the references in place of the kernels and a clock that says 10 us."""
    load = KERNELS.load
    monkeypatch.setattr(KERNELS, "load", lambda name: load(name.replace("/triton", "/reference")))
    for module in (kernel_run, kernel_cells):
        monkeypatch.setattr(module, "RELEASES", SMALL)
    monkeypatch.setattr(kernel_run, "DEVICE", CPU)
    monkeypatch.setattr(kernel_run, "DTYPE", torch.float32)
    monkeypatch.setattr(
        kernel_run, "time_calls", lambda calls, rounds: [call() for call in calls] and Timing(10.0, 0.01)
    )
    kernel_run.check.cache_clear()


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("op", ["sparse_gqa", "norm_rotate_store", "experts_forward", "add_rms_norm"])
def test_a_cell_is_measured(op: str) -> None:
    found = kernel_run.measure(Cell("x", op, Shape(2, 2, 150)), Ceilings(1e9, 1e12), 3, None)
    assert found.failure is None and found.exact_us == found.fast_us == 10.0
    assert found.has_exact == (op in ("sparse_gqa", "experts_forward"))
    assert found.share == found.floor_us / 10.0 > 0 and found.error < 1e-5 and found.peer_us is None


@pytest.mark.usefixtures("on_a_cpu")
def test_what_fails_is_reported(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    cell, limits = Cell("x", "sparse_gqa", Shape(2, 2, 150)), Ceilings(1e9, 1e12)
    assert kernel_run.measure(cell, limits, 3, peer).peer_us == 10.0
    peer.attention.minimax_m3_sparse_attn_decode = lambda *args: args[7].zero_()
    found = kernel_run.measure(cell, limits, 3, peer)
    assert found.exact_us == 10.0 and str(found.failure).startswith("peer: ")
    load = KERNELS.load
    monkeypatch.setattr(
        KERNELS, "load", lambda name: (lambda *args: 1 / 0) if name == "sparse_gqa/triton" else load(name)
    )
    kernel_run.check.cache_clear()
    assert "ZeroDivisionError" in str(kernel_run.measure(cell, limits, 3, None).failure)


def test_lines() -> None:
    measured = Measured("x", True, 10.0, 8.0, 5.0, 0.5, "memory", 0.01, 1e-3, 20.0)
    assert "+25.0%" in _line(measured, True) and "2.00" in _line(measured, True)
    assert "FAILED: why" in _line(Measured("x", False, failure="why"), True)
    assert "WRONG: why" in _line(measured._replace(failure="why"), False)


def test_a_peer_without_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index_topk\.py is missing"):
        load_peer(str(tmp_path))


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    """The documented functions of the peer, in plain torch, and ours as well."""

    def decode(q, cache, table, lengths, longest, budget, init, local, heads, n, longest_n):  # type: ignore[no-untyped-def]
        assert lengths.dtype == table.dtype == torch.int32 and heads == q.shape[1] and n == longest_n
        positions = lengths[:, None] - n + torch.arange(n)
        span = SPAN._replace(positions=positions.long(), block_table=table.long(), query_len=n)
        ids = block_select(q, cache[:, None], span, 32, budget, init, local, False)
        return ids.flip(-1).permute(1, 0, 2)  # in any order

    def attend(q, cache, ids, table, lengths, heads, scale, out, n):  # type: ignore[no-untyped-def]
        positions = (lengths[:, None] - n + torch.arange(n)).long()
        span = SPAN._replace(positions=positions, block_table=table.long(), query_len=n)
        k, v = cache.chunk(2, dim=-1)
        out.copy_(
            sparse_gqa(q, k.contiguous(), v.contiguous(), ids.permute(1, 0, 2).contiguous(), 32, span, scale, False)
        )

    load = KERNELS.load
    monkeypatch.setattr(KERNELS, "load", lambda name: load(name.replace("/triton", "/reference")))
    index, attention = (
        SimpleNamespace(minimax_m3_index_decode=decode),
        SimpleNamespace(minimax_m3_sparse_attn_decode=attend),
    )
    return Peer(index, attention)  # type: ignore[arg-type]


SPAN = Inputs(SMALL, Shape(1, 1, 100), torch.float32, CPU, 1, False).span(32, 4)[0]


@pytest.mark.parametrize("op", ["block_select", "sparse_gqa"])
def test_what_a_peer_is_given(op: str, peer: Peer) -> None:
    cases = [make_case(op, SMALL, Shape(2, 3, 500), torch.float32, CPU) for _ in range(2)]
    made = peer.calls(op, cases)
    assert made is not None and len(made) == 2
    assert peer.calls("linear", cases) is None


def test_a_peer_that_computes_something_else(peer: Peer) -> None:
    attend: Callable[..., Any] = peer.attention.minimax_m3_sparse_attn_decode
    peer.attention.minimax_m3_sparse_attn_decode = lambda *args: (attend(*args), args[7].mul_(1.1))
    with pytest.raises(RuntimeError, match="the peer's results differ"):
        peer.calls("sparse_gqa", [make_case("sparse_gqa", SMALL, Shape(2, 3, 500), torch.float32, CPU)])
    assert kernel_peer.DECODED >= 4
