"""Which implementation of the ops a device gets, decided once at start-up, and the reason."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import torch

from skipstone.config import Kernels
from skipstone.errors import ConfigError, UnsupportedError, install_hint
from skipstone.kernels.ops import OP_NAMES, Implementation, Ops, implementation_of, load_ops

CPU = torch.device("cpu")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of the container that this runs in


class Choice(NamedTuple):
    """The ops, and why these."""

    ops: Ops
    reason: str


def choose_device(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" (AMD's included) means here. Raises ConfigError when it is not there."""
    found = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if found else "cpu")
    if device == "cuda" and not found:
        raise ConfigError("device='cuda', but torch sees no GPU here; pass --device cpu, or see `skipstone doctor`")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype that "auto", "float32" or "bfloat16" means on a device."""
    small = dtype == "bfloat16" or (dtype == "auto" and device.type != "cpu")
    return torch.bfloat16 if small else torch.float32


def free_memory_bytes(device: torch.device = CPU) -> int:
    """A GPU's free memory, or what can be taken without swapping or a container's end; 4 GiB where nothing says."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    try:
        available = _numbers(MEMINFO)["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        available = 4 << 30
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, min(available, limit - used + _numbers(CGROUP / "memory.stat")["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no container, or "max": no limit
        return available


def _numbers(file: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if len(words := line.split()) > 1}


def triton_refusal(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on this device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU they run in Triton's interpreter only, which TRITON_INTERPRET=1 turns on"
    return _broken("triton")


def _broken(package: str) -> str | None:
    """Why a package that is there cannot be imported; None: it can."""
    try:
        if package == "numba":
            import numba  # noqa: F401
        else:
            import triton  # noqa: F401
    except Exception as error:  # whatever a package finds wrong with the versions beside it
        return f"the package {package} cannot be imported: {' '.join(str(error).split())}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numba_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Numba's kernels cannot run here; None: they can."""
    if device.type != "cpu":
        return "they are for CPUs"
    if dtype != torch.float32:
        return f"they compute in float32, not in {_name(dtype)}"
    if importlib.util.find_spec("numba") is None:
        return f"the package numba is not installed; run {install_hint('cpu')}"
    return _broken("numba")


def choose_ops(
    device: torch.device, kernels: Kernels = "auto", exact: bool = False, dtype: torch.dtype = torch.float32
) -> Choice:
    """Triton on GPUs, Numba on CPUs, unless asked otherwise. Raises UnsupportedError naming both features."""
    choice = _choose(device, kernels, dtype)
    if exact and choice.ops.is_reference and device.type != "cpu":
        raise UnsupportedError(
            f"exact=True and kernels={kernels!r} cannot be combined on a GPU ({choice.reason}): there the products of"
            " plain torch depend on how many rows they have; pass --kernels triton or --no-exact"
        )
    return choice


def _choose(device: torch.device, kernels: Kernels, dtype: torch.dtype) -> Choice:
    wanted: Implementation = ("numba" if device.type == "cpu" else "triton") if kernels == "auto" else kernels
    refusal = None
    if wanted != "reference":
        refusal = triton_refusal(device) if wanted == "triton" else numba_refusal(device, dtype)
    if kernels == "auto":
        if refusal is not None:
            return Choice(load_ops("reference"), f"plain torch: {refusal}")
        return Choice(load_ops(wanted), "Numba on a CPU" if wanted == "numba" else "Triton on a GPU")
    if refusal is not None:
        where = f"device={device.type!r}" if kernels == "triton" else f"device={device.type!r}, dtype={_name(dtype)}"
        raise UnsupportedError(f"kernels={kernels!r} and {where} cannot be combined: {refusal}")
    return Choice(load_ops(kernels), "as asked")


def list_ops(device: torch.device) -> list[tuple[str, Implementation, str]]:
    """Every op, what "auto" runs it with on this device, and the reason."""
    choice = choose_ops(device)
    table = choice.ops.implementation
    return [(name, implementation_of(name, table), choice.reason) for name in OP_NAMES]
