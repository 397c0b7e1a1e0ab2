"""What the tests of speculation share: the table of proposers, requests of every kind, and a watched run of them.

A watched run poisons all caches, steps the engine, and checks what must hold in every step whatever the drafts are:
only known token ids are embedded, logits of drafts are never NaN, the books of blocks balance, and the counters of
drafts agree with the tokens that came out. Its results are compared with those of an engine that does not speculate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from oracles.tiny import TINY, VOCAB, Tiny, engine_options, write_folder
from oracles.tiny_heads import with_mtp, write_head
from skipstone import LLM, SamplingParams
from skipstone.core.batch import Batch
from skipstone.core.request import Request, TokenLogprobs
from skipstone.core.speculation import SpeculationStats
from skipstone.outputs import StreamEvent
from skipstone.spec.proposer import DraftStep

Prompt = list[int]
Job = tuple[Prompt, SamplingParams]
FEW = (3, 19, 20)  # the tokens that a lean request writes: guesses are often right
LEAN = dict.fromkeys(FEW, 30.0)
NAN = float("nan")


class Way(NamedTuple):
    """One way to draft: the `spec` option with its places, MTP modules of the target, the head or model beside it."""

    spec: str
    modules: int = 1
    head: str | None = None
    draft_model: dict[str, str] | None = None  # target -> the tiny checkpoint that drafts for it
    most: int = 64  # drafts at once


# A new proposer is one more line.
WAYS: dict[str, Way] = {
    "mtp": Way("mtp:{k}"),
    "mtp2": Way("mtp:{k}", modules=2, most=2),
    "mtp3": Way("mtp:{k}", modules=3, most=3),
    "eagle3": Way("eagle3:{folder}:{k}", head="eagle3"),
    "eagle3_wide": Way("eagle3:{folder}:{k}", head="eagle3_wide"),
    "dflash": Way("dflash:{folder}:{k}", head="dflash", most=7),
    "draft": Way("draft:{folder}:{k}", draft_model={"m3": "m3_flat", "dsa": "m3_mixed", "dsa_fp8": "m3_mixed"}),
    "ngram": Way("ngram:{k}"),
}


# Proposers with caches of their own; not every one with every target, to save time. The other pairs are marked long.
CACHED = ["mtp", "mtp3", "eagle3", "dflash", "draft"]
USUAL = {("m3", "mtp"), ("dsa", "mtp"), ("dsa", "mtp3"), ("m3", "eagle3"), ("dsa", "dflash"), ("m3", "draft")}


def pairs(proposers: list[str]) -> list[Any]:
    """(target, proposer) as parameters of a test."""
    every = itertools.product(["m3", "dsa"], proposers)
    return [pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.long) for pair in every]


class Folders:
    """Tiny checkpoints and heads, written when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._plain: dict[str, Run] = {}

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        folder = self.root / name
        if not folder.exists():
            write(folder)
        return folder

    def target(self, name: str, modules: int = 1) -> Path:
        """The tiny checkpoint with this many MTP modules, and a tokenizer."""
        return self._once(f"{name}_mtp{modules}", lambda path: _write(with_mtp(TINY[name](), modules), path))

    def spec(self, way: Way, name: str, k: int) -> str:
        """The `spec` option for drafts of k tokens."""
        k, target = min(k, way.most), TINY[name]()
        folder = self.root
        if way.head is not None:
            kind = way.head
            folder = self._once(f"{name}_{kind}", lambda path: write_head(kind, target, path))
        if way.draft_model is not None:
            other: Tiny = TINY[way.draft_model[name]]()
            folder = self._once(f"draft_{other.name}", lambda path: _write(other, path))
        return way.spec.format(folder=folder, k=k)

    def plain(self, name: str, jobs: list[Job], **options: Any) -> Run:
        """The jobs without speculation; run once for equal arguments."""
        key = f"{name} {options} {jobs}"
        if key not in self._plain:
            self._plain[key] = run(load(self.target(name), **options), jobs)
        return self._plain[key]


