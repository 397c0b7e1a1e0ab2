"""MTP modules: a projection of (next token, hidden state) and one decoder layer of the target's kind each.

x = eh_proj([enorm(Embed(t[p+1])), hnorm(h_p)]); one decoder layer; a norm; the target's vocabulary product. h_p is the
target's state after its final norm; later steps are fed the module's own output after the module's norm.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import CausalLM, DraftHead, DraftOutput, HiddenStates, empty_parameter, layer_caches


class MtpModule(nn.Module):
    """One module over a target's kind of layer; `index` numbers its caches.

    `own`: which of embed_tokens and shared_head.head its files hold; the others are the target's.
    """

    def __init__(
        self, target: CausalLM, config: Any, index: int, dtype: torch.dtype, exact: bool, own: Collection[str]
    ) -> None:
        super().__init__()
        hidden, kind = config.hidden_size, target.layer_class
        self.embed = empty_parameter(config.vocab_size, hidden, dtype=dtype) if "embed_tokens" in own else None
        self.head = Linear(hidden, config.vocab_size, dtype, exact) if "shared_head.head" in own else None
        self.embed_norm = RMSNorm(hidden, config.eps, kind.norm_offset)
        self.hidden_norm = RMSNorm(hidden, config.eps, kind.norm_offset)
        self.projection = Linear(2 * hidden, hidden, dtype, exact)
        self.layer = kind(config, index, dtype, exact)
        self.norm = RMSNorm(hidden, config.eps, kind.norm_offset)

    def weight_slots(self, prefix: str, norm: str, layer: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills, given the prefix of the layer and the name of the norm behind it."""
        slots: dict[str, Tensor] = {}
        if self.embed is not None:
            slots[f"{prefix}.embed_tokens.weight"] = self.embed
        if self.head is not None:
            slots[f"{prefix}.shared_head.head.weight"] = self.head.hub_weight
        return {
            **slots,
            f"{prefix}.enorm.weight": self.embed_norm.weight,
            f"{prefix}.hnorm.weight": self.hidden_norm.weight,
            f"{prefix}.eh_proj.weight": self.projection.hub_weight,
            f"{prefix}.{norm}.weight": self.norm.weight,
            **self.layer.weight_slots(layer),
        }


class MtpHead(DraftHead):
    """All MTP modules of a checkpoint; `config` is the target's with the draft layers as its layers."""

    def __init__(self, target: CausalLM, config: Any, own: list[list[str]], dtype: torch.dtype, exact: bool) -> None:
        """`own`: of each module, see MtpModule."""
        super().__init__()
        self.config, self.num_modules = config, len(own)
        modules = nn.ModuleList(MtpModule(target, config, i, dtype, exact, names) for i, names in enumerate(own))
        self.mtp = cast("list[MtpModule]", modules)
        self.embed, self.target_logits, self.angles = target.embed, target.logits, target.angles
        self.max_position = target.max_position
        self.attention_scale, self.sparse = config.softmax_scale, config.sparse

    def cache_specs(self) -> list[CacheSpec]:
        """Caches of every module."""
        return layer_caches(module.layer for module in self.mtp)

    def first_hidden(self, hidden: HiddenStates) -> Tensor:
        """States after the final norm."""
        return hidden.final

    def embedded(self, table: Tensor, batch: Batch) -> Tensor:
        """Embeddings of the next tokens, [T, H]."""
        return table[batch.input_ids]

    def forward(self, hidden: Tensor, batch: Batch, attention: AttentionStep, module: int = 0) -> Tensor:
        """States [K, H] of the kept rows."""
        part = self.mtp[module]
        embedded = self.embedded(self.embed if part.embed is None else part.embed, batch)
        x = part.projection(torch.cat([part.embed_norm(embedded), part.hidden_norm(hidden)], dim=-1))
        x, update = part.layer(x, None, self.angles(batch.positions), attention[module])
        return x + update

    def recycled(self, states: Tensor, module: int = 0) -> Tensor:
        """The normalised states."""
        return self.mtp[module].norm(states)

    def outputs(self, states: Tensor, module: int = 0) -> DraftOutput:
        """The normalised states give the logits as well."""
        normed, head = self.recycled(states, module), self.mtp[module].head
        return DraftOutput(self.target_logits(normed) if head is None else head(normed).float(), normed)
