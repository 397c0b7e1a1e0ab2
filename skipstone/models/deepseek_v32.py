"""DeepSeek-V3.2: latent attention (MLA) over the tokens that a lightning indexer selects, and group-limited MoE.

One layer: norm; latent query and latent key/value; the indexer scores every earlier token from the same inputs; the
absorbed query attends to the selected latents only. Rotary pairs differ: MLA rotates neighbours (2i, 2i+1) of the last
dims, the indexer rotates halves (i, i + d/2) of the first dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from skipstone.attention.backend import CacheRows, IndexQuery, LayerAttention, SparseSettings
from skipstone.core.kv_cache import CacheSpec, CacheTensorSpec
from skipstone.kernels.ops import OpsModule
from skipstone.kernels.reference.fp8 import FP8
from skipstone.kernels.reference.index_rows import KeyNorm
from skipstone.kernels.reference.pointwise import Rotary
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.layers.rotary import RotaryTable, rotary_table
from skipstone.models.base import MTP_MODULE, CausalLM, DecoderLayer, ModelConfig, MoeNames, MtpLayout, empty_parameter
from skipstone.models.config_reader import ConfigReader, from_key
from skipstone.models.rotary_keys import read_rotary

# The norms inside attention (latent query, latent, index key) take this and not `rms_norm_eps`: the published modelling
# code, and transformers after it, make them without an eps, so that checkpoints were trained with the default. The
# release says 1e-6 for all others as well.
INNER_NORM_EPS = 1e-6
MLP_KINDS = ("dense", "sparse")
# Variants of the model that are not implemented, by the values that are; the keys may be absent.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (False,),
    "index_topk_freq": (1,),
    "index_share_for_mtp_iteration": (False,),
    "index_k_norm_type": ("layer",),
}


@dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(ModelConfig):
    """The keys of config.json that this model alone needs."""

    q_rank: int = from_key("q_lora_rank")
    kv_rank: int = from_key("kv_lora_rank")
    nope_dim: int = from_key("qk_nope_head_dim")
    rope_dim: int = from_key("qk_rope_head_dim")
    value_dim: int = from_key("v_head_dim")
    index_heads: int = from_key("index_n_heads")
    index_dim: int = from_key("index_head_dim")
    fp8_index_keys: bool = False  # no key of config.json: how index keys are cached

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-1/2, times the square of YaRN's attention temperature."""
        temperature = self.rotary.yarn.temperature if self.rotary.yarn else 1.0
        return float((self.nope_dim + self.rope_dim) ** -0.5 * temperature**2)


def _check_supported(reader: ConfigReader, layers: int) -> None:
    for key, allowed in ONLY.items():
        reader.expect(key, (*allowed, None))
    for key, kind in (("layer_types", "indexed_attention"), ("indexer_types", "full")):
        if reader.get(key) is not None:
            reader.layers(key, layers, (kind,))
    reader.get("index_skip_topk_offset")  # says where skipping begins, which index_topk_freq=1 never does


