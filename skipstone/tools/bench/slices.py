"""Slices of the two releases for benchmarks: real dimensions, few layers and experts, weights drawn at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skipstone.errors import ConfigError
from skipstone.models.loader import ModelInfo
from skipstone.registry import MODELS

_M3_FREQUENCY = [0] + [1] * 7
_M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "hidden_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "vocab_size": 200064,
    "max_position_embeddings": 262144,
    "hidden_act": "swigluoai",
    "dense_intermediate_size": 12288,
    "intermediate_size": 3072,
    "shared_intermediate_size": 3072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": _M3_FREQUENCY,
    "num_mtp_modules": 1,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": _M3_FREQUENCY,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
    },
}
_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
}
SLICES = {"m3": _M3, "v32": _V32}


def slice_info(name: str) -> ModelInfo:
    """The model of a slice, to be built with random weights. Raises ConfigError for an unknown name."""
    if name not in SLICES:
        raise ConfigError(f"--slice {name} is not known; there are " + ", ".join(SLICES))
    raw = SLICES[name]
    architecture = raw["architectures"][0]
    model_class = MODELS.load(architecture)
    folder = Path(f"slice-{name}")
    return ModelInfo(folder, architecture, raw, model_class, model_class.read_config(raw), random_weights=True)
