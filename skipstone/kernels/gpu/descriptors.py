"""Which GPUs load tiles through tensor descriptors, and how persistent programs share out the tiles of a product."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.kernels.gpu.dot import is_hip

ALIGNMENT = 16  # bytes: of a tensor's start and of the distance of its rows


class Tiles(NamedTuple):
    """Tile of a product and launch parameters."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@cache
def capability() -> int:
    """Of the NVIDIA GPU that kernels are compiled for, as in sm_90; 0 for AMD and in Triton's interpreter."""
    if is_hip() or triton.knobs.runtime.interpret:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at the least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def describable(tensor: Tensor) -> bool:
    """Whether a descriptor can cover a matrix (or a contiguous stack of them): aligned rows of 16-bit values."""
    aligned = tensor.stride(-2) * tensor.element_size() % ALIGNMENT == 0 and tensor.data_ptr() % ALIGNMENT == 0
    return tensor.dtype in (torch.bfloat16, torch.float16) and tensor.stride(-1) == 1 and aligned


@triton.jit
def place_of(tile, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Row and column tile. Groups of GROUP row tiles come one after the other, so that neighbours share both in L2."""
    group = tile // (GROUP * n_tiles)
    rows = min(m_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * n_tiles)
    return group * GROUP + within % rows, within // rows
