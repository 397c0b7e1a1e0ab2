"""Which implementation of the ops a device gets, decided once at start-up, and the reason."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch

from skipstone.config import Kernels
from skipstone.errors import ConfigError, UnsupportedError
from skipstone.kernels.ops import OP_NAMES, Implementation, Ops, load_ops


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


def triton_refusal(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on this device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU they run in Triton's interpreter only, which TRITON_INTERPRET=1 turns on"
    return None


def choose_ops(device: torch.device, kernels: Kernels = "auto", exact: bool = False) -> Choice:
    """Triton on GPUs, plain torch on CPUs, unless asked otherwise. Raises UnsupportedError naming both features."""
    choice = _choose(device, kernels)
    if exact and choice.ops.is_reference and device.type != "cpu":
        raise UnsupportedError(
            f"exact=True and kernels={kernels!r} cannot be combined on a GPU ({choice.reason}): there the products of"
            " plain torch depend on how many rows they have; pass --kernels triton or --no-exact"
        )
    return choice


def _choose(device: torch.device, kernels: Kernels) -> Choice:
    implementation: Implementation = "triton" if kernels == "triton" else "reference"
    if kernels == "auto" and device.type != "cpu":
        refusal = triton_refusal(device)
        if refusal is None:
            return Choice(load_ops("triton"), "Triton on a GPU")
        return Choice(load_ops("reference"), f"plain torch: {refusal}")
    if implementation == "triton":
        refusal = triton_refusal(device)
        if refusal is not None:
            raise UnsupportedError(f"kernels='triton' and device={device.type!r} cannot be combined: {refusal}")
    reason = "as asked" if kernels != "auto" else "plain torch on a CPU"
    return Choice(load_ops(implementation), reason)


def list_ops(device: torch.device) -> list[tuple[str, Implementation, str]]:
    """Every op, what "auto" runs it with on this device, and the reason."""
    choice = choose_ops(device)
    return [(name, choice.ops.implementation, choice.reason) for name in OP_NAMES]
