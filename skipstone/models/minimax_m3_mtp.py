"""MTP modules of MiniMax-M3, see `mtp.py`: the embedding is zeroed at position 0, the norm is final_layernorm.

That later steps are fed the normalised states is left open by the released weights; acceptance decides it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from skipstone.core.batch import Batch
from skipstone.models.minimax_m3 import MiniMaxM3
from skipstone.models.mtp import MtpHead

PREFIX = "language_model.model.mtp.layers"


class MiniMaxM3Mtp(MtpHead):
    """All MTP modules of a checkpoint; embedding and vocabulary product are the target's."""

    def __init__(
        self, target: MiniMaxM3, num_modules: int, dtype: torch.dtype, exact: bool, names: Iterable[str] = ()
    ) -> None:
        """`names`: the tensors in its files, of which a copy of the target's weights would be refused by its name."""
        every = (True,) * num_modules  # draft layers are sparse and have experts, whatever the target's are
        config = replace(target.config, sparse_layers=every, moe_layers=every, num_layers=num_modules)
        super().__init__(target, config, [[]] * num_modules, dtype, exact)

    def embedded(self, table: Tensor, batch: Batch) -> Tensor:
        """Zeros at position 0."""
        return super().embedded(table, batch).masked_fill((batch.positions == 0)[:, None], 0)

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names as served in public."""
        slots: dict[str, Tensor] = {}
        for i, module in enumerate(self.mtp):
            slots |= module.weight_slots(f"{PREFIX}.{i}", "final_layernorm", f"{PREFIX}.{i}.transformer_layer")
        return slots

    def ignored_weight(self, name: str) -> str | None:
        """The target's tensors stand in the same files."""
        return None if ".mtp." in name else "target"

    @staticmethod
    def count_modules(names: Iterable[str], num_layers: int) -> int:
        """How many modules the checkpoint's tensors hold; config.json may declare others."""
        count = 0
        while any(name.endswith(f"mtp.layers.{count}.eh_proj.weight") for name in names):
            count += 1
        return count
