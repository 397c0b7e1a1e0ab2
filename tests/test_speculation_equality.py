"""Speculation changes nothing: ids, texts, reasons and all log-probabilities equal those of an engine without it.

Each run holds every sampling feature at every temperature. Its engine is one point of a grid: target, proposer, k, how
drafts are drawn, rows a step, prefix cache, and whether blocks are so few that requests are preempted. The engine
without speculation has room for all. A sample of the grid, in which every two values of two axes meet at least
once, runs always; a larger one is marked long; all of it, in hours, with

    OMP_NUM_THREADS=1 SKIPSTONE_WHOLE_GRID=1 python -m pytest tests/test_speculation_equality.py -m long
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from oracles.speculation import (
    TEMPERATURES,
    WAYS,
    Folders,
    Job,
    Result,
    Run,
    features,
    load,
    run,
    tiny_jobs,
    watch,
)

from skipstone import LLM, SamplingParams
from skipstone.models.locate import heads_beside, locate, shipped_prompts

# Those of the sample; the others differ in their files only.
SAMPLED = ["mtp", "mtp3", "eagle3", "dflash", "draft", "ngram"]


class Point(NamedTuple):
    """One engine."""

    target: str
    proposer: str
    k: int
    sampling: str
    chunk: int
    caching: bool
    tight: bool


AXES: dict[str, list[Any]] = {
    "target": ["m3", "dsa"],
    "proposer": SAMPLED,
    "k": [1, 2, 3, 5, 8],
    "sampling": ["coupled", "greedy", "independent"],
    "chunk": [1, 4, 16, 512],
    "caching": [False, True],
    "tight": [False, True],
}
GRID = [Point(*values) for values in itertools.product(*AXES.values())]
WHOLE_GRID = [Point(*values) for values in itertools.product(*(AXES | {"proposer": list(WAYS)}).values())]


def pairs(point: Point) -> set[tuple]:
    """Every two values that meet in a point."""
    return set(itertools.combinations(enumerate(point), 2))


def sample_of_grid() -> list[Point]:
    """Points in which every pair of values occurs; chosen greedily among random ones, always the same."""
    draw = random.Random(7)
    missing = set().union(*map(pairs, GRID))
    chosen = []
    while missing:
        candidates = draw.sample(GRID, min(60, len(GRID)))
        best = max(candidates, key=lambda point: len(pairs(point) & missing))
        if pairs(best) & missing:
            chosen.append(best)
            missing -= pairs(best)
    return sorted(chosen)


SAMPLE = sample_of_grid()
# The same points with index keys in FP8, on the same checkpoint.
POINTS = [*SAMPLE, *(point._replace(target="dsa_fp8") for point in SAMPLE if point.target == "dsa")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("speculation"))


@pytest.fixture(scope="module")
def alone(folders: Folders) -> Callable[[str], list[list[Result]]]:
    """What each job gives without speculation."""

    def results(name: str) -> list[list[Result]]:
        return folders.plain(name, tiny_jobs(), max_num_seqs=8).results

    return cache(results)


def some_jobs(point: Point) -> slice:
    """Every fourth job, fewer where steps are small and many; all have their turn."""
    stride = {1: 10, 4: 6}.get(point.chunk, 4)
    return slice(POINTS.index(point) % stride, None, stride)


def engine_of(point: Point, folders: Folders) -> LLM:
    """The engine of a point."""
    way = WAYS[point.proposer]
    tight = {"num_blocks": 15, "max_model_len": 96} if point.tight else {"max_num_seqs": 4}
    return load(
        folders.target(point.target, way.modules), folders.spec(way, point.target, point.k),
        draft_sampling=point.sampling, max_num_batched_tokens=point.chunk, prefix_caching=point.caching, **tight,
    )  # fmt: skip


def check_point(point: Point, part: slice, folders: Folders, alone: Callable) -> Counter:
    """Run these jobs in a point and compare; returns what happened in it."""
    llm = engine_of(point, folders)
    chooser = watch(llm)
    found = run(llm, tiny_jobs()[part])
    for job, mine, expected in zip(tiny_jobs()[part], found.results, alone(point.target)[part], strict=True):
        assert mine == expected, f"{point}: {job[1]}"
    stats = llm.engine.scheduler.stats
    return Counter(
        drafted=found.drafted, accepted=found.accepted, preempted=stats.preemptions, hits=stats.prefix_hit_tokens,
        chosen=chooser.count,
    )  # fmt: skip


def test_the_jobs_are_worth_running(alone: Callable) -> None:
    """They end for every reason, and each feature changes some text."""
    for target in AXES["target"]:
        results = alone(target)
        assert len(results) == len(features()) * len(TEMPERATURES)
        reasons = Counter((one.finish_reason, type(one.stop_reason)) for choices in results for one in choices)
        assert set(reasons) >= {("length", type(None)), ("stop", int), ("stop", str)}
        assert len({one.token_ids for choices in results for one in choices}) > len(results)
        assert min(len(one.token_ids) for choices in results for one in choices) < 8


def test_the_sample_holds_every_pair_of_values() -> None:
    """Every value too, of course, and few points."""
    assert set().union(*map(pairs, SAMPLE)) == set().union(*map(pairs, GRID))
    assert len(SAMPLE) < len(GRID) / 10


@pytest.mark.parametrize("point", POINTS, ids=lambda p: "-".join(map(str, p)))
def test_the_text_is_that_without_speculation(point: Point, folders: Folders, alone: Callable) -> None:
    assert_it_happened(point, check_point(point, some_jobs(point), folders, alone))


def assert_it_happened(point: Point, counts: Counter) -> None:
    """Drafts were verified and some kept; blocks were found again and taken away where that was the plan."""
    if point.chunk > 1:  # one row a step leaves none for drafts
        assert counts["drafted"] > 0
    if point.chunk > 4:
        assert counts["accepted"] > 0
        assert counts["drafted"] > counts["accepted"]
        assert (counts["preempted"] > 0) == point.tight
        assert (counts["hits"] > 0) == point.caching


@pytest.mark.long
@pytest.mark.parametrize("proposer", list(WAYS))
@pytest.mark.parametrize("target", AXES["target"])
def test_more_points_of_the_grid(target: str, proposer: str, folders: Folders, alone: Callable) -> None:
    points = [point for point in WHOLE_GRID if (point.target, point.proposer) == (target, proposer)]
    whole = bool(os.environ.get("SKIPSTONE_WHOLE_GRID"))
    for point in points[:: 1 if whole else 61]:
        assert_it_happened(point, check_point(point, slice(None, None, 1 if whole else 3), folders, alone))


def demo_jobs(llm: LLM) -> list[Job]:
    """Held-out prompts with settings that people use."""
    lines = shipped_prompts().read_text().splitlines()[:200:29]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 1.0, "min_p": 0.05, "stop": ["\n\n", ". "]}, {"temperature": 0.0, "stop": "\n"},
        {"temperature": 0.6, "top_k": 20, "min_tokens": 8}, {"temperature": 0.0, "logit_bias": {10: 3.0}},
    ]  # fmt: skip
    prompts = [llm.tokenizer.encode(json.loads(line)["prompt"])[:60] for line in lines]
    params = [SamplingParams(**kind, seed=i, max_tokens=24, logprobs=3) for i, kind in enumerate(kinds)]
    return list(zip(prompts, params, strict=True))


@pytest.fixture(scope="module")
def demo_alone() -> Callable[[str], Run]:
    """The jobs without speculation."""

    def results(name: str) -> Run:
        llm = LLM(model=name, spec="off", dtype="float32", prefix_caching=False)
        return run(llm, demo_jobs(llm))

    return cache(results)


@pytest.mark.parametrize(
    ("name", "spec", "length"),
    [
        ("demo", "mtp:3", 1.7), ("demo", "eagle3:{eagle3}:4", 1.7), ("demo", "dflash:{dflash}:7", 1.4),
        ("demo-dsa", "mtp:5", 1.7), pytest.param("demo-dsa", "mtp:1", 1.4, marks=pytest.mark.long),
        pytest.param("demo", "ngram:4", 1.0, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_trained_drafters_change_nothing_either(name: str, spec: str, length: float, demo_alone: Callable) -> None:
    """With default sizes, or chunks and the prefix cache; acceptance is far from none."""
    heads = {method: str(folder) for method, folder in heads_beside(locate(name)).items()}
    llm = LLM(model=name, spec=spec.format(**heads), dtype="float32", max_num_batched_tokens=48)
    found = run(llm, demo_jobs(llm))
    assert found.results == demo_alone(name).results
    assert llm.engine.scheduler.stats.speculation.acceptance_length > length
