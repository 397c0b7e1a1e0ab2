"""Held-out numbers of a checkpoint: bits per byte with all keys and with the selection, coverage, drafts, acceptance length.

    python training/evaluate.py checkpoints/demo --save training/results/demo.json
    python training/evaluate.py checkpoints/demo --load training/results/demo.json --write-card
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from layers import attention_mass, causal_mask
from network import generate, run_draft, run_target

DRAFTS = 3


def token_bytes(data: Path, device: torch.device) -> Tensor:
    """[V] float: bytes of text that a token stands for; special tokens count 0."""
    content = json.loads((data / "tokenizer.json").read_text(encoding="utf-8"))
    special = {entry["id"] for entry in content["added_tokens"]}
    sizes = torch.zeros(len(content["model"]["vocab"]))
    for text, index in content["model"]["vocab"].items():
        sizes[index] = 0 if index in special else len(text)  # one printable character a byte in byte-level BPE
    return sizes.to(device)


@torch.no_grad()
def bits_per_byte(model: nn.Module, stream: Tensor, data: Path, length: int, mode: str, windows: int) -> float:
    """Over up to `windows` windows spread evenly over the stream; the first token of a window is not predicted."""
    sizes = token_bytes(data, stream.device)
    starts = np.linspace(0, len(stream) - length - 2, min(windows, (len(stream) - 2) // length)).astype(int)
    nats = total = 0.0
    batch = max(1, 8192 // length)
    for index in range(0, len(starts), batch):
        window = torch.stack([stream[s : s + length + 1] for s in starts[index : index + batch]])
        hidden, _, _ = run_target(model, window[:, :-1], mode)
        loss = nn.functional.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), window[:, 1:].flatten(), reduction="sum")
        nats += loss.item()
        total += sizes[window[:, 1:]].sum().item()
    return nats / math.log(2) / total


def best_share(mass: Tensor, attention: nn.Module) -> Tensor:
    """The most that any selection of this size could cover: mass [B, G, R, S] -> [B, G, R]."""
    unit, count = (attention.cfg.block, attention.cfg.top_blocks) if hasattr(attention.cfg, "block") else (1, attention.cfg.index_top)
    pooled = nn.functional.pad(mass, (0, -mass.shape[-1] % unit)).unflatten(-1, (-1, unit)).sum(-1)
    return pooled.topk(min(count, pooled.shape[-1]), -1).values.sum(-1)


@torch.no_grad()
def coverage(model: nn.Module, stream: Tensor, length: int, windows: int) -> tuple[list[float], list[float], list[float]]:
    """Share of the all-keys attention mass on the selected keys, mean per layer (MTP layer last); rows from `length / 2` on.

    Second list: the share under the best selection of the same size. Third: share of the visible keys that the selection holds.
    """
    rows = []
    for start in np.linspace(0, len(stream) - length - 1, windows).astype(int):
        ids = stream[start : start + length][None]
        hidden, _, extras = run_target(model, ids, "select")
        extras.append(run_draft(model, ids, hidden, 1, "select", greedy=False)[2])
        causal, late = causal_mask(length, ids.device), slice(length // 2, None)
        attentions = [*(layer.self_attn for layer in model.layers if getattr(layer.self_attn, "sparse", True)), model.mtp.layer.self_attn]
        for attention, extra in zip(attentions, extras, strict=True):
            mass = attention_mass(*extra["qk"], attention.scale, causal)[:, :, late]
            mask = extra["mask"][:, :, late]
            rows.append([(mass * mask).sum(-1).mean().item(), best_share(mass, attention).mean().item(),
                         (mask.sum(-1) / causal.sum(-1)[late]).float().mean().item()])
    table = np.array(rows).reshape(windows, -1, 3).mean(0)
    return tuple(table[:, column].tolist() for column in range(3))


@torch.no_grad()
def speculation(model: nn.Module, prompts: list[list[int]], count: int) -> dict:
    """Greedy drafts against the target's own greedy continuation.

    agree: share of rows where step j is right given that all earlier steps are; length: mean tokens a verify step emits along
    the path that speculation takes, at k = DRAFTS.
    """
    ids, lengths = generate(model, prompts, count)
    hidden, _, _ = run_target(model, ids, "select")
    outputs, _, _ = run_draft(model, ids, hidden, DRAFTS, "select", greedy=True)
    drafts = torch.stack([model.lm_head(out).argmax(-1) for out in outputs], -1)          # [N, S, k]
    truth = torch.stack([torch.roll(ids, -(step + 1), 1) for step in range(1, DRAFTS + 1)], -1)
    accepted = (drafts == truth).int().cumprod(-1).sum(-1).cpu()                          # [N, S]
    emitted = steps = 0
    reached = np.zeros(DRAFTS + 1)
    for row, length in enumerate(lengths.tolist()):
        at, end = length - 1, length + count - DRAFTS - 2
        while at <= end:
            gained = int(accepted[row, at])
            reached[: gained + 1] += 1
            emitted, steps, at = emitted + gained + 1, steps + 1, at + gained + 1
    return {"length": emitted / steps, "verify_steps": steps, "agree": [float(reached[j + 1] / max(1, reached[j])) for j in range(DRAFTS)],
            "prompts": len(prompts), "tokens_each": count}


def prompt_ids(folder: Path) -> dict[str, list[list[int]]]:
    """Short prompts of checkpoints/prompts.jsonl by kind."""
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kinds: dict[str, list[list[int]]] = {}
    for line in (folder.parent / "prompts.jsonl").open(encoding="utf-8"):
        entry = json.loads(line)
        ids = tokenizer.encode(entry["prompt"]).ids
        if len(ids) <= 512:
            kinds.setdefault(entry["kind"], []).append(ids)
    return kinds


def measure(model: nn.Module, folder: Path, data: Path, prompts: dict[str, list[list[int]]], tiny: bool) -> dict:
    """All numbers of a card."""
    device = model.lm_head.weight.device
    stream = torch.from_numpy(np.fromfile(data / "heldout.bin", dtype=np.uint16).astype(np.int64)).to(device)
    short, long, windows, count = (64, 128, 1, 5) if tiny else (2048, 4096, 1000, 64)
    results: dict = {"heldout_tokens": len(stream)}
    for length in (short, long):
        results[f"bits_per_byte_{length}"] = {name: bits_per_byte(model, stream, data, length, mode, windows)
                                              for name, mode in (("dense", "dense"), ("sparse", "select"))}
        share, best, size = coverage(model, stream, length, 1 if tiny else 16)
        results[f"coverage_{length}"] = {"mass": share, "best": best, "mean_mass": float(np.mean(share[:-1])), "mean_best": float(np.mean(best[:-1])),
                                         "keys": float(np.mean(size[:-1]))}
    chunks = [stream[i : i + short // 2].tolist() for i in range(0, len(stream) - short, max(short, len(stream) // (2 if tiny else 64)))]
    results["speculation_text"] = speculation(model, chunks[:64], count)
    for kind, ids in prompts.items():
        results[f"speculation_{kind}"] = speculation(model, ids[: 2 if tiny else None], count)
    return results


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path, help="use numbers measured before")
    parser.add_argument("--write-card", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.load:
        results = json.loads(options.load.read_text())
    else:
        from export import load_checkpoint
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kind, model = load_checkpoint(options.folder, device)
        prompts = prompt_ids(options.folder)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            results = {"kind": kind} | measure(model, options.folder, options.data, prompts, options.tiny)
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    if options.write_card:
        from card import write_card
        write_card(options.folder, results)


if __name__ == "__main__":
    main()
