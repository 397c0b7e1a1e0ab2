"""Acceptance of draft heads by simulated greedy speculation on the target's own continuations of held-out prompts.

    python training/rollout.py --greedy training/.data/greedy.npz          # once
    python training/evaluate_heads.py checkpoints/demo-eagle3 checkpoints/demo-dflash [--mtp] [--save FILE]

A step drafts k tokens behind the newest token with the target's true features before it, and emits the drafts up to the first
mismatch and one token of the target. Counting ends with the prompt's 128th new token or its first stop token.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from export import END, EOS, load_checkpoint
from heads import Dflash, Eagle3, run_dflash, run_eagle3, run_streams
from network import run_draft

NEW_TOKENS = 128
DRAFTS = {"eagle3": (3, 5), "dflash": (3, 7), "mtp": (3,)}


def stop_index(ids: np.ndarray, start: int) -> int:
    """Index behind the last new token that counts."""
    new = ids[start : start + NEW_TOKENS]
    stops = np.flatnonzero(np.isin(new, (EOS, END)))
    return start + (int(stops[0]) + 1 if len(stops) else len(new))


@torch.no_grad()
def draft_all(head: Eagle3 | Dflash | None, model: nn.Module, ids: Tensor, start: int, k: int) -> Tensor:
    """Drafts behind every new token of ids [1, S]: row r holds the k guesses after ids[start + r], [S - start - k, k]."""
    anchors = torch.arange(start, ids.shape[1] - k, device=ids.device)[None]
    streams, hidden = run_streams(model, ids)
    if isinstance(head, Dflash):
        guesses = model.lm_head(run_dflash(head, model, ids, streams, anchors)).argmax(-1)
        return guesses[0, :, :k]
    if head is None:
        chosen = [model.lm_head(y).argmax(-1) for y in run_draft(model, ids, hidden, k, "select", greedy=True)[0]]
    else:
        chosen = [head.choose(y) for y in run_eagle3(head, model, ids, streams, k, greedy=True)]
    return torch.stack(chosen, -1)[0, anchors[0] - 1]


def walk(matches: np.ndarray, new: int) -> list[int]:
    """Accepted drafts of each verify step; matches [rows, k] says which guesses after new token r equal the text."""
    accepted, at = [], 0
    while at < new - 1:
        row = matches[at][: new - 1 - at]
        count = int(np.cumprod(row).sum())
        accepted.append(count)
        at += count + 1
    return accepted


def summary(accepted: list[int], k: int) -> dict:
    """length: tokens emitted a step, bonus included; rates: share of steps in which draft j was accepted; right: given all before."""
    steps, counts = len(accepted), np.array(accepted)
    reached = np.array([(counts >= j).sum() for j in range(k + 1)])
    return {"length": float(1 + counts.mean()), "steps": steps, "rates": [float(r / steps) for r in reached[1:]],
            "right": [float(b / max(1, a)) for a, b in pairwise(reached)]}


def measure(head: Eagle3 | Dflash | None, model: nn.Module, stored: dict, device: str, limit: int | None = None) -> dict:
    """{k: {kind: summary}}; head None measures the target's MTP module; `limit` prompts at most, spread over the lengths."""
    name = "mtp" if head is None else "eagle3" if isinstance(head, Eagle3) else "dflash"
    largest = max(DRAFTS[name])
    found: dict[int, dict[str, list[int]]] = {k: {} for k in DRAFTS[name]}
    count = len(stored["start"])
    for number in np.linspace(0, count - 1, min(count, limit or count)).astype(int):
        start, kind = int(stored["start"][number]), str(stored["kind"][number])
        end = stop_index(stored["ids"][number], start)
        ids = torch.from_numpy(stored["ids"][number].astype(np.int64))[None, : start + NEW_TOKENS + largest + 1].to(device)
        guesses = draft_all(head, model, ids, start, largest).cpu()
        truth = torch.stack([ids[0, start + j : start + j + len(guesses)].cpu() for j in range(1, largest + 1)], -1)
        matches = (guesses == truth).int().numpy()
        for k, kinds in found.items():
            accepted = walk(matches[:, :k], end - start)
            for key in ("all", kind):
                kinds.setdefault(key, []).extend(accepted)
    return {str(k): {kind: summary(a, k) for kind, a in kinds.items()} for k, kinds in found.items()}


def show(name: str, numbers: dict) -> None:
    for k, kinds in numbers.items():
        parts = "  ".join(f"{kind} {v['length']:.3f}" for kind, v in kinds.items())
        print(f"{name} k={k}: {parts}  accepted {' '.join(f'{100 * r:.1f}' for r in kinds['all']['rates'])} %", flush=True)


def main() -> None:
    from export_heads import load_head
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--target", type=Path, default=here.parent / "checkpoints/demo")
    parser.add_argument("--greedy", type=Path, default=here / ".data/greedy.npz")
    parser.add_argument("--mtp", action="store_true", help="measure the target's MTP module as well")
    parser.add_argument("--save", type=Path, help="JSON with all numbers of the last folder")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, stored = load_checkpoint(options.target, device)[1], dict(np.load(options.greedy))
    for folder in [*options.folders, *([None] if options.mtp else [])]:
        numbers = measure(load_head(folder, device) if folder else None, model, stored, device, options.limit)
        show(folder.name if folder else "mtp", numbers)
        if options.save:
            options.save.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
