"""Top-k, top-p and min-p without reading anything back: one sort per row, so that a GPU can capture it in a graph.

`kernels.reference.sampling` looks at the largest tokens only, which is faster on a CPU but needs to know how many.
Masses are added as integers here: their sum has one value in any order, so a row does not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 2.0**40  # of the likeliest token's mass; the sum over 2^22 tokens still fits into int64


def truncate(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> None:
    """Mask what the settings exclude with -inf, in place: top-k, then top-p among what is left, then min-p.

    scores [L, V] float32 without NaN. top_k [L] int64 (below 1: off), top_p [L] float32 (1: off), min_p [L] float32
    (0: off). Equal scores rank by ascending id, and the likeliest token always stays.
    """
    vocab = scores.shape[1]
    highest = scores.amax(dim=1, keepdim=True)  # [L, 1]
    if top_k is not None or top_p is not None:
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        kept = torch.ones_like(ranked, dtype=torch.bool)
        if top_k is not None:
            rank = torch.arange(vocab, device=scores.device)
            kept = rank < torch.where(top_k < 1, vocab, top_k)[:, None]
        if top_p is not None:
            mass = torch.exp(ranked - highest).nan_to_num_(nan=0.0).masked_fill_(~kept, 0.0).double().mul_(SCALE).long()
            before = mass.cumsum(dim=1) - mass
            needed = (mass.sum(dim=1, keepdim=True).double() * top_p[:, None].double()).long()
            enough = (before >= needed) & (top_p < 1)[:, None]
            enough[:, 0] = False
            kept = kept & ~enough
        scores.masked_fill_(~torch.empty_like(kept).scatter_(1, order, kept), -torch.inf)
    if min_p is not None:
        scores.masked_fill_(scores < highest + min_p.log()[:, None], -torch.inf)
