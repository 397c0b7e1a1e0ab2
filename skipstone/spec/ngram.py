"""Prompt lookup: drafts are what followed the last few tokens when they stood in the context before. Host only."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor

from skipstone.core.batch import PAD
from skipstone.core.kv_cache import CacheMemory, CacheSpec
from skipstone.core.request import Request
from skipstone.kernels.ops import Ops
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep, ProposerNeeds


class Lookup:
    """A growing text, and the earliest other occurrence of the longest suffix that has one.

    The suffix has min_match to max_match tokens; occurrences may overlap it. A token more takes at most max_match
    steps, however long the text is.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._token_ids: list[int] = []
        # A tree of what the text has contained, read backwards: below the root the last token, then the one before it,
        # up to max_match. A node stays a leaf until it occurs a second time: text that never repeats takes one a token.
        self._children: dict[int, int] = {}  # node << 32 plus a token -> node
        self._ends = [0]  # of every node: the place behind its earliest occurrence
        self._follows: int | None = None  # the place behind the occurrence that was looked for
        self.as_predicted = True
        """For who extends it: whether the output is what its caller has predicted."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def drafts(self, k: int) -> list[int]:
        """Up to k tokens behind the occurrence; empty if there is none."""
        return [] if self._follows is None else self._token_ids[self._follows : self._follows + k]

    def extend(self, token_ids: list[int]) -> None:
        """Add tokens to the text and look again."""
        for token_id in token_ids:
            self._append(token_id)

    def _append(self, token_id: int) -> None:
        text, children, ends = self._token_ids, self._children, self._ends
        text.append(token_id)
        node, matched = 0, 0
        while matched < min(self._max_match, len(text)):
            if matched and ends[node] > matched:
                earliest = (node << 32) + text[ends[node] - matched - 1]
                if earliest not in children:  # the node was a leaf, and has now occurred a second time
                    children[earliest] = len(ends)
                    ends.append(ends[node])
            latest = (node << 32) + text[-matched - 1]
            if latest not in children:
                children[latest] = len(ends)
                ends.append(len(text))
                break
            node, matched = children[latest], matched + 1
        self._follows = ends[node] if matched >= self._min_match else None


class NgramProposer:
    """Drafts by prompt lookup; no weights, no caches."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match, self.max_match = min_match, max_match
        self.needs = ProposerNeeds("ngram")
        self._lookups: WeakKeyDictionary[Request, Lookup] = WeakKeyDictionary()

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

    def _find(self, draft: DraftRequest) -> list[int]:
        request, prediction = draft.request, draft.request.prediction
        before = [*prediction, PAD] if prediction else []
        lookup = self._lookups.get(request)
        if lookup is None:
            lookup = self._lookups[request] = Lookup(self.min_match, self.max_match)
            lookup.extend(before)
        known, end = len(lookup) - len(before), draft.length if draft.emitted else draft.num_valid
        new = draft.tokens(known, end)
        lookup.extend(new)
        output = new[max(request.num_prompt_tokens - known, 0) :]
        place = max(known - request.num_prompt_tokens, 0)
        lookup.as_predicted &= output == prediction[place : place + len(output)]
        if prediction and lookup.as_predicted:
            return prediction[place + len(output) : place + len(output) + draft.wanted]
        drafts = lookup.drafts(draft.wanted)
        return drafts[: drafts.index(PAD)] if PAD in drafts else drafts
