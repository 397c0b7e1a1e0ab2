"""Checkpoint folders in the hub's layout: tensor names, config files, shards; and the way back into the training models.

    python training/export.py --model m3 --random --out checkpoints/demo        # seeded random weights, same layout
    python training/export.py --model m3 --state state.pt --out checkpoints/demo
"""

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsa import Dsa, DsaConfig
from m3 import M3, M3Config

MODELS = {"m3": (M3, M3Config), "dsa": (Dsa, DsaConfig)}
SHARD_BYTES = 12_500_000
BOS, EOS, PAD, END = 1, 2, 0, 6
FP32 = ("gate.weight", "e_score_correction_bias")


def rename(kind: str, name: str, cfg: M3Config | DsaConfig) -> str:
    """Training name -> checkpoint name, for everything but the stacked experts."""
    name = name.replace("mlp.balance.bias", "mlp.gate.e_score_correction_bias").replace("moe.balance.bias", "moe.e_score_correction_bias")
    if kind == "m3":
        name = name.replace("mtp.layer.", "mtp.layers.0.transformer_layer.") if name.startswith("mtp.layer.") else name.replace("mtp.", "mtp.layers.0.")
        return "language_model." + (name if name.startswith("lm_head") else "model." + name)
    name = re.sub(r"^mtp\.(layer\.)?", f"layers.{cfg.layers}.", name).replace("shared_head_norm", "shared_head.norm")
    return name if name.startswith("lm_head") else "model." + name


