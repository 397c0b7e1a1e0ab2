"""From a plan of host integers to the batch of one step, and which of its rows need logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from skipstone.core.batch import Batch
from skipstone.core.plan import ScheduledRequest, StepPlan
from skipstone.core.rows import QueryRows, host_batch, to_device


class LogitRow(NamedTuple):
    """A row whose logits are wanted: draft index `draft` of a scheduled item, or a prompt row (draft -1)."""

    item: int
    row: int  # index into the T rows
    position: int  # of the row
    draft: int


class KeptRows(NamedTuple):
    """The last rows of every request, from its first row with logits on, and a batch of them alone."""

    rows: Tensor  # [K] int64 into the T rows
    batch: Batch


class StepRows(NamedTuple):
    """A batch and what its logits are for: `sampled` rows come first, then `prompt` rows."""

    batch: Batch
    starts: list[int]  # [R + 1] first row of each item
    sampled: list[LogitRow]
    prompt: list[LogitRow]
    kept: KeptRows | None = None  # None: the last layer computes all rows


def build_rows(plan: StepPlan, block_size: int, every_row: bool = True) -> StepRows:
    """Inputs of the forward pass for the plan's rows. Without `every_row`, only rows with logits need final states."""
    items = plan.scheduled
    whole = host_batch([QueryRows(_input_ids(i), i.start, i.request.block_ids) for i in items], block_size)
    starts = [0, *whole.lengths.cumsum().tolist()]
    sampled, prompt = _logit_rows(items, starts)
    wanted = np.array([row.row for row in (*sampled, *prompt)], dtype=np.int64)
    whole = whole._replace(logits_indices=wanted)
    counts = None if every_row else _kept_counts([*sampled, *prompt], starts)
    if counts is None:
        ((batch,), _) = to_device([whole], block_size)
        return StepRows(batch, starts, sampled, prompt)
    rows, part = whole.last_rows(counts)
    part = part._replace(logits_indices=rows.searchsorted(wanted))
    (batch, kept), (kept_rows,) = to_device([whole, part], block_size, [rows])
    return StepRows(batch, starts, sampled, prompt, KeptRows(kept_rows, kept))


def _kept_counts(wanted: list[LogitRow], starts: list[int]) -> np.ndarray | None:
    """How many last rows of each item are kept; None where that would not halve the rows.

    If none is wanted one is kept, so that no tensor is empty.
    """
    counts = np.zeros(len(starts) - 1, dtype=np.int64)
    counts[-1] = not wanted
    for row in wanted:
        counts[row.item] = max(counts[row.item], starts[row.item + 1] - row.row)
    return counts if 2 * counts.sum() <= starts[-1] else None


def _input_ids(item: ScheduledRequest) -> list[int]:
    end = item.start + item.query_len
    return item.request.token_ids[item.start : end] + item.request.drafts[: item.num_drafts]


def _logit_rows(items: list[ScheduledRequest], starts: list[int]) -> tuple[list[LogitRow], list[LogitRow]]:
    sampled: list[LogitRow] = []
    prompt: list[LogitRow] = []
    for i, item in enumerate(items):
        end = starts[i] + item.query_len
        if item.samples:
            for draft in range(item.num_drafts + 1):
                offset = item.query_len - 1 - item.num_drafts + draft
                sampled.append(LogitRow(i, end - 1 - item.num_drafts + draft, item.start + offset, draft))
        if item.request.params.prompt_logprobs is not None:
            first = max(item.start, len(item.request.prompt_logprobs))  # recomputed rows are not reported twice
            last = min(item.start + item.query_len, item.request.num_prompt_tokens - 1)
            prompt += [LogitRow(i, starts[i] + p - item.start, p, -1) for p in range(first, last)]
    return sampled, prompt
