"""The prompts and proposers that check and tune run, and one engine's way through them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from skipstone.cli.generate import encoded
from skipstone.cli.prompts import Prompt
from skipstone.config import EngineConfig
from skipstone.core.observer import Observer
from skipstone.core.request import SamplingParams
from skipstone.core.speculation import SpeculationStats
from skipstone.errors import ConfigError, RequestError
from skipstone.llm import LLM
from skipstone.models.loader import ModelInfo
from skipstone.outputs import RequestOutput
from skipstone.runtime.proposers import candidates

Job = tuple[Prompt, SamplingParams]
FEW = 5  # tokens from which an estimate is made


class Pace(NamedTuple):
    """Seconds that an engine without drafts takes: an estimate."""

    load: float
    prompts: float  # of all jobs
    tokens: float  # of all jobs


class Finished(NamedTuple):
    """What an engine made of its jobs, in their order."""

    outputs: list[RequestOutput]
    speculation: SpeculationStats
    steps: int


def job(prompt: Prompt, temperature: float, seed: int, max_tokens: int) -> Job:
    """A prompt with its parameters: what its line says of sampling holds, but for the temperature and n."""
    own = {name: value for name, value in prompt.overrides.items() if name not in ("temperature", "n")}
    return prompt, SamplingParams(**{"seed": seed, "max_tokens": max_tokens} | own, temperature=temperature)


def proposer_specs(info: ModelInfo, names: str | None) -> list[str]:
    """Values of `spec` without a number of drafts: the ones named, or every one that the model's files allow.

    Raises ConfigError for a name that is no proposer, or that the files do not allow.
    """
    found = {candidate.method: candidate for candidate in candidates(info)}
    if names is None:
        return [candidate.spec for candidate in found.values() if candidate.works]
    specs = []
    for name in names.split(","):
        method, _, folder = name.strip().partition(":")
        if method not in found:
            raise ConfigError(f"--proposers {names}: no proposer {method!r}; known: {', '.join(found)}")
        if not folder and not found[method].works:
            raise ConfigError(f"--proposers {names}: {method} cannot be used here: {found[method].reason}")
        specs.append(name.strip() if folder else found[method].spec)
    return specs


def label(spec: str) -> str:
    """A proposer's name for a table."""
    return spec.partition(":")[0]


def with_spec(config: EngineConfig, spec: str, k: int) -> EngineConfig:
    """The same engine with another proposer."""
    return msgspec.structs.replace(config, spec=f"{spec}:{k}" if k else "off")


def encode_jobs(llm: LLM, jobs: Sequence[Job]) -> list[list[int]]:
    """Token ids of every prompt; one that leaves no room for its answer loses its beginning."""
    limit = llm.engine.caches.max_model_len
    ids = []
    for prompt, params in jobs:
        room = limit - (params.max_tokens or 1)
        if room < 1:
            raise RequestError(f"max_tokens={params.max_tokens} leaves no room for a prompt within {limit} tokens")
        if prompt.token_ids is None and llm.tokenizer is not None and prompt.text is not None:
            prompt = replace(prompt, token_ids=llm.tokenizer.encode(prompt.text))
        if prompt.token_ids is not None:
            prompt = replace(prompt, token_ids=prompt.token_ids[-room:])
        ids.append(encoded(llm, prompt))
    return ids


def pace(config: EngineConfig, jobs: Sequence[Job]) -> Pace:
    """How long an engine without drafts will take for the jobs, from a few tokens of each."""
    ends = [time.perf_counter()]
    with LLM(config=with_spec(config, "off", 0)) as llm:
        ends.append(time.perf_counter())
        for count in (1, FEW):  # the second time the prompts are in the prefix cache
            few = [(prompt, msgspec.structs.replace(own, max_tokens=count, min_tokens=0)) for prompt, own in jobs]
            run_on(llm, few, lambda: None)
            ends.append(time.perf_counter())
    load, prompts, tokens = (end - start for start, end in itertools.pairwise(ends))
    return Pace(load, prompts, tokens * max(own.max_tokens or 0 for _, own in jobs) / FEW)


def run_jobs(
    config: EngineConfig, jobs: Sequence[Job], observer: Observer | None, tick: Callable[[], None]
) -> Finished:
    """Run all jobs at once on an engine of their own; `tick` is called for each that ends.

    The request ids are the same in every such run.
    """
    with LLM(config=config, observer=observer) as llm:
        outputs = run_on(llm, jobs, tick)
        return Finished(outputs, llm.engine.scheduler.stats.speculation, llm.engine.stats.steps)


def run_on(llm: LLM, jobs: Sequence[Job], tick: Callable[[], None]) -> list[RequestOutput]:
    """Run all jobs at once; `tick` is called for each that ends."""
    ids = encode_jobs(llm, jobs)
    sessions = [llm.add(tokens, params) for tokens, (_, params) in zip(ids, jobs, strict=True)]
    while not all(session.finished for session in sessions):
        for event in llm.step():
            if event.output is not None:
                tick()
    return [session.output() for session in sessions]
