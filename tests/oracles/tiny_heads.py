"""Tiny random draft heads in every layout that is read, for the tiny targets of `oracles.tiny`.

    folder = write_head("eagle3", target, tmp_path / "head")     # then spec=f"eagle3:{folder}:3"
    folder = write_folder(with_mtp(target, 2), tmp_path / "m")   # then spec="mtp:3"

Random heads guess as good as nothing at temperature 0. At temperature 5 drafts that share the target's noise are
accepted about every third time, so that runs of all lengths occur. Knows config keys and tensor names of the hub; does
not know the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from oracles.tiny import (
    CONTEXT,
    EOS,
    M3_WIDE,
    PROJECTIONS,
    Config,
    Draws,
    Tensors,
    Tiny,
    dsa_layer,
    gated_mlp,
    m3_attention,
    m3_moe,
    store,
)

DRAFT_VOCAB = 96
BLOCK = 8  # of DFlash: 7 drafts at most
MASK_TOKEN = 126
AUX_LAYERS = [1, 2, 4]  # the last one is the output of the last layer
DSA_WIDE = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")


@dataclass(frozen=True)
class Head:
    """A draft head: its raw config.json and its tensors under the layout's names."""

    config: Config
    tensors: Tensors

    def write(self, folder: Path) -> Path:
        """config.json and one file of weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def write_head(kind: str, target: Tiny, folder: Path) -> Path:
    """A random head of one of `HEADS` for the target, as a folder."""
    return HEADS[kind](target).write(folder)


def layer_config(target: Tiny, **changes: object) -> Config:
    """What config.json says of any head's decoder layers."""
    hidden = target.text["hidden_size"]
    return {
        "hidden_size": hidden, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "vocab_size": target.text["vocab_size"],
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": EOS,
    } | changes  # fmt: skip


def layer_tensors(draws: Draws, cfg: Config, name: str, inputs: int) -> Tensors:
    """One decoder layer whose attention reads `inputs` values a row."""
    hidden, dim = cfg["hidden_size"], cfg["head_dim"]
    heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    return {
        f"{name}.input_layernorm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        f"{name}.post_attention_layernorm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        f"{name}.self_attn.q_proj.weight": draws.linear(heads * dim, inputs),
        f"{name}.self_attn.k_proj.weight": draws.linear(kv_heads * dim, inputs),
        f"{name}.self_attn.v_proj.weight": draws.linear(kv_heads * dim, inputs),
        f"{name}.self_attn.o_proj.weight": draws.linear(hidden, heads * dim),
        **gated_mlp(draws, f"{name}.mlp", hidden, cfg["intermediate_size"], PROJECTIONS),
    }


def eagle3_tensors(
    draws: Draws, target: Tiny, cfg: Config, draft_vocab: int, layer: str = "midlayer", embedding: bool = False
) -> Tensors:
    """Every tensor of an EAGLE-3 head; no d2t and t2d when the vocabularies are the same."""
    hidden, vocab = cfg["hidden_size"], target.text["vocab_size"]
    out = {
        "fc.weight": draws.linear(hidden, 3 * target.text["hidden_size"], gain=0.6),
        "norm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        "lm_head.weight": draws.linear(draft_vocab, hidden, gain=2.5),
        f"{layer}.hidden_norm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        **layer_tensors(draws, cfg, layer, 2 * hidden),
    }
    if embedding:
        out["embed_tokens.weight"] = draws.normal(vocab, hidden)
    out = store(out, ())
    if draft_vocab < vocab:
        kept = torch.randperm(vocab, generator=draws.generator)[:draft_vocab].sort().values
        out["d2t"] = kept - torch.arange(draft_vocab)
        out["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    return out


def eagle3(target: Tiny) -> Head:
    """The hub's layout with a smaller draft vocabulary."""
    cfg = layer_config(target, architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1)
    taps = {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS, "use_aux_hidden_state": True}
    cfg |= {"draft_vocab_size": DRAFT_VOCAB, "eagle_config": taps}
    return Head(cfg, eagle3_tensors(Draws(11), target, cfg, DRAFT_VOCAB))


def eagle3_wide(target: Tiny) -> Head:
    """`layers.0.` names, the whole vocabulary without d2t, a hidden size and an embedding of its own, `norm_output`."""
    cfg = layer_config(target, architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, hidden_size=48)
    cfg |= {"draft_vocab_size": target.text["vocab_size"], "norm_output": True, "target_hidden_size": 64}
    cfg |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}}
    tensors = eagle3_tensors(Draws(12), target, cfg, target.text["vocab_size"], layer="layers.0", embedding=True)
    return Head(cfg, tensors)


