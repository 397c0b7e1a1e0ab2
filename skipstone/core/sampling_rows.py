"""How rows choose their tokens: from sampling parameters and tokens seen so far to the tensors of `SamplingRows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipstone.core.batch import Penalties, SamplingRows, TokenValues
from skipstone.core.request import Request


class SampledRow(NamedTuple):
    """A row that chooses the token after the request's committed tokens and `further` ones: drafts, or verified."""

    request: Request
    further: list[int]

    @property
    def position(self) -> int:
        """Of the token to be chosen."""
        return len(self.request.token_ids) + len(self.further)


def _moved(values: Sequence[float] | np.ndarray | Tensor, dtype: torch.dtype) -> Tensor:
    """`values` on the device that tensors are made on, by a copy that does not wait for what runs there."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    device = torch.get_default_device()
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def sampling_rows(rows: list[SampledRow]) -> SamplingRows:
    """Every row sees its own tokens only, so that verified rows and draft rows choose by the same rules."""
    requests = [row.request for row in rows]
    params = [request.params for request in requests]
    top_k = [p.top_k for p in params]
    top_p = [p.top_p for p in params]
    min_p = [p.min_p for p in params]
    return SamplingRows(
        seed=_moved([request.seed for request in requests], torch.int64),
        position=_moved([row.position for row in rows], torch.int64),
        temperature=_moved([0.0 if p.greedy else p.temperature for p in params], torch.float32),
        top_k=_moved(top_k, torch.int64).clamp_(min=0) if any(k > 0 for k in top_k) else None,
        top_p=_moved(top_p, torch.float32) if any(p < 1 for p in top_p) else None,
        min_p=_moved(min_p, torch.float32) if any(p > 0 for p in min_p) else None,
        penalties=_penalties(rows),
        bias=_bias(rows),
        all_greedy=all(p.greedy for p in params),
        allowed=_allowed(rows),
    )


def _allowed(rows: list[SampledRow]) -> Tensor | None:
    """Masks of the rows' grammars. A row behind an illegal draft is never emitted, so it may choose anything."""
    masks = [_mask(row) if row.request.grammar is not None else None for row in rows]
    vocab_size = next((len(mask) for mask in masks if mask is not None), None)
    if vocab_size is None:
        return None
    anything = torch.ones(vocab_size, dtype=torch.bool, device="cpu")
    return _moved(torch.stack([anything if mask is None else mask for mask in masks]), torch.bool)


def _mask(row: SampledRow) -> Tensor | None:
    request = row.request
    assert request.grammar is not None
    mask = request.grammar.allowed(row.further)
    if mask is not None and request.params.ignore_eos:
        going_on = mask.clone()
        going_on[sorted(request.eos_token_ids)] = False
        mask = going_on if going_on.any() else mask  # a text that can go on does
    return mask


def _penalties(rows: list[SampledRow]) -> Penalties | None:
    chosen: list[tuple[int, float, float, float]] = []
    history_row, history_token, history_is_output = [], [], []
    for i, row in enumerate(rows):
        params = row.request.params
        if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
            continue
        tokens = row.request.token_ids + row.further
        history_row.append(np.full(len(tokens), len(chosen)))
        history_token.append(np.array(tokens, dtype=np.int64))
        history_is_output.append(np.arange(len(tokens)) >= row.request.num_prompt_tokens)
        chosen.append((i, params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    if not chosen:
        return None
    index, repetition, presence, frequency = zip(*chosen, strict=True)
    return Penalties(
        _moved(index, torch.int64),
        _moved(repetition, torch.float32),
        _moved(presence, torch.float32),
        _moved(frequency, torch.float32),
        _moved(np.concatenate(history_row), torch.int64),
        _moved(np.concatenate(history_token), torch.int64),
        _moved(np.concatenate(history_is_output), torch.bool),
    )


def _bias(rows: list[SampledRow]) -> TokenValues | None:
    """Logit bias, and -inf for every id that would end the text before `min_tokens`."""
    entries: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        request = row.request
        entries += [(i, token, value) for token, value in request.params.logit_bias.items()]
        if request.num_output_tokens + len(row.further) < request.params.min_tokens:
            entries += [(i, token, -float("inf")) for token in request.banned_token_ids]
    if not entries:
        return None
    index, tokens, values = zip(*entries, strict=True)
    return TokenValues(_moved(index, torch.int64), _moved(tokens, torch.int64), _moved(values, torch.float32))
