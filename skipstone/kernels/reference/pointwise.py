"""Norms, rotary embedding and activations: one value per element or per row, in float32, cast once at the end.

No torch.sigmoid, silu or addcmul here: their vectorised loops finish with scalar code that rounds differently, so a
value would depend on how many rows are in the call. exp, division, multiplication and addition do not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Angles of this step's rows, spread over the D dims of a head."""

    cos: Tensor  # [T, 1, D] float32
    sin: Tensor  # [T, 1, D] float32, negative for the first of each pair
    partner: Tensor  # [D] int64, the other dim of each pair

    def of_rows(self, rows: Tensor) -> Rotary:
        """The angles of some of the rows."""
        return Rotary(self.cos[rows], self.sin[rows], self.partner)


def rms_norm(x: Tensor, scaled_gain: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times a gain. Zhang & Sennrich 2019.

    `scaled_gain` is float32, broadcast against x, and already holds gain * sqrt(D), so that the mean need not be taken.
    """
    x32 = x.float()
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    inverse = length.square_().add_(eps * x.shape[-1]).rsqrt_()
    return (x32 * inverse).mul_(scaled_gain).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., D] to zero mean and unit variance, times weight plus bias (float32)."""
    return torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of x [T, heads, D]: every dim times its cosine plus its partner times its signed sine.

    Su et al. 2021. Which dims are partners, and how many rotate, is in `rotary`; dims that do not rotate have cosine 1
    and sine 0.
    """
    x32 = x.float()
    return (x32 * rotary.cos).add_(x32.index_select(-1, rotary.partner).mul_(rotary.sin)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function of float32 x."""
    return torch.exp(-x).add_(1.0).reciprocal_()


class GatedActivation(NamedTuple):
    """g * sigmoid(alpha g) * (u + shift) with g = min(gate, limit), u = clamp(up, -limit, limit). Shazeer 2020.

    SILU is the plain SwiGLU; MiniMax-M3 has alpha 1.702, limit 7 and shift 1.
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2I] = [gate | up]: [..., I]."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        if self.limit != math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        up = up + self.shift if self.shift else up
        return (gate / (gate * -self.alpha).exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


SILU = GatedActivation()
