"""Drafters that are perfect, always wrong, or anything between: the text stays, the counters say what happened.

A scripted drafter knows the text that the engine gives without speculation. So the acceptance length of every script
is known in advance, and the end of a text can be put at every place of an accepted run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from oracles.drafters import Script, ScriptedProposer, Texts, inject, mixture, perfect, too_many, wrong, wrong_from
from oracles.speculation import (
    CACHED,
    FEW,
    LEAN,
    WAYS,
    Folders,
    Job,
    letter,
    load,
    pairs,
    run,
    tiny_jobs,
    tokens,
    watch,
)

from skipstone import LLM, SamplingParams
from skipstone.core.batch import Batch
from skipstone.core.request import FinishReason, Request
from skipstone.core.speculation import SpeculationStats
from skipstone.errors import RequestError, UnsupportedError
from skipstone.models.base import DraftOutput
from skipstone.models.locate import shipped_prompts
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import CachedProposer, DraftStep

TARGETS = ["m3", "dsa"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("drafters"))


def scripted(folder: Path, k: int, script: Script, texts: Texts, **options: Any) -> tuple[LLM, ScriptedProposer]:
    """An engine that drafts by the script."""
    proposer = ScriptedProposer(script, texts)
    llm = inject(load(folder, f"ngram:{k}", **options), proposer)
    watch(llm)
    return llm, proposer


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    """The parameters with some changed."""
    return msgspec.structs.replace(params, **changes)


def plain_jobs(length: int, count: int = 4) -> list[Job]:
    """Greedy and seeded, `length` tokens each."""
    settings = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 3.0, "repetition_penalty": 1.2}]
    return [
        (
            tokens(5 + 9 * i, i),
            SamplingParams(seed=i, max_tokens=length, ignore_eos=True, logprobs=2, **settings[i % 3]),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", TARGETS)
def test_a_perfect_drafter_gives_k_more_tokens_a_step(name: str, k: int, folders: Folders) -> None:
    """Acceptance length k + 1 exactly, and as many steps fewer."""
    folder, rounds = folders.target(name), 3
    jobs = plain_jobs(1 + rounds * (k + 1))
    expected = folders.plain(name, jobs)
    llm, _ = scripted(folder, k, perfect, expected.texts)
    found = run(llm, jobs)
    assert found.results == expected.results
    for share in found.shares:
        assert share == SpeculationStats(
            steps=rounds, drafted_per_position=[rounds] * k, accepted_per_position=[rounds] * k
        )
        assert share.acceptance_length == k + 1
    assert llm.engine.stats.steps == 1 + rounds


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_that_is_always_wrong_costs_nothing_but_rows(name: str, k: int, folders: Folders) -> None:
    folder, jobs = folders.target(name), plain_jobs(12)
    expected = folders.plain(name, jobs)
    llm, _ = scripted(folder, k, wrong, expected.texts)
    found = run(llm, jobs)
    assert found.results == expected.results
    for share in found.shares:
        assert share is not None
        assert (share.acceptance_length, share.accepted, share.steps) == (1, 0, 10)
    assert llm.engine.stats.steps == 12


@pytest.mark.parametrize("index", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_the_first_wrong_draft_ends_the_run(name: str, index: int, folders: Folders) -> None:
    """Right drafts behind a wrong one count for nothing."""
    folder, k, rounds = folders.target(name), 4, 3
    jobs = plain_jobs(1 + rounds * (index + 1) + k)
    expected = folders.plain(name, jobs)
    llm, _ = scripted(folder, k, wrong_from(index), expected.texts)
    found = run(llm, jobs)
    assert found.results == expected.results
    for share in found.shares:
        assert share is not None
        assert share.accepted_per_position[:index] == [share.steps] * index or index == 0
        full = [d == a for d, a in zip(share.drafted_per_position, share.accepted_per_position, strict=True)]
        assert full == [place < index for place in range(k)] or share.drafted_per_position[-1] < share.steps
        assert not any(share.accepted_per_position[index:])


@pytest.mark.parametrize(
    ("name", "seed", "caching"), [("m3", 0, True), ("m3", 1, False), ("dsa", 2, True), ("dsa", 1, False)]
)
def test_any_mixture_of_right_and_wrong_drafts(name: str, seed: int, caching: bool, folders: Folders) -> None:
    """All features of sampling, in few blocks; drafts of any number."""
    folder, jobs = folders.target(name), tiny_jobs()[seed::3]
    expected = folders.plain(name, jobs)
    limits = {"num_blocks": 15, "max_model_len": 96, "max_num_batched_tokens": 24}
    llm, _ = scripted(folder, 5, mixture(seed), expected.texts, prefix_caching=caching, **limits)
    found = run(llm, jobs)
    assert found.results == expected.results
    assert 0.3 < found.accepted / found.drafted < 0.9
    assert llm.engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("k", [1, 5])
def test_a_draft_model_with_the_weights_of_the_target_is_always_right(k: int, folders: Folders) -> None:
    """At every temperature and with every feature: drafts are chosen as the target will choose, noise included."""
    jobs = [
        (
            prompt,
            replace_params(
                params, stop=[], stop_token_ids=[], ignore_eos=True, min_tokens=0, max_tokens=1 + 3 * (k + 1)
            ),
        )
        for prompt, params in tiny_jobs()
    ]
    llm = load(folders.target("m3"), folders.spec(WAYS["draft"], "m3", k))
    found = run(llm, jobs)
    lengths = [share.acceptance_length for share in found.shares if share]
    # Its sums are rounded in another order, so now and then it takes another token than the target.
    assert sum(length == k + 1 for length in lengths) >= len(lengths) - 1


@pytest.mark.parametrize("count", [1, 40])
def test_more_drafts_than_wanted_do_no_harm(count: int, folders: Folders) -> None:
    folder, jobs = folders.target("m3"), plain_jobs(14)
    expected = folders.plain("m3", jobs)
    llm, _ = scripted(folder, 2, too_many(count), expected.texts, max_model_len=64, max_num_batched_tokens=40)
    sessions = [llm.add(prompt, params) for prompt, params in jobs]
    while llm.engine.has_work:
        llm.step()
        llm.engine.scheduler.check()
    for session, choices in zip(sessions, expected.results, strict=True):
        assert tuple(session.choices[0].token_ids) == choices[0].token_ids


class TestEnds:
    """A text that ends at any place of an accepted run ends there as it would without drafts."""

    K = 4

    def check(self, folders: Folders, ends: list[dict[str, Any]], eos: frozenset[int], cut: list[int]) -> None:
        """The job with each of these settings, perfectly drafted; `cut` are the lengths that must come out."""
        folder, prompt = folders.target("m3"), tokens(20, 2)
        common = {"temperature": 3.0, "seed": 5, "max_tokens": 30, "logprobs": 2}
        texts = folders.plain("m3", [(prompt, SamplingParams(**common, ignore_eos=True))]).texts
        for settings, length in zip(ends, cut, strict=True):
            job = [(prompt, SamplingParams(**(common | settings)))]
            plain = load(folder)
            plain.eos_token_ids = eos
            expected = run(plain, job)
            llm, _ = scripted(folder, self.K, perfect, texts)
            llm.eos_token_ids = eos
            found = run(llm, job)
            assert found.results == expected.results, settings
            ((result,),) = found.results
            assert len(result.token_ids) == len(result.logprobs or ()) == length
            self.check_counters(llm, found.shares[0], length, "max_tokens" in settings)

    def check_counters(self, llm: LLM, share: SpeculationStats | None, length: int, by_length: bool) -> None:
        """One token of the prompt's step, then runs of K + 1, the last of them cut."""
        assert share is not None
        rounds, rest = divmod(length - 1, self.K + 1)
        assert share.accepted == rounds * self.K + max(rest - by_length, 0)
        alone = by_length and rest == 1  # the last step had no room for drafts
        assert share.steps == rounds + (rest > 0) - alone
        assert llm.stats()["output_tokens"] == length

    @pytest.fixture(scope="class")
    @classmethod
    def text(cls, folders: Folders) -> list[int]:
        job = (tokens(20, 2), SamplingParams(temperature=3.0, seed=5, max_tokens=30, ignore_eos=True))
        (text,) = folders.plain("m3", [job]).texts.values()
        assert len(set(text[:14])) == 14, "the ends below need tokens that occur once"
        return text

    LENGTHS = tuple(range(1, 13))

    def test_by_a_stop_id(self, text: list[int], folders: Folders) -> None:
        ends = [{"stop_token_ids": [text[length - 1]], "ignore_eos": True} for length in self.LENGTHS]
        self.check(folders, ends, frozenset(), list(self.LENGTHS))

    def test_by_the_end_of_text(self, text: list[int], folders: Folders) -> None:
        for length in self.LENGTHS:
            self.check(folders, [{}], frozenset([text[length - 1]]), [length])

    def test_by_max_tokens(self, text: list[int], folders: Folders) -> None:
        ends = [{"max_tokens": length, "ignore_eos": True} for length in self.LENGTHS]
        self.check(folders, ends, frozenset(), list(self.LENGTHS))

    @pytest.mark.parametrize("included", [False, True])
    def test_by_a_stop_string(self, included: bool, text: list[int], folders: Folders) -> None:
        ends = [
            {"stop": ["?", letter(text[length - 2]) + letter(text[length - 1])], "include_stop_str_in_output": included}
            for length in self.LENGTHS[1:]
        ]
        self.check(folders, [end | {"ignore_eos": True} for end in ends], frozenset(), list(self.LENGTHS[1:]))

    def test_by_a_stop_string_right_before_another_end(self, text: list[int], folders: Folders) -> None:
        """In the same run: the stop string comes first, so it is the reason."""
        for later in (1, 2):
            for length in self.LENGTHS[later::2]:
                stop = {"stop": letter(text[length - 1]), "ignore_eos": True}
                others = [{"max_tokens": length + later}, {"stop_token_ids": [text[length - 1 + later]]}]
                for other in others:
                    folder, prompt = folders.target("m3"), tokens(20, 2)
                    common = {"temperature": 3.0, "seed": 5, "max_tokens": 30, "logprobs": 2}
                    job = [(prompt, SamplingParams(**(common | stop | other)))]
                    texts = folders.plain("m3", [(prompt, SamplingParams(**common, ignore_eos=True))]).texts
                    found = run(scripted(folder, self.K, perfect, texts)[0], job)
                    assert found.results == run(load(folder), job).results
                    assert found.results[0][0].finish_reason == "stop"
                    assert len(found.results[0][0].token_ids) == length

    def test_streams_end_at_the_same_token(self, text: list[int], folders: Folders) -> None:
        """The events' ids add up to the output's, and so do their texts."""
        folder, prompt = folders.target("m3"), tokens(20, 2)
        common = {"temperature": 3.0, "seed": 5, "max_tokens": 30, "ignore_eos": True}
        texts = folders.plain("m3", [(prompt, SamplingParams(**common))]).texts
        for length in self.LENGTHS:
            for end in ({"stop": letter(text[length - 1])}, {"max_tokens": length}):
                llm, _ = scripted(folder, self.K, perfect, texts)
                events = list(llm.stream(prompt, SamplingParams(**(common | end))))
                output = events[-1].output.outputs[0]
                assert [token for event in events for token in event.token_ids] == output.token_ids
                assert "".join(event.text for event in events) == output.text
                assert len(output.token_ids) == length


