"""Compare a checkpoint's training model with an independent implementation (transformers), in fp32, on one long prompt.

    python training/crosscheck.py checkpoints/demo checkpoints/demo-dsa [--perturb]

`--perturb` first replaces the weights by larger random ones, so that norms, biases and the selection all matter.
"""

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from export import load_checkpoint, to_checkpoint
from network import run_target

LENGTH = 700


def perturb(model: nn.Module) -> None:
    """Random weights under which every mechanism shows: no gain of one, no bias of zero."""
    torch.manual_seed(1)
    for name, value in model.state_dict().items():
        if "norm" in name:
            value += 0.3 * torch.randn_like(value)
        elif "balance.bias" in name:
            value.copy_(0.1 * torch.randn_like(value))
        elif value.dim() > 1:
            value.copy_(torch.randn_like(value) * (1.0 if "embed" in name else 1.5 * value.shape[-1] ** -0.5))


def merge_m3(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint names -> transformers names of the text model: stacked experts, fused gate and up."""
    out: dict[str, Tensor] = {}
    tensors = {n.removeprefix("language_model."): t.float() for n, t in tensors.items() if ".mtp." not in n}
    experts = sorted({m[1] for n in tensors if (m := re.match(r"(.*\.experts)\.\d+\.", n))})
    for name in experts:
        count = len({n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(name + ".")})
        part = {w: [tensors.pop(f"{name}.{e}.{w}.weight") for e in range(count)] for w in ("w1", "w2", "w3")}
        out[name + ".gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["w1"], part["w3"])])
        out[name + ".down_proj"] = torch.stack(part["w2"])
    for name in [n for n in tensors if n.endswith("gate_proj.weight")]:
        out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))])
    out |= tensors
    out = {n.replace("block_sparse_moe.e_score", "mlp.gate.e_score").replace("block_sparse_moe", "mlp"): t for n, t in out.items()}
    return {re.sub(r"self_attn\.index_([qk])_", r"self_attn.indexer.\1_", n): t for n, t in out.items()}


def oracle_m3(folder: Path, tensors: dict[str, Tensor]) -> nn.Module:
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = MiniMaxM3VLTextConfig(**{k: v for k, v in text.items() if k != "architectures"})
    config._attn_implementation = "eager"
    model = MiniMaxM3VLForCausalLM(config)
    missing, unexpected = model.load_state_dict(merge_m3(tensors), strict=False)
    if missing or unexpected:
        raise ValueError(f"missing {missing[:4]}, unexpected {unexpected[:4]}")
    return model


def merge_dsa(tensors: dict[str, Tensor], last: int) -> dict[str, Tensor]:
    """Checkpoint names -> transformers names: stacked experts; the MTP layer is left out."""
    tensors = {n: t.float() for n, t in tensors.items() if not n.startswith(f"model.layers.{last}.")}
    out: dict[str, Tensor] = {}
    for name in sorted({m[1] for n in tensors if (m := re.match(r"(.*\.experts)\.\d+\.", n))}):
        count = len({n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(name + ".")})
        part = {w: [tensors.pop(f"{name}.{e}.{w}_proj.weight") for e in range(count)] for w in ("gate", "up", "down")}
        out[name + ".gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["gate"], part["up"])])
        out[name + ".down_proj"] = torch.stack(part["down"])
    return out | tensors


def oracle_dsa(folder: Path, tensors: dict[str, Tensor]) -> nn.Module:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
    raw = json.loads((folder / "config.json").read_text())
    config = DeepseekV32Config(**raw)
    config._attn_implementation = "eager"
    model = DeepseekV32ForCausalLM(config)
    missing, unexpected = model.load_state_dict(merge_dsa(tensors, config.num_hidden_layers), strict=False)
    if missing or unexpected:
        raise ValueError(f"missing {missing[:4]}, unexpected {unexpected[:4]}")
    return model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--perturb", action="store_true")
    options = parser.parse_args()
    failed = False
    for folder in options.folders:
        kind, model = load_checkpoint(folder)
        tensors: dict[str, Tensor] = {}
        if options.perturb:
            perturb(model)
            tensors = {n: t.float() for n, t in to_checkpoint(kind, model).items()}
            bf16 = model.state_dict()
            for name, value in bf16.items():
                if "balance" not in name and not (kind == "m3" and "moe.gate" in name) and "k_norm" not in name:
                    value.copy_(value.bfloat16().float())
                elif "k_norm" in name and "indexer" not in name:
                    value.copy_(value.bfloat16().float())
        else:
            for shard in sorted(folder.glob("model-*.safetensors")):
                tensors |= load_file(shard)
        from tokenizers import Tokenizer
        text = json.loads((folder.parent / "prompts.jsonl").read_text().splitlines()[-1])["prompt"] if (folder.parent / "prompts.jsonl").exists() else "import os\n" * 400
        ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:LENGTH]])
        ours = model.lm_head(run_target(model, ids, "select")[0])
        dense = model.lm_head(run_target(model, ids, "dense")[0])
        oracle = (oracle_m3 if kind == "m3" else oracle_dsa)(folder, tensors).eval()
        theirs = oracle(input_ids=ids).logits
        gap, selection = (ours - theirs).abs().max().item(), (ours - dense).abs().max().item()
        print(f"{folder.name}: {ids.shape[1]} tokens, max |logit difference| {gap:.2e} (scale {theirs.abs().mean():.2f}; without the selection {selection:.2e})")
        failed |= gap > 1e-3 or ids.shape[1] < LENGTH
    raise SystemExit(3 if failed else 0)


if __name__ == "__main__":
    main()
