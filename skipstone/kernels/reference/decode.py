"""What surrounds the model in a decode step on the device: where its rows stand, and how many drafts survive."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, SPARE_BLOCK, ZERO_BLOCK
from skipstone.kernels.reference.sampling import gumbel_noise

# Any constant that is used nowhere else.
UNIFORM_STREAM = 0x1F83D9ABFB41BD6B


class DecodeRows(NamedTuple):
    """The rows of R requests with n rows each, T = R * n. Padding rows stand at position 0 and write to SPARE_BLOCK."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    seen: Tensor  # [R, n] int64, PAD for padding rows
    slot_block: Tensor  # [T] int64
    slot_offset: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int64


def decode_rows(token_ids: Tensor, start: Tensor, limit: Tensor, table: Tensor, block_size: int) -> DecodeRows:
    """Rows at positions start, start + 1, ... of each request.

    token_ids [R, n] int64 (PAD reads token 0), start [R], limit [R], table [R, blocks] int64. Requests with a negative
    start are padding, and so are rows from `limit` on.
    """
    positions = start[:, None] + torch.arange(token_ids.shape[1], device=start.device)
    real = (start[:, None] >= 0) & (positions < limit[:, None])
    place = torch.where(real, positions, 0)
    block = table.gather(1, place // block_size)
    seen = torch.where(real, positions, PAD)
    return DecodeRows(
        token_ids.clamp(min=0).flatten(),
        place.flatten(),
        seen,
        torch.where(real & (block != ZERO_BLOCK), block, SPARE_BLOCK).flatten(),
        (place % block_size).flatten(),
        seen.amax(dim=1) + 1,
    )


class Accepted(NamedTuple):
    """What verification says of R requests with k drafts each."""

    num_accepted: Tensor  # [R] int64, drafts that survive
    emitted: Tensor  # [R, k + 1] int64; what follows token `num_accepted` is not emitted
    following: Tensor  # [R, k + 1] int64, the token after each row; rows of rejected drafts repeat the last known one
    start: Tensor  # [R] int64, position of the newest committed token; PAD for padding requests


def accept(
    tokens: Tensor, token_ids: Tensor, start: Tensor, limit: Tensor, seed: Tensor, rates: Tensor | None
) -> Accepted:
    """Keep drafts while they equal the target's own sample at their position.

    tokens [R, k + 1] are the samples, token_ids [R, k + 1] the newest committed token and the drafts (PAD: none).
    Drafts at positions from `limit` [R] on count as none. With `rates` [N] float64 a coin of (seed, position) decides
    instead, the last rate serving all further drafts.
    """
    k = tokens.shape[1] - 1
    column = torch.arange(k + 1, device=tokens.device)
    if k == 0:
        return Accepted(torch.zeros_like(start), tokens, tokens, torch.where(start >= 0, start + 1, PAD))
    positions = start[:, None] + column[1:]
    drafts = torch.where(positions < limit[:, None], token_ids[:, 1:], PAD)
    matches = tokens[:, :k] == drafts if rates is None else coins(seed, positions, rates) & (drafts >= 0)
    count = matches.long().cumprod(dim=1).sum(dim=1)
    emitted = tokens
    if rates is not None:
        kept = column[:k] < count[:, None]
        emitted = torch.cat([torch.where(kept, drafts, tokens[:, :k]), tokens[:, k:]], dim=1)
    following = emitted.gather(1, torch.minimum(column, count[:, None]))
    return Accepted(count, emitted, following, torch.where(start >= 0, start + count + 1, PAD))


def coins(seed: Tensor, position: Tensor, rates: Tensor) -> Tensor:
    """Whether each draft survives a coin of its conditional rate; the last rate serves all further positions.

    seed [R], position [R, k] of the drafts, rates [N] float64. Returns [R, k] bool, a function of (seed, position).
    """
    k = position.shape[1]
    each = torch.cat([rates, rates[-1:].expand(k)])[:k]
    return uniforms(seed.repeat_interleave(k), position.flatten()).view(-1, k) < each


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """A number in (0, 1) per row, a function of (seed, position): [L] float64."""
    gumbel = gumbel_noise(seed ^ UNIFORM_STREAM, position, 1)[:, 0].double()
    return torch.exp(-torch.exp(-gumbel))
