"""The table of ops: every op has a kernel with its twin's signature, and tests."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from oracles.kernels import Kernel

from skipstone.kernels.ops import OP_NAMES
from skipstone.registry import KERNELS

pytest.importorskip("triton")

# Where each op is tested; a new op is added here together with its tests.
TESTED_IN = {
    "test_kernels_attention.py": ("dense_attention", "sparse_gqa", "sparse_mla"),
    "test_index_rows.py": ("index_rows",),
    "test_kernels_selection.py": ("block_select", "token_select"),
    "test_kernels_steps.py": ("step_rows", "accept"),
    "test_kernels_tables.py": ("verify_page_table", "prefill_page_table", "paged_attention"),
    "test_kernels_rows.py": (
        "linear", "bmm", "rms_norm", "add_rms_norm", "rotate", "norm_rotate_store", "gated", "store",
        "route", "experts_forward", "sample",
    ),
}  # fmt: skip


def named_in(file: str) -> set[str]:
    """Ops that a test file names in a string."""
    tree = ast.parse((Path(__file__).parent / file).read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings & set(OP_NAMES)


def test_every_op_is_tested() -> None:
    told = {op for ops in TESTED_IN.values() for op in ops}
    assert told == set(OP_NAMES), "list a new op in TESTED_IN, and test it there"
    for file, ops in TESTED_IN.items():
        assert set(ops) <= named_in(file), f"{file} lacks tests of {set(ops) - named_in(file)}"


@pytest.mark.parametrize("op", OP_NAMES)
def test_signatures_are_the_twins(op: str) -> None:
    """Names, order and defaults of the arguments."""
    kernel, twin = (inspect.signature(KERNELS.load(f"{op}/{by}")) for by in ("triton", "reference"))
    assert [(p.name, p.default) for p in kernel.parameters.values()] == [
        (p.name, p.default) for p in twin.parameters.values()
    ]


def test_unknown_ops_are_refused() -> None:
    with pytest.raises(AssertionError):
        Kernel("no_such_op")