def _read_moe_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: all behind the first few, or as a list says."""
    if reader.get("mlp_layer_types") is None or reader.get("first_k_dense_replace") is not None:
        dense = min(reader.integer("first_k_dense_replace", low=0), layers)
        kinds = [MLP_KINDS[layer >= dense] for layer in range(layers)]
        reader.adopt("mlp_layer_types", kinds, reader.place("first_k_dense_replace"))
    return reader.layers("mlp_layer_types", layers, MLP_KINDS)


def read_deepseek_v32(raw: dict[str, Any]) -> DeepseekV32Config:
    """Read config.json of either generation. Raises ConfigError naming the key."""
    reader = ConfigReader(raw, "config.json")
    layers, heads = reader.integer("num_hidden_layers"), reader.integer("num_attention_heads")
    _check_supported(reader, layers)
    for name in ("num_experts", "num_local_experts"):
        reader.also("n_routed_experts", reader, name)
    experts, groups = reader.integer("n_routed_experts"), reader.integer("n_group")
    reader.multiple("n_routed_experts", experts, "n_group", groups)
    kept = reader.integer("topk_group")
    reader.integer("num_experts_per_tok")
    reader.expect("topk_group", tuple(range(1, groups + 1)))
    reader.expect("num_experts_per_tok", tuple(range(1, kept * (experts // groups) + 1)))
    kv_rank, rope_dim, index_dim = (reader.integer(k) for k in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"))
    reader.multiple("qk_rope_head_dim", rope_dim, "2 halves", 2)
    reader.expect("qk_rope_head_dim", tuple(range(2, index_dim + 1, 2)))
    nope_dim, expert_width = reader.integer("qk_nope_head_dim"), reader.integer("moe_intermediate_size")
    reader.agree("qk_head_dim", nope_dim + rope_dim, f"{reader.where}: qk_nope_head_dim + qk_rope_head_dim")
    reader.agree("num_key_value_heads", heads, f"{reader.where}: num_attention_heads")
    config = reader.fill(
        DeepseekV32Config,
        rotary=read_rotary(reader, reader.integer("max_position_embeddings")),
        sparse=SparseSettings(unit=1, budget=reader.integer("index_topk"), value_width=kv_rank),
        moe_layers=_read_moe_layers(reader, layers),
        dense_intermediate=reader.integer("intermediate_size"),
        expert_intermediate=expert_width,
        experts=experts,
        shared_intermediate=expert_width * reader.integer("n_shared_experts", low=0),
        expert_groups=groups,
        kept_groups=kept,
        declared_mtp_modules=reader.integer("num_nextn_predict_layers", low=0, default=0),
    )
    reader.finish()
    return config


class Rotaries(NamedTuple):
    """The same angles for the two shapes of heads: MLA's rotary part and the indexer's heads."""

    mla: Rotary
    indexer: Rotary


class LightningIndexer(OpsModule):
    """Scores earlier tokens from the layer's input and its latent query."""

    def __init__(self, config: DeepseekV32Config, exact: bool) -> None:
        super().__init__()
        self.config = config
        self.key_weight = empty_parameter(config.index_dim, dtype=torch.float32)
        self.key_bias = empty_parameter(config.index_dim, dtype=torch.float32)
        self.head_weights = Linear(config.hidden_size, config.index_heads, torch.float32, exact)
        self.weight_scale = config.index_heads**-0.5 * config.index_dim**-0.5

    def forward(
        self, x: Tensor, projected_q: Tensor, projected_k: Tensor, rotary: Rotary, attend: LayerAttention
    ) -> IndexQuery:
        """x [T, H], projected_q [T, HI * DI], projected_k [T, DI] -> the rows' queries; their keys are cached."""
        q = projected_q.view(x.shape[0], -1, self.config.index_dim)
        norm = KeyNorm(self.key_weight, self.key_bias, INNER_NORM_EPS)
        return attend.index_rows(q, projected_k, self.head_weights(x), self.weight_scale, norm, rotary)


