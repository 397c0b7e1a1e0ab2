"""A batch from ranges of tokens, by plain loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from skipstone.core.batch import SPARE_BLOCK, ZERO_BLOCK, Batch, make_spans


class QueryRows(NamedTuple):
    """Rows of one request: these tokens, at positions from `start` on. Blocks it does not own yet may be missing."""

    token_ids: list[int]
    start: int
    block_ids: list[int]


def build_batch(rows: list[QueryRows], block_size: int, see_ahead: bool = False) -> Batch:
    """The batch of these rows; requests with equally many rows should stand next to each other.

    With `see_ahead` every row sees all rows of its request, also later ones. Rows without a block of their own are
    padding: nothing reads what they write.
    """
    ends = [item.start + len(item.token_ids) for item in rows]
    width = -(-max(ends) // block_size)
    table = [
        (item.block_ids + [ZERO_BLOCK] * width)[: -(-end // block_size)] for item, end in zip(rows, ends, strict=True)
    ]
    table = torch.tensor([own + [ZERO_BLOCK] * (width - len(own)) for own in table])
    ids, positions, seen, blocks = [], [], [], []
    for item, end, own in zip(rows, ends, table.tolist(), strict=True):
        for position, token in enumerate(item.token_ids, item.start):
            ids.append(token)
            positions.append(position)
            seen.append(end - 1 if see_ahead else position)
            block = own[position // block_size]
            blocks.append(SPARE_BLOCK if block == ZERO_BLOCK else block)
    return Batch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        seq_lens=torch.tensor(ends),
        slot_block=torch.tensor(blocks),
        slot_offset=torch.tensor(positions) % block_size,
        block_table=table,
        spans=make_spans(np.array([len(item.token_ids) for item in rows]), torch.tensor(seen), table),
        max_seq_len=max(ends),
    )
