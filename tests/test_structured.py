"""Structured output with drafts: the texts are those without drafts, and all of them are in the grammar.

The first half runs a grammar written by hand, so that drafts can be legal, illegal, right and wrong at chosen places.
The second half runs llguidance; its texts are judged by `json`, `re`, and a validator that knows nothing of masks.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from oracles.drafters import Script, ScriptedProposer, Texts, inject, perfect
from oracles.speculation import WAYS, Job, Run, load, run, tokens, watch
from oracles.structured import (
    TEXTS,
    AsciiFolders,
    Automata,
    any_drafts,
    changed_at,
    random_schema,
    valid,
)
from oracles.tiny import EOS, VOCAB

from skipstone import LLM, SamplingParams
from skipstone.core.plan import StepPlan
from skipstone.core.request import FinishReason, Request
from skipstone.core.speculation import SpeculationStats
from skipstone.errors import RequestError, SkipstoneError, UnsupportedError
from skipstone.models.locate import heads_beside, locate, shipped_prompts
from skipstone.runtime.scheduler import SchedulerStats
from skipstone.text.structured import GrammarCompiler, Made, TokenGrammar

K = 4
PROMPT = tokens(20, 2)
COMMON: dict[str, Any] = {"temperature": 3.0, "seed": 5, "max_tokens": 30, "logprobs": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> AsciiFolders:
    return AsciiFolders(tmp_path_factory.mktemp("structured"))


def by_hand(folder: Path, script: Script | None = None, texts: Texts | None = None, **options: Any) -> LLM:
    """An engine whose grammars are automata, and which drafts by a script or not at all."""
    llm = load(folder, f"ngram:{K}" if script else "off", **options)
    llm._grammars = Automata()  # type: ignore[assignment]
    if script:
        inject(llm, ScriptedProposer(script, texts or {}))
    watch(llm)
    return llm


def planned(llm: LLM) -> list[tuple[Request, int]]:
    """Will hold every request's drafts of every step from now on."""
    seen: list[tuple[Request, int]] = []
    engine = llm.engine
    start = engine.runner.start

    def watched(plan: StepPlan) -> Any:
        for item in plan.items:
            request = engine.scheduler.owner(item)
            if request is not None and request.num_output_tokens:
                seen.append((request, item.num_drafts))
                drafts = request.drafts[: item.num_drafts]
                assert request.grammar is None or request.grammar.legal(drafts) == len(drafts)
        return start(plan)

    engine.runner.start = watched  # type: ignore[method-assign]
    return seen


def one_each(length: int) -> list[Job]:
    """Constrained and free requests in one batch, greedy and not."""
    settings = [{"temperature": 0.0}, {"temperature": 3.0}, {"temperature": 3.0, "repetition_penalty": 1.3}]
    return [
        (
            tokens(5 + 9 * i, i),
            SamplingParams(seed=i, max_tokens=length, ignore_eos=True, logprobs=2, regex=regex, **settings[i % 3]),
        )
        for i, regex in enumerate(["99", None, "99", "99", None])
    ]


