"""Tables of rotary embeddings: plain, partial and YaRN."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Yarn(NamedTuple):
    """YaRN context extension (Peng et al. 2023) with the keys of `rope_scaling`."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def amplitude(self, mscale: float) -> float:
        """m(factor, mscale) = 0.1 mscale ln(factor) + 1, the attention temperature of YaRN."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rotary_table(dim: int, theta: float, max_position: int, yarn: Yarn | None = None) -> Tensor:
    """[max_position, dim] float32: dim/2 cosines, then dim/2 sines of position x frequency."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequency = theta**-exponent
    scale = 1.0
    if yarn is not None:
        frequency = _stretch(frequency, dim, theta, yarn)
        scale = yarn.amplitude(yarn.mscale) / yarn.amplitude(yarn.mscale_all_dim)
    angle = torch.arange(max_position, dtype=torch.float64)[:, None] * frequency
    return (torch.cat([angle.cos(), angle.sin()], dim=-1) * scale).float()


def _stretch(frequency: Tensor, dim: int, theta: float, yarn: Yarn) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear ramp between."""

    def dim_of(rotations: float) -> float:
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequency / yarn.factor * (1 - kept) + frequency * kept
