"""How drafts are drawn from a head's logits: with the target's own noise, greedily, or independently.

Coupled drafts take the arg max of the draft's processed logits plus the very noise that the target's sample will use,
so that both pick the same token with probability of at least (1 - TV) / (1 + TV); greedy drafts only reach the target's
probability of the draft's favourite (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024). The emitted text is the target's own sample in every case.
"""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from skipstone.core.request import Request
from skipstone.core.sampling_rows import SampledRow, sampling_rows
from skipstone.kernels.reference.sampling import process_logits, sample

DraftSampling = Literal["coupled", "greedy", "independent"]
# Flips bits of the seed, so that the noise is another stream of the same request.
INDEPENDENT_STREAM = 0x510E527FADE682D1
STEP_STRIDE = 0x1B873593CC9E2D51  # any large odd number


def fresh_seeds(seeds: Tensor, rows: list[SampledRow]) -> Tensor:
    """Seeds [R] that differ from step to step: a position may be drafted and verified in several of them."""
    committed = torch.tensor([len(row.request.token_ids) for row in rows], dtype=torch.int64)
    return seeds + committed * STEP_STRIDE


class DraftChooser:
    """Chooses draft tokens. `keep_laws`: also keep the law each was drawn from, for verification by rejection."""

    def __init__(self, mode: DraftSampling, keep_laws: bool = False) -> None:
        self.mode = mode
        self.keep_laws = keep_laws
        self._laws: WeakKeyDictionary[Request, list[Tensor]] = WeakKeyDictionary()  # [V] per draft

    def __call__(self, logits: Tensor, rows: list[SampledRow]) -> list[int]:
        """A token per row of logits [R, V]."""
        how = sampling_rows(rows)
        if self.mode == "greedy":
            how = how._replace(temperature=torch.zeros_like(how.temperature), all_greedy=True)
        elif self.mode == "independent":
            how = how._replace(seed=fresh_seeds(how.seed ^ INDEPENDENT_STREAM, rows))
        tokens = sample(logits, how).tolist()
        if self.keep_laws:
            law = process_logits(logits, how).softmax(dim=1)
            # A head with a smaller vocabulary has no law left where all its tokens are forbidden; its draft is token 0.
            greedy = (how.temperature == 0) | law.isnan().any(dim=1)
            law[greedy] = torch.nn.functional.one_hot(torch.tensor(tokens), logits.shape[1]).to(law.dtype)[greedy]
            for row, probs in zip(rows, law, strict=True):
                self._laws.setdefault(row.request, []).append(probs)
        return tokens

    def take(self, request: Request, count: int) -> list[Tensor]:
        """The laws [V] of a request's first `count` drafts since the last call; the others were dropped."""
        return self._laws.pop(request, [])[:count]