class TestDrafts:
    """What becomes of drafts that the grammar allows or forbids."""

    def test_legal_right_drafts_are_all_kept(self, folders: AsciiFolders) -> None:
        jobs = one_each(1 + 3 * (K + 1))
        expected = run(by_hand(folders.target("m3")), jobs)
        found = run(by_hand(folders.target("m3"), perfect, expected.texts), jobs)
        assert found.results == expected.results
        for share in found.shares:
            assert share == SpeculationStats(steps=3, drafted_per_position=[3] * K, accepted_per_position=[3] * K)

    @pytest.mark.parametrize("index", range(K))
    def test_an_illegal_draft_and_those_behind_it_take_no_rows(self, index: int, folders: AsciiFolders) -> None:
        """Of free requests nothing is cut."""
        jobs = one_each(1 + 3 * (index + 1) + 1)
        expected = run(by_hand(folders.target("m3")), jobs)
        llm = by_hand(folders.target("m3"), changed_at(index, legal=False), expected.texts)
        seen = planned(llm)
        found = run(llm, jobs)
        assert found.results == expected.results
        for (_, params), share in zip(jobs, found.shares, strict=True):
            assert share is not None
            if params.regex is None:
                assert share.drafted_per_position[index] >= 3
            else:
                assert share.drafted_per_position[:index] == share.accepted_per_position[:index]
                assert not any(share.drafted_per_position[index:])
                assert share.accepted >= 3 * index
        for request in {request for request, _ in seen if request.grammar is not None}:
            counts = [drafts for other, drafts in seen if other is request]
            assert counts[:3] == [index] * 3
            assert max(counts) == index

    @pytest.mark.parametrize("index", range(K))
    def test_a_legal_wrong_draft_ends_the_run(self, index: int, folders: AsciiFolders) -> None:
        """It costs a row and is rejected; the grammar forgets the drafts behind the run."""
        jobs = one_each(1 + 3 * (index + 1) + K)
        expected = run(by_hand(folders.target("m3")), jobs)
        llm = by_hand(folders.target("m3"), changed_at(index, legal=True), expected.texts)
        seen = planned(llm)
        found = run(llm, jobs)
        assert found.results == expected.results
        some = 0
        for (_, params), share in zip(jobs, found.shares, strict=True):
            if params.regex is not None:
                assert share is not None
                some += share.drafted_per_position[index] - share.accepted_per_position[index]
        assert some >= 3
        assert all(request.grammar is None or request.grammar.text == request.output_token_ids for request, _ in seen)

    @pytest.mark.parametrize("seed", range(2))
    def test_any_mixture_with_few_blocks_and_chunks(self, seed: int, folders: AsciiFolders) -> None:
        """Preempted requests keep their place in the grammar."""
        ends = ["9", "99", "7", "24", None, "30", "99", "1", None, "18"]
        jobs = [
            (prompt, with_changes(params, regex=end, seed=number))
            for number, ((prompt, params), end) in enumerate(zip(one_each(24) * 2, ends, strict=True))
        ]
        expected = run(by_hand(folders.target("m3")), jobs)
        limits = {"num_blocks": 15, "max_model_len": 96, "max_num_batched_tokens": 16}
        llm = by_hand(folders.target("m3"), any_drafts(seed), expected.texts, prefix_caching=seed % 2 == 0, **limits)
        seen = planned(llm)
        found = run(llm, jobs)
        assert found.results == expected.results
        assert llm.engine.scheduler.stats.preemptions > 0
        assert found.accepted > 0
        for request in {request for request, _ in seen if request.grammar is not None}:
            assert request.grammar.text == request.output_token_ids

    @pytest.mark.parametrize("index", [None, *range(K)])
    def test_steps_that_are_started_ahead(self, index: int | None, folders: AsciiFolders) -> None:
        """Such a step runs the rows of illegal drafts as well; they are none of the counters."""
        jobs = one_each(1 + 3 * (K + 1) + 3)
        expected = run(by_hand(folders.target("m3")), jobs)
        script = any_drafts(3) if index is None else changed_at(index, legal=False)
        llm = by_hand(folders.target("m3"), script, expected.texts)
        llm.engine.overlap = True
        found = run(llm, jobs)
        assert found.results == expected.results
        if index is not None:
            for (_, params), share in zip(jobs, found.shares, strict=True):
                assert share is not None
                assert share.accepted >= 3 * index
                assert params.regex is None or not any(share.drafted_per_position[index:])

    @pytest.mark.parametrize("failing", ["start", "finish"])
    @pytest.mark.parametrize("call", range(5, 8))
    def test_a_failed_step_leaves_nothing_behind(
        self, failing: str, call: int, folders: AsciiFolders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one that was started ahead and waits for its masks."""
        jobs = one_each(20)
        expected = run(by_hand(folders.target("m3")), jobs)
        llm = by_hand(folders.target("m3"), any_drafts(3), expected.texts)
        llm.engine.overlap = True
        work, calls = getattr(llm.engine.runner, failing), itertools.count()

        def broken(*arguments: Any) -> Any:
            if next(calls) == call:
                raise ValueError("out of luck")
            return work(*arguments)

        monkeypatch.setattr(llm.engine.runner, failing, broken)
        with pytest.raises(ValueError, match="out of luck"):
            run(llm, jobs)
        llm.close()
        assert run(llm, jobs).results == expected.results


def with_changes(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | changes)


class TestEnds:
    """Any end at any place of an accepted run: ids, log-probabilities, reason and counters are cut together."""

    LENGTHS = tuple(range(1, K + 4))

    @pytest.fixture(scope="class")
    @classmethod
    def text(cls, folders: AsciiFolders) -> list[int]:
        job = (PROMPT, SamplingParams(**COMMON, ignore_eos=True, regex="99"))
        (text,) = run(by_hand(folders.target("m3")), [job]).texts.values()
        assert len(set(text[:12])) == 12, "the ends below need tokens that occur once"
        return text

    def check(self, folders: AsciiFolders, text: list[int], length: int, **end: Any) -> Any:
        """Perfectly drafted, it must come out as without drafts."""
        job = [(PROMPT, SamplingParams(**(COMMON | {"ignore_eos": True, "regex": "99"} | end)))]
        expected = run(by_hand(folders.target("m3")), job)
        texts = {(tuple(PROMPT), seed): text for _, seed in expected.texts}
        llm = by_hand(folders.target("m3"), perfect, texts)
        sessions: list[Any] = []
        add = llm.add
        llm.add = lambda *arguments: sessions.append(add(*arguments)) or sessions[-1]  # type: ignore[method-assign]
        found = run(llm, job)
        assert found.results == expected.results
        ((result,),) = found.results
        assert len(result.token_ids) == len(result.logprobs or ()) == length
        assert llm.stats()["output_tokens"] == length
        request = sessions[0].choices[0].request
        assert request.output_token_ids == list(result.token_ids) == text[:length]
        assert len(request.logprobs) == length
        share, by_length = found.shares[0], "max_tokens" in end
        rounds, rest = divmod(length - 1, K + 1)
        assert share is not None
        assert share.accepted == rounds * K + max(rest - by_length, 0)
        assert share.steps == rounds + (rest > 0) - (by_length and rest == 1)
        return result, request

    @pytest.mark.parametrize("length", LENGTHS)
    def test_by_the_grammar(self, length: int, text: list[int], folders: AsciiFolders) -> None:
        result, request = self.check(folders, text, length, regex=str(length))
        assert (result.finish_reason, result.stop_reason) == ("stop", None)
        assert request.grammar.text == text[:length]

    @pytest.mark.parametrize("length", LENGTHS)
    def test_by_a_stop_id(self, length: int, text: list[int], folders: AsciiFolders) -> None:
        result, request = self.check(folders, text, length, stop_token_ids=[text[length - 1]])
        assert (result.finish_reason, result.stop_reason) == ("stop", text[length - 1])
        assert request.grammar.text == text[:length]

    @pytest.mark.parametrize("length", LENGTHS)
    def test_by_max_tokens(self, length: int, text: list[int], folders: AsciiFolders) -> None:
        result, request = self.check(folders, text, length, max_tokens=length)
        assert result.finish_reason == "length"
        assert request.grammar.text == text[:length]

    @pytest.mark.parametrize("length", LENGTHS[1:])
    def test_by_a_stop_string(self, length: int, text: list[int], folders: AsciiFolders) -> None:
        stop = TEXTS[text[length - 2]] + TEXTS[text[length - 1]]
        result, _ = self.check(folders, text, length, stop=[stop, "never written"])
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == "".join(TEXTS[token] for token in text[: length - 2])

    @pytest.mark.parametrize("length", LENGTHS[2:])
    def test_a_stop_string_right_before_the_grammar_ends(
        self, length: int, text: list[int], folders: AsciiFolders
    ) -> None:
        stop = TEXTS[text[length - 2]] + TEXTS[text[length - 1]]
        for later in (0, 1, 2):
            result, _ = self.check(folders, text, length, stop=stop, regex=str(length + later))
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)

    def test_the_end_of_the_grammar_before_the_others(self, text: list[int], folders: AsciiFolders) -> None:
        for length in self.LENGTHS[::2]:
            stop = TEXTS[text[length]] + TEXTS[text[length + 1]]
            for end in ({"stop_token_ids": [text[length]]}, {"stop": stop}):
                result, _ = self.check(folders, text, length, regex=str(length), **end)
                assert (result.finish_reason, result.stop_reason) == ("stop", None)


# With llguidance.

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c-d"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
OPTIONS = ["yes", "no", "maybe so", 'a "quoted" one', "no, never"]
WORDS = r"[A-Z][a-z]{2,6}( [a-z]{1,5}){1,3}[.!]"
LARK = 'start: item ("," item){1,3} ";"\nitem: /[a-z]{1,4}/ | "(" item ")"\n'
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json_schema": json.dumps(PERSON)},
    "regex": {"regex": WORDS},
    "choice": {"choice": OPTIONS},
    "lark": {"grammar": LARK},
    "free": {},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"top_p": 0.9, "min_p": 0.02, "top_k": 30},
    {"n": 2, "ignore_eos": True},
    {"logprobs": -1, "prompt_logprobs": 1},
    {"stop": ["e", ":"], "stop_token_ids": [70, 71]},
]


def written(text: str) -> bool:
    """A text of the Lark grammar: brackets match."""
    while "(" in text:
        shorter = re.sub(r"\(([a-z]{1,4})\)", r"\1", text)
        if shorter == text:
            return False
        text = shorter
    return re.fullmatch(r"[a-z]{1,4}(,[a-z]{1,4}){1,3};", text) is not None


def complete(params: SamplingParams, text: str) -> bool:
    """Whether the whole text is what was asked for."""
    if params.json_schema is not None:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        schema = json.loads(params.json_schema)
        return is_person(value) if schema == PERSON else valid(schema, value)
    if params.regex is not None:
        return re.fullmatch(params.regex, text) is not None
    if params.grammar is not None:
        return written(text)
    return params.structured_output is None or text in params.choice


def is_person(value: Any) -> bool:
    """By hand."""
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b", "c-d"}
    )


def check_texts(grammars: GrammarCompiler, jobs: list[Job], found: Run) -> int:
    """Complete texts are valid, unfinished ones can be continued. Returns how many were complete."""
    count = 0
    for (_, params), choices in zip(jobs, found.results, strict=True):
        for choice in choices:
            assert choice.finish_reason in ("stop", "length"), params
            grammar = grammars.compile(params)
            if grammar is None:
                continue
            matcher = grammar._matcher  # fresh, and asked in the library's own way
            assert matcher.consume_tokens(list(choice.token_ids)), (params, choice.text)
            stopped = choice.stop_reason is not None and choice.stop_reason not in grammars.eos_token_ids
            if choice.finish_reason == "stop" and not stopped:
                assert complete(params, choice.text), (params, choice.text)
                count += 1
            elif not stopped:
                assert len(choice.token_ids) == params.max_tokens
    return count


def constrained_jobs(prompts: list[list[int]], length: int, kinds: list[str], settings: list[dict]) -> list[Job]:
    """Every kind at T = 0 and 1, each with the next settings."""
    jobs, turn = [], itertools.cycle(settings)
    for number, (kind, temperature) in enumerate(itertools.product(kinds, (0.0, 1.0))):
        common = {"temperature": temperature, "seed": number, "max_tokens": length, "logprobs": 2}
        jobs.append((prompts[number % len(prompts)], SamplingParams(**(common | KINDS[kind] | next(turn)))))
    return jobs


def tiny_jobs(turn: int) -> list[Job]:
    """All kinds and settings; some prompts begin alike."""
    shared = tokens(30, 1)
    prompts = [tokens(9, 3), shared, [*shared[:24], 5, 6], tokens(3, 4), [*shared, 7]]
    return constrained_jobs(prompts, 40, list(KINDS), SETTINGS[turn:] + SETTINGS[:turn])


ROOM: dict[str, Any] = {}
CHUNKS = {"max_num_batched_tokens": 16, "prefix_caching": True}
TIGHT = CHUNKS | {"num_blocks": 14, "max_model_len": 96}


class TestEquality:
    """Drafts change nothing."""

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, folders: AsciiFolders) -> Callable[[int], Run]:
        def results(turn: int) -> Run:
            llm, jobs = load(folders.target("m3")), tiny_jobs(turn)
            found = run(llm, jobs)
            assert check_texts(llm._grammars, jobs, found) > 3
            return found

        return cache(results)

    @pytest.mark.parametrize(
        ("proposer", "k", "options", "turn"),
        [
            ("mtp", 3, TIGHT, 0), ("eagle3", 5, TIGHT, 1), ("dflash", 7, CHUNKS, 5), ("ngram", 4, CHUNKS, 5),
            ("draft", 4, ROOM | {"draft_sampling": "independent"}, 1),
        ],
    )  # fmt: skip
    def test_tiny_models(
        self, proposer: str, k: int, options: dict, turn: int, folders: AsciiFolders, alone: Callable[[int], Run]
    ) -> None:
        """With prefix hits, chunks and preemption."""
        stats = self.check(proposer, k, options, turn, folders, alone)
        assert (stats.preemptions > 0) == ("num_blocks" in options)
        assert (stats.prefix_hit_tokens > 0) == ("prefix_caching" in options)

    @pytest.mark.long
    @pytest.mark.parametrize("turn", range(len(SETTINGS)))
    @pytest.mark.parametrize("options", [ROOM, CHUNKS, TIGHT], ids=["room", "chunks", "tight"])
    @pytest.mark.parametrize("proposer", list(WAYS))
    def test_every_pair(
        self, proposer: str, options: dict, turn: int, folders: AsciiFolders, alone: Callable[[int], Run]
    ) -> None:
        for k in (1, 4, 8):
            self.check(proposer, k, options, turn, folders, alone)

    def check(
        self, proposer: str, k: int, options: dict, turn: int, folders: AsciiFolders, alone: Callable[[int], Run]
    ) -> SchedulerStats:
        way, jobs = WAYS[proposer], tiny_jobs(turn)
        llm = load(folders.target("m3", way.modules), folders.spec(way, "m3", k), **options)
        watch(llm)
        seen = planned(llm)
        found = run(llm, jobs)
        assert found.results == alone(turn).results
        assert any(drafts for request, drafts in seen if request.grammar is not None)
        return llm.engine.scheduler.stats

    @pytest.mark.parametrize("seed", range(2))
    def test_scripted_drafts_right_wrong_and_illegal(
        self, seed: int, folders: AsciiFolders, alone: Callable[[int], Run]
    ) -> None:
        """More drafts are kept than any tiny head would get right."""
        turn = 5 * seed
        expected = alone(turn)
        texts = {key: [*text, EOS, 3] for key, text in expected.texts.items()}
        llm = inject(load(folders.target("m3"), "ngram:6", **TIGHT), ScriptedProposer(any_drafts(seed), texts))
        watch(llm)
        planned(llm)
        found = run(llm, tiny_jobs(turn))
        assert found.results == expected.results
        assert found.accepted / found.drafted > 0.5


def demo_jobs(llm: LLM) -> list[Job]:
    lines = shipped_prompts().read_text().splitlines()[:200:33]
    prompts = [llm.tokenizer.encode(json.loads(line)["prompt"])[:30] for line in lines]
    settings = [SETTINGS[i] for i in (0, 1, 2, 3)] + [{"stop": ["e", ":"]}]
    return constrained_jobs([*prompts, prompts[0][:20]], 22, list(KINDS)[:4], settings)


@pytest.fixture(scope="module")
def demo_alone() -> Run:
    llm = LLM(model="demo", spec="off", dtype="float32", prefix_caching=False)
    jobs = demo_jobs(llm)
    found = run(llm, jobs)
    assert check_texts(llm._grammars, jobs, found) >= 4
    return found


@pytest.mark.parametrize(
    ("spec", "kept", "steps"),
    [("mtp:3", 0.3, 16), ("eagle3:{eagle3}:5", 0.2, 17), ("dflash:{dflash}:7", 0.1, 18), ("ngram:4", 0.0, 24)],
)
def test_trained_drafters_change_nothing_either(spec: str, kept: float, steps: int, demo_alone: Run) -> None:
    """Prompts in chunks; acceptance of constrained texts is far from none."""
    heads = {method: str(folder) for method, folder in heads_beside(locate("demo")).items()}
    llm = LLM(model="demo", spec=spec.format(**heads), dtype="float32", max_num_batched_tokens=48)
    found = run(llm, demo_jobs(llm))
    assert found.results == demo_alone.results
    assert found.accepted >= kept * found.drafted
    assert llm.engine.stats.steps <= steps  # drafts are drawn under the grammar's masks


class TestValidity:
    """Random schemas, drafts and proposers."""

    def jobs(self, seed: int, count: int) -> list[Job]:
        draw = random.Random(seed)
        jobs = []
        for number in range(count):
            schema = random_schema(draw, 2)
            params = SamplingParams(
                json_schema=json.dumps(schema), temperature=draw.choice([0.0, 1.0, 4.0]), seed=number, max_tokens=60
            )
            jobs.append((tokens(draw.randint(1, 20), number), params))
        return jobs

    def check(self, seed: int, count: int, folders: AsciiFolders) -> None:
        jobs = self.jobs(seed, count)
        plain = load(folders.target("m3"))
        expected = run(plain, jobs)
        assert check_texts(plain._grammars, jobs, expected) > count // 2
        texts = {key: [*text, EOS, 3] for key, text in expected.texts.items()}
        scripted = inject(load(folders.target("m3"), "ngram:5", **TIGHT), ScriptedProposer(any_drafts(seed), texts))
        name = ["mtp", "eagle3", "dflash", "ngram"][seed % 4]
        way = WAYS[name]
        headed = load(folders.target("m3", way.modules), folders.spec(way, "m3", 3 + seed % 5))
        for llm in (scripted, headed):
            watch(llm)
            planned(llm)
            found = run(llm, jobs)
            assert found.results == expected.results
            check_texts(plain._grammars, jobs, found)

    @pytest.mark.parametrize("seed", range(2))
    def test_every_answer_fits_its_schema(self, seed: int, folders: AsciiFolders) -> None:
        self.check(seed, 8, folders)

    @pytest.mark.long
    @pytest.mark.parametrize("seed", range(2, 42))
    def test_many_more(self, seed: int, folders: AsciiFolders) -> None:
        self.check(seed, 24, folders)

    @pytest.mark.parametrize(("rule", "proposer"), [("block", "mtp"), ("rejection", "ngram")])
    def test_by_the_other_rules_of_acceptance(self, rule: str, proposer: str, folders: AsciiFolders) -> None:
        """Other texts, but valid ones; laws are masked as samples are."""
        jobs = self.jobs(50, 6) + [(p, q) for p, q in tiny_jobs(0) if q.structured_output][::2]
        way = WAYS[proposer]
        llm = load(folders.target("m3", way.modules), folders.spec(way, "m3", 4), verification=rule, **CHUNKS)
        watch(llm)
        planned(llm)
        found = run(llm, jobs)
        assert check_texts(llm._grammars, jobs, found) > 4
        assert found.drafted > 0


class TestState:
    """Questions do not move the grammar; commits do."""

    @pytest.fixture(scope="class")
    @classmethod
    def compiler(cls, folders: AsciiFolders) -> GrammarCompiler:
        return GrammarCompiler(folders.target("m3"), VOCAB, frozenset([EOS]))

    @staticmethod
    def fresh(compiler: GrammarCompiler, params: SamplingParams, text: list[int]) -> Any:
        """The library's matcher after a text, or None if the text is not legal."""
        grammar = compiler.compile(params)
        assert grammar is not None
        matcher = grammar._matcher
        return matcher if matcher.consume_tokens(text) else None

    @staticmethod
    def mask(matcher: Any) -> list[int]:
        """Allowed ids, by another call than the engine's."""
        return [token for token, bias in enumerate(matcher.compute_logit_bias()[:VOCAB]) if bias]

    @pytest.mark.parametrize("kind", ["json", "regex", "choice", "lark"])
    def test_random_questions_leave_it_where_it_was(self, kind: str, compiler: GrammarCompiler) -> None:
        draw, params = random.Random(3), SamplingParams(**KINDS[kind])
        for _ in range(2):
            grammar, text = compiler.compile(params), []
            assert grammar is not None
            while not grammar.ended and len(text) < 25:
                for _ in range(3):
                    further = self.walk(grammar, draw)
                    reference = self.fresh(compiler, params, text)
                    count = 0
                    while count < len(further) and self.fresh(compiler, params, text + further[: count + 1]):
                        count += 1
                    ask_mask, ask_count = draw.random() < 0.7, draw.random() < 0.7
                    if ask_count:
                        assert grammar.legal(further) == count
                    if ask_mask:
                        mask = grammar.allowed(further)
                        after = self.fresh(compiler, params, text + further)
                        assert (mask is None) == (after is None)
                        if mask is not None:
                            assert mask.nonzero()[:, 0].tolist() == self.mask(after)
                    assert grammar.ended == reference.is_stopped()
                now = grammar.allowed([])
                assert now is not None
                assert now.nonzero()[:, 0].tolist() == self.mask(self.fresh(compiler, params, text))
                forbidden = (~now).nonzero()[:, 0].tolist()
                assert not grammar.advance(draw.choice(forbidden))
                token = draw.choice(now.nonzero()[:, 0].tolist())
                assert grammar.advance(token)
                text.append(token)

    @staticmethod
    def walk(grammar: TokenGrammar, draw: random.Random) -> list[int]:
        """A few tokens, legal up to some place."""
        further: list[int] = []
        for _ in range(draw.randint(0, 6)):
            mask = grammar.allowed(further)
            if further[-1:] == [EOS] or (mask is not None and mask.nonzero()[:, 0].tolist() == [EOS]):
                break  # what may follow the end is nobody's business
            if mask is None or not mask.any() or draw.random() < 0.15:
                further.append(draw.randrange(EOS))
            else:
                further.append(draw.choice(mask.nonzero()[:, 0].tolist()))
        return further

    def test_masks_of_choices_by_definition(self, compiler: GrammarCompiler) -> None:
        """A token may follow when some option begins with the text and it."""
        draw = random.Random(1)
        for _ in range(12):
            grammar, text = compiler.compile(SamplingParams(choice=OPTIONS)), ""
            assert grammar is not None
            while True:
                want = {
                    token
                    for token, piece in enumerate(TEXTS)
                    if any(option.startswith(text + piece) for option in OPTIONS)
                } | ({EOS} if text in OPTIONS else set())
                mask = grammar.allowed([])
                assert mask is not None
                assert set(mask.nonzero()[:, 0].tolist()) == want
                assert grammar.ended == (text in OPTIONS and want == {EOS})
                token = draw.choice(sorted(want))
                assert grammar.advance(token)
                if token == EOS or grammar.ended:
                    break
                text += TEXTS[token]

    @pytest.mark.parametrize("text", ["é", "\N{GRINNING FACE}", "a\nb", 'q"q', "b\\s", "tab\t", " blank ", "\x7f", "|"])
    def test_a_choice_may_hold_any_character(self, text: str) -> None:
        llm_folder = locate("demo")
        compiler, encode = demo_compiler()
        grammar = compiler.compile(SamplingParams(choice=[text, "something else"]))
        assert grammar is not None, llm_folder
        ids = encode(text)
        assert grammar.legal(ids) == len(ids)
        assert all(grammar.advance(token) for token in ids)
        assert grammar.ended


@cache
def demo_compiler() -> tuple[GrammarCompiler, Callable[[str], list[int]]]:
    from skipstone.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(locate("demo"))
    compiler = GrammarCompiler(locate("demo"), 6144, frozenset([2, 6]))
    return compiler, lambda text: tokenizer.encode(text, add_special_tokens=False)


def banned(*texts: str) -> dict[int, float]:
    """Logit bias against these tokens."""
    return {TEXTS.index(text): -float("inf") for text in texts}


class TestNothingPossible:
    """A request without any possible token ends; the others do not notice."""

    FREE: Job = (tokens(12, 8), SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1))

    def engine(self, folders: AsciiFolders, k: int) -> LLM:
        return load(folders.target("m3"), f"mtp:{k}" if k else "off")

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("k", [0, 3])
    def test_at_once_or_later(self, k: int, temperature: float, folders: AsciiFolders) -> None:
        expected = run(self.engine(folders, k), [self.FREE]).results[0]
        common = {"temperature": temperature, "seed": 1, "max_tokens": 20, "logprobs": 1}
        dead = [
            ({"choice": ["QR"], "logit_bias": banned("Q")}, ""),
            ({"choice": ["QR"], "logit_bias": banned("R")}, "Q"),
            ({"choice": ["QRSTUVWX"], "logit_bias": banned("W")}, "QRSTUV"),
            ({"regex": "Q{5}[RS]", "logit_bias": banned("R", "S")}, "QQQQQ"),
        ]
        jobs = [(tokens(7, 1), SamplingParams(**common, **settings)) for settings, _ in dead]
        llm = self.engine(folders, k)
        sessions = [llm.add(*job) for job in (jobs[0], self.FREE, *jobs[1:])]
        while llm.engine.has_work:
            llm.step()
            llm.engine.scheduler.check()
        free = sessions.pop(1).output().outputs[0]
        assert (tuple(free.token_ids), free.finish_reason) == (expected[0].token_ids, expected[0].finish_reason)
        for session, (settings, text) in zip(sessions, dead, strict=True):
            choice = session.output().outputs[0]
            assert (choice.text, choice.finish_reason) == (text, "abort"), settings
            kind = next(iter(settings))
            assert choice.error is not None
            assert choice.error.startswith(f"{kind} cannot be used: after {len(choice.token_ids)} tokens of output no")
            assert f"{kind} and logit_bias" in choice.error
            assert len(choice.token_ids) == len(choice.logprobs or ())
            assert "".join(TEXTS[token] for token in choice.token_ids) == text
        assert llm.engine.pool.num_used == 0

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_token_0_is_forbidden_as_others_are(self, temperature: float, folders: AsciiFolders) -> None:
        params = SamplingParams(regex=" Q", logit_bias=banned(" "), temperature=temperature, max_tokens=5)
        (out,) = self.engine(folders, 0).generate([tokens(7, 1)], params, progress=False)
        assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == ([], "abort")

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("k", [0, 3])
    def test_without_a_grammar(self, k: int, temperature: float, folders: AsciiFolders) -> None:
        """Biases against everything, or against all but a token that may not come yet."""
        llm, every = self.engine(folders, k), dict.fromkeys(range(VOCAB), -float("inf"))
        all_but_q = {token: bias for token, bias in every.items() if token != TEXTS.index("Q")}
        all_but_the_end = {token: bias for token, bias in every.items() if token != EOS}
        cases: list[tuple[dict[str, Any], int, str, str]] = [
            ({"logit_bias": every}, 0, "abort", "logit_bias"),
            ({"logit_bias": all_but_the_end, "min_tokens": 3}, 0, "abort", "logit_bias and min_tokens"),
            (
                {"logit_bias": all_but_q, "min_tokens": 3, "stop_token_ids": [TEXTS.index("Q")]},
                0,
                "abort",
                "min_tokens",
            ),
            ({"logit_bias": all_but_the_end}, 1, "stop", ""),
            ({"logit_bias": all_but_q}, 5, "length", ""),
        ]
        common = {"temperature": temperature, "seed": 1, "max_tokens": 5, "top_k": 3, "top_p": 0.9, "logprobs": 1}
        params = [SamplingParams(**common | settings) for settings, *_ in cases]
        for output, (settings, count, reason, words) in zip(
            llm.generate([tokens(7, 1)] * len(cases), params, progress=False), cases, strict=True
        ):
            choice = output.outputs[0]
            assert (len(choice.token_ids), choice.finish_reason) == (count, reason), list(settings)
            assert len(choice.logprobs or ()) == count
            assert (choice.error is None) == (reason != "abort") and words in (choice.error or "")
        assert llm.engine.pool.num_used == 0

    @pytest.mark.parametrize("k", [0, 3])
    def test_whoever_waits_is_told(self, k: int, folders: AsciiFolders) -> None:
        """A stream ends with a finished event, and the engine forgets the request."""
        for text, bias in (("", "Q"), ("QR", "S")):
            llm = self.engine(folders, k)
            params = SamplingParams(choice=["QRST"], logit_bias=banned(bias), temperature=0.0)
            events = list(llm.stream(tokens(7, 1), params))
            assert events[-1].finished
            assert events[-1].output is not None
            assert events[-1].output.outputs[0].finish_reason == "abort"
            assert "".join(event.text for event in events) == text
            session = llm.add(tokens(7, 1), params)
            events = [event for _ in range(10) if llm.engine.has_work for event in llm.step()]
            assert session.finished
            assert [event.finished for event in events][-1:] == [True]
            assert not llm._sessions

    def test_a_matcher_that_gives_up_ends_its_own_request(self, folders: AsciiFolders) -> None:
        """Limits of the library, here set very low."""
        expected = run(self.engine(folders, 3), [self.FREE]).results[0]
        llm = self.engine(folders, 3)
        llm._grammars.compile(SamplingParams(regex="a"))
        source = llguidance.grammar_from("regex", "[a-z]{3,40}( [a-z]{2,50}){2,30}[.]")
        limits = llguidance.LLParserLimits(max_lexer_states=12)
        matcher = llguidance.LLMatcher(llm._grammars._tokenizer, source, limits=limits, log_level=0)
        assert not matcher.is_error()
        bad = llm.add(tokens(5, 5), SamplingParams(temperature=1.0, seed=1, max_tokens=30))
        bad.choices[0].request.grammar = TokenGrammar(Made(matcher), VOCAB, frozenset([EOS]))
        good = llm.add(*self.FREE)
        while llm.engine.has_work:
            llm.step()
            llm.engine.scheduler.check()
        assert bad.choices[0].request.finish_reason is FinishReason.ABORT
        assert "its grammar was given up: " in (bad.output().outputs[0].error or "")
        assert tuple(good.output().outputs[0].token_ids) == expected[0].token_ids

    @pytest.mark.parametrize("k", [0, 3])
    def test_an_abort_amid_the_text(self, k: int, folders: AsciiFolders) -> None:
        """What is out is a legal beginning; the others go on."""
        jobs = tiny_jobs(2)[:8:2]
        expected = run(self.engine(folders, k), jobs)
        for step in (1, 4):
            llm = self.engine(folders, k)
            sessions = [llm.add(*job) for job in jobs]
            for _ in range(step):
                llm.step()
            llm.abort(sessions[0].session_id)
            while llm.engine.has_work:
                llm.step()
                llm.engine.scheduler.check()
            aborted = sessions[0].output().outputs[0]
            whole = expected.results[0][0]
            if whole.token_ids != tuple(aborted.token_ids):
                assert aborted.finish_reason == "abort"
            assert whole.token_ids[: len(aborted.token_ids)] == tuple(aborted.token_ids)
            for session, choices in zip(sessions[1:], expected.results[1:], strict=True):
                assert [tuple(c.token_ids) for c in session.output().outputs] == [c.token_ids for c in choices]
            assert llm.engine.pool.num_used == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": ""}, "json_schema"),
    ({"json_schema": "{"}, "json_schema.*not valid JSON"),
    ({"json_schema": "5"}, "json_schema"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"json_schema": {"type": "object"}}, "json_schema.*wrong type"),
    ({"json_schema": '{"type": "text"}'}, "json_schema.*text"),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "json_schema.*uniqueItems"),
    ({"json_schema": '{"not": {}}'}, "json_schema.*not"),
    ({"json_schema": '{"$ref": "#/nowhere"}'}, "json_schema.*nowhere"),
    ({"json_schema": '{"type": "string", "pattern": "("}'}, "json_schema"),
    ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "json_schema.*minimum"),
    ({"json_schema": '{"enum": ["\\ud800"]}'}, "json_schema"),
    ({"regex": "("}, "regex.*unclosed group"),
    ({"regex": "a{1000000}"}, "regex.*too many expressions"),
    ({"regex": "a(?=b)"}, "regex"),
    ({"regex": r"(a)\1"}, "regex"),
    ({"regex": 3}, "regex=3"),
    ({"regex": "\ud800"}, "regex"),
    ({"grammar": ""}, "grammar"),
    ({"grammar": "begin: 'a'"}, "grammar"),
    ({"grammar": "start: missing"}, "grammar.*missing"),
    ({"grammar": 'start: "a'}, "grammar"),
    ({"grammar": '{"grammars": []}'}, "grammar"),
    ({"grammar": 'start: "\ud800"'}, "grammar"),
    ({"choice": ""}, "choice.*empty"),
    ({"choice": ["a", ""]}, "choice.*empty"),
    ({"choice": [1]}, "choice"),
    ({"choice": ["\ud800"]}, "choice"),
    ({"choice": ["a"], "regex": "a"}, "regex and choice"),
    ({"json_schema": "{}", "grammar": 'start: "a"'}, "json_schema and grammar"),
    *(
        ({**settings, "min_tokens": 2}, f"min_tokens=2 and {next(iter(settings))}")
        for settings in list(KINDS.values())[:4]
    ),
]


class TestRefusals:
    """Each names the field, before anything runs."""

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, folders: AsciiFolders) -> LLM:
        return load(folders.target("m3"), "mtp:3")

    @pytest.mark.parametrize(("settings", "words"), BAD, ids=lambda value: ascii(value)[:60])
    def test_bad_values(self, settings: dict[str, Any], words: str, llm: LLM) -> None:
        self.check(llm, settings, RequestError, words)

    def check(self, llm: LLM, settings: dict[str, Any], kind: type[SkipstoneError], words: str) -> None:
        steps = llm.engine.stats.steps
        fine = SamplingParams(max_tokens=3)
        with pytest.raises(kind, match=words) as caught:
            llm.generate([[1, 2], [3]], [fine, SamplingParams(**settings)], progress=False)
        assert "\n" not in str(caught.value)
        for call in (llm.add, lambda *job: next(llm.stream(*job))):
            with pytest.raises(kind, match=words):
                call([1, 2], SamplingParams(**settings))
        assert llm.engine.stats.steps == steps
        assert not llm.engine.has_work
        assert llm.engine.pool.num_used == 0
        assert not llm._sessions

    def test_thousands_of_choices_are_none(self, llm: LLM) -> None:
        """A parser's row holds 2,000 alternatives."""
        words = [f"{a}{b}{c}" for a in "abcdefghijklmn" for b in "abcdefghijklmn" for c in "abcdefghijklmn"]
        params = SamplingParams(choice=words, temperature=1, seed=3, max_tokens=9)
        (out,) = llm.generate([[1, 2]], params, progress=False)[0].outputs
        assert out.text in words and out.finish_reason == "stop"

    @pytest.mark.parametrize("kind", ["json", "regex", "choice", "lark"])
    def test_without_the_library(self, kind: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """What needs no grammar runs."""
        monkeypatch.setitem(sys.modules, "llguidance", None)
        self.check(llm, KINDS[kind], UnsupportedError, f"{next(iter(KINDS[kind]))}.*llguidance.*pip install")
        llm.generate([[1, 2]], SamplingParams(max_tokens=2), progress=False)

    def test_without_a_tokenizer(self, folders: AsciiFolders, tmp_path: Path) -> None:
        folder = tmp_path / "bare"
        shutil.copytree(folders.target("m3"), folder)
        (folder / "tokenizer.json").unlink()
        self.check(load(folder), KINDS["regex"], RequestError, "regex needs.*tokenizer.json.*bare")

    def test_without_an_end_of_text(self, folders: AsciiFolders, tmp_path: Path) -> None:
        folder = tmp_path / "endless"
        shutil.copytree(folders.target("m3"), folder)
        for name in ("config.json", "generation_config.json"):
            config = json.loads((folder / name).read_text())
            del config["eos_token_id"]
            (folder / name).write_text(json.dumps(config))
        self.check(load(folder), KINDS["choice"], RequestError, "choice needs.*eos_token_id.*endless")

    def test_no_options_are_no_constraint(self, llm: LLM) -> None:
        params = SamplingParams(choice=[], max_tokens=4, temperature=0.0, ignore_eos=True)
        (out,) = llm.generate([[1, 2]], params, progress=False)
        assert len(out.outputs[0].token_ids) == 4


def test_the_end_of_text_ends_a_constrained_text_that_may_go_on(folders: AsciiFolders) -> None:
    """It is no part of the text. Who ignores it gets a text that goes on while it can."""
    for settings in ({}, {"ignore_eos": True}, {"skip_special_tokens": False}):
        for k in (0, 3):
            llm = load(folders.target("m3"), f"mtp:{k}" if k else "off")
            jobs = [
                (
                    tokens(5, seed),
                    SamplingParams(regex="(ab|Q)+", temperature=1.0, seed=seed, max_tokens=40, **settings),
                )
                for seed in range(3)
            ]
            for (result,) in run(llm, jobs).results:
                if "ignore_eos" in settings:
                    assert (result.finish_reason, len(result.token_ids)) == ("length", 40)
                else:
                    assert (result.finish_reason, result.stop_reason) == ("stop", EOS)
                    assert re.fullmatch("(ab|Q)+", result.text)


def test_who_ignores_the_end_of_text_gets_the_empty_text_that_was_asked_for(folders: AsciiFolders) -> None:
    params = SamplingParams(regex="", ignore_eos=True, max_tokens=3)
    (out,) = load(folders.target("m3")).generate([tokens(7, 1)], params, progress=False)
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize("k", [0, 3])
def test_who_ignores_the_end_of_text_still_gets_an_end(k: int, folders: AsciiFolders) -> None:
    """Texts after which nothing but the end may follow."""
    constraints: list[dict[str, Any]] = [
        {"json_schema": '{"type": "integer", "minimum": 10, "maximum": 99}'},
        {"json_schema": '{"type": "number", "minimum": 0, "maximum": 0}'},
        {"json_schema": '{"enum": [1, 12, 123]}'},
        {"regex": "Q{2,4}"},
        {"regex": "[ab]?"},
        {"choice": ["a", "aa", "aaa"]},
        {"grammar": 'start: "x"? "y"?'},
    ]
    llm = load(folders.target("m3"), f"mtp:{k}" if k else "off")
    common = {"temperature": 2.0, "max_tokens": 30, "ignore_eos": True, "skip_special_tokens": False}
    jobs = [(tokens(5, seed), SamplingParams(seed=seed, **common, **c)) for c in constraints for seed in range(3)]
    for (_, params), (result,) in zip(jobs, run(llm, jobs).results, strict=True):
        assert result.finish_reason == "stop", params
        text = result.text.removesuffix("<eos>")
        if params.grammar is None:
            assert complete(params, text), (params, text)


def test_the_mask_is_none_of_the_log_probabilities(folders: AsciiFolders) -> None:
    """They are the model's own, so forbidden tokens have theirs."""
    params = SamplingParams(choice=["Q", "Z"], temperature=0.0, logprobs=-1, max_tokens=1)
    (constrained,) = load(folders.target("m3")).generate([PROMPT], params, progress=False)
    free = SamplingParams(temperature=0.0, logprobs=-1, max_tokens=1, ignore_eos=True)
    (plain,) = load(folders.target("m3")).generate([PROMPT], free, progress=False)
    assert constrained.outputs[0].logprobs[0].top_logprobs == plain.outputs[0].logprobs[0].top_logprobs
    assert all(value > -float("inf") for value in constrained.outputs[0].logprobs[0].top_logprobs)
    assert torch.tensor(constrained.outputs[0].logprobs[0].rank) > 0
