"""The device tensors of one step: which rows run, where their keys go, which rows need logits and how to sample them.

A row is one query token. Every request contributes `query_len` rows: a chunk of its prompt, one token, or one token
and its drafts; nothing here says which. Requests of equal `query_len` stand next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

SPARE_BLOCK = 0  # padding rows write here; never read
ZERO_BLOCK = 1  # all zeros, never written; read in place of a block that a request does not have
FIRST_BLOCK = 2  # the first block that requests can own
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
    logits_indices: Tensor  # [L] int64
    spans: list[Span]
    max_seq_len: int

    def advanced(self, block_size: int) -> Batch:
        """The batch of the next draft step: every request's one row moves to the next position.

        The block tables must reach that far. Equals a batch that is built from scratch.
        """
        positions = self.positions + 1
        block = self.block_table.gather(1, (positions // block_size)[:, None])[:, 0]
        spans = [span._replace(positions=span.positions + 1) for span in self.spans]
        return replace(
            self,
            positions=positions,
            seq_lens=self.seq_lens + 1,
            slot_block=torch.where(block == ZERO_BLOCK, SPARE_BLOCK, block),
            slot_offset=positions % block_size,
            spans=spans,
            max_seq_len=self.max_seq_len + 1,
        )


class Selection(NamedTuple):
    """The keys chosen for each row: the one contract between indexers and attention.

    `indices` [T, G, S] int32 are relative to the request, in units of `unit` tokens, unique, ascending, then PAD.
    The last chosen unit may reach past the row's own position; attention masks by position.
    """

    indices: Tensor
    unit: int


class Penalties(NamedTuple):
    """Penalties of the P rows that have any, with the tokens seen so far as flat (row, token) pairs.

    `history_row` indexes into these P rows. Prompt tokens count for the repetition penalty only.
    """

    rows: Tensor  # [P] int64, index into the L sampled rows
    repetition: Tensor  # [P] float32
    presence: Tensor  # [P] float32
    frequency: Tensor  # [P] float32
    history_row: Tensor  # [N] int64
    history_token: Tensor  # [N] int64
    history_is_output: Tensor  # [N] bool


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
