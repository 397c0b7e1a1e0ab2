"""MTP modules of MiniMax-M3: a projection of (next token, hidden state) and one sparse decoder layer each.

x = eh_proj([norm(Embed(t[p+1])), norm(h_p)]), the embedding zeroed at position 0; one decoder layer; final_layernorm;
the target's vocabulary product. h_p is the target's state after its final norm; later steps are fed the module's own
output after final_layernorm, which the released weights leave open and acceptance decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep, SparseSettings
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import DraftHead, DraftOutput, HiddenStates, Kept
from skipstone.models.minimax_m3 import DecoderLayer, MiniMaxM3, MiniMaxM3Config

PREFIX = "language_model.model.mtp.layers"


class MtpModule(nn.Module):
    """One module; `index` numbers its caches."""

    def __init__(self, config: MiniMaxM3Config, index: int, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_norm = RMSNorm(hidden, config.eps, offset=1.0)
        self.hidden_norm = RMSNorm(hidden, config.eps, offset=1.0)
        self.projection = Linear(2 * hidden, hidden, dtype, exact)
        self.layer = DecoderLayer(config, index, dtype, exact)
        self.norm = RMSNorm(hidden, config.eps, offset=1.0)

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        return {
            f"{prefix}.enorm.weight": self.embed_norm.weight,
            f"{prefix}.hnorm.weight": self.hidden_norm.weight,
            f"{prefix}.eh_proj.weight": self.projection.hub_weight,
            f"{prefix}.final_layernorm.weight": self.norm.weight,
            **self.layer.weight_slots(f"{prefix}.transformer_layer"),
        }


class MiniMaxM3Mtp(DraftHead):
    """All MTP modules of a checkpoint; embedding and vocabulary product are the target's."""

    def __init__(
        self, target: MiniMaxM3, num_modules: int, dtype: torch.dtype, exact: bool, names: Iterable[str] = ()
    ) -> None:
        """`names`: the tensors in its files, of which a copy of the target's weights would be refused by its name."""
        super().__init__()
        self.num_modules = num_modules
        every = (True,) * num_modules  # draft layers are sparse and have experts, whatever the target's are
        self.config = replace(target.config, sparse_layers=every, moe_layers=every, num_layers=num_modules)
        modules = nn.ModuleList(MtpModule(self.config, i, dtype, exact) for i in range(num_modules))
        self.mtp = cast("list[MtpModule]", modules)
        self.embed, self.target_logits, self.rotary = target.embed, target.logits, target.rotary
        self.max_position = target.rotary.cos.shape[0]

    def cache_specs(self) -> list[CacheSpec]:
        """One sparse layer per module."""
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
        embedded = self.embed[batch.input_ids].masked_fill((batch.positions == 0)[:, None], 0)
        x = part.projection(torch.cat([part.embed_norm(embedded), part.hidden_norm(hidden)], dim=-1))
        x, update = part.layer(x, None, self.rotary(batch.positions), attention, kept)
        return x + update

    def recycled(self, states: Tensor, module: int = 0) -> Tensor:
        """The normalised states."""
        return self.mtp[module].norm(states)

    def outputs(self, states: Tensor, module: int = 0) -> DraftOutput:
        """The normalised states give the logits as well."""
        normed = self.recycled(states, module)
        return DraftOutput(self.target_logits(normed), normed)

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names as served in public."""
        slots: dict[str, Tensor] = {}
        for i, module in enumerate(self.mtp):
            slots |= module.weight_slots(f"{PREFIX}.{i}")
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
