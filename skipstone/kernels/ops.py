"""The ops that a model computes with: one table, filled from plain torch, from Triton, or from Numba and plain torch.

Every op has one signature in all of them, documented at the plain-torch twin in `kernels.reference`. `kernels.dispatch`
says which table a device gets and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn

from skipstone.kernels.reference.decode import Accepted, PlacedRows
from skipstone.registry import KERNELS

Implementation = Literal["reference", "triton", "numba"]


@dataclass(frozen=True)
class Ops:
    """One implementation of every op."""

    implementation: Implementation
    linear: Callable[..., Tensor]
    bmm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate: Callable[..., Tensor]
    norm_rotate_store: Callable[..., Tensor]
    index_rows: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    store: Callable[..., None]
    route: Callable[..., tuple[Tensor, Tensor]]
    experts_forward: Callable[..., Tensor]
    dense_attention: Callable[..., Tensor]
    block_select: Callable[..., Tensor]
    token_select: Callable[..., Tensor]
    sparse_gqa: Callable[..., Tensor]
    sparse_mla: Callable[..., Tensor]
    verify_page_table: Callable[..., Any]
    prefill_page_table: Callable[..., Any]
    paged_attention: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    step_rows: Callable[..., PlacedRows]
    accept: Callable[..., Accepted]

    @property
    def is_reference(self) -> bool:
        """Whether these are the plain-torch ops."""
        return self.implementation == "reference"


OP_NAMES = tuple(field.name for field in fields(Ops) if field.name != "implementation")


def implementation_of(op: str, table: Implementation) -> Implementation:
    """What an op of a table is made of: Numba has some of them only, the others are plain torch."""
    return table if f"{op}/{table}" in KERNELS.entries else "reference"


@functools.cache
def load_ops(implementation: Implementation) -> Ops:
    """All ops of one implementation."""
    loaded = {name: KERNELS.load(f"{name}/{implementation_of(name, implementation)}") for name in OP_NAMES}
    return Ops(implementation, **loaded)


class OpsModule(nn.Module):
    """A module that computes with a table of ops: plain torch, until `use_ops` gives it another."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = load_ops("reference")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Without the hooks of torch's modules, which take as long as a small op."""
        return self.forward(*args, **kwargs)


def use_ops(module: nn.Module, ops: Ops) -> None:
    """Have a module and all that it contains compute with these ops."""
    for part in module.modules():
        if isinstance(part, OpsModule):
            part.ops = ops


def settle(module: nn.Module) -> None:
    """Make the parts of a loaded module plain attributes; torch's look-up takes as long as a small op does."""
    for part in module.modules():
        for parts in (part._parameters, part._buffers, part._modules):
            part.__dict__.update(parts)
