"""Decode steps that stay on the device write what the plain loop writes; here on the CPU, without graphs.

The oracle is the engine without speculation, and for acceptance the plain loop with the same drafts.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from skipstone.runtime.device_loop import DeviceLoop

from skipstone import LLM, SamplingParams
from skipstone.core.batch import Batch
from skipstone.core.plan import StepPlan
from skipstone.outputs import RequestOutput

SPECS = ["off", "mtp:1", "mtp:3", "mtp:5", "eagle3:3"]


def on_device(llm: LLM, overlap: bool) -> DeviceLoop:
    engine = llm.engine
    k = engine.speculation.k
    loop = engine.runner.make_device_loop(engine.scheduler.max_requests, k, engine.caches.max_model_len, graphs=False)
    assert loop is not None
    engine.overlap = overlap
    return loop


def jobs(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(8, 6000) for _ in range(length)] for length in (3, 31, 32, 65, 100, 7)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=1, max_tokens=50),
        SamplingParams(temperature=1, seed=2, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0.3, seed=3, max_tokens=64, num_speculative_tokens=1 if llm.proposer else None),
        SamplingParams(temperature=1, seed=4, max_tokens=20, top_p=0.9, min_p=0.05, top_k=40, min_tokens=4),
    ]
    return prompts, params


def run(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(*jobs(llm), progress=False)
    llm.engine.scheduler.check()
    assert llm.engine.pool.num_used == 0
    return outputs


def texts(outputs: list[RequestOutput]) -> list[Any]:
    return [(choice.token_ids, choice.finish_reason) for output in outputs for choice in output.outputs]


def options(model: str, spec: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "spec": spec, "max_num_seqs": 6, "max_model_len": 256, "device": "cpu", **more}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    return {model: texts(run(LLM(**options(model, "off")))) for model in ("demo", "demo-dsa")}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "model, spec", [*(("demo", spec) for spec in SPECS), ("demo-dsa", "off"), ("demo-dsa", "mtp:3")]
)
def test_same_text_as_without_drafts(model: str, spec: str, overlap: bool, expected: dict[str, list[Any]]) -> None:
    llm = LLM(**options(model, spec))
    on_device(llm, overlap)
    assert texts(run(llm)) == expected[model]


@pytest.mark.parametrize("spec", ["mtp:3", "eagle3:3"])
def test_same_acceptance_as_the_plain_loop(spec: str) -> None:
    plain, device = LLM(**options("demo", spec)), LLM(**options("demo", spec))
    on_device(device, overlap=False)
    run(plain), run(device)
    a, b = (llm.engine.scheduler.stats.speculation for llm in (plain, device))
    # Draft heads are not exact: with other rows beside it, a draft may turn out another where two logits are close.
    assert abs(a.accepted - b.accepted) <= 2
    assert abs(a.drafted - b.drafted) <= 6


def test_overlap_starts_steps_early(monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[Any]]) -> None:
    llm = LLM(**options("demo", "mtp:3"))
    loop = on_device(llm, overlap=True)
    early: list[int] = []
    start_next = loop.start_next
    monkeypatch.setattr(loop, "start_next", lambda before: early.append(1) or start_next(before))
    assert texts(run(llm)) == expected["demo"]
    assert len(early) > llm.engine.stats.steps // 3


@pytest.mark.parametrize("overlap", [False, True])
def test_few_blocks_and_preemption(overlap: bool, expected: dict[str, list[Any]]) -> None:
    llm = LLM(**options("demo", "mtp:3", num_blocks=9))
    on_device(llm, overlap)
    assert texts(run(llm)) == expected["demo"]
    assert llm.engine.scheduler.stats.preemptions > 0


def test_simulated_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins are a function of seed and position, so both loops accept the same number everywhere."""
    lengths = []
    for device in (False, True):
        llm = LLM(**options("demo", "mtp:3", simulate_acceptance="0.8,0.6,0.3"))
        if device:
            on_device(llm, overlap=True)
        params = SamplingParams(temperature=0, seed=7, max_tokens=60, ignore_eos=True)
        llm.generate([[5, 6, 7], [9, 10]], params, progress=False)
        lengths.append(llm.engine.scheduler.stats.speculation.accepted)
    assert lengths[0] == lengths[1] > 20


def test_joining_and_leaving(expected: dict[str, list[Any]]) -> None:
    """Requests that come and go between steps leave the others' texts alone."""
    llm = LLM(**options("demo", "mtp:3"))
    on_device(llm, overlap=True)
    prompts, params = jobs(llm)
    sessions = []
    for prompt, p in zip(prompts, params, strict=True):
        sessions.append(llm.add(prompt, p))
        for _ in range(4):
            llm.step()
    aborted = llm.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=100))
    llm.step()
    llm.step()
    llm.abort(aborted.session_id)
    while llm.engine.has_work:
        llm.step()
    assert texts([session.output() for session in sessions]) == expected["demo"]
    assert llm.engine.pool.num_used == 0


def test_what_the_device_does_not_sample_takes_the_plain_loop() -> None:
    llm = LLM(**options("demo", "mtp:3"))
    loop = on_device(llm, overlap=False)
    seen: list[bool] = []
    covers = loop.covers

    def watched(plan: StepPlan) -> bool:
        seen.append(covers(plan))
        return seen[-1]

    loop.covers = watched  # type: ignore[method-assign]
    for option in ({"logprobs": 2}, {"repetition_penalty": 1.1}, {"logit_bias": {5: 1.0}}):
        params = SamplingParams(temperature=1, seed=1, max_tokens=6, **option)  # type: ignore[arg-type]
        llm.generate([[3, 4]], params, progress=False)
    assert seen and not any(seen)


@pytest.mark.parametrize("seed", range(3))
def test_fuzz(seed: int, expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive, are aborted, preempted and admitted again at random while steps are started early."""
    rng = random.Random(seed)
    llm = LLM(**options("demo", "mtp:3", num_blocks=11))
    on_device(llm, overlap=True)
    model = llm.engine.model
    run_model = model.forward

    def in_range(batch: Batch, *rest: Any) -> Any:
        assert int(batch.input_ids.min()) >= 0 and int(batch.input_ids.max()) < llm.engine.vocab_size
        return run_model(batch, *rest)

    monkeypatch.setattr(model, "forward", in_range)
    prompts, params = jobs(llm)
    waiting = list(range(len(prompts)))
    rng.shuffle(waiting)
    sessions: dict[int, Any] = {}
    noise: list[Any] = []
    while waiting or llm.engine.has_work:
        if waiting and rng.random() < 0.2:
            number = waiting.pop()
            sessions[number] = llm.add(prompts[number], params[number])
        if waiting and rng.random() < 0.15:
            length = rng.randrange(1, 90)
            noise.append(llm.add([9] * length, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
        if noise and rng.random() < 0.2:
            llm.abort(noise.pop(rng.randrange(len(noise))).session_id)
        if llm.engine.has_work:
            llm.step()
            llm.engine.scheduler.check()
    assert texts([sessions[number].output() for number in range(len(prompts))]) == expected["demo"]
    assert llm.engine.pool.num_used == 0
