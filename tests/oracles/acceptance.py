"""Both acceptance rules for a chain of drafts: by plain loops for one row, and for many rows with deliberate mistakes.

Drafts of a row are d_1 .. d_m. `target` are the laws p_0 .. p_m of the tokens after 0 .. m drafts, `draft` the laws
q_1 .. q_m that the drafts were drawn from, `coins` the uniforms u_1 .. u_m.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

Law = list[float]


def rejection_thresholds(target: list[Law], draft: list[Law], drafts: list[int]) -> list[float]:
    """Draft i is kept, once all before it are, where its coin lies below: min(1, p / q)."""
    return [min(1.0, p[d] / q[d]) for p, q, d in zip(target, draft, drafts, strict=False)]


def block_thresholds(target: list[Law], draft: list[Law], drafts: list[int]) -> list[float]:
    """Drafts 1 .. i may be kept together where coin i lies below h_i = S_i / (S_i + 1 - P_i); the last is h_m = P_m.

    P_i is the running ratio of both laws, cut at 1 in every step; S_i what p_i, thus weighted, has more than q_i+1.
    """
    thresholds, ratio = [], 1.0
    for i, d in enumerate(drafts):
        ratio = min(ratio * target[i][d] / draft[i][d], 1.0)
        if i + 1 == len(drafts):
            thresholds.append(ratio)
            break
        more = math.fsum(max(ratio * p - q, 0.0) for p, q in zip(target[i + 1], draft[i + 1], strict=True))
        thresholds.append(more / (more + 1 - ratio) if more > 0 else math.floor(ratio))
    return thresholds


def rejection_accepts(thresholds: list[float], coins: list[float]) -> int:
    """Drafts before the first coin that is not below its threshold."""
    below = [coin < threshold for coin, threshold in zip(coins, thresholds, strict=False)]
    return below.index(False) if False in below else len(below)


def block_accepts(thresholds: list[float], coins: list[float]) -> int:
    """The last coin below its threshold decides, whatever the earlier ones are."""
    return max([i + 1 for i, threshold in enumerate(thresholds) if coins[i] < threshold], default=0)


def recovered_law(rule: str, target: list[Law], draft: list[Law], drafts: list[int], accepted: int) -> Law:
    """Weights of the token after the accepted drafts, not normalised."""
    if accepted == len(drafts):
        return target[accepted]
    ratio = 1.0
    for i in range(accepted if rule == "block" else 0):
        ratio = min(ratio * target[i][drafts[i]] / draft[i][drafts[i]], 1.0)
    return [max(ratio * p - q, 0.0) for p, q in zip(target[accepted], draft[accepted], strict=True)]


def survival(rule: str, target: list[Tensor], draft: list[Tensor]) -> list[float]:
    """P(at least i drafts are kept) for i = 1 .. k, by enumerating what may be drafted.

    target[i] and draft[i] [V**i, V] are the laws of the next token after each possible text of i tokens.
    """
    k, vocab = len(draft), target[0].shape[-1]
    total = [0.0] * k
    for path in itertools.product(range(vocab), repeat=k):
        texts = [sum(d * vocab ** (i - j - 1) for j, d in enumerate(path[:i])) for i in range(k + 1)]
        p = [target[i][texts[i]].tolist() for i in range(k + 1)]
        q = [draft[i][texts[i]].tolist() for i in range(k)]
        chance = math.prod(law[d] for law, d in zip(q, path, strict=True))
        if chance == 0:
            continue
        drafts = list(path)
        if rule == "rejection":
            kept = list(itertools.accumulate(rejection_thresholds(p, q, drafts), lambda a, b: a * b))
        else:
            missed = [1 - threshold for threshold in block_thresholds(p, q, drafts)]
            kept = [1 - math.prod(missed[i:]) for i in range(k)]
        total = [a + chance * b for a, b in zip(total, kept, strict=True)]
    return total


REJECTION_FLAWS = [
    "nothing subtracted", "only the draft removed", "laws swapped", "draft law ignored", "one coin for all",
    "later drafts kept", "bonus of the row before", "recovered of the row after", "padding has a law",
]  # fmt: skip
BLOCK_FLAWS = [
    "first failure", "plain residual", "ratio not cut", "ratio as threshold", "one coin for all",
    "bonus of the row before", "padding has a law",
]  # fmt: skip


def flawed_rule(
    rule: str, flaw: str, target: Tensor, draft: Tensor, drafts: Tensor, coins: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Either rule for all rows with one mistake, or none where `flaw` is empty: (token_ids [R, k+1], accepted [R])."""
    rows, k, vocab = draft.shape
    target, draft, coins = target.double(), draft.double(), coins.double()
    real = drafts >= 0  # [R, k]
    if flaw != "padding has a law":
        draft = draft * real[:, :, None]
    draft = torch.cat([draft, draft.new_zeros(rows, 1, vocab)], dim=1)  # [R, k+1, V] nothing is drafted at the end
    if flaw == "one coin for all":
        coins = coins[:, :1].expand(-1, k)
    ratio, ratios, below = torch.ones(rows, dtype=torch.float64), [], []
    for i in range(k):
        token = drafts[:, i : i + 1].clamp(min=0)
        p, q = (laws[:, i].gather(1, token)[:, 0] for laws in (target, draft))
        if rule == "rejection":
            p, q = {"laws swapped": (q, p), "draft law ignored": (p, torch.ones_like(q))}.get(flaw, (p, q))
            below.append((coins[:, i] * q < p) & real[:, i])
            continue
        ratio = ratio * p / q.clamp(min=1e-300)
        ratio = ratio if flaw == "ratio not cut" else ratio.clamp(max=1)
        ratios.append(ratio)
        more = (ratio[:, None] * target[:, i + 1] - draft[:, i + 1]).clamp(min=0).sum(dim=1)
        last = i + 1 == k or flaw == "ratio as threshold"
        threshold = ratio if last else more / (more + 1 - ratio).clamp(min=1e-300)
        below.append((coins[:, i] < threshold) & real[:, i])
    kept = torch.stack(below, dim=1)  # [R, k]
    if flaw == "later drafts kept":
        accepted = kept.sum(dim=1)
    elif rule == "rejection" or flaw == "first failure":
        accepted = kept.int().cumprod(dim=1).sum(dim=1)
    else:
        accepted = (kept * torch.arange(1, k + 1)).amax(dim=1)
    row = torch.arange(rows)
    all_kept = accepted == real.sum(dim=1)
    source = accepted.clone()
    if flaw == "bonus of the row before":
        source = torch.where(all_kept, (accepted - 1).clamp(min=0), accepted)
    if flaw == "recovered of the row after":
        source = torch.where(all_kept, accepted, accepted + 1)
    law, minus = target[row, source], draft[row, accepted]
    if flaw == "only the draft removed":
        minus = torch.zeros_like(law)
        token = drafts[row, accepted.clamp(max=k - 1)]
        minus[row, token.clamp(min=0)] = (~all_kept).double()
    if flaw == "nothing subtracted":
        minus = torch.zeros_like(law)
    if rule == "block" and flaw != "plain residual":
        law = law * torch.stack([torch.ones_like(ratio), *ratios], dim=1)[row, accepted][:, None]
    last = ((law - minus).clamp(min=0).log() + noise[row, accepted]).argmax(dim=1)
    token_ids = torch.cat([drafts, torch.full((rows, 1), -1)], dim=1)
    token_ids[torch.arange(k + 1) > accepted[:, None]] = -1
    token_ids[row, accepted] = last
    return token_ids, accepted