class Attention(OpsModule):
    """MLA in its absorbed form over selected latents."""

    def __init__(self, config: DeepseekV32Config, layer: int, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        self.config, self.layer, self.exact = config, layer, exact
        heads, q_dim = config.heads, config.nope_dim + config.rope_dim
        self.in_widths = [config.q_rank, config.kv_rank, config.rope_dim, config.index_dim]
        self.in_proj = Linear(config.hidden_size, sum(self.in_widths), dtype, exact)
        self.q_norm = RMSNorm(config.q_rank, INNER_NORM_EPS)
        self.kv_norm = RMSNorm(config.kv_rank, INNER_NORM_EPS)
        self.q_widths = [heads * q_dim, config.index_heads * config.index_dim]
        self.q_up = Linear(config.q_rank, sum(self.q_widths), dtype, exact)
        self.kv_up = empty_parameter(heads, config.nope_dim + config.value_dim, config.kv_rank, dtype=dtype)
        self.o_proj = Linear(heads * config.value_dim, config.hidden_size, dtype, exact)
        self.indexer = LightningIndexer(config, exact)

    def forward(self, x: Tensor, rotary: Rotaries, attend: LayerAttention) -> Tensor:
        """Normalised x [T, H] -> [K, H] of the kept rows."""
        config, mla = self.config, rotary.mla
        latent_q, latent, rope_k, index_k = self.in_proj(x).split(self.in_widths, dim=-1)
        q, index_q = self.q_up(self.q_norm(latent_q)).split(self.q_widths, dim=-1)
        latent_row = torch.cat([self.kv_norm(latent)[:, None], self.ops.rotate(rope_k[:, None], mla)], dim=-1)
        attend.write(CacheRows(latent=latent_row))
        index = self.indexer(x, index_q, index_k, rotary.indexer, attend)
        selection = attend.select(index)
        q, mla = attend.keep(q), mla if attend.kept_rows is None else mla.of_rows(attend.kept_rows)
        rows = q.shape[0]
        nope_q, rope_q = q.view(rows, config.heads, -1).split([config.nope_dim, config.rope_dim], dim=-1)
        key_up, value_up = self.kv_up.split([config.nope_dim, config.value_dim], dim=1)  # [H, nope | value, kv_rank]
        absorbed = self.ops.bmm(nope_q.transpose(0, 1), key_up, self.exact).transpose(0, 1)  # [K, H, kv_rank]
        query = torch.cat([absorbed, self.ops.rotate(rope_q, mla)], dim=-1)
        latent_out = attend.run(query, selection)  # [K, H, kv_rank]
        out = self.ops.bmm(latent_out.transpose(0, 1), value_up.transpose(1, 2), self.exact).transpose(0, 1)
        return self.o_proj(out.reshape(rows, -1))

    def cache_specs(self) -> list[CacheSpec]:
        """One latent and one index key per token, shared by all heads."""
        config = self.config
        latent = CacheTensorSpec("latent", 1, config.kv_rank + config.rope_dim)
        index_key: tuple[CacheTensorSpec, ...] = (CacheTensorSpec("index_k", 1, config.index_dim),)
        if config.fp8_index_keys:
            scale = CacheTensorSpec("index_k_scale", 1, 1, torch.float32)
            index_key = (CacheTensorSpec("index_k", 1, config.index_dim, FP8), scale)
        return [
            CacheSpec(self.layer, "latents", "dsa", (latent,)),
            CacheSpec(self.layer, "index keys", "dsa_index", index_key),
        ]

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        config = self.config
        q_a, kv_a, index_k = self.in_proj.hub_weight.split(
            [config.q_rank, config.kv_rank + config.rope_dim, config.index_dim]
        )
        q_b, index_q = self.q_up.hub_weight.split(self.q_widths)
        return {
            f"{prefix}.q_a_proj.weight": q_a,
            f"{prefix}.q_a_layernorm.weight": self.q_norm.weight,
            f"{prefix}.q_b_proj.weight": q_b,
            f"{prefix}.kv_a_proj_with_mqa.weight": kv_a,
            f"{prefix}.kv_a_layernorm.weight": self.kv_norm.weight,
            f"{prefix}.kv_b_proj.weight": self.kv_up.flatten(0, 1),
            f"{prefix}.o_proj.weight": self.o_proj.hub_weight,
            f"{prefix}.indexer.wq_b.weight": index_q,
            f"{prefix}.indexer.wk.weight": index_k,
            f"{prefix}.indexer.k_norm.weight": self.indexer.key_weight,
            f"{prefix}.indexer.k_norm.bias": self.indexer.key_bias,
            f"{prefix}.indexer.weights_proj.weight": self.indexer.head_weights.hub_weight,
        }


class DeepseekV32Layer(DecoderLayer):
    """Experts go by the names of dense layers."""

    attention_class = Attention
    moe_names = MoeNames("mlp", "gate.e_score_correction_bias", "gate_proj", "up_proj", "down_proj")


class DeepseekV32(CausalLM):
    """DeepSeek-V3.2 without its draft layer."""

    config: DeepseekV32Config
    layer_class = DeepseekV32Layer
    mtp = MtpLayout("model.layers.", "shared_head.norm", after_layers=True, copies=("embed_tokens", "shared_head.head"))
    read_config = staticmethod(read_deepseek_v32)

    @staticmethod
    def with_fp8_index_keys(config: Any) -> DeepseekV32Config:
        """Index keys, one per token, can be in FP8."""
        return replace(cast("DeepseekV32Config", config), fp8_index_keys=True)

    def __init__(self, config: DeepseekV32Config, dtype: torch.dtype, exact: bool, max_position: int) -> None:
        super().__init__(config, dtype, exact, max_position)
        table = rotary_table(config.rope_dim, config.rotary.theta, max_position, config.rotary.yarn)
        self.mla_rotary = RotaryTable(table, config.rope_dim, pairs=True)
        self.index_rotary = RotaryTable(table, config.index_dim, pairs=False)

    def angles(self, positions: Tensor) -> Rotaries:
        """Of both shapes of heads."""
        return Rotaries(self.mla_rotary(positions), self.index_rotary(positions))

    def ignored_weight(self, name: str) -> str | None:
        """Layers behind the last one are draft modules, loaded by their proposers."""
        parts = name.split(".")
        if not name.startswith("model.layers.") or not parts[2].isdigit():
            return None
        behind = int(parts[2]) - self.config.num_layers
        return MTP_MODULE if 0 <= behind < max(self.config.declared_mtp_modules, 1) else None
