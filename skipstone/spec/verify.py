"""Acceptance: how many drafts of each request survive, and which token follows them.

Knows logits and drafts. Does not know proposers, caches or scheduling.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skipstone.core.batch import PAD
from skipstone.core.sampling_rows import SampledRow, sampling_rows
from skipstone.kernels.reference.decode import coins, uniforms
from skipstone.kernels.reference.sampling import gumbel_noise, process_logits, sample
from skipstone.spec.choose import fresh_seeds
from skipstone.spec.rejection import block_verify, rejection_sample

Rule = Literal["exact", "rejection", "block"]
# The stream of the verification's own draws; any constant that is used nowhere else.
RECOVERY_STREAM = 0x2BE0CD19137E2179


class Run(NamedTuple):
    """What one request emits in a step: accepted drafts, then one more token (recovered, or the bonus)."""

    token_ids: list[int]
    num_accepted: int


class Verifier:
    """The acceptance rule of an engine.

    "exact": keep drafts while they equal the target's own sample at their position, which the request would have
    drawn without drafts as well; so drafts only save steps, for every sampling setting. "rejection" and "block" keep
    the law but not the text. `rates`: accept by coins of these conditional rates per position instead, for benchmarks;
    the text then means nothing.
    """

    def __init__(self, rule: Rule = "exact", rates: list[float] | None = None) -> None:
        self.rule = rule
        self.rates = rates

    def verify(
        self, logits: Tensor, rows: list[SampledRow], drafts: list[list[int]], draft_probs: list[list[Tensor]] | None
    ) -> list[Run]:
        """One run per request.

        logits [L, V], each request's rows after one another, one more than its drafts; row j has seen j drafts.
        `draft_probs`: the law [V] that each draft was drawn from; needed by "rejection" and "block".
        """
        if not rows:
            return []
        how = sampling_rows(rows)
        if self.rule == "exact" or self.rates is not None:
            tokens = sample(logits, how).tolist()
            runs, first = [], 0
            for ids in drafts:
                last = first + len(ids)
                runs.append(self._compare(ids, tokens[first : last + 1], rows[first]))
                first = last + 1
            return runs
        assert draft_probs is not None
        counts = [len(ids) + 1 for ids in drafts]
        # A greedy row's law has all its mass on one token.
        scores = process_logits(logits, how)
        law, greedy = scores.softmax(dim=1), how.temperature == 0
        law[greedy] = torch.zeros_like(law[greedy]).scatter_(1, scores[greedy].argmax(dim=1, keepdim=True), 1.0)
        target = pad_sequence(list(law.split(counts)), batch_first=True)  # [R, k+1, V]
        noise = gumbel_noise(how.seed ^ RECOVERY_STREAM, how.position, logits.shape[1])
        # Block verification looks at the numbers of all drafts, so those behind the run it keeps are not used again.
        draws = uniforms(fresh_seeds(how.seed, rows), how.position)
        rule = rejection_sample if self.rule == "rejection" else block_verify
        verified = rule(
            target,
            _padded_laws(draft_probs, drafts, target),
            pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in drafts], True, PAD),
            pad_sequence([part[: len(part) - 1] for part in draws.split(counts)], True),
            pad_sequence(list(noise.split(counts)), batch_first=True),
        )
        accepted = verified.num_accepted.tolist()
        return [Run(ids[: n + 1], n) for ids, n in zip(verified.token_ids.tolist(), accepted, strict=True)]

    def _compare(self, drafts: list[int], tokens: list[int], row: SampledRow) -> Run:
        accepted = 0
        if self.rates is None:
            while accepted < len(drafts) and drafts[accepted] == tokens[accepted]:
                accepted += 1
            return Run(tokens[: accepted + 1], accepted)
        if not drafts:
            return Run(tokens[:1], 0)
        position = torch.arange(row.position, row.position + len(drafts))[None]
        rates = torch.tensor(self.rates, dtype=torch.float64)
        kept = coins(torch.full_like(position[:, 0], row.request.seed), position, rates)[0].tolist()
        while accepted < len(drafts) and kept[accepted]:
            accepted += 1
        return Run([*drafts[:accepted], tokens[accepted]], accepted)


def _padded_laws(draft_probs: list[list[Tensor]], drafts: list[list[int]], target: Tensor) -> Tensor:
    """[R, k, V] from ragged lists of laws, zero where there is no draft. A draft without a law was certain."""
    out = target.new_zeros(target.shape[0], target.shape[1] - 1, target.shape[2])
    for i, (laws, ids) in enumerate(zip(draft_probs, drafts, strict=True)):
        for j, token in enumerate(ids):
            if j < len(laws):
                out[i, j] = laws[j]
            else:
                out[i, j, token] = 1.0
    return out