def _write(tiny: Tiny, folder: Path) -> None:
    write_folder(tiny, folder)
    letters().save(str(folder / "tokenizer.json"))


def letters() -> Tokenizer:
    """One letter per token, so that stop strings can be written down."""
    tokenizer = Tokenizer(models.BPE({letter(token): token for token in range(VOCAB)}, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def letter(token: int) -> str:
    """The text of a token of `letters`."""
    return chr(0x4E00 + token)


def tokens(length: int, seed: int, vocab: int = VOCAB - 3) -> Prompt:
    """Uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def load(folder: Path | str, spec: str = "off", **options: Any) -> LLM:
    """A float32, exact engine with blocks of eight tokens."""
    defaults = {"block_size": 8, "num_blocks": 200, "max_num_batched_tokens": 512, "prefix_caching": False}
    own = {"dtype": "float32", "exact": True, **engine_options(folder)}
    return LLM(model=str(folder), spec=spec, **(own | defaults | options))


def check_batch(batch: Batch, vocab: int) -> None:
    """No sentinel is embedded."""
    if len(batch.input_ids):
        assert int(batch.input_ids.min()) >= 0
        assert int(batch.input_ids.max()) < vocab
    assert int(batch.positions.min()) >= 0


class DraftCount:
    """How many drafts were drawn."""

    count = 0


def watch(llm: LLM) -> DraftCount:
    """Poison all caches, and check every batch and every draft from now on."""
    engine = llm.engine
    runner, vocab = engine.runner, engine.vocab_size
    groups = [runner.groups]
    runner.cache.fill(NAN)
    for name in ("cache", "groups"):
        part = getattr(runner.proposer, name, None)
        if name == "cache" and part is not None:
            part.fill(NAN)
        if name == "groups" and part is not None:
            groups.append(part)
    for part in groups:
        plan = part.plan

        def checked(batch: Batch, kept: Any = None, plan: Callable = plan) -> Any:
            for one in (batch, kept.batch) if kept else (batch,):
                check_batch(one, vocab)
            return plan(batch, kept)

        part.plan = checked
    drafts, propose = DraftCount(), getattr(runner.proposer, "propose", None)

    def watched(step: DraftStep) -> Any:
        sample = step.sampler.sample

        def no_nan(logits: Tensor, *rest: Any) -> Tensor:
            # Rows of requests that do not draft run along, over blocks that may have been filled without drafts.
            assert not logits[step.wanted > 0].isnan().any(), "drafts depend on a cache slot that nobody wrote"
            drafts.count += len(logits)
            return sample(logits, *rest)

        object.__setattr__(step.sampler, "sample", no_nan)
        assert propose is not None
        return propose(step)

    if propose is not None:
        runner.proposer.propose = watched
    return drafts


def entry(item: TokenLogprobs | None) -> tuple | None:
    """All numbers of one position."""
    if item is None:
        return None
    return item.token_id, item.logprob, item.rank, tuple(item.top_ids), tuple(item.top_logprobs)


class Result(NamedTuple):
    """Everything about one choice that speculation must not change."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: tuple | None
    prompt_logprobs: tuple | None
    usage: int


@dataclass
class Run:
    """Results per job, then per choice, and what was drafted for them."""

    results: list[list[Result]]
    shares: list[SpeculationStats | None]
    texts: dict[tuple[tuple[int, ...], int], list[int]]  # (prompt, seed of the request) -> what followed

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return sum(share.drafted for share in self.shares if share)

    @property
    def accepted(self) -> int:
        """Drafts that were emitted."""
        return sum(share.accepted for share in self.shares if share)


def run(llm: LLM, jobs: list[Job]) -> Run:
    """Run all jobs together; checks what must hold whatever the drafts are."""
    engine = llm.engine
    stats = engine.scheduler.stats.speculation
    before = [stats.drafted, stats.accepted, stats.steps]
    sessions = [llm.add(prompt, params) for prompt, params in jobs]
    events: dict[Request, list[StreamEvent]] = {c.request: [] for s in sessions for c in s.choices}
    by_name = {(s.session_id, c.index): c.request for s in sessions for c in s.choices}
    steps = 0
    while engine.has_work:
        for event in llm.step():
            events[by_name[event.request_id, event.index]].append(event)
        engine.scheduler.check()
        steps += 1
        assert steps < 5000
    assert engine.pool.num_used == 0
    results, shares = [], []
    for session in sessions:
        out = session.output()
        prompt_logprobs = None if out.prompt_logprobs is None else tuple(entry(e) for e in out.prompt_logprobs)
        results.append([])
        for choice, one in zip(out.outputs, session.choices, strict=True):
            check_share(choice.speculation, one.request, events[one.request])
            shares.append(choice.speculation)
            logprobs = None if choice.logprobs is None else tuple(entry(e) for e in choice.logprobs)
            results[-1].append(
                Result(
                    tuple(choice.token_ids), choice.text, choice.finish_reason, choice.stop_reason, logprobs,
                    prompt_logprobs, len(choice.token_ids),
                )
            )  # fmt: skip
    for name, old in zip(("drafted", "accepted", "steps"), before, strict=True):
        assert getattr(stats, name) - old == sum(getattr(share, name) for share in shares if share)
    texts = {
        (tuple(s.prompt_token_ids), c.request.seed): c.request.output_token_ids for s in sessions for c in s.choices
    }
    return Run(results, shares, texts)


def check_share(share: SpeculationStats | None, request: Request, events: list[StreamEvent]) -> None:
    """Counters of one request against its tokens: one token a step, and its accepted drafts."""
    k = request.max_drafts
    assert (share is None) == (k == 0)
    if share is None:
        assert all(len(event.token_ids) == 1 for event in events)
        return
    drafted, accepted = share.drafted_per_position, share.accepted_per_position
    assert len(drafted) == len(accepted) <= k
    assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))
    for counts in (drafted, accepted):
        assert counts == sorted(counts, reverse=True)
    assert share.steps == (drafted[0] if drafted else 0) <= len(events)
    emitted = sum(len(event.token_ids) for event in events)
    # The last step has no token of its own when the text ends with an accepted draft.
    assert share.accepted + len(events) - emitted in ((0, 1) if request.finished else (0,))
    assert all(1 <= len(event.token_ids) <= k + 1 for event in events)
    assert sum(len(event.token_ids) > 1 for event in events) <= share.steps


