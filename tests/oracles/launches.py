"""Every kernel that a table of op calls launches, compiled for a GPU that need not be there.

    TRITON_INTERPRET=0 python -m oracles.launches sm_90 m3      one JSON line per kernel and call

Runs in a process of its own: Triton decides at import whether kernels are interpreted, and op files may remember the
platform. Launches are compiled instead of run, so results hold anything; a call that reads one back raises.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from oracles.kernels import NoSync

KIB = 1024


class Target(NamedTuple):
    """A GPU as the compiler knows it, and what one program may use of it."""

    backend: str
    arch: int | str
    warp: int
    shared: int  # bytes of shared memory (LDS) of one program
    registers: int  # of one thread: 32 bits each; on AMD vector and accumulation registers together


TARGETS = {
    "sm_90": Target("cuda", 90, 32, 227 * KIB, 255),
    "sm_100": Target("cuda", 100, 32, 227 * KIB, 255),
    "gfx942": Target("hip", "gfx942", 64, 64 * KIB, 512),
    "gfx950": Target("hip", "gfx950", 64, 160 * KIB, 512),
}


class Usage(NamedTuple):
    """What a compiled kernel takes. `spilled`: bytes of a thread's registers that live in memory."""

    registers: int
    spilled: int
    shared: int


class Driver:
    """Stands for the driver of a GPU: answers which one it is."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def usage(kernel: Any) -> Usage:
    """Registers, spills and shared memory, as the compilers report them."""
    shared = kernel.metadata.shared
    if "cubin" in kernel.asm:
        return Usage(*_cuda_registers(kernel.asm["cubin"]), shared)
    text = kernel.asm["amdgcn"]

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    # `.vgpr_count` is the sum of both kinds on these chips, which share one file of 512.
    return Usage(max(number("vgpr_count"), number("agpr_count")), number("private_segment_fixed_size"), shared)


def _cuda_registers(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread. Triton's kernels have no other use for a stack than spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found, text.stdout
    return int(found[1]), int(found[2])


class Recorder:
    """Within it, launches are compiled for a target and kept: (kernel, grid, file)."""

    def __init__(self, name: str) -> None:
        self.name, self.target = name, TARGETS[name]
        self.launches: list[tuple[Any, tuple[int, ...], str]] = []
        self.stack = ExitStack()

    def __enter__(self) -> Recorder:
        from unittest.mock import patch

        import torch
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        backend, arch, warp, shared, _ = self.target
        driver.set_active(Driver(GPUTarget(backend, arch, warp)))
        hip = "6.4" if backend == "hip" else None
        for owner, attribute, value in (
            (JITFunction, "run", self._instead_of(JITFunction.run)),
            (torch.version, "hip", hip),
            (torch.version, "cuda", None if hip else "13.0"),
        ):
            self.stack.enter_context(patch.object(owner, attribute, value))
        # Op files ask the device of their tensors, which is the CPU here.
        from skipstone.kernels.ops import OP_NAMES
        from skipstone.registry import KERNELS

        for op in OP_NAMES:
            with suppress(ImportError):  # the op's call will tell
                KERNELS.load(f"{op}/triton")
        for name, module in list(sys.modules.items()):
            if name.startswith("skipstone.kernels.") and hasattr(module, "shared_memory"):
                self.stack.enter_context(patch.object(module, "shared_memory", lambda device: shared))
            if name.startswith("skipstone.kernels.") and hasattr(module, "multiprocessors"):
                self.stack.enter_context(patch.object(module, "multiprocessors", lambda device: 132))
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    def _instead_of(self, run: Any) -> Any:
        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            if callable(grid):
                grid = grid({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs})
            self.launches.append((compiled, tuple(grid), kernel.fn.__module__.split(".")[-1] + ".py"))
            return compiled

        return compile_only


class Unmultiplied(NoSync):
    """Within it, torch's own products are not computed either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.bmm.default"):
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def compiled(target: str, geometry: str) -> Iterator[dict[str, Any]]:
    """A record for every kernel of every call of a geometry."""
    from oracles.kernel_calls import calls

    seen: set[tuple[str, str]] = set()
    with Recorder(target) as recorder:
        for op, label, call in calls(geometry):
            recorder.launches.clear()
            start = time.perf_counter()
            record = {"op": op, "call": label}
            try:
                with Unmultiplied():
                    call()
            except Exception:
                yield record | {"error": "".join(traceback.format_exc().splitlines(keepends=True)[-12:])}
                continue
            seconds = time.perf_counter() - start
            for kernel, grid, file in recorder.launches:
                registers, spilled, shared = usage(kernel)
                key = (kernel.hash, op)
                yield record | {
                    "file": file, "kernel": kernel.metadata.name,
                    "registers": registers, "spilled": spilled, "shared": shared,
                    "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages, "grid": grid,
                    "launches": len(recorder.launches), "seconds": round(seconds, 2), "again": key in seen,
                }  # fmt: skip
                seen.add(key)


def in_a_process(target: str, geometry: str) -> list[dict[str, Any]]:
    """`compiled`, in a Python of its own that compiles."""
    tests = Path(__file__).parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, "-m", "oracles.launches", target, geometry]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Print the records of one target and geometry."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("geometry")
    given = parser.parse_args()
    for record in compiled(given.target, given.geometry):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
