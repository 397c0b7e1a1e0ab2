"""How the rows of a step choose their tokens: the settings of their requests, from the sequence table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import Penalties, SamplingRows, TokenValues
from skipstone.core.request import SamplingParams
from skipstone.core.sequence_table import (
    FREQUENCY,
    MIN_P,
    NUM_PROMPT,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SequenceTable,
    SlotRows,
)

ALWAYS = 1 << 62  # a position that no row reaches


class TokenBias(NamedTuple):
    """Values that are added to some tokens' logits at positions below `until`, as arrays of one length."""

    token_ids: np.ndarray  # int64
    values: np.ndarray  # float64
    until: np.ndarray  # int64


class Features:
    """What one request's sampling needs beyond a temperature; constant while it runs."""

    def __init__(self, params: SamplingParams, end_token_ids: list[int], num_prompt_tokens: int) -> None:
        self.greedy = params.greedy
        self.truncated = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self.penalized = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        self.constrained = params.structured_output is not None
        self.logprobs, self.prompt_logprobs = params.logprobs, params.prompt_logprobs
        least = num_prompt_tokens + params.min_tokens
        banned = end_token_ids if params.min_tokens else []
        entries = [(token, value, ALWAYS) for token, value in params.logit_bias.items()]
        entries += [(token, -np.inf, least) for token in banned]
        ids, values, until = zip(*entries, strict=True) if entries else ((), (), ())
        bias = TokenBias(np.array(ids, np.int64), np.array(values, np.float64), np.array(until, np.int64))
        self.bias = bias if entries else None

    @property
    def plain(self) -> bool:
        """Whether temperature, top-k, top-p and min-p are all there is."""
        return not self.penalized and self.bias is None and self.logprobs is None and not self.constrained


PLAIN = Features(SamplingParams(), [], 0)


class RowFeatures:
    """The features of N rows that choose a token, `item` [N] naming the request of each on the host.

    Made once for the rows that verify, and once for those that draft.
    """

    def __init__(self, table: SequenceTable, item: np.ndarray, features: list[Features], width: int) -> None:
        self.table, self.width = table, width
        self.all_greedy = all(each.greedy for each in features)
        self.truncated = any(each.truncated for each in features)
        self.penalized: Tensor | None = None  # [P] rows
        self.bias: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # row, token, value, until
        if any(each.penalized for each in features):
            self.penalized = table.moved(np.array([each.penalized for each in features])[item].nonzero()[0])
        if any(each.bias is not None for each in features):
            biased = [(row, features[i].bias) for row, i in enumerate(item)]
            parts = [(np.full(len(b.token_ids), row), *b) for row, b in biased if b is not None]
            rows, ids, values, until = (np.concatenate(column) for column in zip(*parts, strict=True))
            whole = table.moved(np.stack([rows, ids, values.astype(np.float64).view(np.int64), until]))
            self.bias = (whole[0], whole[1], whole[2].view(torch.float64).float(), whole[3])

    def rows(
        self, at: SlotRows, slots: Tensor, position: Tensor, allowed: Tensor | None = None, greedy: bool = False
    ) -> SamplingRows:
        """The tensors of the sampling ops; `at`, `slots` and `position`, of the token to be chosen, are by row [N]."""
        temperature = at.fractions(TEMPERATURE)
        rows = SamplingRows(
            seed=at.seed,
            position=position,
            temperature=torch.zeros_like(temperature) if greedy else temperature,
            top_k=None,
            top_p=None,
            min_p=None,
            penalties=self._penalties(at, slots, position),
            bias=self._bias(position),
            all_greedy=self.all_greedy or greedy,
            allowed=allowed,
        )
        if self.truncated and not greedy:
            rows = rows._replace(
                top_k=at.integers(TOP_K).contiguous(), top_p=at.fractions(TOP_P), min_p=at.fractions(MIN_P)
            )
        return rows

    def _penalties(self, at: SlotRows, slots: Tensor, position: Tensor) -> Penalties | None:
        if self.penalized is None:
            return None
        chosen = self.penalized
        at = at.take(chosen)
        # Drafts stand behind the committed tokens, so all that is before a row's token is in its request's row.
        tokens = self.table.tokens[:, : self.width][slots[chosen]]
        penalties = (at.fractions(REPETITION), at.fractions(PRESENCE), at.fractions(FREQUENCY))
        return Penalties(chosen, *penalties, tokens, position[chosen], at.integers(NUM_PROMPT))

    def _bias(self, position: Tensor) -> TokenValues | None:
        if self.bias is None:
            return None
        row, token, value, until = self.bias
        return TokenValues(row, token, torch.where(position[row] < until, value, 0.0))
