"""`LLM` used from several threads: everybody gets the text that is theirs, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

from skipstone import LLM, SamplingParams

PROMPTS = [[5 + i, 9, 2 + 3 * i, 40, 7] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def texts(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [choice.token_ids for choice in llm.generate(prompt, params, progress=False)[0].outputs]


@pytest.fixture
def llm(folder: Callable[[str], Path]) -> LLM:
    return LLM(str(folder("m3")), max_num_seqs=4, max_num_batched_tokens=32, spec="ngram:2")


def test_every_thread_gets_its_own_text(llm: LLM) -> None:
    """By every method that writes; more threads than the engine runs at once, ends of all kinds."""
    several = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=17)
    expected = [(texts(llm, prompt), texts(llm, prompt, several)) for prompt in PROMPTS]
    together = threading.Barrier(len(PROMPTS))

    def work(number: int) -> None:
        prompt, (greedy, sampled) = PROMPTS[number], expected[number]
        together.wait()
        for turn in range(6):
            if (turn + number) % 3 == 0:
                assert texts(llm, prompt) == greedy
            elif (turn + number) % 3 == 1:
                assert texts(llm, prompt, several) == sampled
            else:
                events = list(llm.stream(prompt, GREEDY))
                assert [token for event in events for token in event.token_ids] == greedy[0]
                assert events[-1].finished and events[-1].output is not None
            stream = llm.stream(prompt, GREEDY)
            assert next(stream).token_ids == greedy[0][: llm.engine.speculation.k + 1][:1]
            stream.close()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for done in [pool.submit(work, number) for number in range(len(PROMPTS))]:
            done.result(timeout=PATIENCE_S)
    llm.engine.scheduler.check()
    assert llm.engine.pool.num_used == 0 and not llm._sessions


def test_results_reach_whoever_asked(llm: LLM) -> None:
    """`on_output` is called for each prompt, whichever thread ran the step that ended it."""
    found: list[dict[int, Any]] = [{} for _ in range(3)]

    def work(number: int) -> None:
        for _ in range(3):
            found[number].clear()
            llm.generate(PROMPTS, GREEDY, progress=False, on_output=found[number].__setitem__)
            assert sorted(found[number]) == list(range(len(PROMPTS)))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, number) for number in range(3)]:
            done.result(timeout=PATIENCE_S)
    assert len({str([found[n][i].outputs[0].token_ids for i in range(6)]) for n in range(3)}) == 1


def test_who_waits_comes_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text in one thread holds up nobody in another, and `abort` from there ends it."""
    long = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
    step = llm._step

    def slow_step() -> Any:
        time.sleep(0.05)  # so that the steps allowed below are long even for a busy machine
        return step()

    monkeypatch.setattr(llm, "_step", slow_step)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(llm.generate, [1, 2, 3], long, progress=False)
        wait_for(lambda: bool(llm._sessions))
        (name,) = {session.session_id for session, _ in llm._sessions.values()}
        steps = llm.engine.stats.steps
        assert len(texts(llm, PROMPTS[0])[0]) == 24
        assert llm.engine.stats.steps - steps < 60
        assert not writing.done()
        llm.abort(name)
        assert writing.result(timeout=PATIENCE_S)[0].outputs[0].finish_reason == "abort"


def test_a_forgotten_stream_is_closed_amid_a_step(llm: LLM) -> None:
    """Python may do so at any time, so also within a step that another thread waits for."""
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    step = llm._step

    def closing_step() -> Any:
        stream.close()
        return step()

    llm._step = closing_step  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(texts, llm, prompt) for prompt in PROMPTS]:
            assert len(done.result(timeout=PATIENCE_S)[0]) == 24
    assert llm.engine.pool.num_used == 0