def eagle3_speculators(target: Tiny) -> Head:
    """The speculators layout, with `norm_before_residual` and the verifier's norm beside."""
    layer = layer_config(target, model_type="llama", num_hidden_layers=1)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    cfg = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.2.0",
        "draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": AUX_LAYERS, "norm_before_residual": True,
        "target_hidden_size": None, "torch_dtype": "bfloat16", "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": target.config["architectures"]},
        },
    }  # fmt: skip
    tensors = eagle3_tensors(Draws(13), target, layer, DRAFT_VOCAB, layer="layers.0", embedding=True)
    tensors["verifier_norm.weight"] = torch.ones(layer["hidden_size"], dtype=torch.bfloat16)
    return Head(cfg, tensors)


def dflash(target: Tiny) -> Head:
    """Two layers over three tapped ones; `target_layer_ids` count outputs of layers."""
    cfg = layer_config(target, architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=2)
    options = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [layer - 1 for layer in AUX_LAYERS]}
    cfg |= {"block_size": BLOCK, "dflash_config": options, "num_target_layers": target.text["num_hidden_layers"]}
    cfg |= {"layer_types": ["full_attention"] * 2, "use_sliding_window": False}
    draws, hidden = Draws(14), cfg["hidden_size"]
    out = {
        "fc.weight": draws.linear(hidden, 3 * target.text["hidden_size"]),
        "hidden_norm.weight": draws.normal(hidden, std=0.3, mean=1.0),
        "norm.weight": draws.normal(hidden, std=0.3, mean=1.0),
    }
    for layer in range(2):
        name = f"layers.{layer}"
        out |= layer_tensors(draws, cfg, name, hidden)
        for norm in ("q_norm", "k_norm"):
            out[f"{name}.self_attn.{norm}.weight"] = draws.normal(cfg["head_dim"], std=0.3, mean=1.0)
    return Head(cfg, store(out, ()))


HEADS: dict[str, Callable[[Tiny], Head]] = {
    "eagle3": eagle3,
    "eagle3_wide": eagle3_wide,
    "eagle3_speculators": eagle3_speculators,
    "dflash": dflash,
}


def with_mtp(target: Tiny, modules: int) -> Tiny:
    """The target with this many MTP modules (0 removes them) in its config and its files."""
    if target.config["architectures"][0].startswith("MiniMaxM3"):
        return _m3_with_mtp(target, modules)
    last = target.config["num_hidden_layers"]
    kept = {n: t for n, t in target.tensors.items() if not n.startswith(f"model.layers.{last}.")}
    for module in range(modules):
        kept |= _dsa_module(target, f"model.layers.{last + module}", Draws(21 + module))
    config = target.config | {"num_nextn_predict_layers": modules}
    return replace(target, name=f"{target.name}_mtp{modules}", config=config, tensors=kept)


def _dsa_module(target: Tiny, name: str, draws: Draws) -> Tensors:
    cfg, hidden = target.config, target.config["hidden_size"]
    out = dsa_layer(draws, cfg, name, moe=True)
    out |= _joined_input(draws, name, hidden, mean=1.0)
    out[f"{name}.shared_head.norm.weight"] = draws.normal(hidden, std=0.3, mean=1.0)
    copies = {
        f"{name}.embed_tokens.weight": target.tensors["model.embed_tokens.weight"].clone(),
        f"{name}.shared_head.head.weight": target.tensors["lm_head.weight"].clone(),
    }
    return store(out, DSA_WIDE) | copies


def _m3_with_mtp(target: Tiny, modules: int) -> Tiny:
    cfg, hidden = target.text, target.text["hidden_size"]
    prefix = "language_model." if "text_config" in target.config else ""
    tensors = {n: t for n, t in target.tensors.items() if ".mtp." not in n}
    for module in range(modules):
        name, draws = f"{prefix}model.mtp.layers.{module}", Draws(31 + module)
        layer = f"{name}.transformer_layer"
        out = _joined_input(draws, name, hidden, mean=0.0)
        for norm in (f"{name}.final_layernorm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
            out[f"{norm}.weight"] = draws.normal(hidden, std=0.3)
        out |= m3_attention(draws, cfg, f"{layer}.self_attn", sparse=True)
        out |= m3_moe(draws, cfg, f"{layer}.block_sparse_moe")
        tensors |= store(out, M3_WIDE)
    text = cfg | {"num_mtp_modules": modules}
    config = target.config | {"text_config": text} if prefix else text
    return replace(target, name=f"{target.name}_mtp{modules}", config=config, tensors=tensors)


def _joined_input(draws: Draws, name: str, hidden: int, mean: float) -> Tensors:
    """The two norms and the projection of (embedding, hidden state)."""
    return {
        f"{name}.enorm.weight": draws.normal(hidden, std=0.3, mean=mean),
        f"{name}.hnorm.weight": draws.normal(hidden, std=0.3, mean=mean),
        f"{name}.eh_proj.weight": draws.linear(hidden, 2 * hidden),
    }
