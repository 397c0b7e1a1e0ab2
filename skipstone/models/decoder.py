"""The stack of decoder layers that every target model is: embedding, layers, final norm, vocabulary product.

A model adds its attention, the angles of its rotary embedding, and its names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.layers.feed_forward import GatedMLP, MixtureOfExperts, Router
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import CausalLM, HiddenStates, Kept, ModelConfig, empty_parameter


class MoeNames(NamedTuple):
    """What a checkpoint calls a mixture of experts and its parts."""

    module: str
    bias: str
    gate: str
    up: str
    down: str


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). Subclasses name the attention, and the weights."""

    attention_class: type[Any]  # of (config, layer, dtype, exact), with `forward`, `cache_specs` and `weight_slots`
    norm_offset = 0.0  # see RMSNorm
    moe_names: MoeNames

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        hidden, activation = config.hidden_size, config.activation
        self.attention_norm = RMSNorm(hidden, config.eps, self.norm_offset)
        self.attention: Any = self.attention_class(config, layer, dtype, exact)
        self.ffn_norm = RMSNorm(hidden, config.eps, self.norm_offset)
        self.ffn: GatedMLP | MixtureOfExperts
        if config.moe_layers[layer]:
            groups = (config.expert_groups, config.kept_groups)
            router = Router(hidden, config.experts, config.experts_per_token, config.routed_scaling, exact, *groups)
            widths = (config.expert_intermediate, config.shared_intermediate)
            self.ffn = MixtureOfExperts(hidden, *widths, router, activation, dtype)
        else:
            self.ffn = GatedMLP(hidden, config.dense_intermediate, activation, dtype, exact)

    def forward(
        self, x: Tensor, update: Tensor | None, rotary: Any, attention: AttentionStep, kept: Kept | None = None
    ) -> tuple[Tensor, Tensor]:
        """Stream x [T, H] and the last layer's update of it, yet to be added -> the same of this layer's kept rows."""
        x, normed = (x, self.attention_norm(x)) if update is None else self.attention_norm.add(x, update)
        attended = self.attention(normed, rotary, attention, kept)
        x, normed = self.ffn_norm.add(x if kept is None else x[kept.rows], attended)
        return x, self.ffn(normed)

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        slots = {
            f"{prefix}.input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": self.ffn_norm.weight,
            **self.attention.weight_slots(f"{prefix}.self_attn"),
        }
        if isinstance(self.ffn, GatedMLP):
            return slots | self.ffn.weight_slots(f"{prefix}.mlp")
        names = self.moe_names
        moe = f"{prefix}.{names.module}"
        slots[f"{moe}.gate.weight"] = self.ffn.router.scores.hub_weight
        slots[f"{moe}.{names.bias}"] = self.ffn.router.bias
        slots |= self.ffn.expert_slots(f"{moe}.experts", names.gate, names.up, names.down)
        return slots | self.ffn.shared_slots(f"{moe}.shared_experts")


class Decoder(CausalLM):
    """The stack. Subclasses name their layer, and make the tables that `angles` looks up."""

    config: Any
    layer_class: type[DecoderLayer]

    def __init__(self, config: Any, dtype: torch.dtype, exact: bool, max_position: int) -> None:
        super().__init__()
        self.config, self.max_position = config, max_position
        self.embed = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        layers = nn.ModuleList(self.layer_class(config, i, dtype, exact) for i in range(config.num_layers))
        self.layers = cast("list[DecoderLayer]", layers)
        self.norm = RMSNorm(config.hidden_size, config.eps, self.layer_class.norm_offset)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, exact)

    def angles(self, positions: Tensor) -> Any:
        """What the layers' attention takes as the rotary embedding of rows at `positions` [T]."""
        raise NotImplementedError

    def cache_specs(self) -> list[CacheSpec]:
        """One or two per layer."""
        return layer_caches(self.layers)

    def forward(
        self, batch: Batch, attention: AttentionStep, taps: tuple[int, ...] = (), kept: Kept | None = None
    ) -> HiddenStates:
        """States of every row, see CausalLM."""
        x = self.embed[batch.input_ids]
        rotary = self.angles(batch.positions)
        update: Tensor | None = None
        tapped = []
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped.append(x if update is None else x + update)
            x, update = layer(x, update, rotary, attention, kept if layer is self.layers[-1] else None)
        assert update is not None
        x, normed = self.norm.add(x, update)
        if len(self.layers) in taps:
            tapped.append(x)
        return HiddenStates(normed, tuple(tapped))

    def compact_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V]."""
        return self.lm_head(hidden)

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names."""
        slots: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.hub_weight,
        }
        for i, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"model.layers.{i}")
        return slots


def layer_caches(layers: Iterable[DecoderLayer]) -> list[CacheSpec]:
    """The cache groups of layers, in their order."""
    return [spec for layer in layers for spec in layer.attention.cache_specs()]
