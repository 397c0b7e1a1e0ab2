"""Tables of rotary embeddings: plain, partial and YaRN."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skipstone.kernels.reference.pointwise import Rotary


class Yarn(NamedTuple):
    """YaRN context extension (Peng et al. 2023)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool  # whether the ends of the ramp are whole dims
    amplitude: float  # of cosines and sines
    temperature: float  # latent attention multiplies its scores by the square of it

    @staticmethod
    def mscale(factor: float, mscale: float = 1.0) -> float:
        """m(factor, mscale) = 0.1 mscale ln(factor) + 1."""
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class RotarySettings(NamedTuple):
    """What the keys of rotary embeddings say."""

    theta: float
    partial: float  # the part of a head that rotates
    yarn: Yarn | None


def rotary_table(dim: int, theta: float, max_position: int, yarn: Yarn | None = None) -> Tensor:
    """[max_position, dim] float32: dim/2 cosines, then dim/2 sines of position x frequency."""
    if torch.get_default_device().type == "meta":  # to compute without memory torch imports for a second
        return torch.empty(max_position, dim)
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequency = theta**-exponent
    if yarn is not None:
        frequency = _stretch(frequency, dim, theta, yarn)
    angle = torch.arange(max_position, dtype=torch.float64)[:, None] * frequency
    return (torch.cat([angle.cos(), angle.sin()], dim=-1) * (yarn.amplitude if yarn else 1.0)).float()


class RotaryTable(nn.Module):
    """Cosines and sines of every position for heads of `width` dims, of which `table.shape[1]` from `first` on rotate.

    `pairs` True: neighbours (2i, 2i + 1) rotate together; False: halves (i, i + dim / 2), the NeoX layout.
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __init__(self, table: Tensor, width: int, pairs: bool, first: int = 0) -> None:
        super().__init__()
        if table.is_meta:
            return
        half = table.shape[1] // 2
        cos, sin = table[:, :half], table[:, half:]
        dims = torch.arange(half)
        one, other = (2 * dims, 2 * dims + 1) if pairs else (dims, dims + half)
        one, other = one + first, other + first
        full_cos, full_sin = torch.ones(len(table), 1, width), torch.zeros(len(table), 1, width)
        partner = torch.arange(width)
        partner[one], partner[other] = other, one
        full_cos[:, 0, one] = full_cos[:, 0, other] = cos
        full_sin[:, 0, one], full_sin[:, 0, other] = -sin, sin
        self.register_buffer("cos", full_cos, persistent=False)
        self.register_buffer("sin", full_sin, persistent=False)
        self.register_buffer("partner", partner, persistent=False)

    def forward(self, positions: Tensor) -> Rotary:
        """The angles of rows at `positions` [T]."""
        return Rotary(self.cos[positions], self.sin[positions], self.partner)


def _stretch(frequency: Tensor, dim: int, theta: float, yarn: Yarn) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear ramp between."""

    def dim_of(rotations: float) -> float:
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = dim_of(yarn.beta_fast), dim_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequency / yarn.factor * (1 - kept) + frequency * kept
