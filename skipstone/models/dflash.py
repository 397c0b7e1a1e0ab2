"""DFlash: a few decoder layers that draft a whole block in one pass by filling in mask tokens (block diffusion).

f_p = norm(fc([outputs of some target layers at p])). A layer's keys and values of committed positions are projections
of f_p itself, so committed tokens never run through the layers; rows of a block read them and each other, in both
directions. Embedding and vocabulary product are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep, CacheRows, LayerAttention
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.errors import ConfigError
from skipstone.kernels.reference.pointwise import Rotary
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import BlockDraftHead, CausalLM, HiddenStates, ModelConfig
from skipstone.models.config_reader import ConfigReader
from skipstone.models.draft_layers import (
    DraftLayer,
    DraftLayerConfig,
    check_vocabulary,
    read_draft_layer,
    read_layer_ids,
)

OPTIONS = ("mask_token_id", "target_layer_ids")


@dataclass(frozen=True)
class DflashConfig:
    """The keys of config.json that the head needs. Tap i is the residual stream entering the target's layer i."""

    layer: DraftLayerConfig
    num_layers: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]


def read_dflash(raw: dict[str, Any], target: ModelConfig, where: str) -> DflashConfig:
    """Read config.json and check it against the target. Raises ConfigError naming the key."""
    reader = ConfigReader(raw, where)
    options = reader.section("dflash_config")
    for key, value in options.raw.items():
        if key not in OPTIONS and value not in (None, False):
            raise ConfigError(f"{options.where}: {key}={value!r} is not supported; use a head without it")
    check_vocabulary(reader, target)
    reader.expect("hidden_size", (target.hidden_size,))
    reader.expect("num_target_layers", (target.num_layers, None))
    for key in ("is_causal", "causal", "attention_sink_bias"):
        reader.expect(key, (False, None))
    mask = options.integer("mask_token_id", low=0)
    if mask >= target.vocab_size:
        raise ConfigError(
            f"{options.where}: mask_token_id={mask} is outside the target's vocabulary, 0 to {target.vocab_size - 1}; "
            "use a head that was trained for this model"
        )
    outputs = read_layer_ids(options, OPTIONS[1], options.raw.get(OPTIONS[1]), 0, target.num_layers - 1)
    return DflashConfig(
        layer=read_draft_layer(reader),
        num_layers=reader.integer("num_hidden_layers"),
        block_size=reader.integer("block_size", low=2),
        mask_token_id=mask,
        taps=tuple(layer + 1 for layer in outputs),
    )


class DflashLayer(DraftLayer):
    """One decoder layer; keys and values have a projection of their own, as committed rows need nothing else."""

    def __init__(self, config: DraftLayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.index, hidden = index, config.hidden_size
        self.attention_norm = RMSNorm(hidden, config.eps)
        self.q_proj = Linear(hidden, self.heads * self.head_dim, dtype, exact=False)
        self.kv_proj = Linear(hidden, 2 * self.kv_heads * self.head_dim, dtype, exact=False)
        self.q_norm = RMSNorm(self.head_dim, config.eps)
        self.k_norm = RMSNorm(self.head_dim, config.eps)

    def write(self, x: Tensor, rotary: Rotary, attend: LayerAttention) -> None:
        """Keys and values of x [T, H]: features of committed rows, or normalised states of block rows."""
        k, v = self.kv_proj(x).view(len(x), -1, self.head_dim).split(self.kv_heads, dim=1)
        attend.write(CacheRows(self.ops.rotate(self.k_norm(k), rotary), v))

    def forward(self, x: Tensor, rotary: Rotary, attend: LayerAttention) -> Tensor:
        """[T, H] -> [T, H]."""
        normed = self.attention_norm(x)
        self.write(normed, rotary, attend)
        q = self.q_norm(self.q_proj(normed).view(len(x), -1, self.head_dim))
        return self.close(x, attend.run(self.ops.rotate(q, rotary), None))

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        k, v = self.kv_proj.hub_weight.chunk(2)
        norms = {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        norms["input_layernorm"] = self.attention_norm
        return self.named(prefix, self.q_proj.hub_weight, k, v, norms)


class Dflash(BlockDraftHead):
    """The head: feature projection, layers, final norm."""

    def __init__(self, config: DflashConfig, target: CausalLM, dtype: torch.dtype, max_position: int) -> None:
        super().__init__()
        self.config, self.taps = config, config.taps
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        hidden = config.layer.hidden_size
        self.fc = Linear(len(config.taps) * hidden, hidden, dtype, exact=False)
        self.hidden_norm = RMSNorm(hidden, config.layer.eps)
        layers = nn.ModuleList(DflashLayer(config.layer, i, dtype) for i in range(config.num_layers))
        self.layers = cast("list[DflashLayer]", layers)
        self.norm = RMSNorm(hidden, config.layer.eps)
        self.embed, self.target_logits = target.embed, target.logits
        self.max_position = min(config.layer.max_position, max_position)
        self.rotary = config.layer.rotary_table(self.max_position)
        self.attention_scale = config.layer.softmax_scale

    def cache_specs(self) -> list[CacheSpec]:
        """Keys and values of every layer."""
        return [spec for layer in self.layers for spec in self.config.layer.cache_specs(layer.index)]

    def store_context(self, hidden: HiddenStates, batch: Batch, attention: AttentionStep) -> None:
        """Features of the target's rows as keys and values, see BlockDraftHead."""
        features = self.hidden_norm(self.fc(torch.cat(hidden.taps, dim=-1)))
        rotary = self.rotary(batch.positions)
        for layer in self.layers:
            layer.write(features, rotary, attention[layer.index])

    def forward(self, batch: Batch, attention: AttentionStep) -> Tensor:
        """States [T, H] before the norm."""
        x = self.embed[batch.input_ids]
        rotary = self.rotary(batch.positions)
        for layer in self.layers:
            x = layer(x, rotary, attention[layer.index])
        return x

    def logits(self, states: Tensor) -> Tensor:
        """The target's product of the normalised states."""
        return self.target_logits(self.norm(states))

    def weight_slots(self) -> dict[str, Tensor]:
        """The hub's names."""
        slots: dict[str, Tensor] = {
            "fc.weight": self.fc.hub_weight,
            "hidden_norm.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
        }
        for layer in self.layers:
            slots |= layer.weight_slots(f"layers.{layer.index}")
        return slots

    def ignored_weight(self, name: str) -> str | None:
        """Nothing is left out."""
        return None
