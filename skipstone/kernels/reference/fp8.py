"""FP8 with one scale a vector: e4m3 values times a float32 factor (DeepSeek-V3.2's index keys and queries)."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
# Of every byte; on the CPU even where this file is first imported while a model is built on another device.
VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).float()
SMALLEST_AMAX = 1e-4  # vectors below it are as good as zero, and their scale must not be


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., D] -> [..., D] float8_e4m3fn and scales [..., 1] float32: their product is near the values.

    Bits of a vector depend on that vector alone, on every device. One NaN or infinity makes a vector's scale and so
    its every product NaN or infinite. The same ops run on a CPU and on a GPU, without a synchronization.
    """
    wide = values.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX)  # [..., 1]
    scale = largest / largest.new_full((), LARGEST)  # by a Python number a GPU would multiply with its inverse
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def widen(values: Tensor) -> Tensor:
    """FP8 as float32 of the same shape, exactly."""
    if values.device.type != "cpu":
        return values.float()
    # A CPU looks bytes up in a quarter of the time that torch's conversion takes.
    return VALUES.index_select(0, values.contiguous().view(torch.uint8).flatten().int()).view(values.shape)
