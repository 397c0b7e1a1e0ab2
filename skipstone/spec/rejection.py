"""Verification by the laws of target and draft: the emitted tokens follow the target's law, but are other samples.

The rule that is used otherwise compares drafts with the target's own samples, and its text does not depend on the
drafts. The two rules here give that up, in return for accepting the more drafts the closer the laws are. Every draw is
an argument, so equal arguments give equal tokens. The draws must be independent of each other and of the drafts, and
fresh in every step. All arithmetic is in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.core.batch import PAD
from skipstone.errors import ShapeError

TINY = torch.finfo(torch.float64).tiny


class Verified(NamedTuple):
    """What one step emits: the accepted drafts of each request and one token more."""

    token_ids: Tensor  # [R, k+1] int64, PAD after the last emitted token
    num_accepted: Tensor  # [R] int64, 0..k


class _Drafted(NamedTuple):
    """Both laws with every trace of padding removed: a place without a draft has draft law 0."""

    target: Tensor  # [R, k+1, V] float64
    draft: Tensor  # [R, k+1, V] float64
    real: Tensor  # [R, k] bool, True up to the first PAD
    target_of_draft: Tensor  # [R, k] float64, the target's probability of each draft, 0 for PAD
    draft_of_draft: Tensor  # [R, k] float64


def rejection_sample(
    target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor, uniforms: Tensor, noise: Tensor
) -> Verified:
    """Keep drafts one by one, each with probability min(1, target / draft); then one token from what is left.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling" (2023). target_probs [R, k+1, V],
    draft_probs [R, k, V]: the laws the drafts were drawn from, one-hot for drafts without one. draft_token_ids [R, k],
    PAD after a request's last draft. uniforms [R, k] in [0, 1), noise [R, k+1, V] standard Gumbel, of which the row of
    the last token is used. A draft that the target cannot emit is never kept. After a mismatch the next token is drawn
    from the positive part of target - draft, or from the target where the laws are equal; after m kept drafts of m,
    from target_probs[:, m].
    """
    drafted = _prepare(target_probs, draft_probs, draft_token_ids, uniforms, noise)
    # The strict comparison rejects what has target probability 0 even when the uniform is 0 as well.
    kept = drafted.real & (uniforms.double() * drafted.draft_of_draft < drafted.target_of_draft)  # [R, k]
    num_accepted = kept.long().cumprod(dim=1).sum(dim=1)  # [R]
    joint = torch.ones_like(drafted.target[:, :, 0])  # [R, k+1]
    return _emit(drafted, draft_token_ids, num_accepted, joint, noise)


def block_verify(
    target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor, uniforms: Tensor, noise: Tensor
) -> Verified:
    """Keep the longest run of drafts that passes as a whole; then one token from what is left.

    Sun et al., "Block Verification Accelerates Speculative Decoding" (2024): the target's law again, and on average at
    least as many kept drafts as `rejection_sample`, which has the same arguments and treats PAD alike. With P_i the
    running product of target / draft, capped at 1 after every factor, and S_i the mass of the positive part of
    P_i * target - draft at the next place, the first i of m drafts pass when their uniform is below
    S_i / (S_i + 1 - P_i), all m when it is below P_m. The next token is drawn from that positive part.
    """
    drafted = _prepare(target_probs, draft_probs, draft_token_ids, uniforms, noise)
    ratios = drafted.target_of_draft / drafted.draft_of_draft.clamp(min=TINY)  # [R, k]
    steps = [torch.ones_like(drafted.target[:, 0, 0])]
    for place in range(draft_token_ids.shape[1]):
        steps.append((steps[-1] * ratios[:, place]).clamp(max=1.0))
    joint = torch.stack(steps, dim=1)  # [R, k+1]
    mass = (joint[:, :, None] * drafted.target - drafted.draft).clamp(min=0).sum(dim=2)  # [R, k+1]
    # 0 / 0 where the whole run is sure and the laws agree at the next place: then longer runs are as sure.
    # At the last place nothing is subtracted, so that S_m = P_m, which is then the threshold.
    threshold = torch.where(joint < 1, mass / (mass + 1 - joint).clamp(min=TINY), 1.0)[:, 1:]  # [R, k] of 1..k drafts
    passes = drafted.real & (uniforms.double() < threshold)
    length = torch.arange(1, passes.shape[1] + 1, device=passes.device)
    num_accepted = F.pad(torch.where(passes, length, 0), (1, 0)).amax(dim=1)  # [R]
    return _emit(drafted, draft_token_ids, num_accepted, joint, noise)


def _prepare(
    target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor, uniforms: Tensor, noise: Tensor
) -> _Drafted:
    """Check shapes, and blank what belongs to no draft."""
    requests, k = draft_token_ids.shape
    vocab_size = target_probs.shape[-1]
    for name, tensor, expected in (
        ("target_probs", target_probs, (requests, k + 1, vocab_size)),
        ("draft_probs", draft_probs, (requests, k, vocab_size)),
        ("uniforms", uniforms, (requests, k)),
        ("noise", noise, (requests, k + 1, vocab_size)),
    ):
        if tensor.shape != expected:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}, expected {list(expected)} for {requests} requests with {k}"
                f" drafts of {vocab_size} tokens; pad draft_token_ids with PAD, and every other argument likewise"
            )
    real = (draft_token_ids != PAD).long().cumprod(dim=1).bool()  # [R, k]
    chosen = draft_token_ids.long().masked_fill(~real, 0)[:, :, None]  # [R, k, 1]
    target = target_probs.double()
    draft = draft_probs.double().masked_fill(~real[:, :, None], 0)  # [R, k, V]
    return _Drafted(
        target,
        F.pad(draft, (0, 0, 0, 1)),
        real,
        target[:, :k].gather(2, chosen)[:, :, 0].masked_fill(~real, 0),
        draft.gather(2, chosen)[:, :, 0],
    )


def _emit(drafted: _Drafted, draft_token_ids: Tensor, num_accepted: Tensor, joint: Tensor, noise: Tensor) -> Verified:
    """Append one token drawn from joint * target - draft, joint [R, k+1], at the place after the accepted drafts."""
    row = torch.arange(len(num_accepted), device=num_accepted.device)
    target = drafted.target[row, num_accepted]  # [R, V]
    residual = (joint[row, num_accepted, None] * target - drafted.draft[row, num_accepted]).clamp(min=0)
    empty = residual.sum(dim=1, keepdim=True) <= 0
    law = torch.where(empty, target, residual)
    token = (law.log() + noise[row, num_accepted].double()).argmax(dim=1)  # [R] int64
    place = torch.arange(joint.shape[1], device=joint.device)
    token_ids = F.pad(draft_token_ids.long(), (0, 1)).masked_fill(place > num_accepted[:, None], PAD)
    return Verified(token_ids.scatter(1, num_accepted[:, None], token[:, None]), num_accepted)
