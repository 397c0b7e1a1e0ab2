"""Gated MLPs and mixtures of experts with a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from skipstone.kernels.reference.moe import experts_forward, route
from skipstone.layers.linear import Linear

Activation = Callable[[Tensor], Tensor]


class GatedMLP(nn.Module):
    """down(activation([gate | up] x)); gate and up are one product."""

    def __init__(self, hidden: int, intermediate: int, activation: Activation, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, dtype, exact)
        self.down = Linear(intermediate, hidden, dtype, exact)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(self.activation(self.gate_up(x)))

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        gate, up = self.gate_up.hub_weight.chunk(2)
        return {
            f"{prefix}.gate_proj.weight": gate,
            f"{prefix}.up_proj.weight": up,
            f"{prefix}.down_proj.weight": self.down.hub_weight,
        }


class Router(nn.Module):
    """Float32 scores of every expert, and which ones a row takes. See `kernels.reference.moe.route`."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, scaling: float, exact: bool, groups: int = 1, kept_groups: int = 1
    ) -> None:
        super().__init__()
        self.scores = Linear(hidden, experts, torch.float32, exact)
        self.bias = nn.Parameter(torch.zeros(experts, dtype=torch.float32), requires_grad=False)
        self.top_k, self.scaling = top_k, scaling
        self.groups, self.kept_groups = groups, kept_groups

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> expert ids [T, top_k] int64, weights [T, top_k] float32."""
        return route(self.scores(x), self.bias, self.top_k, self.scaling, self.groups, self.kept_groups)


class MixtureOfExperts(nn.Module):
    """Routed experts plus a shared expert that every row takes with weight 1."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        router: Router,
        shared: GatedMLP | None,
        activation: Activation,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.router = router
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * intermediate, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.empty(experts, intermediate, hidden, dtype=dtype), requires_grad=False)
        self.shared = shared
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        experts, weights = self.router(x)
        out = experts_forward(x, experts, weights, self.gate_up, self.down, self.activation, self.router.scores.exact)
        if self.shared is not None:
            out = out + self.shared(x)
        return out.to(x.dtype)

    def expert_slots(self, prefix: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
        """Checkpoint name -> view for every routed expert, given the checkpoint's names of its three projections."""
        slots = {}
        for expert in range(self.gate_up.shape[0]):
            gate_view, up_view = self.gate_up[expert].t().chunk(2)
            slots[f"{prefix}.{expert}.{gate}.weight"] = gate_view
            slots[f"{prefix}.{expert}.{up}.weight"] = up_view
            slots[f"{prefix}.{expert}.{down}.weight"] = self.down[expert].t()
        return slots
