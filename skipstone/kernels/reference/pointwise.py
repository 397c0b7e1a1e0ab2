"""Norms, rotary embedding and activations: one value per element or per row, in float32, cast once at the end.

No torch.sigmoid, silu or addcmul here: their vectorised loops finish with scalar code that rounds differently, so a
value would depend on how many rows are in the call. exp, division, multiplication and addition do not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times gain (float32, broadcast against x). Zhang & Sennrich 2019."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True).add_(eps))
    return (x32 * scale).mul_(gain).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., D] to zero mean and unit variance, times weight plus bias (float32)."""
    return torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def rotate_halves(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding on pairs (i, i + D/2) of the first D dims of x [T, heads, >= D]; the rest passes through.

    cos_sin [T, D] float32: D/2 cosines, then D/2 sines. Su et al. 2021 in the NeoX layout.
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :].float())
    return torch.cat(parts, dim=-1).to(x.dtype)


def rotate_pairs(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding on pairs (2i, 2i + 1) of all D dims of x [T, heads, D]; cos_sin as in `rotate_halves`."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function of float32 x."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2I] = [gate | up]: [..., I]. Shazeer 2020."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * sigmoid(gate)).mul_(up).to(gate_up.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """g * sigmoid(alpha g) * (u + 1) with g = min(gate, limit), u = clamp(up, -limit, limit): the SwiGLU of MiniMax-M3.

    gate_up [..., 2I] = [gate | up]: [..., I].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1.0)).to(gate_up.dtype)
