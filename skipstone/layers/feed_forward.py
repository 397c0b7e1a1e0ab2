"""Gated MLPs and mixtures of experts with a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skipstone.kernels.ops import OpsModule
from skipstone.kernels.reference.pointwise import GatedActivation
from skipstone.layers.linear import Linear


class GatedMLP(OpsModule):
    """down(activation([gate | up] x)); gate and up are one product."""

    def __init__(
        self, hidden: int, intermediate: int, activation: GatedActivation, dtype: torch.dtype, exact: bool
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, dtype, exact)
        self.down = Linear(intermediate, hidden, dtype, exact)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(self.ops.gated(self.gate_up(x), self.activation))

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        return _gated_slots(prefix, self.gate_up.hub_weight, self.down.hub_weight)


def _gated_slots(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up, f"{prefix}.down_proj.weight": down}


class Router(OpsModule):
    """Float32 scores of every expert, and which ones a row takes. See `kernels.reference.moe.route`."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, scaling: float, exact: bool, groups: int = 1, kept_groups: int = 1
    ) -> None:
        super().__init__()
        self.scores = Linear(hidden, experts, torch.float32, exact)
        self.bias = nn.Parameter(torch.zeros(experts, dtype=torch.float32), requires_grad=False)
        self.top_k, self.scaling = top_k, scaling
        self.groups, self.kept_groups = groups, kept_groups

    def forward(self, x: Tensor, shared: int | None = None) -> tuple[Tensor, Tensor]:
        """[T, H] -> expert ids [T, top_k] int64, weights [T, top_k] float32; with `shared` one more of weight 1."""
        settings = (self.top_k, self.scaling, self.groups, self.kept_groups)
        return self.ops.route(self.scores(x), self.bias, *settings, shared)


class MixtureOfExperts(OpsModule):
    """Routed experts plus a shared expert that every row takes with weight 1.

    A shared expert of the routed experts' width is stored behind them and runs with them, which saves its launches.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        shared_intermediate: int,
        router: Router,
        activation: GatedActivation,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.router, self.activation = router, activation
        self.routed = router.bias.shape[0]
        self.fused = shared_intermediate == intermediate
        stored = self.routed + self.fused
        self.gate_up = nn.Parameter(torch.empty(stored, hidden, 2 * intermediate, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.empty(stored, intermediate, hidden, dtype=dtype), requires_grad=False)
        separate = shared_intermediate and not self.fused
        exact = router.scores.exact
        self.shared = GatedMLP(hidden, shared_intermediate, activation, dtype, exact) if separate else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        experts, weights = self.router(x, self.routed if self.fused else None)
        exact = self.router.scores.exact
        out_dtype = x.dtype if self.shared is None else torch.float32
        settings = (self.activation, exact, out_dtype)
        out = self.ops.experts_forward(x, experts, weights, self.gate_up, self.down, *settings)
        return out if self.shared is None else (out + self.shared(x)).to(x.dtype)

    def shared_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> view for the shared expert."""
        if self.shared is not None:
            return self.shared.weight_slots(prefix)
        return _gated_slots(prefix, self.gate_up[-1].t(), self.down[-1].t()) if self.fused else {}

    def expert_slots(self, prefix: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
        """Checkpoint name -> view for every routed expert, given the checkpoint's names of its three projections."""
        slots = {}
        for expert in range(self.routed):
            gate_view, up_view = self.gate_up[expert].t().chunk(2)
            slots[f"{prefix}.{expert}.{gate}.weight"] = gate_view
            slots[f"{prefix}.{expert}.{up}.weight"] = up_view
            slots[f"{prefix}.{expert}.{down}.weight"] = self.down[expert].t()
        return slots
