"""Facts about the machine, and the self-test of every op in the way that "auto" would run it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import torch

from skipstone.attention.msa_aiter import aiter_refusal
from skipstone.kernels.dispatch import (
    choose_device,
    choose_ops,
    free_memory_bytes,
    list_ops,
    numba_refusal,
    triton_refusal,
)
from skipstone.kernels.ops import OP_NAMES, Implementation
from skipstone.tools.doctor.op_run import Verdict, examine, import_kernels

GB = 1e9


class Report(msgspec.Struct):
    """Everything that `doctor` says."""

    facts: dict[str, str]
    notes: list[str]
    ops: list[Verdict]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no op is broken."""
        return all(item.failure is None for item in self.ops)


def report() -> Report:
    """Examine this machine. Does not raise for broken kernels."""
    started = time.perf_counter()
    device = choose_device("auto")
    interpreted = device.type == "cpu" and triton_refusal(device) is None
    choices = {op: (implementation, reason) for op, implementation, reason in list_ops(device)}
    if interpreted:
        ops: Implementation = choose_ops(device, "triton").ops.implementation
        choices = dict.fromkeys(OP_NAMES, (ops, "Triton's interpreter, as TRITON_INTERPRET=1 asks"))
    verdicts = _examine_all(choices, device)
    for verdict in verdicts:
        verdict.implementation, verdict.reason = choices[verdict.op]
    facts = dict(_facts(device)) | {"ops": "; ".join(dict.fromkeys(reason for _, reason in choices.values()))}
    return Report(facts, list(_notes(device)), verdicts, time.perf_counter() - started)


def _examine_all(choices: dict[str, tuple[Implementation, str]], device: torch.device) -> list[Verdict]:
    if device.type == "cpu":
        return [examine(op, implementation, torch.float32, device) for op, (implementation, _) in choices.items()]
    import_kernels(f"{op}/{implementation}" for op, (implementation, _) in choices.items())
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:  # most of the time goes into compiling
        # Models run in bfloat16 on a GPU; plain torch samples from float32 only.
        dtypes = {op: torch.bfloat16 if kind == "triton" else torch.float32 for op, (kind, _) in choices.items()}
        return list(pool.map(lambda op: examine(op, choices[op][0], dtypes[op], device), choices))


def _facts(device: torch.device) -> Iterator[tuple[str, str]]:
    yield "skipstone", _version("skipstone")
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    version = torch.version
    build = f"ROCm {version.hip}" if version.hip else f"CUDA {version.cuda}" if version.cuda else "CPUs"
    yield "torch", f"{torch.__version__}, for {build}"
    yield "Triton", _version("triton") + (f"; not used: {refusal}" if (refusal := triton_refusal(device)) else "")
    unused = numba_refusal(device, torch.float32)
    yield "Numba", _version("numba") + (f"; not used: {unused}" if unused else "")
    memory = f"{free_memory_bytes() / GB:.1f} GB of memory available"
    yield "processor", f"{_processor()}, {torch.get_num_threads()} threads of {os.cpu_count()}, {memory}"
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        kind = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        size = f"{free / GB:.1f} of {total / GB:.1f} GB free, {properties.multi_processor_count} multiprocessors"
        yield f"GPU {index}", f"{properties.name} ({kind}), {size}"
    if not count:
        yield "GPU", "none that torch sees"
    elif driver := _driver():
        yield "driver", driver
    refusal = aiter_refusal(device)
    yield "msa_aiter", f"not used: {refusal}" if refusal else "for sparse decode and verification, with --no-exact"


def _notes(device: torch.device) -> Iterator[str]:
    """What a user may want to change."""
    if device.type == "cpu":
        numpy = tuple(int(part) for part in np.__version__.split(".")[:2])
        yield "row alone: equal bits need an order of sums or a padding, which exact mode measures per shape of product"
        if triton_refusal(device) is None and numpy >= (2, 4):
            yield "Triton's interpreter cannot run loops with numpy 2.4 and above; pip install 'numpy<2.4'"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """The kernel's driver of the GPU; empty where Linux does not say."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            return " ".join(Path(path).read_text().splitlines()[0].split())
    return ""


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or "unknown"
