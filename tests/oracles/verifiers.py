"""Verifiers that keep drafts by chance, so that every number of kept drafts occurs, in whatever order."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from oracles.tiny import VOCAB
from skipstone.core.batch import PAD, SamplingRows
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import Accepted
from skipstone.spec.verify import Drafted, Verifier


class RandomVerifier(Verifier):
    """Keeps as many drafts as a random script says, right or not; the text is what comes of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.counts: list[tuple[int, int]] = []  # drafts of a request, and how many of them were kept

    def verify(self, logits: Tensor, rows: SamplingRows, drafted: Drafted, ops: Ops) -> Accepted:
        """Behind the kept drafts comes the target's own token, or another one where that is the rejected draft."""
        emitted = drafted.by_request(ops.sample(logits, rows), PAD)
        given = zip(drafted.token_ids.tolist(), drafted.newest.tolist(), drafted.end.tolist(), strict=True)
        counts = []
        for i, (ids, newest, end) in enumerate(given):
            drafts = [token for token in ids[1 : max(end - newest, 1)] if token != PAD]
            counts.append(self.draw.randint(0, len(drafts)))
            self.counts.append((len(drafts), counts[-1]))
            emitted[i, : counts[-1]] = torch.tensor(drafts[: counts[-1]])
            if drafts[counts[-1] :][:1] == [int(emitted[i, counts[-1]])]:
                emitted[i, counts[-1]] = (drafts[counts[-1]] + 1) % VOCAB
        count = torch.tensor(counts, dtype=torch.int64)
        column = torch.minimum(torch.arange(emitted.shape[1]), count[:, None])
        return Accepted(count, emitted, emitted.gather(1, column), drafted.newest + count + 1)