def features() -> dict[str, dict[str, Any]]:
    """Every sampling setting that verified rows must treat as rows that run alone."""
    first, second, third = FEW
    return {
        "plain": {"logit_bias": {}},
        "lean": {},
        "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.9},
        "min_p": {"min_p": 0.15, "top_k": 40, "top_p": 0.95},
        "bias": {"logit_bias": LEAN | {30: 29.0, 31: 28.0, first: -float("inf")}},
        "min_tokens": {"min_tokens": 9, "stop_token_ids": [second]},
        "logprobs": {"logprobs": -1, "prompt_logprobs": 2},
        "stop ids": {"stop_token_ids": [third, 50, 90], "min_tokens": 3},
        "stop strings": {"stop": [letter(first) * 2 + letter(second), letter(third) * 3]},
        "choices": {"n": 2},
    }


TEMPERATURES = (0.0, 1.0, 5.0)


def tiny_jobs() -> list[Job]:
    """Every feature at every temperature; prompts around block edges, many with equal beginnings."""
    shared, out = tokens(43, 1), []
    lengths = (1, 7, 8, 9, 23, 33, 45)
    for temperature in TEMPERATURES:
        for settings in features().values():
            number = len(out)
            prompt = tokens(lengths[number % 7], number)
            if number % 5 > 1:
                prompt = shared[: 8 + 5 * (number % 8)] + tokens(number % 3, number)
            common = {"temperature": temperature, "seed": 100 + number, "max_tokens": 15 + number % 11, "logprobs": 3}
            lean = {"logit_bias": LEAN}
            out.append((prompt, SamplingParams(**(common | lean | settings))))
    return out
