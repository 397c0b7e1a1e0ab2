"""Tiny random checkpoints in the hub's layout: every mechanism of the two architectures, small enough for a laptop.

Budgets are far below the context, so the sparse path decides the text. Knows config keys and tensor names of the hub;
does not know the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 128
EOS = 127
CONTEXT = 640
Config = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Tiny:
    """One tiny checkpoint: its raw config.json, its tensors under hub names, and what a test must know about it."""

    name: str
    config: Config
    tensors: Tensors
    budget: int  # tokens a row may read in a sparse layer

    @property
    def text(self) -> Config:
        """The language model's keys: nested or flat."""
        return self.config.get("text_config", self.config)


class Draws:
    """Seeded random tensors under which every weight shows: no gain of one, no bias of zero."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        """Gaussian values."""
        return mean + std * torch.randn(shape, generator=self.generator)

    def linear(self, out_features: int, in_features: int, gain: float = 1.2) -> Tensor:
        """A projection that keeps the scale of its input, up to `gain`."""
        return self.normal(out_features, in_features, std=gain * in_features**-0.5)


def m3_text_config(**changes: Any) -> Config:
    """`text_config` of MiniMax-M3 with the raw keys of the hub, and one of four layers dense."""
    sparse = {
        "use_sparse_attention": True, "sparse_attention_freq": [0, 1, 1, 1], "sparse_block_size": 8,
        "sparse_topk_blocks": 3, "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_init_block": 0,
        "sparse_local_block": 1, "sparse_score_type": "max", "sparse_disable_index_value": [0, 1, 1, 1],
    }  # fmt: skip
    config = {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "use_gemma_norm": True, "use_qk_norm": True,
        "qk_norm_type": "per_head", "attention_output_gate": False, "rope_theta": 10000.0, "rotary_dim": 8,
        "partial_rotary_factor": 0.5, "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 1.5,
        "intermediate_size": 32, "shared_intermediate_size": 32, "dense_intermediate_size": 96,
        "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "scoring_func": "sigmoid",
        "use_routing_bias": True, "routed_scaling_factor": 2.0, "moe_layer_freq": [0, 1, 1, 1],
        "tie_word_embeddings": False, "num_mtp_modules": 0, "num_nextn_predict_layers": 1,
        "sparse_attention_config": sparse | changes.pop("sparse", {}),
    }  # fmt: skip
    return config | changes


def nest(text: Config) -> Config:
    """The released form: the language model under `text_config`, vision beside it."""
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14, "num_channels": 3,
    }  # fmt: skip
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": EOS, "tie_word_embeddings": False,
        "projector_hidden_size": 32, "image_token_index": VOCAB - 3, "video_token_index": VOCAB - 2,
        "vision_config": vision, "text_config": text,
    }  # fmt: skip


def flatten(text: Config) -> Config:
    """A text-only export: the same keys at top level."""
    return text | {"bos_token_id": 1, "eos_token_id": EOS, "torch_dtype": "float32"}


def m3_attention(draws: Draws, cfg: Config, name: str, sparse: bool) -> Tensors:
    """Projections and per-head norms of one layer, and the index branch of a sparse one."""
    hidden, dim = cfg["hidden_size"], cfg["head_dim"]
    heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    out = {
        f"{name}.q_proj.weight": draws.linear(heads * dim, hidden),
        f"{name}.k_proj.weight": draws.linear(kv_heads * dim, hidden),
        f"{name}.v_proj.weight": draws.linear(kv_heads * dim, hidden),
        f"{name}.o_proj.weight": draws.linear(hidden, heads * dim),
        f"{name}.q_norm.weight": draws.normal(dim, std=0.3, mean=0.3),
        f"{name}.k_norm.weight": draws.normal(dim, std=0.3, mean=0.3),
    }
    if sparse:
        part = cfg["sparse_attention_config"]
        index_dim = part["sparse_index_dim"]
        out |= {
            f"{name}.index_q_proj.weight": draws.linear(part["sparse_num_index_heads"] * index_dim, hidden),
            f"{name}.index_k_proj.weight": draws.linear(index_dim, hidden),
            f"{name}.index_q_norm.weight": draws.normal(index_dim, std=0.3),
            f"{name}.index_k_norm.weight": draws.normal(index_dim, std=0.3),
        }
    return out


def gated_mlp(draws: Draws, name: str, hidden: int, width: int, names: tuple[str, str, str]) -> Tensors:
    """Gate, up and down projection under the given names."""
    gate, up, down = names
    return {
        f"{name}.{gate}.weight": draws.linear(width, hidden, gain=2.0),
        f"{name}.{up}.weight": draws.linear(width, hidden, gain=2.0),
        f"{name}.{down}.weight": draws.linear(hidden, width, gain=0.7),
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def m3_moe(draws: Draws, cfg: Config, name: str) -> Tensors:
    """Router with its bias beside it (not under `gate`), numbered experts, shared expert."""
    hidden, experts = cfg["hidden_size"], cfg["num_local_experts"]
    out = {
        f"{name}.gate.weight": draws.linear(experts, hidden),
        f"{name}.e_score_correction_bias": draws.normal(experts, std=0.15),
    }
    for expert in range(experts):
        out |= gated_mlp(draws, f"{name}.experts.{expert}", hidden, cfg["intermediate_size"], ("w1", "w3", "w2"))
    return out | gated_mlp(draws, f"{name}.shared_experts", hidden, cfg["shared_intermediate_size"], PROJECTIONS)


def m3_tensors(seed: int, cfg: Config) -> Tensors:
    """Every tensor of the language model, without the prefix of the released checkpoint."""
    draws, hidden = Draws(seed), cfg["hidden_size"]
    out = {
        "model.embed_tokens.weight": draws.normal(cfg["vocab_size"], hidden),
        "model.norm.weight": draws.normal(hidden, std=0.3),
        "lm_head.weight": draws.linear(cfg["vocab_size"], hidden, gain=2.5),
    }
    for layer in range(cfg["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        out[f"{name}.input_layernorm.weight"] = draws.normal(hidden, std=0.3)
        out[f"{name}.post_attention_layernorm.weight"] = draws.normal(hidden, std=0.3)
        sparse = bool(cfg["sparse_attention_config"]["sparse_attention_freq"][layer])
        out |= m3_attention(draws, cfg, f"{name}.self_attn", sparse)
        if cfg["moe_layer_freq"][layer]:
            out |= m3_moe(draws, cfg, f"{name}.block_sparse_moe")
        else:
            out |= gated_mlp(draws, f"{name}.mlp", hidden, cfg["dense_intermediate_size"], PROJECTIONS)
    return out


def store(tensors: Tensors, wide: tuple[str, ...]) -> Tensors:
    """Tensors in the dtypes of the release: bf16, and float32 where the name ends in one of `wide`."""
    return {n: t if n.endswith(wide) else t.bfloat16() for n, t in tensors.items()}


M3_WIDE = ("block_sparse_moe.gate.weight", "e_score_correction_bias")


def m3() -> Tiny:
    """MiniMax-M3 as released: nested config, `language_model.` prefix, vision tensors that text ignores."""
    text = m3_text_config()
    tensors = {f"language_model.{n}": t for n, t in store(m3_tensors(1, text), M3_WIDE).items()}
    tensors["vision_tower.vision_model.pre_layrnorm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    tensors["multi_modal_projector.linear_1.bias"] = torch.zeros(32, dtype=torch.bfloat16)
    tensors["patch_merge_mlp.linear_1.bias"] = torch.zeros(32, dtype=torch.bfloat16)
    return Tiny("m3", nest(text), tensors, budget=24)


def m3_flat() -> Tiny:
    """The same weights as a text-only export: flat keys, no prefix, no vision."""
    text = m3_text_config()
    return Tiny("m3_flat", flatten(text), store(m3_tensors(1, text), M3_WIDE), budget=24)


def m3_mixed() -> Tiny:
    """Sparse attention and MoE in different layers, two local blocks, other widths and constants; all float32."""
    text = m3_text_config(
        moe_layer_freq=[1, 0, 1, 0], shared_intermediate_size=40, swiglu_alpha=1.3, rms_norm_eps=1e-5,
        routed_scaling_factor=1.5, num_experts_per_tok=3, num_attention_heads=6,
        sparse={"sparse_attention_freq": [1, 1, 0, 1], "sparse_local_block": 2, "sparse_topk_blocks": 4,
                "sparse_disable_index_value": [1, 1, 0, 1]},
    )  # fmt: skip
    tensors = {f"language_model.{n}": t for n, t in m3_tensors(2, text).items()}
    return Tiny("m3_mixed", nest(text), tensors, budget=32)


def m3_init() -> Tiny:
    """One leading block that every row keeps (the checkpoint key `sparse_init_block`)."""
    text = m3_text_config(sparse={"sparse_init_block": 1})
    tensors = {f"language_model.{n}": t for n, t in store(m3_tensors(3, text), M3_WIDE).items()}
    return Tiny("m3_init", nest(text), tensors, budget=24)


def dsa_config() -> Config:
    """DeepSeek-V3.2's flat config with YaRN, group-limited routing and one MTP layer."""
    yarn = {
        "type": "yarn", "factor": 10, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": EOS, "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": VOCAB, "intermediate_size": 96,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 16,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "index_n_heads": 4, "index_head_dim": 32, "index_topk": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT, "rope_theta": 10000.0, "rope_scaling": yarn,
        "num_nextn_predict_layers": 1, "use_cache": True,
    }  # fmt: skip