def to_checkpoint(kind: str, model: nn.Module) -> dict[str, Tensor]:
    """All tensors under their checkpoint names; bf16 except the router weight and bias of M3, and the biases of both."""
    parts = {"gate": "w1", "up": "w3", "down": "w2"} if kind == "m3" else {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stacked = re.fullmatch(r"(.*\.experts)\.(gate|up|down)", name)
        if stacked:
            for expert, weight in enumerate(value):
                tensors[rename(kind, f"{stacked[1]}.{expert}.{parts[stacked[2]]}.weight", model.cfg)] = weight
        else:
            tensors[rename(kind, name, model.cfg)] = value
    wide = FP32 if kind == "m3" else ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")
    wide = tuple("." + suffix for suffix in wide)
    keep = {n for n in tensors if n.endswith(wide) and not (kind == "m3" and n.endswith(".gate.weight") and "block_sparse_moe" not in n)}
    if kind == "dsa":
        keep = {n for n in keep if "indexer" in n or "e_score" in n}
    return {n: t.detach().cpu().to(torch.float32 if n in keep else torch.bfloat16).contiguous() for n, t in tensors.items()}


def load_checkpoint(folder: Path, device: str = "cpu") -> tuple[str, nn.Module]:
    """(kind, training model in fp32) from an exported folder; every tensor must be used and filled exactly once."""
    kind = "m3" if "text_config" in json.loads((folder / "config.json").read_text()) else "dsa"
    cls, config = MODELS[kind]
    model = cls(config())
    files = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        files |= load_file(shard)
    state = {}
    for name, value in model.state_dict().items():
        stacked = re.fullmatch(r"(.*\.experts)\.(gate|up|down)", name)
        if stacked:
            part = {"gate": "w1", "up": "w3", "down": "w2"}[stacked[2]] if kind == "m3" else stacked[2] + "_proj"
            names = [rename(kind, f"{stacked[1]}.{expert}.{part}.weight", model.cfg) for expert in range(value.shape[0])]
            state[name] = torch.stack([files.pop(n).float() for n in names])
        else:
            state[name] = files.pop(rename(kind, name, model.cfg)).float()
    if files:
        raise ValueError(f"tensors without a place in the model: {sorted(files)[:5]}")
    model.load_state_dict(state)
    return kind, model.eval().to(device)


def m3_config(cfg: M3Config) -> dict:
    """The hub's nested form."""
    per_layer = [0] * cfg.dense_layers + [1] * (cfg.layers - cfg.dense_layers)
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_size": cfg.hidden, "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim, "vocab_size": cfg.vocab, "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": 1e-6, "use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False,
        "rope_theta": cfg.rope_theta, "rotary_dim": cfg.rotary_dim, "partial_rotary_factor": cfg.rotary_dim / cfg.head_dim, "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "intermediate_size": cfg.expert_width, "shared_intermediate_size": cfg.expert_width,
        "dense_intermediate_size": cfg.dense_width, "num_local_experts": cfg.experts, "num_experts_per_tok": cfg.experts_per_token, "n_shared_experts": 1,
        "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": cfg.routed_scale, "moe_layer_freq": per_layer,
        "tie_word_embeddings": False, "num_mtp_modules": 1, "num_nextn_predict_layers": 1,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_attention_freq": per_layer, "sparse_block_size": cfg.block, "sparse_topk_blocks": cfg.top_blocks,
            "sparse_num_index_heads": cfg.kv_heads, "sparse_index_dim": cfg.index_dim, "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_score_type": "max", "sparse_disable_index_value": per_layer,
        },
    }
    return {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl", "torch_dtype": "bfloat16",
            "bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD, "tie_word_embeddings": False, "text_config": text}


def dsa_config(cfg: DsaConfig) -> dict:
    """DeepSeek-V3.2's flat form."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16", "bos_token_id": BOS, "eos_token_id": [EOS, END],
        "pad_token_id": PAD, "hidden_size": cfg.hidden, "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.heads,
        "vocab_size": cfg.vocab, "intermediate_size": cfg.dense_width, "moe_intermediate_size": cfg.expert_width, "first_k_dense_replace": cfg.dense_layers,
        "moe_layer_freq": 1, "n_routed_experts": cfg.experts, "n_shared_experts": 1, "num_experts_per_tok": cfg.experts_per_token,
        "n_group": cfg.expert_groups, "topk_group": cfg.groups_per_token, "routed_scaling_factor": cfg.routed_scale, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "q_lora_rank": cfg.q_rank, "kv_lora_rank": cfg.kv_rank, "qk_nope_head_dim": cfg.nope,
        "qk_rope_head_dim": cfg.rope, "v_head_dim": cfg.value, "index_n_heads": cfg.index_heads, "index_head_dim": cfg.index_dim, "index_topk": cfg.index_top,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "max_position_embeddings": cfg.max_positions, "rope_theta": cfg.rope_theta,
        "rope_scaling": {"type": "yarn", "factor": cfg.yarn_factor, "original_max_position_embeddings": cfg.yarn_original, "beta_fast": cfg.beta_fast,
                         "beta_slow": cfg.beta_slow, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 1, "use_cache": True,
    }


def shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """At least two groups of at most SHARD_BYTES, in checkpoint order."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        nbytes = tensors[name].nbytes
        if size + nbytes > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = tensors[name]
        size += nbytes
    return groups


def write_weights(tensors: dict[str, Tensor], out: Path, index: bool = True) -> None:
    """Shards and their index; each file appears whole, by a rename."""
    out.mkdir(parents=True, exist_ok=True)
    groups = shards(tensors)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, out / (file + ".part"), metadata={"format": "pt"})
        (out / (file + ".part")).chmod(0o644)
        (out / (file + ".part")).rename(out / file)
        weight_map |= dict.fromkeys(group, file)
    if not index:
        return
    content = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(content, indent=1) + "\n")


def write_folder(kind: str, model: nn.Module, out: Path) -> None:
    """Weights, config.json and generation_config.json."""
    write_weights(to_checkpoint(kind, model), out)
    config = m3_config(model.cfg) if kind == "m3" else dsa_config(model.cfg)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--state", type=Path, help="state dict written by train.py")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    cls, config = MODELS[options.model]
    model = cls(config())
    if not options.random:
        model.load_state_dict({n: t.float() for n, t in torch.load(options.state, weights_only=True, map_location="cpu").items()})
    write_folder(options.model, model, options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
          f"{sum(f.stat().st_size for f in options.out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
