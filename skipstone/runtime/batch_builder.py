"""From a plan of host integers to the batch of one step, and which of its rows need logits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from skipstone.core.batch import Batch
from skipstone.core.plan import ScheduledRequest, StepPlan
from skipstone.core.rows import QueryRows, build_batch


class LogitRow(NamedTuple):
    """A row whose logits are wanted: draft index `draft` of a scheduled item, or a prompt row (draft -1)."""

    item: int
    row: int  # index into the T rows
    position: int  # of the row
    draft: int


class StepRows(NamedTuple):
    """A batch and what its logits are for: `sampled` rows come first, then `prompt` rows."""

    batch: Batch
    starts: list[int]  # [R + 1] first row of each item
    sampled: list[LogitRow]
    prompt: list[LogitRow]


def build_rows(plan: StepPlan, block_size: int) -> StepRows:
    """Inputs of the forward pass for the plan's rows."""
    items = plan.scheduled
    batch = build_batch([QueryRows(_input_ids(i), i.start, i.request.block_ids) for i in items], block_size)
    starts = [0]
    for item in items:
        starts.append(starts[-1] + item.query_len)
    sampled, prompt = _logit_rows(items, starts)
    indices = torch.tensor([row.row for row in (*sampled, *prompt)], dtype=torch.int64)
    return StepRows(replace(batch, logits_indices=indices), starts, sampled, prompt)


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
