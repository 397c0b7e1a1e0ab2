"""Prompt lookup: drafts are what followed the last few tokens when they stood in the context before. Host only."""

from __future__ import annotations

from torch import Tensor

from skipstone.core.batch import PAD
from skipstone.core.kv_cache import CacheMemory, CacheSpec
from skipstone.kernels.ops import Ops
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep, ProposerNeeds


def find_drafts(token_ids: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    """Up to k tokens that followed the earliest other occurrence of the longest matching suffix.

    The suffix has min_match to max_match tokens; occurrences may overlap it. Empty without a match. Linear time: over
    the reversed tokens, the prefix function gives for every place how long a suffix of the text ends there.
    """
    length = len(token_ids)
    if k <= 0 or length <= min_match:
        return []
    backwards = token_ids[::-1]
    matched = [0] * length  # longest proper border of backwards[: i + 1], cut at max_match
    best, best_end = 0, 0
    border = 0
    for i in range(1, length):
        if border == max_match:
            border = matched[border - 1]
        while border and backwards[i] != backwards[border]:
            border = matched[border - 1]
        if backwards[i] == backwards[border]:
            border += 1
        matched[i] = border
        if border >= max(best, min_match):  # `>=`: the later in reverse, the earlier in the text
            best, best_end = border, i
    if best < min_match:
        return []
    follows = length - 1 - best_end + best  # the text's index behind the occurrence
    return token_ids[follows : follows + k]


class NgramProposer:
    """Drafts by prompt lookup; no weights, no caches."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match, self.max_match = min_match, max_match
        self.needs = ProposerNeeds("ngram")

    def cache_specs(self) -> list[CacheSpec]:
        """None."""
        return []

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Nothing to make."""

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Nothing to copy."""

    def propose(self, step: DraftStep) -> list[Drafts]:
        """Look up each request's own tokens, and what its caller has predicted."""
        return [Drafts(self._find(request)) for request in step.requests]

    def _find(self, request: DraftRequest) -> list[int]:
        prediction, tokens = request.request.prediction, request.tokens(0, request.length)
        if not prediction:
            return find_drafts(tokens, request.wanted, self.min_match, self.max_match)
        output = tokens[request.request.num_prompt_tokens :]
        if output == prediction[: len(output)]:
            return prediction[len(output) : len(output) + request.wanted]
        drafts = find_drafts([*prediction, PAD, *tokens], request.wanted, self.min_match, self.max_match)
        return drafts[: drafts.index(PAD)] if PAD in drafts else drafts
