"""Proposers that follow a script: the known text, wrong tokens, or mixtures. They have no weights and no caches."""

from __future__ import annotations

import random
from collections.abc import Callable

from torch import Tensor

from oracles.tiny import VOCAB
from skipstone import LLM
from skipstone.core.kv_cache import CacheMemory, CacheSpec
from skipstone.kernels.ops import Ops
from skipstone.spec.proposer import DraftRequest, Drafts, DraftStep, ProposerNeeds

# From the right drafts of a step (as many as wanted) and the request to what is drafted.
Script = Callable[[list[int], DraftRequest], list[int]]
Texts = dict[tuple[tuple[int, ...], int], list[int]]  # (prompt, seed of the request) -> the tokens that follow


def perfect(right: list[int], _: DraftRequest) -> list[int]:
    """What the target will say."""
    return right


def wrong(right: list[int], _: DraftRequest) -> list[int]:
    """Never what the target will say."""
    return [other(token) for token in right]


def wrong_from(index: int) -> Script:
    """Right before this place of each run, wrong there, right behind it."""
    return lambda right, _: [other(token) if i == index else token for i, token in enumerate(right)]


def mixture(seed: int) -> Script:
    """Each draft right or wrong, and as many as it likes up to what is wanted; the same for equal texts."""

    def script(right: list[int], request: DraftRequest) -> list[int]:
        draw = random.Random(seed * 1000 + request.length)
        some = right[: draw.randint(0, len(right))]
        return [token if draw.random() < 0.7 else other(token) for token in some]

    return script


def too_many(count: int) -> Script:
    """More drafts than are wanted: the engine must not rely on a proposer's modesty."""
    return lambda right, _: right + [5] * count


def other(token: int) -> int:
    """A token that is not this one."""
    return (token + 1) % VOCAB


class ScriptedProposer:
    """Drafts by a script from the texts that the engine without speculation gave; counts the drafts it makes."""

    def __init__(self, script: Script, texts: Texts) -> None:
        self.script, self.texts = script, texts
        self.needs = ProposerNeeds("scripted")
        self.wanted: list[int] = []

    def cache_specs(self) -> list[CacheSpec]:
        """None."""
        return []

    def bind(self, memory: CacheMemory, ops: Ops) -> None:
        """Nothing to make."""

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Nothing to copy."""

    def propose(self, step: DraftStep) -> list[Drafts]:
        """By the script."""
        return [Drafts(self._drafts(request)) for request in step.requests]

    def _drafts(self, request: DraftRequest) -> list[int]:
        if not request.wanted:
            return []
        self.wanted.append(request.wanted)
        own = request.request
        prompt = tuple(own.token_ids[: own.num_prompt_tokens])
        follows = self.texts[prompt, own.seed]
        right = follows[request.length - len(prompt) :][: request.wanted]
        return self.script(right + [0] * (request.wanted - len(right)), request)


def inject(llm: LLM, proposer: ScriptedProposer) -> LLM:
    """Let an engine that was started with `spec="ngram:K"` draft by a script."""
    engine = llm.engine
    engine.speculation = engine.speculation._replace(proposer=proposer)
    engine.runner.proposer = proposer
    engine.scheduler.needs = proposer.needs
    return llm
