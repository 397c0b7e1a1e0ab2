"""The device tensors of one step: which rows run, where their keys go, which rows need logits and how to sample them.

A row is one query token. Every request contributes `query_len` rows: a chunk of its prompt, one token, or one token
and its drafts; nothing here says which. Requests of equal `query_len` stand next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

SPARE_BLOCK = 0  # padding rows write here; never read
ZERO_BLOCK = 1  # all zeros, never written; read in place of a block that a request does not have
FIRST_BLOCK = 2  # the first block that requests can own
ALIGNMENT = 16  # bytes: kernels are compiled once more for tensors that begin elsewhere
PAD = -1  # the one sentinel of device tensors: no slot, no selected key, no token. Never reaches a gather.


class Span(NamedTuple):
    """Neighbouring requests with the same number of rows, so that kernels can view them as [R, query_len, ...]."""

    requests: slice
    rows: slice
    query_len: int
    positions: Tensor  # [R, query_len] int64, the last position that each row sees: its own, unless rows see ahead
    block_table: Tensor  # [R, blocks of the longest of the span's sequences] int64


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward. T rows, R requests, L rows with logits."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute position of each row
    seq_lens: Tensor  # [R] int64, keys visible to the last row of each request
    slot_block: Tensor  # [T] int64, the block that takes each row's keys; SPARE_BLOCK for padding rows
    slot_offset: Tensor  # [T] int64, the row's place in that block
    block_table: Tensor  # [R, max_blocks] int64
    spans: list[Span]
    max_seq_len: int

    def take(self, rows: Tensor, requests: Tensor, spans: list[Span]) -> Batch:
        """The batch of some rows [K] alone, which belong to these requests; `spans` are of the new rows."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
            seq_lens=self.seq_lens[requests],
            slot_block=self.slot_block[rows],
            slot_offset=self.slot_offset[rows],
            block_table=self.block_table[requests],
            spans=spans,
        )


def host_rows(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Request and place in its request of every row, of R requests with `counts` [R] rows each."""
    item = np.arange(len(counts)).repeat(counts)
    return item, np.arange(len(item)) - (counts.cumsum() - counts)[item]


def make_spans(counts: np.ndarray, seen: Tensor, table: Tensor) -> list[Span]:
    """Spans of R requests with `counts` [R] rows each, of which row t sees positions up to seen[t].

    Neighbouring requests with equally many rows share one; `table` [R, blocks] is their block tables.
    """
    spans, row, first = [], 0, 0
    while first < len(counts):
        query_len, last = int(counts[first]), first + 1
        while last < len(counts) and counts[last] == query_len:
            last += 1
        rows = slice(row, row + (last - first) * query_len)
        requests = slice(first, last)
        part = seen[rows]
        if part.data_ptr() % ALIGNMENT:
            part = part.clone()
        spans.append(Span(requests, rows, query_len, part.view(last - first, query_len), table[requests]))
        row, first = rows.stop, last
    return spans


class Selection(NamedTuple):
    """The keys chosen for each row: the one contract between indexers and attention.

    `indices` [T, G, S] int32 are relative to the request, in units of `unit` tokens, unique, ascending, then PAD.
    The last chosen unit may reach past the row's own position; attention masks by position.
    """

    indices: Tensor
    unit: int


class Penalties(NamedTuple):
    """Penalties of the P rows that have any, with the tokens before each of them.

    Prompt tokens count for the repetition penalty only.
    """

    rows: Tensor  # [P] int64, index into the L sampled rows
    repetition: Tensor  # [P] float32
    presence: Tensor  # [P] float32
    frequency: Tensor  # [P] float32
    tokens: Tensor  # [P, W] integers, of which those at `length` and behind, and PAD, do not count
    length: Tensor  # [P] int64
    num_prompt: Tensor  # [P] int64, how many of them are the prompt


class TokenValues(NamedTuple):
    """Flat (row, token) -> value list: logit bias, or -inf for forbidden tokens."""

    rows: Tensor  # [N] int64, index into the L sampled rows
    token_ids: Tensor  # [N] int64
    values: Tensor  # [N] float32


class SamplingRows(NamedTuple):
    """How each of the L rows with logits is sampled. All per-row tensors are [L].

    `position` is the absolute position of the token to be chosen; noise is a function of (seed, position, token id).
    None means that no row of the step uses the feature, so its work is skipped.
    """

    seed: Tensor  # int64
    position: Tensor  # int64
    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor | None  # int64, 0: off
    top_p: Tensor | None  # float32, 1: off
    min_p: Tensor | None  # float32, 0: off
    penalties: Penalties | None
    bias: TokenValues | None
    all_greedy: bool
    allowed: Tensor | None = None  # [L, V] bool, tokens that a grammar permits
