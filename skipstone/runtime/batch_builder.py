"""From a plan of host integers to the tensors of one step."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import ZERO_BLOCK, Batch, Penalties, SamplingRows, Span, TokenValues
from skipstone.core.plan import ScheduledRequest, StepPlan


class LogitRow(NamedTuple):
    """A row whose logits are wanted: draft index `draft` of a scheduled item, or a prompt row (draft -1)."""

    item: int
    row: int  # index into the T rows
    position: int  # of the row
    draft: int


class StepRows(NamedTuple):
    """A batch and what its logits are for: `sampled` rows come first, then `prompt` rows."""

    batch: Batch
    sampled: list[LogitRow]
    prompt: list[LogitRow]


def build_rows(plan: StepPlan, block_size: int) -> StepRows:
    """Inputs of the forward pass for the plan's rows."""
    items = plan.scheduled
    lengths = np.array([item.query_len for item in items])
    seq_lens = np.array([item.start + item.query_len for item in items])
    input_ids = np.concatenate([_input_ids(item) for item in items])
    positions = np.concatenate([np.arange(item.start, item.start + item.query_len) for item in items])
    max_seq_len = int(seq_lens.max())
    table = np.full((len(items), -(-max_seq_len // block_size)), ZERO_BLOCK, dtype=np.int64)
    for i, item in enumerate(items):
        blocks = item.request.block_ids[: -(-int(seq_lens[i]) // block_size)]
        table[i, : len(blocks)] = blocks
    row_table = table.repeat(lengths, axis=0)  # [T, max_blocks]
    slot_block = row_table[np.arange(len(positions)), positions // block_size]
    starts = np.concatenate([[0], lengths.cumsum()])
    sampled, prompt = _logit_rows(items, starts)
    position_tensor, table_tensor = torch.from_numpy(positions), torch.from_numpy(table)
    batch = Batch(
        input_ids=torch.from_numpy(input_ids),
        positions=position_tensor,
        seq_lens=torch.from_numpy(seq_lens),
        slot_block=torch.from_numpy(slot_block),
        slot_offset=torch.from_numpy(positions % block_size),
        row_block_table=torch.from_numpy(row_table),
        logits_indices=torch.tensor([row.row for row in (*sampled, *prompt)], dtype=torch.int64),
        spans=_spans(lengths, seq_lens, starts, position_tensor, table_tensor, block_size),
        max_seq_len=max_seq_len,
    )
    return StepRows(batch, sampled, prompt)


def _input_ids(item: ScheduledRequest) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    end = item.start + item.query_len
    ids = item.request.token_ids[item.start : end]
    return np.array(ids + item.request.drafts[: item.num_drafts], dtype=np.int64)


def _spans(
    lengths: np.ndarray, seq_lens: np.ndarray, starts: np.ndarray, positions: Tensor, table: Tensor, block_size: int
) -> list[Span]:
    spans = []
    for query_len, group in itertools.groupby(range(len(lengths)), key=lambda i: int(lengths[i])):
        members = list(group)
        requests = slice(members[0], members[-1] + 1)
        rows = slice(int(starts[requests.start]), int(starts[requests.stop]))
        longest = int(seq_lens[requests].max())
        blocks = table[requests, : -(-longest // block_size)]
        spans.append(Span(requests, rows, query_len, longest, positions[rows].view(len(members), query_len), blocks))
    return spans


def _logit_rows(items: list[ScheduledRequest], starts: np.ndarray) -> tuple[list[LogitRow], list[LogitRow]]:
    sampled: list[LogitRow] = []
    prompt: list[LogitRow] = []
    for i, item in enumerate(items):
        end = int(starts[i]) + item.query_len
        if item.samples:
            for draft in range(item.num_drafts + 1):
                offset = item.query_len - 1 - item.num_drafts + draft
                sampled.append(LogitRow(i, end - 1 - item.num_drafts + draft, item.start + offset, draft))
        if item.request.params.prompt_logprobs is not None:
            first = max(item.start, len(item.request.prompt_logprobs))  # recomputed rows are not reported twice
            last = min(item.start + item.query_len, item.request.num_prompt_tokens - 1)
            prompt += [LogitRow(i, int(starts[i]) + p - item.start, p, -1) for p in range(first, last)]
    return sampled, prompt


def sampling_rows(plan: StepPlan, rows: list[LogitRow]) -> SamplingRows:
    """How each sampled row chooses its token: row j of a request sees its committed tokens and its first j drafts."""
    requests = [plan.scheduled[row.item].request for row in rows]
    params = [request.params for request in requests]
    top_k = [p.top_k for p in params]
    top_p = [p.top_p for p in params]
    min_p = [p.min_p for p in params]
    return SamplingRows(
        seed=torch.tensor([request.seed for request in requests], dtype=torch.int64),
        position=torch.tensor([row.position + 1 for row in rows], dtype=torch.int64),
        temperature=torch.tensor([0.0 if p.greedy else p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int64).clamp_(min=0) if any(k > 0 for k in top_k) else None,
        top_p=torch.tensor(top_p, dtype=torch.float32) if any(p < 1 for p in top_p) else None,
        min_p=torch.tensor(min_p, dtype=torch.float32) if any(p > 0 for p in min_p) else None,
        penalties=_penalties(plan, rows),
        bias=_bias(plan, rows),
        all_greedy=all(p.greedy for p in params),
    )


def _penalties(plan: StepPlan, rows: list[LogitRow]) -> Penalties | None:
    chosen: list[tuple[int, float, float, float]] = []
    history_row, history_token, history_is_output = [], [], []
    for i, row in enumerate(rows):
        request = plan.scheduled[row.item].request
        params = request.params
        if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
            continue
        tokens = request.token_ids + request.drafts[: row.draft]
        history_row.append(np.full(len(tokens), len(chosen)))
        history_token.append(np.array(tokens, dtype=np.int64))
        history_is_output.append(np.arange(len(tokens)) >= request.num_prompt_tokens)
        chosen.append((i, params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    if not chosen:
        return None
    index, repetition, presence, frequency = zip(*chosen, strict=True)
    return Penalties(
        torch.tensor(index),
        torch.tensor(repetition, dtype=torch.float32),
        torch.tensor(presence, dtype=torch.float32),
        torch.tensor(frequency, dtype=torch.float32),
        torch.from_numpy(np.concatenate(history_row)),
        torch.from_numpy(np.concatenate(history_token)),
        torch.from_numpy(np.concatenate(history_is_output)),
    )


def _bias(plan: StepPlan, rows: list[LogitRow]) -> TokenValues | None:
    """Logit bias, and -inf for every id that would end the text before `min_tokens`."""
    entries: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        request = plan.scheduled[row.item].request
        entries += [(i, token, value) for token, value in request.params.logit_bias.items()]
        if request.num_output_tokens + row.draft < request.params.min_tokens:
            entries += [(i, token, -float("inf")) for token in request.banned_token_ids]
    if not entries:
        return None
    index, tokens, values = zip(*entries, strict=True)
    return TokenValues(torch.tensor(index), torch.tensor(tokens), torch.tensor(values, dtype=torch.float32))
