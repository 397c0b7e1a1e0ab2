"""Every kernel compiles for every GPU that we name, on a machine without any, within what that GPU has.

`short` runs here; the whole models run with `pytest -m long`, and `python tests/test_kernel_targets.py` writes the
table of docs/kernels.md from them.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from oracles.kernel_calls import GEOMETRIES, SHORT, SWEEP, ops_covered
from oracles.launches import TARGETS, in_a_process

from skipstone.kernels.ops import OP_NAMES

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "kernels.md"
# Bytes of a thread's registers that may live in memory: a few, used outside of loops, cost nothing. Float32 runs the
# small demos only.
MAX_SPILLED, MAX_SPILLED_FLOAT = 128, 256
MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)

CASES = [
    pytest.param(target, geometry, marks=() if geometry == SHORT else pytest.mark.long)
    for geometry in (*GEOMETRIES, SWEEP)
    for target in TARGETS
]
compiled = functools.cache(in_a_process)


@pytest.mark.parametrize(("target", "geometry"), CASES)
def test_compiles_within_limits(target: str, geometry: str) -> None:
    """One process per case compiles everything; all faults are listed together."""
    limits, faults = TARGETS[target], []
    records = compiled(target, geometry)
    assert records
    for record in records:
        what = f"{record['op']} ({record['call'].strip()})"
        if "error" in record:
            faults.append(f"{what}: {record['error']}")
            continue
        what += f", {record['kernel']}"
        if record["shared"] > limits.shared:
            faults.append(f"{what}: {record['shared']} bytes of shared memory, {target} has {limits.shared}")
        if record["registers"] > limits.registers:
            faults.append(f"{what}: {record['registers']} registers, {target} has {limits.registers}")
        if record["spilled"] > (MAX_SPILLED_FLOAT if " f32" in record["call"] else MAX_SPILLED):
            faults.append(f"{what}: {record['spilled']} bytes of registers spilled, see docs/kernels.md")
        if any(size > limit for size, limit in zip(record["grid"], MAX_GRID, strict=False)):
            faults.append(f"{what}: a grid of {record['grid']}")
    assert not faults, "\n".join(faults)


def test_every_op_is_compiled() -> None:
    """An op without a call here would never be compiled before a GPU runs it."""
    assert ops_covered(SHORT) == set(OP_NAMES)
    assert set.union(*(ops_covered(name) for name in GEOMETRIES)) == set(OP_NAMES)


def kernels_in_sources() -> set[str]:
    """Names of the kernels in skipstone/kernels/gpu, as `file: name`. By convention a kernel's name ends in _kernel."""
    found = set()
    for path in sorted((ROOT / "skipstone" / "kernels" / "gpu").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(text.startswith(("triton.jit", "jit")) for text in decorators):
                    found.add(f"{path.name}: {node.name}")
    return found


def test_the_document_lists_every_kernel() -> None:
    """docs/kernels.md is generated; numbers may lag behind, the set of kernels may not."""
    listed = set(re.findall(r"^\| `(\w+\.py)` \| `(\w+)`", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert {f"{file}: {kernel}" for file, kernel in listed} == kernels_in_sources()


def test_the_document_names_the_limits() -> None:
    text = DOCUMENT.read_text()
    assert all(target in text for target in TARGETS)
    assert f"above {MAX_SPILLED} bytes" in text


INTRODUCTION = """# Kernels

What each Triton kernel takes of a GPU, as the compilers report it: `tests/test_kernel_targets.py` compiles every op for
every target on a machine without a GPU, and fails where shared memory or registers do not suffice, or where more than a
few registers spill: above {limit} bytes per thread, {limit_float} in float32. This table is written by

    PYTHONPATH=tests python tests/test_kernel_targets.py

Without arguments it compiles the calls of MiniMax-M3, DeepSeek-V3.2 and the demos in bfloat16 and float32: decoding 4
requests, verifying 3 drafts of each, and a chunk of 512 rows, exact and not. The numbers below are from: {geometries}
(`short`: M3 verifying and a chunk, exact, and what only V3.2 has). An entry is the largest value over all calls:
registers per thread / bytes spilled per thread / KiB of shared memory per program. On AMD the registers are vector and
accumulation registers together. A dash: none of these calls launches the kernel.

| limit | {targets} |
|---|{rule}
| registers | {registers} |
| shared memory, KiB | {shared} |

| file | kernel | ops | variants | {targets} |
|---|---|---|---|{rule}
"""


def largest(records: list[dict[str, Any]], key: str) -> int:
    return max(record[key] for record in records)


def document(found: dict[str, list[dict[str, Any]]], geometries: list[str]) -> str:
    """docs/kernels.md from the records of each target."""
    limits = TARGETS.values()
    text = INTRODUCTION.format(
        limit=MAX_SPILLED,
        limit_float=MAX_SPILLED_FLOAT,
        geometries=", ".join(geometries),
        targets=" | ".join(TARGETS),
        rule="---|" * len(TARGETS),
        registers=" | ".join(str(limit.registers) for limit in limits),
        shared=" | ".join(str(limit.shared // 1024) for limit in limits),
    )
    for name in sorted(kernels_in_sources()):
        file, kernel = name.split(": ")
        mine = {
            target: [r for r in records if r.get("kernel") == kernel and r["file"] == file]
            for target, records in found.items()
        }
        every = [record for records in mine.values() for record in records]
        ops = ", ".join(sorted({f"`{record['op']}`" for record in every}))
        variants = max((sum(not r["again"] for r in records) for records in mine.values()), default=0)
        cells = [
            f"{largest(r, 'registers')} / {largest(r, 'spilled')} / {largest(r, 'shared') / 1024:.0f}" if r else "-"
            for r in mine.values()
        ]
        text += f"| `{file}` | `{kernel}` | {ops} | {variants} | {' | '.join(cells)} |\n"
    return text


def main() -> None:
    """Compile everything and write the document."""
    found: dict[str, list[dict[str, Any]]] = {}
    geometries = sys.argv[1:] or [*GEOMETRIES]
    for target in TARGETS:
        found[target] = []
        for geometry in geometries:
            records = in_a_process(target, geometry)
            found[target] += [record for record in records if "error" not in record]
            errors = [record for record in records if "error" in record]
            print(f"{target} {geometry}: {len(records)} launches, {len(errors)} failed", file=sys.stderr)
            for record in errors:
                print(record["op"], record["call"], record["error"], file=sys.stderr)
    DOCUMENT.write_text(document(found, geometries))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    main()
