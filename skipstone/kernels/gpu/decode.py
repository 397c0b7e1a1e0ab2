"""What surrounds the model in a step, in Triton: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import PAD, SPARE_BLOCK, ZERO_BLOCK
from skipstone.kernels.gpu.sampling import _gumbel, _noise_bits
from skipstone.kernels.reference.decode import UNIFORM_STREAM, Accepted, PlacedRows

NONE = tl.constexpr(PAD)
SPARE = tl.constexpr(SPARE_BLOCK)
ZERO = tl.constexpr(ZERO_BLOCK)
COIN_STREAM = tl.constexpr(UNIFORM_STREAM)


ROWS = 128  # of a program


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
    """See `kernels.reference.decode.step_rows`."""
    listed = slots is not None and row_item is not None and row_offset is not None
    count = len(row_item) if row_item is not None else tokens.numel()
    ids, places, seen, blocks, offsets = torch.empty(5, count, dtype=torch.int64, device=start.device)
    lens = torch.empty(len(start), dtype=torch.int64, device=start.device)
    if count:
        _step_rows_kernel[(triton.cdiv(count, ROWS),)](
            tokens, slots if listed else start, start, end, table, row_item if listed else start,
            row_offset if listed else start, ids, places, seen, blocks, offsets, lens, count, *tokens.stride(),
            slots.stride(0) if slots is not None else 0, start.stride(0), end.stride(0), *table.stride(),
            N=0 if listed else tokens.shape[1], BLOCK_SIZE=block_size, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return PlacedRows(ids, places, seen, blocks, offsets, lens)


@triton.jit(do_not_specialize=["count", "token_stride", "slot_stride", "start_stride", "end_stride", "table_stride"])
def _step_rows_kernel(
    token_ptr,  # [S, W] int32; with N [R, N] int64
    slot_ptr,  # [R] int64; not read with N, nor are item_ptr and row_offset_ptr
    start_ptr,  # [R] int64
    end_ptr,  # [R] int64
    table_ptr,  # [R, blocks] int64
    item_ptr,  # [T] int64
    row_offset_ptr,  # [T] int64
    ids_ptr,  # [T] int64
    place_ptr,  # [T] int64
    seen_ptr,  # [T] int64
    block_ptr,  # [T] int64
    offset_ptr,  # [T] int64
    len_ptr,  # [R] int64
    count,
    token_stride,
    column_stride,
    slot_stride,
    start_stride,
    end_stride,
    table_stride,
    entry_stride,
    N: tl.constexpr,  # rows of every request; 0: as listed
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    if N > 0:
        item = row // N
        row_offset = row % N
    else:
        item = tl.load(item_ptr + row, mask=inside, other=0)
        row_offset = tl.load(row_offset_ptr + row, mask=inside, other=0)
    start = tl.load(start_ptr + item * start_stride, mask=inside, other=-1)
    end = tl.load(end_ptr + item * end_stride, mask=inside, other=0)
    position = start + row_offset
    real = inside & (start >= 0) & (position < end)
    place = tl.where(real, position, 0)
    if N > 0:
        token = tl.load(token_ptr + item * token_stride + row_offset * column_stride, mask=inside, other=0)
        end = tl.where(end > start, tl.minimum(end, start + N), 0)
    else:
        slot = tl.load(slot_ptr + item * slot_stride, mask=inside, other=0)
        token = tl.load(token_ptr + slot * token_stride + place * column_stride, mask=real, other=0).to(tl.int64)
    block = tl.load(table_ptr + item * table_stride + place // BLOCK_SIZE * entry_stride, mask=real, other=ZERO)
    tl.store(ids_ptr + row, tl.maximum(token, 0), mask=inside)
    tl.store(place_ptr + row, place, mask=inside)
    tl.store(seen_ptr + row, tl.where(real, position, NONE), mask=inside)
    tl.store(block_ptr + row, tl.where(real & (block != ZERO), block, SPARE), mask=inside)
    tl.store(offset_ptr + row, place % BLOCK_SIZE, mask=inside)
    first = inside & (row_offset == 0)
    tl.store(len_ptr + item, tl.where(start >= 0, end, 0), mask=first)


def accept(
    tokens: Tensor, token_ids: Tensor, start: Tensor, limit: Tensor, seed: Tensor, rates: Tensor | None
) -> Accepted:
    """See `kernels.reference.decode.accept`."""
    requests, n = tokens.shape
    emitted, following = torch.empty(2, requests, n, dtype=torch.int64, device=tokens.device)
    count, next_start = torch.empty(2, requests, dtype=torch.int64, device=tokens.device)
    if not requests:
        return Accepted(count, emitted, following, next_start)
    _accept_kernel[(requests,)](
        tokens.contiguous(), token_ids, start, limit, seed, tokens if rates is None else rates, count, emitted,
        following, next_start, token_ids.stride(0), token_ids.stride(1), start.stride(0), limit.stride(0),
        seed.stride(0), N=n, BLOCK_N=triton.next_power_of_2(n), RATES=0 if rates is None else len(rates), num_warps=1,
    )  # fmt: skip
    return Accepted(count, emitted, following, next_start)


@triton.jit(do_not_specialize=["token_stride", "start_stride", "limit_stride", "seed_stride"])
def _accept_kernel(
    sample_ptr,  # [R, N] int64
    token_ptr,  # [R, N] int64, the newest committed token and the drafts
    start_ptr,  # [R] int64
    limit_ptr,  # [R] int64
    seed_ptr,  # [R] int64
    rate_ptr,  # [RATES] float64
    count_ptr,  # [R] int64
    emitted_ptr,  # [R, N] int64
    following_ptr,  # [R, N] int64
    next_start_ptr,  # [R] int64
    token_stride,
    column_stride,
    start_stride,
    limit_stride,
    seed_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RATES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    inside = column < N
    start = tl.load(start_ptr + request * start_stride)
    limit = tl.load(limit_ptr + request * limit_stride)
    # Column j holds the sample behind row j, and the draft that this sample is compared with.
    sampled = tl.load(sample_ptr + request * N + column, mask=inside, other=0)
    drafts_at = token_ptr + request * token_stride + (column + 1) * column_stride
    draft = tl.load(drafts_at, mask=column + 1 < N, other=NONE)
    draft = tl.where(start + column + 1 < limit, draft, NONE)
    if RATES > 0:
        rate = tl.load(rate_ptr + tl.minimum(column, RATES - 1))
        seed = tl.load(seed_ptr + request * seed_stride)
        gumbel = _gumbel(_noise_bits(seed ^ COIN_STREAM, start + column + 1, tl.zeros([1], tl.int64)))
        coin = tl.exp(-tl.exp(-gumbel.to(tl.float64)))
        match = (coin < rate) & (draft >= 0)
    else:
        match = draft == sampled
    count = tl.min(tl.where(match & (column + 1 < N), N, column), axis=0)
    emitted = sampled
    if RATES > 0:
        emitted = tl.where(column < count, draft, sampled)
    newest = tl.sum(tl.where(column == count, emitted, 0), axis=0)
    out = request * N + column
    tl.store(count_ptr + request, count.to(tl.int64))
    tl.store(emitted_ptr + out, emitted, mask=inside)
    tl.store(following_ptr + out, tl.where(column < count, emitted, newest), mask=inside)
    tl.store(next_start_ptr + request, tl.where(start >= 0, start + count + 1, NONE))