def edge_jobs(limit: int, k: int) -> list[Job]:
    """Prompts around blocks, chunks and the longest that fits, each written to the limit."""
    lengths = {1, 2, *(edge + d for edge in (8, 16, 32) for d in (-1, 0, 1)), *range(limit - k - 3, limit)}
    return [
        (tokens(n, n), SamplingParams(temperature=n % 3 * 2.5, seed=n, ignore_eos=True, logprobs=1, logit_bias=LEAN))
        for n in sorted(lengths)
    ]


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(("name", "proposer"), pairs(list(WAYS)))
def test_prompts_of_every_length_up_to_the_limit(name: str, proposer: str, k: int, folders: Folders) -> None:
    """max_model_len - k - 1 .. max_model_len - 1 and the edges of blocks and chunks, until the context is full."""
    way, limit = WAYS[proposer], 53
    options = {"max_model_len": limit, "max_num_batched_tokens": 16, "num_blocks": 40}
    jobs = edge_jobs(limit, k)[:: 1 if k == 1 else 2]
    expected = folders.plain(name, jobs, **options)
    llm = load(folders.target(name, way.modules), folders.spec(way, name, k), **options)
    watch(llm)
    found = run(llm, jobs)
    assert found.results == expected.results
    assert found.accepted > 0
    for (prompt, _), choices in zip(jobs, found.results, strict=True):
        assert len(prompt) + len(choices[0].token_ids) == limit
        assert choices[0].finish_reason == "length"


