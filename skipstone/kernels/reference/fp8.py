"""FP8 with one scale a vector: e4m3 values times a float32 factor (DeepSeek-V3.2's index keys and queries)."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_AMAX = 1e-4  # vectors below it are as good as zero, and their scale must not be


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., D] -> [..., D] float8_e4m3fn and scales [..., 1] float32: their product is near the values.

    Bits of a vector depend on that vector alone, on every device. One NaN or infinity makes a vector's scale and so
    its every product NaN or infinite. The same ops run on a CPU and on a GPU, without a synchronization.
    """
    wide = values.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX) / LARGEST  # [..., 1]
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale
