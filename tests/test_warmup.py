"""The steps before the first request: all kinds of them run, and nothing of them is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from oracles.speculation import WAYS, Folders, load, run, tiny_jobs

from skipstone.core.batch import FIRST_BLOCK, ZERO_BLOCK
from skipstone.core.kv_cache import KVCache
from skipstone.core.plan import StepPlan
from skipstone.runtime.runner import ModelRunner, StepHandle
from skipstone.runtime.warmup import warm_up

NAN = float("nan")
Start = Callable[[ModelRunner, StepPlan], StepHandle]


@pytest.mark.parametrize(("target", "way"), [("dsa", "off"), *(("m3", way) for way in WAYS), ("dsa", "mtp3")])
def test_texts_are_those_without_it(target: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = Folders(tmp_path)
    spec = folders.spec(WAYS[way], target, 3) if way in WAYS else "off"
    files = folders.target(target, WAYS[way].modules if way in WAYS else 1)
    sizes = {"max_num_seqs": 5, "max_model_len": 96, "max_num_batched_tokens": 40}
    jobs = tiny_jobs()[::4]
    expected = run(load(files, spec, **sizes), jobs)
    llm = load(files, spec, **sizes)
    runner = llm.engine.runner
    own = getattr(runner.proposer, "cache", None)
    caches: list[KVCache] = [runner.cache, *([own] if own is not None else [])]
    for cache in caches:
        cache.fill(NAN)
    plans: list[StepPlan] = []
    start: Start = ModelRunner.start
    monkeypatch.setattr(ModelRunner, "start", lambda self, plan: plans.append(plan) or start(self, plan))
    ticks: list[tuple[int, int]] = []
    warm_up(runner, 40, lambda done, count: ticks.append((done, count)))
    monkeypatch.undo()
    assert ticks == [(i, len(plans)) for i in range(1, len(plans) + 1)]
    check_plans(plans, runner.most_drafts)
    for tensor in (tensor for cache in caches for tensors in cache.layers.values() for tensor in tensors.values()):
        assert not tensor[ZERO_BLOCK].float().any()
        assert tensor[FIRST_BLOCK:].float().isnan().all()
    found = run(llm, jobs)
    assert (found.results, found.drafted, found.accepted) == (expected.results, expected.drafted, expected.accepted)


def check_plans(plans: list[StepPlan], k: int) -> None:
    """Prompts of all lengths up to the budget, alone and beside a request that decodes; every number of requests."""
    rows = {tuple(item.num_rows for item in plan.items) for plan in plans}
    assert {(1,), (8,), (33,), (40,), (k + 1, 40)} <= rows
    assert {(k + 1,) * count for count in (1, 2, 4, 5)} <= rows
    params = [new.params for plan in plans for new in plan.admissions if len(plan.admissions) == 5]
    assert {(p.greedy, p.top_p < 1, p.logprobs, bool(p.logit_bias)) for p in params} == {
        (True, False, None, False), (False, True, None, False), (False, False, 1, False), (False, False, None, True),
    }  # fmt: skip
