"""MTP modules of DeepSeek-V3.2: a projection of (next token, hidden state) and one decoder layer each (report V3, 2.2).

x = eh_proj([enorm(Embed(t[p+1])), hnorm(h_p)]); one decoder layer with its own indexer; shared_head.norm; the target's
vocabulary product. h_p is the target's state after its final norm; later steps are fed the module's own output after
shared_head.norm. Releases store embedding and vocabulary product with every module: copies of the target's, which are
dropped once they are compared; others are used.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep, SparseSettings
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import DraftHead, DraftOutput, HiddenStates, Kept, empty_parameter
from skipstone.models.deepseek_v32 import DecoderLayer, DeepseekV32, DeepseekV32Config, Rotaries


class MtpModule(nn.Module):
    """One module; `index` numbers its caches. `own`: which of embed_tokens and shared_head.head its files hold."""

    def __init__(self, config: DeepseekV32Config, index: int, dtype: torch.dtype, exact: bool, own: list[str]) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed = empty_parameter(config.vocab_size, hidden, dtype=dtype) if "embed_tokens" in own else None
        self.head = Linear(hidden, config.vocab_size, dtype, exact) if "shared_head.head" in own else None
        self.embed_norm = RMSNorm(hidden, config.eps)
        self.hidden_norm = RMSNorm(hidden, config.eps)
        self.projection = Linear(2 * hidden, hidden, dtype, exact)
        self.layer = DecoderLayer(config, index, dtype, exact)
        self.norm = RMSNorm(hidden, config.eps)

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        own: dict[str, Tensor] = {}
        if self.embed is not None:
            own[f"{prefix}.embed_tokens.weight"] = self.embed
        if self.head is not None:
            own[f"{prefix}.shared_head.head.weight"] = self.head.hub_weight
        return {
            **own,
            f"{prefix}.enorm.weight": self.embed_norm.weight,
            f"{prefix}.hnorm.weight": self.hidden_norm.weight,
            f"{prefix}.eh_proj.weight": self.projection.hub_weight,
            f"{prefix}.shared_head.norm.weight": self.norm.weight,
            **self.layer.weight_slots(prefix),
        }


class DeepseekV32Mtp(DraftHead):
    """All MTP modules of a checkpoint. `names`: the tensors in its files."""

    def __init__(
        self, target: DeepseekV32, num_modules: int, dtype: torch.dtype, exact: bool, names: Container[str] = ()
    ) -> None:
        super().__init__()
        self.num_modules = num_modules
        self.target_layers = target.config.num_layers
        self.config = replace(target.config, moe_layers=(True,) * num_modules, num_layers=num_modules)
        modules = nn.ModuleList()
        for i in range(num_modules):
            prefix = f"model.layers.{self.target_layers + i}"
            own = [name for name in ("embed_tokens", "shared_head.head") if f"{prefix}.{name}.weight" in names]
            modules.append(MtpModule(self.config, i, dtype, exact, own))
        self.mtp = cast("list[MtpModule]", modules)
        self.embed, self.target_logits, self.target_head = target.embed, target.logits, target.lm_head
        self.mla_rotary, self.index_rotary = target.mla_rotary, target.index_rotary
        self.max_position = target.mla_rotary.cos.shape[0]

    def cache_specs(self) -> list[CacheSpec]:
        """Latents and index keys of every module."""
        return [spec for module in self.mtp for spec in module.layer.attention.cache_specs()]

    @property
    def attention_scale(self) -> float:
        """As the target's."""
        return self.config.softmax_scale

    @property
    def sparse(self) -> SparseSettings:
        """As the target's."""
        return self.config.sparse

    def first_hidden(self, hidden: HiddenStates) -> Tensor:
        """States after the final norm."""
        return hidden.final

    def forward(
        self, hidden: Tensor, batch: Batch, attention: AttentionStep, module: int = 0, kept: Kept | None = None
    ) -> Tensor:
        """States [T, H] of one module, or [K, H] of the kept rows."""
        part = self.mtp[module]
        table = self.embed if part.embed is None else part.embed
        embedded = part.embed_norm(table[batch.input_ids])
        x = part.projection(torch.cat([embedded, part.hidden_norm(hidden)], dim=-1))
        rotary = Rotaries(self.mla_rotary(batch.positions), self.index_rotary(batch.positions))
        x, update = part.layer(x, None, rotary, attention, kept)
        return x + update

    def recycled(self, states: Tensor, module: int = 0) -> Tensor:
        """The normalised states."""
        return self.mtp[module].norm(states)

    def outputs(self, states: Tensor, module: int = 0) -> DraftOutput:
        """The normalised states give the logits as well."""
        normed, head = self.recycled(states, module), self.mtp[module].head
        return DraftOutput(self.target_logits(normed) if head is None else head(normed).float(), normed)

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
            slots |= module.weight_slots(f"model.layers.{self.target_layers + i}")
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
