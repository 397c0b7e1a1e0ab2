"""What the dense decoder layers of draft heads share: their config keys, their caches, their place in a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipstone.core.kv_cache import CacheSpec, CacheTensorSpec
from skipstone.errors import ConfigError
from skipstone.kernels.ops import OpsModule
from skipstone.kernels.reference.pointwise import SILU
from skipstone.layers.feed_forward import GatedMLP
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.layers.rotary import RotarySettings, RotaryTable, rotary_table
from skipstone.models.base import ModelConfig
from skipstone.models.config_reader import ConfigReader, from_key
from skipstone.models.rotary_keys import read_rotary


@dataclass(frozen=True, kw_only=True)
class DraftLayerConfig:
    """A plain decoder layer: grouped-query attention with full rotary embedding, and a gated MLP."""

    hidden_size: int = from_key()
    intermediate: int = from_key("intermediate_size")
    heads: int = from_key("num_attention_heads")
    kv_heads: int
    head_dim: int
    eps: float = from_key("rms_norm_eps")
    rotary: RotarySettings
    max_position: int = from_key("max_position_embeddings")

    @property
    def softmax_scale(self) -> float:
        """head_dim^-1/2."""
        return float(self.head_dim**-0.5)

    def cache_specs(self, layer: int) -> list[CacheSpec]:
        """Keys and values of one layer, all layers in one group."""
        tensors = tuple(CacheTensorSpec(name, self.kv_heads, self.head_dim) for name in ("k", "v"))
        return [CacheSpec(layer, "draft K/V", "dense", tensors)]

    def rotary_table(self, max_position: int) -> RotaryTable:
        """Angles of that many positions."""
        table = rotary_table(self.head_dim, self.rotary.theta, max_position, self.rotary.yarn)
        return RotaryTable(table, self.head_dim, pairs=False)


class DraftLayer(OpsModule):
    """What stands behind attention, and the names of it all; subclasses project the queries, keys and values."""

    def __init__(self, config: DraftLayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        hidden = config.hidden_size
        self.o_proj = Linear(config.heads * config.head_dim, hidden, dtype, exact=False)
        self.ffn_norm = RMSNorm(hidden, config.eps)
        self.ffn = GatedMLP(hidden, config.intermediate, SILU, dtype, exact=False)

    def close(self, residual: Tensor, out: Tensor) -> Tensor:
        """The stream [T, H] and what attention gives, [T, heads, head_dim] -> the layer's output [T, H]."""
        x = residual + self.o_proj(out.reshape(len(residual), -1))
        return x + self.ffn(self.ffn_norm(x))

    def named(self, prefix: str, q: Tensor, k: Tensor, v: Tensor, norms: dict[str, RMSNorm]) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills, given the views of three projections, and norms by their names."""
        norms = {**norms, "post_attention_layernorm": self.ffn_norm}
        return {
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.o_proj.weight": self.o_proj.hub_weight,
            **{f"{prefix}.{name}.weight": norm.weight for name, norm in norms.items()},
            **self.ffn.weight_slots(f"{prefix}.mlp"),
        }


def read_draft_layer(reader: ConfigReader) -> DraftLayerConfig:
    """Read the keys of a decoder layer. Raises ConfigError naming one that is missing, or asks for what we lack."""
    reader.expect("hidden_act", ("silu",), "silu")
    reader.expect("attention_bias", (False,), False)
    reader.expect("mlp_bias", (False,), False)
    reader.expect("use_sliding_window", (False, None))
    if "use_sliding_window" not in reader.raw:
        reader.expect("sliding_window", (None,))
    layers = reader.integer("num_hidden_layers")
    if reader.get("layer_types") is not None:
        reader.layers("layer_types", layers, ("full_attention",))
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", default=heads)
    reader.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if reader.raw.get("head_dim") is None:
        reader.multiple("hidden_size", hidden, "num_attention_heads", heads)
    head_dim = reader.integer("head_dim") if reader.raw.get("head_dim") is not None else hidden // heads
    reader.multiple("head_dim", head_dim, "2 halves", 2)
    reader.agree("rotary_dim", head_dim, f"{reader.where}: head_dim")
    rotary = read_rotary(reader, reader.integer("max_position_embeddings"))
    config = reader.fill(DraftLayerConfig, kv_heads=kv_heads, head_dim=head_dim, rotary=rotary)
    reader.finish()
    return config


def check_vocabulary(reader: ConfigReader, target: ModelConfig) -> None:
    """Raise ConfigError when the head was made for another vocabulary than the target's."""
    if reader.integer("vocab_size", default=target.vocab_size) != target.vocab_size:
        raise ConfigError(
            f"{reader.where}: vocab_size={reader.raw['vocab_size']} differs from the target's {target.vocab_size}; "
            "use a head that was trained for this model"
        )


def read_layer_ids(reader: ConfigReader, key: str, ids: Any, low: int, high: int) -> tuple[int, ...]:
    """Distinct layer numbers from low to high, ascending. Raises ConfigError naming the key."""
    whole = isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or len(set(ids)) < len(ids) or min(ids) < low or max(ids) > high:
        raise ConfigError(
            f"{reader.where}: {key}={ids!r} must list different layers of the target, {low} to {high}; use a head that "
            "was trained for this model"
        )
    return tuple(sorted(ids))
