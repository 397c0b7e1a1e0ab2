"""Acceptance: how many drafts of each request survive, and which token follows them.

Knows logits and drafts. Does not know proposers, caches or scheduling.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, SamplingRows
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import Accepted, uniforms
from skipstone.kernels.reference.sampling import gumbel_noise, process_logits
from skipstone.registry import VERIFICATION
from skipstone.spec.draft_sampler import fresh_seeds

Rule = Literal["exact", "rejection", "block"]
# The stream of the verification's own draws; any constant that is used nowhere else.
RECOVERY_STREAM = 0x2BE0CD19137E2179


class Drafted(NamedTuple):
    """What is verified: D requests with up to k drafts each."""

    token_ids: Tensor  # [D, k + 1] int64, the newest committed token and its drafts, PAD where there is none
    newest: Tensor  # [D] int64, position of the newest committed token; PAD for padding
    end: Tensor  # [D] int64, drafts at this position and behind do not count
    seed: Tensor  # [D] int64
    place: tuple[Tensor, Tensor] | None  # row -> request, number of drafts before it; None: k + 1 rows each
    probs: Tensor | None = None  # [D, k, V] float32, what each draft was drawn from; all 0: it was certain

    def by_request(self, rows: Tensor, fill: float) -> Tensor:
        """[L, ...] of all rows as [D, k + 1, ...], `fill` where there is no row."""
        shape = (*self.token_ids.shape, *rows.shape[1:])
        if self.place is None:
            return rows.view(shape)
        return rows.new_full(shape, fill).index_put_(self.place, rows)


class Verifier:
    """The acceptance rule of an engine.

    "exact": keep drafts while they equal the target's own sample at their position, which the request would have
    drawn without drafts as well; so drafts only save steps, for every sampling setting. "rejection" and "block" keep
    the distribution but not the text. `rates`: accept by coins of these conditional rates per position instead, for
    benchmarks; the text then means nothing.
    """

    def __init__(self, rule: Rule = "exact", rates: list[float] | None = None) -> None:
        self.rule = rule
        self.rates = rates
        self._rates: Tensor | None = None

    @property
    def needs_probs(self) -> bool:
        """Whether it looks at the distributions that drafts were drawn from."""
        return self.rule != "exact" and self.rates is None

    def verify(self, logits: Tensor, rows: SamplingRows, drafted: Drafted, ops: Ops) -> Accepted:
        """logits [L, V]: k + 1 rows of each request, or fewer where `drafted.place` says so."""
        if self.needs_probs:
            return self._by_probs(logits.float(), rows, drafted)
        tokens = drafted.by_request(ops.sample(logits, rows), PAD)
        if self.rates is not None and self._rates is None:
            self._rates = torch.tensor(self.rates, dtype=torch.float64, device=logits.device)
        return ops.accept(tokens, drafted.token_ids, drafted.newest, drafted.end, drafted.seed, self._rates)

    def _by_probs(self, logits: Tensor, rows: SamplingRows, drafted: Drafted) -> Accepted:
        assert drafted.probs is not None
        width = drafted.token_ids.shape[1]
        column = torch.arange(1, width, device=logits.device)
        drafts = drafted.token_ids[:, 1:]
        drafts = torch.where(drafted.newest[:, None] + column < drafted.end[:, None], drafts, PAD)
        sure = torch.zeros_like(drafted.probs).scatter_(2, drafts.clamp(min=0)[:, :, None], 1.0)
        draft_probs = torch.where(drafted.probs.sum(dim=2, keepdim=True) > 0, drafted.probs, sure)
        # A greedy row's distribution has all its mass on one token.
        scores = process_logits(logits, rows)
        greedy = (rows.temperature == 0)[:, None]
        certain = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
        probs = torch.where(greedy, certain, scores.softmax(dim=1))
        noise = gumbel_noise(rows.seed ^ RECOVERY_STREAM, rows.position, logits.shape[1])
        # Block verification looks at the numbers of all drafts, so those behind the run it keeps are not used again.
        committed = drafted.newest + 1
        place = drafted.place
        committed = committed.repeat_interleave(width) if place is None else committed[place[0]]
        draws = uniforms(fresh_seeds(rows.seed, committed), rows.position)
        verified = VERIFICATION.load(self.rule)(
            drafted.by_request(probs, 0.0),
            draft_probs,
            drafts,
            drafted.by_request(draws, 0.0)[:, :-1],
            drafted.by_request(noise, 0.0),
        )
        count = verified.num_accepted
        last = torch.minimum(torch.arange(width, device=logits.device), count[:, None])
        following = verified.token_ids.gather(1, last)
        start = torch.where(drafted.newest >= 0, drafted.newest + count + 1, PAD)
        return Accepted(count, following, following, start)
