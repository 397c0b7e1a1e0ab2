"""Projections and norms as modules that own their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skipstone.kernels.ops import OpsModule


class Linear(OpsModule):
    """x [T, in] -> [T, out] without bias; rows are bit-independent of each other when `exact`.

    The weight is stored as [in, out], see `kernels.reference.gemm`; `hub_weight` is its view as checkpoints store it.
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features, dtype=dtype), requires_grad=False)
        self.exact = exact

    @property
    def hub_weight(self) -> Tensor:
        """[out, in], a view."""
        return self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] in the weight's dtype."""
        return self.ops.linear(x, self.weight, self.exact)


class RMSNorm(OpsModule):
    """Root-mean-square norm over the last dimension with a float32 gain.

    `offset` 1 is the Gemma form of MiniMax-M3: stored weights are zero-centred, the gain is 1 + weight.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def after_load(self) -> None:
        """Turn the stored weight into the gain times sqrt(width) that the kernel takes, once."""
        self.weight.add_(self.offset).mul_(self.weight.shape[-1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D] in x's dtype."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and the norm of it."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
