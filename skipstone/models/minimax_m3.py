"""MiniMax-M3, text tower: grouped-query attention, block-sparse from the first sparse layer on, and MoE.

One pass of a sparse layer: norm; one product gives [q | k | index q | index k | v]; per-head Gemma norm and partial
rotary on the first four; caches written; the index heads choose blocks, one set per KV head; attention; MoE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.attention.backend import IndexQuery, LayerAttention, SparseSettings
from skipstone.core.kv_cache import CacheSpec, CacheTensorSpec
from skipstone.kernels.ops import OpsModule
from skipstone.kernels.reference.pointwise import GatedActivation, Rotary
from skipstone.layers.linear import Linear
from skipstone.layers.rotary import RotaryTable, rotary_table
from skipstone.models.base import MTP_MODULE, CausalLM, DecoderLayer, ModelConfig, MoeNames, MtpLayout, empty_parameter
from skipstone.models.config_reader import ConfigReader, from_key
from skipstone.models.rotary_keys import read_rotary

# Variants of the model that are not implemented, by the values that are.
ONLY: dict[str, tuple[Any, ...]] = {
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False,),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "hidden_act": ("swigluoai", "silu"),  # transformers 5 saves "silu" and computes the clamped SwiGLU all the same
    "swiglu_beta": (1.0,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (False,),
    "use_index_cache": (False,),
    "index_topk_freq": (1,),
}
# Keys of `sparse_attention_config`, and what transformers 5 saves them as.
SPARSE_NAMES = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
ATTENTION_KINDS, MLP_KINDS = ("full_attention", "minimax_m3_sparse"), ("dense", "sparse")


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Config(ModelConfig):
    """The keys of `text_config` that the text tower alone needs."""

    kv_heads: int = from_key("num_key_value_heads")
    head_dim: int = from_key()
    rotary_dim: int
    sparse_layers: tuple[bool, ...]
    swiglu_alpha: float = from_key(default=1.702)
    swiglu_limit: float = from_key(default=7.0)

    @property
    def softmax_scale(self) -> float:
        """head_dim^-1/2."""
        return float(self.head_dim**-0.5)

    def of_draft_layers(self, count: int) -> MiniMaxM3Config:
        """MTP layers are also sparse."""
        return replace(super().of_draft_layers(count), sparse_layers=(True,) * count)

    @property
    def activation(self) -> GatedActivation:
        """Clamped SwiGLU."""
        return GatedActivation(self.swiglu_alpha, self.swiglu_limit, shift=1.0)


def _read_sparse(
    reader: ConfigReader, layers: int, kv_heads: int, head_dim: int
) -> tuple[tuple[bool, ...], SparseSettings]:
    name = "sparse_attention_config"
    old = reader.section(name) if reader.get(name) else ConfigReader({}, f"{reader.where}.{name}")
    old.expect("use_sparse_attention", (True,), True)
    old.expect("sparse_score_type", ("max",), "max")
    for older, key in SPARSE_NAMES.items():
        reader.also(key, old, older)
    _adopt_layers(reader, "layer_types", ATTENTION_KINDS, old, "sparse_attention_freq", layers)
    sparse_layers = reader.layers("layer_types", layers, ATTENTION_KINDS)
    if old.get("sparse_disable_index_value") is not None:
        no_value = old.layers("sparse_disable_index_value", layers)
        if any(is_sparse and not off for is_sparse, off in zip(sparse_layers, no_value, strict=True)):
            old.agree("sparse_disable_index_value", list(map(int, sparse_layers)), reader.place("layer_types"))
    for key, width, of in (
        ("index_n_heads", kv_heads, "num_key_value_heads"),
        ("index_head_dim", head_dim, "head_dim"),
    ):
        reader.integer(key)
        reader.agree(key, width, f"{reader.where}: {of}")
    settings = SparseSettings(
        unit=reader.integer("index_block_size"),
        budget=reader.integer("index_topk_blocks"),
        init_units=old.integer("sparse_init_block", low=0, default=0),
        local_units=reader.integer("index_local_blocks", low=0, default=1),
        groups=kv_heads,
    )
    if settings.init_units + settings.local_units > settings.budget:
        reader.expect("index_local_blocks", tuple(range(settings.budget + 1)), 1)
        old.expect("sparse_init_block", tuple(range(settings.budget - settings.local_units + 1)))
    old.finish(("",))
    return sparse_layers, settings


def _adopt_layers(
    reader: ConfigReader, key: str, kinds: tuple[str, str], old: ConfigReader, name: str, layers: int
) -> None:
    """Read the older list of zeros and ones as the newer list of names."""
    value = None if old.get(name) is None else [kinds[flag] for flag in old.layers(name, layers)]
    reader.adopt(key, value, old.place(name))


def read_minimax_m3(raw: dict[str, Any]) -> MiniMaxM3Config:
    """Read config.json, nested under `text_config` or flat, of either generation. Raises ConfigError naming the key."""
    outer = ConfigReader(raw, "config.json")
    if "text_config" not in raw:
        return _read_text(outer)
    reader = outer.section("text_config")
    config = _read_text(reader)
    for key in reader.read & raw.keys():
        if outer.get(key) is not False:  # outside, it says nothing where the language model is silent
            outer.agree(key, reader.raw.get(key), reader.place(key))
    outer.finish()
    return config


def _read_text(reader: ConfigReader) -> MiniMaxM3Config:
    layers = reader.integer("num_hidden_layers")
    heads, kv_heads = reader.integer("num_attention_heads"), reader.integer("num_key_value_heads")
    reader.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim, max_position = reader.integer("head_dim"), reader.integer("max_position_embeddings")
    rotary = read_rotary(reader, max_position, theta=5e6, partial=True)
    rotary_dim = int(head_dim * rotary.partial)
    reader.adopt("rotary_dim", rotary_dim, f"{reader.where}: head_dim x partial_rotary_factor")
    reader.expect("rotary_dim", tuple(range(2, head_dim + 1, 2)))
    for key, allowed in ONLY.items():
        reader.expect(key, (*allowed, None))
    sparse_layers, sparse = _read_sparse(reader, layers, kv_heads, head_dim)
    _adopt_layers(reader, "mlp_layer_types", MLP_KINDS, reader, "moe_layer_freq", layers)
    reader.also("num_local_experts", reader, "num_experts")
    experts = reader.integer("num_local_experts")
    reader.integer("num_experts_per_tok")
    reader.expect("num_experts_per_tok", tuple(range(1, experts + 1)))
    config = reader.fill(
        MiniMaxM3Config,
        rotary_dim=rotary_dim,
        rotary=rotary,
        sparse_layers=sparse_layers,
        moe_layers=reader.layers("mlp_layer_types", layers, MLP_KINDS),
        sparse=sparse,
        dense_intermediate=reader.integer("dense_intermediate_size"),
        expert_intermediate=reader.integer("intermediate_size"),
        shared_intermediate=reader.integer("shared_intermediate_size"),
        experts=experts,
        declared_mtp_modules=reader.integer("num_mtp_modules", low=0, default=0),
    )
    reader.finish()
    return config


class HeadNorm(OpsModule):
    """Gemma RMS norm of every head; heads of one kind (q, k, index q, index k) share a weight of head_dim values."""

    def __init__(self, head_counts: list[int], head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_counts, self.eps = head_counts, eps
        self.weight = empty_parameter(len(head_counts), head_dim, dtype=torch.float32)

    def after_load(self) -> None:
        """Spread the weights over the heads once: gain * sqrt(head_dim), [heads, head_dim]."""
        counts = torch.tensor(self.head_counts, device=self.weight.device)
        gain = (self.weight + 1.0) * self.weight.shape[-1] ** 0.5
        self.scaled_gain = gain.repeat_interleave(counts, dim=0)


class Attention(nn.Module):
    """Attention of one layer; `sparse` layers own an index branch."""

    def __init__(self, config: MiniMaxM3Config, layer: int, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        self.config, self.layer, self.sparse = config, layer, config.sparse_layers[layer]
        self.kinds = ["q", "k", "index_q", "index_k"] if self.sparse else ["q", "k"]
        self.head_counts = [config.heads, config.kv_heads, config.kv_heads, 1][: len(self.kinds)]
        firsts = accumulate([0, *self.head_counts])
        self.first_heads = dict(zip([*self.kinds, "v"], firsts, strict=True))  # in a row of in_proj
        heads = self.first_heads["v"] + config.kv_heads
        self.in_proj = Linear(config.hidden_size, heads * config.head_dim, dtype, exact)
        self.norm = HeadNorm(self.head_counts, config.head_dim, config.eps)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden_size, dtype, exact)

    def forward(self, x: Tensor, rotary: Rotary, attend: LayerAttention) -> Tensor:
        """Normalised x [T, H] -> [K, H] of the kept rows."""
        projected = self.in_proj(x).view(x.shape[0], -1, self.config.head_dim)
        gain, eps, first = self.norm.scaled_gain, self.norm.eps, self.first_heads
        heads = attend.norm_rotate_store(projected, gain, eps, rotary, first)
        selection = None
        if self.sparse:
            selection = attend.select(IndexQuery(heads[:, first["index_q"] : first["index_k"]]))
        out = attend.run(attend.keep(heads[:, : first["k"]]), selection)
        return self.o_proj(out.flatten(1))

    def cache_specs(self) -> list[CacheSpec]:
        """Keys and values; sparse layers also cache one index key per token."""
        config = self.config
        tensors = (
            CacheTensorSpec("k", config.kv_heads, config.head_dim),
            CacheTensorSpec("v", config.kv_heads, config.head_dim),
        )
        if not self.sparse:
            return [CacheSpec(self.layer, "dense K/V", "dense", tensors)]
        index_key = (CacheTensorSpec("index_k", 1, config.head_dim),)
        return [
            CacheSpec(self.layer, "sparse K/V", "msa", tensors),
            CacheSpec(self.layer, "index keys", "msa_index", index_key),
        ]

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        config = self.config
        counts = [*self.head_counts, config.kv_heads]
        rows = self.in_proj.hub_weight.split([count * config.head_dim for count in counts])
        slots = {f"{prefix}.o_proj.weight": self.o_proj.hub_weight}
        for i, name in enumerate(self.kinds):
            slots[f"{prefix}.{name}_proj.weight"] = rows[i]
            slots[f"{prefix}.{name}_norm.weight"] = self.norm.weight[i]
        slots[f"{prefix}.v_proj.weight"] = rows[-1]
        return slots


class MiniMaxM3Layer(DecoderLayer):
    """Gemma norms around the attention."""

    attention_class = Attention
    norm_offset = 1.0
    moe_names = MoeNames("block_sparse_moe", "e_score_correction_bias", gate="w1", up="w3", down="w2")


class MiniMaxM3(CausalLM):
    """The text tower of MiniMax-M3."""

    config: MiniMaxM3Config
    layer_class = MiniMaxM3Layer
    mtp = MtpLayout(
        "mtp.layers.", "final_layernorm", base="language_model.model.", layer=".transformer_layer", zero_first=True
    )
    read_config = staticmethod(read_minimax_m3)

    def __init__(self, config: MiniMaxM3Config, dtype: torch.dtype, exact: bool, max_position: int) -> None:
        super().__init__(config, dtype, exact, max_position)
        table = rotary_table(config.rotary_dim, config.rotary.theta, max_position, config.rotary.yarn)
        self.rotary = RotaryTable(table, config.head_dim, pairs=False)

    def angles(self, positions: Tensor) -> Rotary:
        """Of a part of every head."""
        return self.rotary(positions)

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names of the release, under `language_model.`; a text-only export may leave the prefix out."""
        return {f"language_model.{name}": view for name, view in super().weight_slots().items()}

    def ignored_weight(self, name: str) -> str | None:
        """Draft modules are loaded by their proposers; the vision tower is not served."""
        if ".mtp." in name:
            return MTP_MODULE
        parts = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
        return "vision tower" if any(part in name for part in parts) else None
