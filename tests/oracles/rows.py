"""From plain settings to the flat tensors that the sampling functions take."""

from __future__ import annotations

import torch
from torch import Tensor

from oracles.sampling import Row
from skipstone.core.batch import Penalties, SamplingRows, TokenValues


def to_rows(rows: list[Row], seeds: Tensor | None = None, positions: Tensor | None = None) -> SamplingRows:
    """SamplingRows of these settings; features that no row uses are None."""
    count = len(rows)
    greedy = all(row.temperature == 0 for row in rows)

    def column(name: str, off: float, dtype: torch.dtype) -> Tensor | None:
        values = [getattr(row, name) for row in rows]
        return None if all(v == off for v in values) else torch.tensor(values, dtype=dtype)

    return SamplingRows(
        seed=torch.arange(count) if seeds is None else seeds,
        position=torch.full((count,), 7) if positions is None else positions,
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        penalties=_penalties(rows),
        bias=_bias(rows),
        all_greedy=greedy,
    )


def _penalties(rows: list[Row]) -> Penalties | None:
    """Penalties of the rows that have any."""
    used = [i for i, row in enumerate(rows) if (row.repetition, row.presence, row.frequency) != (1.0, 0.0, 0.0)]
    if not used:
        return None
    history = [rows[i].prompt + rows[i].output for i in used]
    width = max(map(len, history)) + 3
    tokens = [torch.tensor([*row, *[7] * (width - len(row))]) for row in history]  # what lies behind must not count
    return Penalties(
        rows=torch.tensor(used),
        repetition=torch.tensor([rows[i].repetition for i in used], dtype=torch.float32),
        presence=torch.tensor([rows[i].presence for i in used], dtype=torch.float32),
        frequency=torch.tensor([rows[i].frequency for i in used], dtype=torch.float32),
        tokens=torch.stack(tokens),
        length=torch.tensor([len(row) for row in history]),
        num_prompt=torch.tensor([len(rows[i].prompt) for i in used]),
    )


def _bias(rows: list[Row]) -> TokenValues | None:
    """Bias entries of all rows."""
    entries = [(i, token, value) for i, row in enumerate(rows) for token, value in row.bias.items()]
    if not entries:
        return None
    return TokenValues(
        rows=torch.tensor([e[0] for e in entries]),
        token_ids=torch.tensor([e[1] for e in entries]),
        values=torch.tensor([e[2] for e in entries], dtype=torch.float32),
    )
