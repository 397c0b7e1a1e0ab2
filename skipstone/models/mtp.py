"""MTP modules: a projection of (next token, hidden state) and one decoder layer of the target's kind each.

x = eh_proj([enorm(Embed(t[p+1])), hnorm(h_p)]); one decoder layer; a norm; the target's vocabulary product. h_p is the
target's state after its final norm; later steps are fed the module's own output after the module's norm, which the
released weights of MiniMax-M3 leave open: acceptance decides it. Releases of DeepSeek (report V3, 2.2) store embedding
and vocabulary product with every module: copies of the target's, which are dropped once they are compared; others are
used. A model's `MtpLayout` says what differs.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import (
    MTP_MODULE,
    CausalLM,
    DraftHead,
    DraftOutput,
    HiddenStates,
    MtpLayout,
    empty_parameter,
    layer_caches,
)


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

    def weight_slots(self, prefix: str, layout: MtpLayout) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
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
            f"{prefix}.{layout.norm}.weight": self.norm.weight,
            **self.layer.weight_slots(prefix + layout.layer),
        }


class MtpHead(DraftHead):
    """All MTP modules of a checkpoint."""

    def __init__(
        self, target: CausalLM, num_modules: int, dtype: torch.dtype, exact: bool, names: Container[str] = ()
    ) -> None:
        """`names`: the tensors in its files, which tell which modules hold weights of the target's again."""
        super().__init__()
        assert target.mtp is not None
        self.layout, self.num_modules, num_layers = target.mtp, num_modules, target.config.num_layers
        self.config = target.config.of_draft_layers(num_modules)
        self.prefixes = [self.layout.base + module_name(self.layout, i, num_layers) for i in range(num_modules)]
        own = [[n for n in self.layout.copies if f"{prefix}.{n}.weight" in names] for prefix in self.prefixes]
        modules = nn.ModuleList(MtpModule(target, self.config, i, dtype, exact, held) for i, held in enumerate(own))
        self.mtp = cast("list[MtpModule]", modules)
        self.embed, self.target_head, self.target_logits = target.embed, target.lm_head, target.logits
        self.angles, self.target_ignores = target.angles, target.ignored_weight
        self.max_position = target.max_position
        self.attention_scale, self.sparse = self.config.softmax_scale, self.config.sparse

    def after_load(self) -> None:
        """Drop what is a copy of the target's."""
        super().after_load()
        for module in self.mtp:
            if module.embed is not None and torch.equal(module.embed, self.embed):
                module.embed = None
            if module.head is not None and torch.equal(module.head.weight, self.target_head.weight):
                module.head = None

    def cache_specs(self) -> list[CacheSpec]:
        """Caches of every module."""
        return layer_caches(module.layer for module in self.mtp)

    def first_hidden(self, hidden: HiddenStates) -> Tensor:
        """States after the final norm."""
        return hidden.final

    def forward(self, hidden: Tensor, batch: Batch, attention: AttentionStep, module: int = 0) -> Tensor:
        """States [K, H] of the kept rows."""
        part = self.mtp[module]
        embedded = (self.embed if part.embed is None else part.embed)[batch.input_ids]
        if self.layout.zero_first:
            embedded = embedded.masked_fill((batch.positions == 0)[:, None], 0)
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

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names as served in public."""
        slots: dict[str, Tensor] = {}
        for prefix, module in zip(self.prefixes, self.mtp, strict=True):
            slots |= module.weight_slots(prefix, self.layout)
        return slots

    def ignored_weight(self, name: str) -> str | None:
        """The target's tensors stand in the same files."""
        return None if self.target_ignores(name) == MTP_MODULE else "target"


def module_name(layout: MtpLayout, module: int, num_layers: int) -> str:
    """What the tensors of a module begin with, behind `layout.base`."""
    return f"{layout.stem}{module + num_layers if layout.after_layers else module}"


def count_modules(layout: MtpLayout, names: Iterable[str], num_layers: int) -> int:
    """How many modules the checkpoint's tensors hold; config.json may declare others."""
    count = 0
    while any(name.endswith(f"{module_name(layout, count, num_layers)}.eh_proj.weight") for name in names):
        count += 1
    return count
