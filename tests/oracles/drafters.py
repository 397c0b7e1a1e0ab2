"""Proposers that follow a script: the known text, wrong tokens, or mixtures. They have no weights and no caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oracles.tiny import VOCAB
from skipstone import LLM
from skipstone.core.batch import PAD
from skipstone.core.kv_cache import CacheMemory, CacheSpec
from skipstone.core.sequence_table import NUM_PROMPT
from skipstone.kernels.ops import Ops
from skipstone.spec.proposer import DraftStep, ProposerNeeds


class Drafting(NamedTuple):
    """One request that drafts."""

    prompt: tuple[int, ...]
    seed: int
    text: list[int]  # committed tokens behind the prompt
    wanted: int

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.text)


# From the right drafts of a step (as many as wanted) and the request to what is drafted.
Script = Callable[[list[int], Drafting], list[int]]
Texts = dict[tuple[tuple[int, ...], int], list[int]]  # (prompt, seed of the request) -> the tokens that follow


def perfect(right: list[int], _: Drafting) -> list[int]:
    """What the target will say."""
    return right


def wrong(right: list[int], _: Drafting) -> list[int]:
    """Never what the target will say."""
    return [other(token) for token in right]


def wrong_from(index: int) -> Script:
    """Right before this place of each run, wrong there, right behind it."""
    return lambda right, _: [other(token) if i == index else token for i, token in enumerate(right)]


def mixture(seed: int) -> Script:
    """Each draft right or wrong, and as many as it likes up to what is wanted; the same for equal texts."""

    def script(right: list[int], request: Drafting) -> list[int]:
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

    def propose(self, step: DraftStep) -> Tensor | None:
        """By the script."""
        if not step.k:
            return None
        rows = []
        prompts = step.draft_at.integers(NUM_PROMPT).tolist()
        each = zip(step.draft_slots.tolist(), prompts, step.draft_at.seed.tolist(), strict=True)
        for i, (slot, num_prompt, seed) in enumerate(each):
            known = step.table.tokens[slot, : int(step.newest[i]) + 1].tolist()
            request = Drafting(tuple(known[:num_prompt]), seed, known[num_prompt:], int(step.wanted[i]))
            found = self._drafts(request)[: step.k]
            rows.append(found + [PAD] * (step.k - len(found)))
        return torch.tensor(rows, dtype=torch.int64).view(-1, step.k)

    def _drafts(self, request: Drafting) -> list[int]:
        if not request.wanted:
            return []
        self.wanted.append(request.wanted)
        follows = self.texts[request.prompt, request.seed]
        right = follows[len(request.text) :][: request.wanted]
        return self.script(right + [0] * (request.wanted - len(right)), request)


def inject(llm: LLM, proposer: ScriptedProposer) -> LLM:
    """Let an engine that was started with `spec="ngram:K"` draft by a script."""
    engine = llm.engine
    engine.speculation = engine.speculation._replace(proposer=proposer)
    engine.runner.step.proposer = proposer
    engine.scheduler.needs = proposer.needs
    return llm