def dsa_attention(draws: Draws, cfg: Config, name: str) -> Tensors:
    """Latent attention and its indexer."""
    hidden, heads, rope = cfg["hidden_size"], cfg["num_attention_heads"], cfg["qk_rope_head_dim"]
    q_rank, kv_rank, nope, value = (cfg[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    index_heads, index_dim = cfg["index_n_heads"], cfg["index_head_dim"]
    return {
        f"{name}.q_a_proj.weight": draws.linear(q_rank, hidden),
        f"{name}.q_a_layernorm.weight": draws.normal(q_rank, std=0.3, mean=1.0),
        f"{name}.q_b_proj.weight": draws.linear(heads * (nope + rope), q_rank),
        f"{name}.kv_a_proj_with_mqa.weight": draws.linear(kv_rank + rope, hidden),
        f"{name}.kv_a_layernorm.weight": draws.normal(kv_rank, std=0.3, mean=1.0),
        f"{name}.kv_b_proj.weight": draws.linear(heads * (nope + value), kv_rank),
        f"{name}.o_proj.weight": draws.linear(hidden, heads * value),
        f"{name}.indexer.wq_b.weight": draws.linear(index_heads * index_dim, q_rank),
        f"{name}.indexer.wk.weight": draws.linear(index_dim, hidden),
        f"{name}.indexer.k_norm.weight": draws.normal(index_dim, std=0.3, mean=1.0),
        f"{name}.indexer.k_norm.bias": draws.normal(index_dim, std=0.5),
        f"{name}.indexer.weights_proj.weight": draws.linear(index_heads, hidden),
    }


def dsa_moe(draws: Draws, cfg: Config, name: str) -> Tensors:
    """Router, numbered experts, shared expert."""
    hidden, experts, width = cfg["hidden_size"], cfg["n_routed_experts"], cfg["moe_intermediate_size"]
    out = {
        f"{name}.gate.weight": draws.linear(experts, hidden),
        f"{name}.gate.e_score_correction_bias": draws.normal(experts, std=0.15, mean=-0.1),
    }
    for expert in range(experts):
        out |= gated_mlp(draws, f"{name}.experts.{expert}", hidden, width, PROJECTIONS)
    return out | gated_mlp(draws, f"{name}.shared_experts", hidden, width, PROJECTIONS)


def dsa_layer(draws: Draws, cfg: Config, name: str, moe: bool) -> Tensors:
    """One decoder layer."""
    hidden = cfg["hidden_size"]
    out = {
        f"{name}.input_layernorm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        f"{name}.post_attention_layernorm.weight": draws.normal(hidden, std=0.3, mean=1.0),
    }
    out |= dsa_attention(draws, cfg, f"{name}.self_attn")
    if moe:
        return out | dsa_moe(draws, cfg, f"{name}.mlp")
    return out | gated_mlp(draws, f"{name}.mlp", hidden, cfg["intermediate_size"], PROJECTIONS)


def dsa() -> Tiny:
    """DeepSeek-V3.2 as released, the MTP layer stored as one more layer that the target must leave alone."""
    cfg, draws = dsa_config(), Draws(4)
    hidden, vocab, last = cfg["hidden_size"], cfg["vocab_size"], cfg["num_hidden_layers"]
    out = {
        "model.embed_tokens.weight": draws.normal(vocab, hidden),
        "model.norm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        "lm_head.weight": draws.linear(vocab, hidden, gain=2.5),
    }
    for layer in range(last):
        out |= dsa_layer(draws, cfg, f"model.layers.{layer}", moe=layer >= cfg["first_k_dense_replace"])
    name = f"model.layers.{last}"
    out |= dsa_layer(draws, cfg, name, moe=True)
    out |= {
        f"{name}.embed_tokens.weight": out["model.embed_tokens.weight"].clone(),
        f"{name}.enorm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        f"{name}.hnorm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        f"{name}.eh_proj.weight": draws.linear(hidden, 2 * hidden),
        f"{name}.shared_head.norm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        f"{name}.shared_head.head.weight": out["lm_head.weight"].clone(),
    }
    wide = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")
    return Tiny("dsa", cfg, store(out, wide), budget=16)


def dsa_fp8() -> Tiny:
    """The same checkpoint, for engines that cache index keys in FP8."""
    return replace(dsa(), name="dsa_fp8")


TINY = {"m3": m3, "m3_flat": m3_flat, "m3_mixed": m3_mixed, "m3_init": m3_init, "dsa": dsa, "dsa_fp8": dsa_fp8}


def engine_options(folder: Path | str) -> dict[str, str]:
    """What an engine on the folder of a tiny checkpoint is started with; the name of the folder begins with its own."""
    return {"index_keys": "fp8"} if Path(folder).name.startswith("dsa_fp8") else {}


def write_folder(tiny: Tiny, folder: Path) -> Path:
    """The checkpoint as two shards with their index, config.json and generation_config.json; no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tiny.tensors)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: tiny.tensors[n].contiguous() for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tiny.tensors.values())}, "weight_map": weight_map}
    for file, content in (
        ("model.safetensors.index.json", index),
        ("config.json", tiny.config),
        ("generation_config.json", {"eos_token_id": EOS}),
    ):
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    return folder
