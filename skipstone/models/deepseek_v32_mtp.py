"""MTP modules of DeepSeek-V3.2 (report V3, 2.2), see `mtp.py`: the norm is shared_head.norm.

Releases store embedding and vocabulary product with every module: copies of the target's, which are dropped once they
are compared; others are used.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor

from skipstone.models.deepseek_v32 import DeepseekV32
from skipstone.models.mtp import MtpHead


class DeepseekV32Mtp(MtpHead):
    """All MTP modules of a checkpoint. `names`: the tensors in its files."""

    def __init__(
        self, target: DeepseekV32, num_modules: int, dtype: torch.dtype, exact: bool, names: Container[str] = ()
    ) -> None:
        layers = target.config.num_layers
        config = replace(target.config, moe_layers=(True,) * num_modules, num_layers=num_modules)
        copies = ("embed_tokens", "shared_head.head")
        own = [[n for n in copies if f"model.layers.{layers + i}.{n}.weight" in names] for i in range(num_modules)]
        super().__init__(target, config, own, dtype, exact)
        self.target_layers, self.target_head = layers, target.lm_head

    def after_load(self) -> None:
        """Drop what is a copy of the target's."""
        super().after_load()
        for module in self.mtp:
            if module.embed is not None and torch.equal(module.embed, self.embed):
                module.embed = None
            if module.head is not None and torch.equal(module.head.weight, self.target_head.weight):
                module.head = None

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names: module i stands behind the target's layers."""
        slots: dict[str, Tensor] = {}
        for i, module in enumerate(self.mtp):
            prefix = f"model.layers.{self.target_layers + i}"
            slots |= module.weight_slots(prefix, "shared_head.norm", prefix)
        return slots

    def ignored_weight(self, name: str) -> str | None:
        """The target's tensors stand in the same files."""
        layer = name.removeprefix("model.layers.").split(".")[0]
        is_draft = name.startswith("model.layers.") and int(layer) >= self.target_layers
        return None if is_draft else "target"

    @staticmethod
    def count_modules(names: Container[str], num_layers: int) -> int:
        """How many modules the checkpoint's tensors hold; config.json may declare others."""
        count = 0
        while f"model.layers.{num_layers + count}.eh_proj.weight" in names:
            count += 1
        return count