@pytest.mark.parametrize("script", [perfect, wrong], ids=["perfect", "wrong"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_scripted_drafts_up_to_the_limit(script: Script, k: int, folders: Folders) -> None:
    """No draft is asked for that could not be kept, so nothing is written past the last position."""
    folder, limit = folders.target("m3"), 53
    options = {"max_model_len": limit, "max_num_batched_tokens": 40}
    jobs = edge_jobs(limit, k)
    expected = folders.plain("m3", jobs, **options)
    llm, proposer = scripted(folder, k, script, expected.texts, **options)
    found = run(llm, jobs)
    assert found.results == expected.results
    assert max(proposer.wanted) == k
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([tokens(limit, 1)], SamplingParams(), progress=False)


@pytest.mark.parametrize(("name", "proposer"), pairs(CACHED))
def test_every_request_may_choose_its_number_of_drafts(name: str, proposer: str, folders: Folders) -> None:
    """0 to k in one batch, or alone; each gets what it asked for, its text, and the same drafts in any company."""
    way = WAYS[proposer]
    k = min(4, way.most)
    jobs: list[Job] = []
    for number, (prompt, params) in enumerate(tiny_jobs()[10:28]):
        asked = None if number % 7 == 6 else number % (k + 1)
        jobs.append((prompt, replace_params(params, num_speculative_tokens=asked)))
    expected = folders.plain(name, tiny_jobs()[10:28])
    every_share = []
    for order, most in ((1, 16), (-1, 1)):
        llm = load(folders.target(name, way.modules), folders.spec(way, name, k), max_num_seqs=most)
        watch(llm)
        found = run(llm, jobs[::order])
        assert found.results == expected.results[::order]
        shares = iter(found.shares)
        for _, params in jobs[::order]:
            asked = k if params.num_speculative_tokens is None else params.num_speculative_tokens
            for _ in range(params.n):
                share = next(shares)
                assert (share is None) == (asked == 0)
                assert share is None or len(share.drafted_per_position) == asked
        shares_of = iter(found.shares)
        grouped = [[next(shares_of) for _ in range(params.n)] for _, params in jobs[::order]]
        every_share.append(grouped[::order])
    together, alone = every_share
    # The sums of draft heads are rounded by the batch, so now and then a draft is another one.
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= len(jobs) - 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_coupled_drafts_and_rules_of_laws_are_refused(rule: str, folders: Folders) -> None:
    """Only when asked for both: alone, such a rule draws its drafts independently."""
    target = folders.target("m3")
    with pytest.raises(UnsupportedError, match=f"draft_sampling=coupled and verification={rule} .*independent"):
        load(target, "mtp:2", verification=rule, draft_sampling="coupled")
    assert "independent drafts" in dict(load(target, "mtp:2", verification=rule).card)["speculation"]
    assert load(target, "mtp:2", verification=rule, draft_sampling="coupled", simulate_acceptance="0.5").engine


def test_what_has_no_effect_without_drafts_is_said(folders: Folders) -> None:
    llm = load(folders.target("m3"), "off", verification="rejection", draft_sampling="greedy")
    said = dict(llm.card)["speculation"]
    assert "verification=rejection has no effect" in said and "draft_sampling=greedy has no effect" in said
    assert "no effect" not in dict(load(folders.target("m3"), "off").card)["speculation"]


def test_more_drafts_than_the_engine_makes_are_refused(folders: Folders) -> None:
    llm = load(folders.target("m3"), "mtp:3")
    params = SamplingParams(num_speculative_tokens=4)
    with pytest.raises(RequestError, match=r"num_speculative_tokens=4.*3"):
        llm.generate([[1, 2]], params, progress=False)
    with pytest.raises(RequestError, match="num_speculative_tokens=-1"):
        llm.generate([[1, 2]], SamplingParams(num_speculative_tokens=-1), progress=False)
    with pytest.raises(RequestError, match="num_speculative_tokens=1"):
        load(folders.target("m3")).generate([[1, 2]], SamplingParams(num_speculative_tokens=1), progress=False)
    assert llm.engine.pool.num_used == 0
    assert not llm.engine.has_work
    for asked in (0, 3, None):
        params = SamplingParams(num_speculative_tokens=asked, max_tokens=3, temperature=0.0, ignore_eos=True)
        (out,) = llm.generate([[1, 2]], params, progress=False)
        assert len(out.outputs[0].token_ids) == 3


class Crowd:
    """Random arrivals and aborts around a real engine; every text is a beginning of the text without speculation."""

    def __init__(self, llm: LLM, seed: int, most: int) -> None:
        self.llm, self.random, self.most = llm, random.Random(seed), most
        self.bases = [tokens(60, 50 + i) for i in range(3)]
        self.requests: list[Request] = []
        self.aborted_with_drafts = 0

    def arrive(self) -> None:
        """A request that shares the beginning of an earlier one."""
        draw, number = self.random, len(self.requests)
        prompt = draw.choice(self.bases)[: draw.randint(1, 50)] + tokens(draw.randint(0, 4), number)
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0, 5.0]), logit_bias=LEAN, stop_token_ids=draw.choice([[], [FEW[0], 40]]),
            min_tokens=draw.randint(0, 4), num_speculative_tokens=draw.choice([None, None, draw.randint(0, self.most)]),
        )  # fmt: skip
        request = Request(f"r{number}", prompt, params, number, len(prompt) + draw.randint(4, 30))
        self.requests.append(request)
        self.llm.engine.add(request)

    def step(self) -> None:
        """Arrivals keep the queue filled; now and then one of all that are under way is aborted."""
        engine = self.llm.engine
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < self.random.randint(2, 7):
            self.arrive()
        engine.step()
        engine.scheduler.check()
        unfinished = [*engine.scheduler.running, *engine.scheduler.waiting]
        if unfinished and self.random.random() < 0.06:
            victim = self.random.choice(unfinished)
            self.aborted_with_drafts += bool(victim.drafts)
            engine.abort(victim)
            assert victim.block_ids == [] and victim not in engine.scheduler.places

    def finish(self) -> None:
        """Let all end; no block is lost."""
        engine = self.llm.engine
        while engine.has_work:
            engine.step()
        engine.scheduler.check()
        assert engine.pool.num_free == engine.pool.num_ownable


