"""From a plan of host integers to the batch of one step, and which of its rows need logits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import Batch
from skipstone.core.plan import ScheduledRequest, StepPlan
from skipstone.core.rows import QueryRows, build_batch


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
    batch = build_batch([QueryRows(_input_ids(i), i.start, i.request.block_ids) for i in items], block_size)
    starts = [0]
    for item in items:
        starts.append(starts[-1] + item.query_len)
    sampled, prompt = _logit_rows(items, starts)
    indices = torch.tensor([row.row for row in (*sampled, *prompt)], dtype=torch.int64)
    kept = None if every_row else _kept_rows(items, starts, [*sampled, *prompt], block_size)
    return StepRows(replace(batch, logits_indices=indices), starts, sampled, prompt, kept)


def _kept_rows(
    items: list[ScheduledRequest], starts: list[int], wanted: list[LogitRow], block_size: int
) -> KeptRows | None:
    """None where that would not halve the rows. If none is wanted one is kept, so that no tensor is empty."""
    firsts = {} if wanted else {len(items) - 1: starts[-1] - 1}
    for row in wanted:
        firsts[row.item] = min(row.row, firsts.get(row.item, row.row))
    if 2 * sum(starts[i + 1] - first for i, first in firsts.items()) > starts[-1]:
        return None
    rows: list[int] = []
    queries = []
    for i, first in sorted(firsts.items()):
        rows += range(first, starts[i + 1])
        offset, item = first - starts[i], items[i]
        queries.append(QueryRows(_input_ids(item)[offset:], item.start + offset, item.request.block_ids))
    places = {row: place for place, row in enumerate(rows)}
    indices = torch.tensor([places[row.row] for row in wanted], dtype=torch.int64)
    batch = replace(build_batch(queries, block_size), logits_indices=indices)
    return KeptRows(torch.tensor(rows, dtype=torch.int64), batch)


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
