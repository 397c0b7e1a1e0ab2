"""What surrounds the model in a step: where its rows stand, and how many drafts survive."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, SPARE_BLOCK, ZERO_BLOCK, Batch, Span
from skipstone.kernels.reference.sampling import gumbel_noise

# Any constant that is used nowhere else.
UNIFORM_STREAM = 0x1F83D9ABFB41BD6B


class PlacedRows(NamedTuple):
    """The T rows of R requests. Padding rows stand at position 0 and write to SPARE_BLOCK."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    seen: Tensor  # [T] int64, the last position that each row sees; PAD for padding rows
    slot_block: Tensor  # [T] int64
    slot_offset: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int64

    def batch(self, table: Tensor, spans: list[Span], max_seq_len: int) -> Batch:
        """With the block tables [R, blocks] that the rows were placed by."""
        return Batch(
            input_ids=self.input_ids,
            positions=self.positions,
            seq_lens=self.seq_lens,
            slot_block=self.slot_block,
            slot_offset=self.slot_offset,
            block_table=table,
            spans=spans,
            max_seq_len=max_seq_len,
        )


def step_rows(
    tokens: Tensor,
    slots: Tensor | None,
    start: Tensor,
    end: Tensor,
    table: Tensor,
    row_item: Tensor | None,
    row_offset: Tensor | None,
    block_size: int,
) -> PlacedRows:
    """Row t is at position start + row_offset[t] of request row_item[t], and reads its token there.

    tokens [S, W] int32 by slot, slots [R], start [R], end [R], table [R, blocks], row_item [T], row_offset [T], all
    int64. Requests with a negative start are padding, and so are rows from `end` on. Tokens below 0 read as 0.

    With slots, row_item and row_offset None, tokens [R, n] int64 are those of the rows themselves, n of each request.
    """
    if slots is None or row_item is None or row_offset is None:
        n = tokens.shape[1]
        row = torch.arange(tokens.numel(), device=tokens.device)
        slots, row_item, row_offset = None, row // n, row % n
        end = torch.where(end > start, torch.minimum(end, start + n), 0)
    positions = start[row_item] + row_offset
    real = (start[row_item] >= 0) & (positions < end[row_item])
    place = torch.where(real, positions, 0)
    ids = tokens.flatten() if slots is None else torch.where(real, tokens[slots[row_item], place], 0)
    rows = placed_rows(ids, positions, real, table[row_item, place // block_size], block_size)
    return PlacedRows(*rows, torch.where(start >= 0, end, 0))


def placed_rows(
    ids: Tensor, positions: Tensor, real: Tensor, block: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All of PlacedRows but `seq_lens`: rows [T] with these tokens, positions and blocks; others are padding."""
    place = torch.where(real, positions, 0)
    return (
        ids.clamp(min=0).long(),
        place,
        torch.where(real, positions, PAD),
        torch.where(real & (block != ZERO_BLOCK), block, SPARE_BLOCK),
        place % block_size,
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
