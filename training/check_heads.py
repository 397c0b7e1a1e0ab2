"""Row-by-row checks of the draft heads: what training runs at once equals what an engine runs step by step.

    python training/check_heads.py checkpoints/demo-eagle3 checkpoints/demo-dflash

EAGLE-3: rows 0..p run through the layer, then one recycled row after the other behind them. DFlash: one block alone, every head
and row written out in plain loops. Also the way through the exported files and back.
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscheck import long_prompt
from export import load_checkpoint
from export_heads import load_head, to_tensors, write_head
from heads import Dflash, Eagle3, run_dflash, run_eagle3, run_streams

TOLERANCE = 1e-3


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_rope(x: Tensor, position: int, theta: float) -> Tensor:
    """x [D], dims i and i + D/2 turned together."""
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / x.shape[0])
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def plain_mlp(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    gate, up = x @ weights[name + "gate_proj.weight"].T, x @ weights[name + "up_proj.weight"].T
    return (F.silu(gate) * up) @ weights[name + "down_proj.weight"].T


def plain_block(head: Dflash, weights: dict[str, Tensor], features: Tensor, rows: Tensor, anchor: int) -> Tensor:
    """features [S, 3H] of positions 0..anchor-1, rows [K, H] -> normed output [K, H]; nothing but the stored tensors is used."""
    cfg = head.cfg
    f, h, size = plain_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"]), rows, cfg.head_dim
    for number in range(cfg.layers):
        name = f"layers.{number}."
        w = {n: weights[f"{name}self_attn.{n}_proj.weight"] for n in "qkvo"}
        x = plain_norm(h, weights[name + "input_layernorm.weight"])
        source = torch.cat([f, x])                                            # keys come from the features, then from the block
        attended = torch.zeros(len(h), cfg.heads * size)
        for number_q in range(cfg.heads):
            mine, group = slice(number_q * size, (number_q + 1) * size), number_q // (cfg.heads // cfg.kv_heads)
            theirs = slice(group * size, (group + 1) * size)
            k = plain_norm(source @ w["k"][theirs].T, weights[name + "self_attn.k_norm.weight"])
            k = torch.stack([plain_rope(row, p, cfg.rope_theta) for p, row in enumerate(k)])
            v = source @ w["v"][theirs].T
            q = plain_norm(x @ w["q"][mine].T, weights[name + "self_attn.q_norm.weight"])
            for i, row in enumerate(q):
                scores = k @ plain_rope(row, anchor + i, cfg.rope_theta) / size**0.5
                attended[i, mine] = scores.softmax(0) @ v
        h = h + attended @ w["o"].T
        h = h + plain_mlp(plain_norm(h, weights[name + "post_attention_layernorm.weight"]), weights, name + "mlp.")
    return plain_norm(h, weights["norm.weight"])


def dflash_gaps(head: Dflash, model: nn.Module, ids: Tensor, anchors: list[int]) -> list[float]:
    streams, _ = run_streams(model, ids)
    together = run_dflash(head, model, ids, streams, torch.tensor([anchors]))[0]
    weights = {n: t.float() for n, t in to_tensors(head).items()}
    gaps = []
    for anchor, block in zip(anchors, together, strict=True):
        features = torch.cat([streams[tap + 1][0, :anchor] for tap in sorted(head.cfg.taps)], -1)
        rows = torch.stack([ids[0, anchor], *[torch.tensor(head.cfg.mask_token)] * (head.cfg.block - 1)])
        alone = plain_block(head, weights, features, model.embed_tokens.weight[rows], anchor)
        gaps.append((alone[1:] - block).abs().max().item())
    return gaps


def eagle3_gaps(head: Eagle3, model: nn.Module, ids: Tensor, rows: list[int], steps: int) -> list[float]:
    streams, _ = run_streams(model, ids)
    outputs = run_eagle3(head, model, ids, streams, steps, greedy=True)
    positions, features = torch.arange(ids.shape[1] + steps)[None], head.fc(head.taps(streams))
    gaps = []
    for row in rows:
        tokens, hidden, gap = ids[:, 1 : row + 2], features[:, : row + 1], 0.0
        for step in range(steps):
            y = head.midlayer(model.embed_tokens(tokens), hidden, positions[:, : tokens.shape[1]])[0][:, -1:]
            gap = max(gap, (y - outputs[step][:, row : row + 1]).abs().max().item())
            draft = head.logits(y).argmax(-1)
            tokens, hidden = torch.cat([tokens, draft + head.d2t[draft]], 1), torch.cat([hidden, y], 1)
        gaps.append(gap)
    return gaps


def check(folder: Path, model: nn.Module, ids: Tensor) -> bool:
    """Print the comparisons for one folder; True if they hold."""
    head = load_head(folder)
    with tempfile.TemporaryDirectory() as place:
        write_head(head, Path(place))
        again = load_head(Path(place))
    same = all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True)) and head.cfg == again.cfg
    if isinstance(head, Eagle3):
        gaps = eagle3_gaps(head, model, ids, list(range(ids.shape[1] - 40, ids.shape[1] - 8, 4)), 5)
        ordered = bool((head.target_ids().diff() > 0).all()) and torch.equal(head.t2d.nonzero()[:, 0], head.target_ids())
    else:
        gaps, ordered = dflash_gaps(head, model, ids, [1, 2, 70, ids.shape[1] - 9]), True
    print(f"{folder.name}: largest difference {max(gaps):.1e} over {len(gaps)} rows; files and back {same}; vocabulary {ordered}")
    return max(gaps) < TOLERANCE and same and ordered


@torch.no_grad()
def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--target", type=Path, default=here.parent / "checkpoints/demo")
    parser.add_argument("--length", type=int, default=300)
    options = parser.parse_args()
    model = load_checkpoint(options.target)[1]
    ids = long_prompt(options.target)[:, : options.length]
    raise SystemExit(0 if all([check(folder, model, ids) for folder in options.folders]) else 3)


if __name__ == "__main__":
    main()
