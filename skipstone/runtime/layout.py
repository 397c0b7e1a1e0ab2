"""Where the rows of a plan stand: host integers, moved to the device by one copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from skipstone.core.batch import ALIGNMENT, host_rows
from skipstone.core.plan import PlanItem
from skipstone.core.sequence_table import SequenceTable


class KeptRows(NamedTuple):
    """The rows whose final states are wanted, where that is not all of them."""

    rows: Tensor  # [K] int64 into the T rows
    items: Tensor  # [R'] int64, the requests they belong to
    counts: np.ndarray  # [R'] rows of each of them


class Layout(NamedTuple):
    """The rows of one step: R requests, T rows, of which L sample for D requests; then rows of prompts with logits."""

    counts: np.ndarray  # [R] rows of each request
    slots: Tensor  # [R] int64
    num_rows: Tensor  # [R] int64, as `counts`; fewer where a graph has more rows
    row_item: Tensor  # [T] int64
    row_offset: Tensor  # [T] int64
    sampling: Tensor | None  # [D] int64 into R; None: all
    lead: Tensor | None  # [D] int64, rows of each before the one that reads its newest committed token; None: no rows
    wanted: Tensor  # [D] int64, drafts to make
    place: tuple[Tensor, Tensor]  # row of L -> (D, drafts before it)
    uniform: bool  # whether every request has most_drafts + 1 such rows
    logit_rows: Tensor | None  # [L + prompt rows] int64 into T, or into the kept rows; None: all
    first_rows: Tensor  # [D] int64 into T, the row that reads the newest committed token
    kept: KeptRows | None
    most_drafts: int  # K, of any request
    num_sampled: int  # L
    k: int  # drafts to make, of the request that wants most
    end: int  # bound of positions
    chunks: bool  # whether a row belongs to a prompt, but for the last
    sampled_items: np.ndarray  # [L], D index of each sampled row
    first_sampled: np.ndarray  # [D], the first of its rows in L


def make_layout(items: list[PlanItem], table: SequenceTable, every_row: bool) -> Layout:
    """The layout of a plan. Without `every_row`, only rows with logits need final states."""
    counts = np.array([item.num_rows for item in items])
    firsts = counts.cumsum() - counts
    row_item, row_offset = host_rows(counts)
    sampling = np.array([i for i, item in enumerate(items) if item.samples], dtype=np.int64)
    chosen = [items[i] for i in sampling]
    drafts = np.array([item.num_drafts for item in chosen], dtype=np.int64)
    wanted = np.array([item.num_next_drafts for item in chosen], dtype=np.int64)
    lead = counts[sampling] - 1 - drafts
    first_rows = firsts[sampling] + lead
    sampled_item, sampled_draft = host_rows(drafts + 1)
    logit_rows = first_rows[sampled_item] + sampled_draft
    prompt = [np.arange(*item.prompt_rows) + firsts[i] for i, item in enumerate(items) if item.prompt_rows[1]]
    logit_rows = np.concatenate([logit_rows, *prompt]).astype(np.int64)
    kept = None if every_row else np.unique(logit_rows) if len(logit_rows) else np.array([len(row_item) - 1])
    if kept is not None and 2 * len(kept) > len(row_item):
        kept = None
    most = int(drafts.max(initial=0))
    uniform = bool((drafts == most).all())
    arrays = [np.array([item.slot for item in items]), counts, row_item, row_offset, lead, wanted, first_rows]
    arrays += [sampling, sampled_item, sampled_draft]
    if kept is not None:
        kept_items, kept_counts = np.unique(row_item[kept], return_counts=True)
        arrays += [np.searchsorted(kept, logit_rows), kept, kept_items]
    else:
        arrays += [logit_rows]
    slots, num_rows, item, offset, lead_, wanted_, first_, sampling_, place, before, *rest = packed(arrays, table)
    everything = kept is None and np.array_equal(logit_rows, np.arange(len(row_item)))
    return Layout(
        counts=counts,
        slots=slots,
        num_rows=num_rows,
        row_item=item,
        row_offset=offset,
        sampling=None if len(sampling) == len(items) else sampling_,
        lead=lead_ if lead.any() else None,
        wanted=wanted_,
        place=(place, before),
        uniform=uniform,
        logit_rows=None if everything else rest[0],
        first_rows=first_,
        kept=None if kept is None else KeptRows(rest[1], rest[2], kept_counts),
        most_drafts=most,
        num_sampled=len(sampled_item),
        k=int(wanted.max(initial=0)),
        end=max(item.end for item in items),
        chunks=bool(lead.any()) or len(sampling) < len(items),
        sampled_items=sampled_item,
        first_sampled=(drafts + 1).cumsum() - (drafts + 1),
    )


ALIGNED = ALIGNMENT // 8  # int64 values


def packed(arrays: list[np.ndarray], table: SequenceTable) -> list[Tensor]:
    """Integer arrays as int64 tensors, by one copy."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + array.size + array.size % ALIGNED)
    whole = np.zeros(starts[-1], dtype=np.int64)
    for start, array in zip(starts, arrays, strict=False):
        whole[start : start + array.size] = array
    moved = table.moved(whole)
    return [moved[start : start + array.size] for start, array in zip(starts, arrays, strict=False)]