@pytest.mark.parametrize(
    ("name", "proposer", "steps", "overlap"),
    [
        ("m3", "mtp", 160, False),
        ("dsa", "mtp3", 160, True),
        pytest.param("m3", "mtp", 2500, True, marks=pytest.mark.long),
        pytest.param("m3", "draft", 2500, True, marks=pytest.mark.long),
        pytest.param("dsa", "ngram", 2500, False, marks=pytest.mark.long),
    ],
)
def test_thousands_of_steps_lose_no_block(
    name: str, proposer: str, steps: int, overlap: bool, folders: Folders
) -> None:
    way = WAYS[proposer]
    llm = load(
        folders.target(name, way.modules), folders.spec(way, name, 3), prefix_caching=True, num_blocks=17,
        max_model_len=96, max_num_batched_tokens=24,
    )  # fmt: skip
    llm.engine.overlap = overlap
    watch(llm)
    crowd = Crowd(llm, 3, 3)
    for _ in range(steps):
        crowd.step()
    crowd.finish()
    stats = llm.engine.scheduler.stats
    assert stats.preemptions > steps / 100
    assert stats.prefix_hit_tokens > steps / 2
    assert crowd.aborted_with_drafts > steps / 100
    assert stats.speculation.accepted > steps / 5
    assert {request.finish_reason for request in crowd.requests} == set(FinishReason)
    some = crowd.requests[:: max(1, len(crowd.requests) // 6)]
    plain = load(folders.target(name))
    for request in some:
        start = request.num_prompt_tokens
        again = Request(
            "again",
            request.token_ids[:start],
            replace_params(request.params, num_speculative_tokens=None),
            request.seed,
            request.max_total_tokens,
        )
        plain.engine.add(again)
        while plain.engine.has_work:
            plain.engine.step()
        ends = request.finish_reason is FinishReason.ABORT
        assert request.token_ids == again.token_ids[: len(request.token_ids) if ends else None]


class TestSensitivity:
    """The trained modules of the demos accept much less when fed anything but what they were trained on.

    So the acceptance that they reach shows that states, ids and positions are aligned. Breaking them leaves the text.
    """

    K = 3

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls) -> list[str]:
        lines = shipped_prompts().read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines[:40:10]]

    def run(self, name: str, prompts: list[str], flaw: Callable | None = None) -> tuple[list, SpeculationStats]:
        """Texts and counters, with a flaw planted."""
        llm = LLM(model=name, spec=f"mtp:{self.K}", dtype="float32", prefix_caching=False)
        ids = [llm.tokenizer.encode(prompt)[:110] for prompt in prompts]
        if flaw is not None:
            flaw(llm.engine.runner.proposer.head)
        params = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True, logprobs=1)
        outs = llm.generate(ids, params, progress=False)
        texts = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs]
        return texts, llm.engine.scheduler.stats.speculation

    @pytest.mark.parametrize("name", ["demo", "demo-dsa"])
    def test_flaws_show(self, name: str, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        texts, right = self.run(name, prompts)
        assert right.acceptance_length > 2.2

        def shifted_states(head: Any) -> None:
            original = head.first_hidden
            head.first_hidden = lambda hidden: original(hidden).roll(1, 0)

        def no_recycling(head: Any) -> None:
            original = head.outputs
            head.outputs = lambda states, module=0: DraftOutput(
                original(states, module).logits, torch.zeros_like(states)
            )

        def no_positions(head: Any) -> None:
            original = head.forward
            head.forward = lambda hidden, batch, attention, module=0: original(
                hidden, replace(batch, positions=torch.ones_like(batch.positions)), attention, module
            )

        def unshifted(proposer: HiddenStateProposer, step: DraftStep, _: int) -> Batch:
            return CachedProposer.followed(proposer, step, 0)

        less = right.acceptance_length - 0.15
        most = {shifted_states: 1.6, no_recycling: less, no_positions: less}
        for flaw, limit in most.items():
            found, stats = self.run(name, prompts, flaw)
            assert found == texts
            assert stats.acceptance_length < limit, f"{flaw.__name__}: {stats.acceptance_length}, right {right}"
        monkeypatch.setattr(HiddenStateProposer, "followed", unshifted)
        found, stats = self.run(name, prompts)
        assert found == texts
        assert stats.acceptance_length < 1.3

    def test_drafts_that_share_the_noise_are_accepted_more_often(self, prompts: list[str]) -> None:
        """At temperature 1, with the same text for each way of drafting."""
        lengths, texts = {}, []
        for sampling in ("coupled", "independent"):
            llm = LLM(model="demo", spec="mtp:2", dtype="float32", draft_sampling=sampling, prefix_caching=False)
            params = [SamplingParams(temperature=1.0, seed=i, max_tokens=36, ignore_eos=True) for i in range(4)]
            outs = llm.generate([prompt[:200] for prompt in prompts], params, progress=False)
            texts.append([out.outputs[0].token_ids for out in outs])
            lengths[sampling] = llm.engine.scheduler.stats.speculation.acceptance_length
        assert texts[0] == texts[1]
        assert lengths["coupled"] > lengths["independent"] + 0.2


def test_a_right_prediction_is_drafted_from_the_first_token_on(folders: Folders) -> None:
    """Nothing of the text stands in the prompt."""
    llm = load(folders.target("m3"), "ngram:3")
    prompt, params = tokens(4, 1), SamplingParams(temperature=1.0, seed=3, max_tokens=21, ignore_eos=True)
    text = llm.generate([prompt], params, progress=False)[0].outputs[0].token_ids
    accepted = []
    for prediction in ([], text):
        session = llm.add(prompt, params, prediction)
        while llm.engine.has_work:
            llm.step()
        (choice,) = session.output().outputs
        assert choice.token_ids == text
        accepted.append(choice.speculation.accepted)
    assert accepted[0] < accepted[1] == 15  # five steps of three drafts and a token of their own
