"""Compare a checkpoint's training model with an independent implementation (transformers), in fp32, on one long prompt.

    python training/crosscheck.py checkpoints/demo checkpoints/demo-dsa

Also checks that the unrolled draft steps equal drafting row by row.
"""

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from export import load_checkpoint
from network import run_draft, run_target, shift

LENGTH = 700


def merge_m3(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint names -> transformers names of the text model: stacked experts, fused gate and up."""
    out: dict[str, Tensor] = {}
    tensors = {n.removeprefix("language_model."): t.float() for n, t in tensors.items() if ".mtp." not in n}
    experts = sorted({m[1] for n in tensors if (m := re.match(r"(.*\.experts)\.\d+\.", n))})
    for name in experts:
        count = len({n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(name + ".")})
        part = {w: [tensors.pop(f"{name}.{e}.{w}.weight") for e in range(count)] for w in ("w1", "w2", "w3")}
        out[name + ".gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["w1"], part["w3"], strict=True)])
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
    missing, unexpected = model.load_state_dict(merge_m3(tensors), strict=True)
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
        out[name + ".gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["gate"], part["up"], strict=True)])
        out[name + ".down_proj"] = torch.stack(part["down"])
    return out | tensors


def oracle_dsa(folder: Path, tensors: dict[str, Tensor]) -> nn.Module:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
    raw = json.loads((folder / "config.json").read_text())
    config = DeepseekV32Config(**raw)
    config._attn_implementation = "eager"
    model = DeepseekV32ForCausalLM(config)
    missing, unexpected = model.load_state_dict(merge_dsa(tensors, config.num_hidden_layers), strict=True)
    if missing or unexpected:
        raise ValueError(f"missing {missing[:4]}, unexpected {unexpected[:4]}")
    return model


def long_prompt(folder: Path) -> Tensor:
    """The first LENGTH tokens of the longest held-out prompt, [1, LENGTH]."""
    from tokenizers import Tokenizer
    prompts = [json.loads(line)["prompt"] for line in (folder.parent / "prompts.jsonl").open(encoding="utf-8")]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(max(prompts, key=len)).ids
    return torch.tensor([ids[:LENGTH]])


def draft_gap(model: nn.Module, ids: Tensor, rows: list[int], steps: int) -> list[float]:
    """Largest difference, per row, between the unrolled draft and the module run as an engine runs it.

    The engine's way: step-1 inputs at positions 0..p, then one recycled row after the other behind them.
    """
    hidden, _, _ = run_target(model, ids, "select")
    outputs, _, _ = run_draft(model, ids, hidden, steps, "select", greedy=True)
    positions = torch.arange(ids.shape[1] + steps)[None]
    first = model.mtp.combine(model.embed_tokens(shift(ids, 1)), hidden, positions[:, : ids.shape[1]])
    gaps = []
    for row in rows:
        x, gap = first[:, : row + 1], 0.0
        for step in range(1, steps + 1):
            out = model.mtp.out_norm(model.mtp.layer(x, positions[:, : x.shape[1]], "select")[0][:, -1:])
            gap = max(gap, (out - outputs[step - 1][:, row : row + 1]).abs().max().item())
            at = positions[:, row + step : row + step + 1]
            x = torch.cat([x, model.mtp.combine(model.embed_tokens(model.lm_head(out).argmax(-1)), out, at)], 1)
        gaps.append(gap)
    return gaps


def check(folder: Path) -> bool:
    """Print both comparisons for one folder; True if they hold."""
    kind, model = load_checkpoint(folder)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    ids = long_prompt(folder)
    ours, dense = (model.lm_head(run_target(model, ids, mode)[0]) for mode in ("select", "dense"))
    theirs = (oracle_m3 if kind == "m3" else oracle_dsa)(folder, tensors).eval()(input_ids=ids).logits
    gap, selection = (ours - theirs).abs().max().item(), (ours - dense).abs().max().item()
    print(f"{folder.name}: {ids.shape[1]} tokens, max |logit difference| {gap:.1e} "
          f"(mean |logit| {theirs.abs().mean():.2f}; without the selection {selection:.1e})")
    gaps = draft_gap(model, ids, list(range(LENGTH - 60, LENGTH - 20)), 3)
    equal = sum(g < 1e-3 for g in gaps)
    print(f"{folder.name}: unrolled draft equals row by row for {equal} of {len(gaps)} rows "
          f"(largest difference {max(gaps):.1e}; ties at the edge of a selection may differ)")
    return gap < 1e-3 and equal >= 0.8 * len(gaps) and ids.shape[1] == LENGTH


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    raise SystemExit(0 if all([check(folder) for folder in parser.parse_args().folders]) else 3)


if __name__ == "__main__":
    main()
