"""How long prompts may hold up requests that decode: `max_decode_delay`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from oracles.tiny import Tiny, write_folder

from skipstone import LLM, SamplingParams
from skipstone.runtime import engine as engine_module
from skipstone.runtime.chunk_limit import FEWEST, is_chunk

PROMPT = [number % 90 + 5 for number in range(300)]


class Clock:
    """A machine whose steps take `fixed` seconds, and `per_row` for every row of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM, fixed: float, per_row: float) -> None:
        self.now, self.chunks, self.seconds = 0.0, [], []
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        start = llm.engine.runner.start

        def started(plan):  # type: ignore[no-untyped-def]
            rows = sum(item.num_rows for item in plan.items if is_chunk(item))
            spent = fixed + per_row * rows
            self.now += spent
            if rows and len(plan.items) > 1:
                self.chunks.append(rows)
                self.seconds.append(spent)
            return start(plan)

        monkeypatch.setattr(llm.engine.runner, "start", started)


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tiny("m3"), tmp_path_factory.mktemp("chunks") / "m3"))


def answers(llm: LLM) -> list[list[int]]:
    """A request that decodes, and a long prompt that comes while it does."""
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    sessions = [llm.add(PROMPT[:5], params)]
    for _ in range(3):
        llm.step()
    sessions.append(llm.add(PROMPT, params))
    while not all(session.finished for session in sessions):
        llm.step()
    return [session.choices[0].token_ids for session in sessions]


def test_steps_become_as_long_as_allowed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, spec="off", max_decode_delay=50, prefix_caching=False, max_num_batched_tokens=256) as llm:
        clock = Clock(monkeypatch, llm, fixed=0.005, per_row=0.002)  # 22 rows in 50 ms
        limited = answers(llm)
    assert sum(clock.chunks) >= len(PROMPT) - 1
    assert all(spent < 0.055 for spent in clock.seconds[3:]), clock.seconds
    assert sorted(clock.chunks)[len(clock.chunks) // 2] >= 18
    with LLM(folder, spec="off", prefix_caching=False, max_num_batched_tokens=256) as llm:
        clock = Clock(monkeypatch, llm, fixed=0.005, per_row=0.002)
        assert answers(llm) == limited
    assert clock.chunks[0] == 255, "without a limit a prompt takes all rows of a step but those that decode"


def test_an_unreachable_limit_leaves_a_little(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, spec="off", max_decode_delay=1, prefix_caching=False) as llm:
        clock = Clock(monkeypatch, llm, fixed=0.02, per_row=0.002)
        answers(llm)
    assert min(clock.chunks[:-1]) == FEWEST


def test_prompts_alone_take_all_rows(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, spec="off", max_decode_delay=1, prefix_caching=False, max_num_batched_tokens=128) as llm:
        rows: list[int] = []
        start = llm.engine.runner.start
        monkeypatch.setattr(llm.engine.runner, "start", lambda plan: rows.append(plan.num_rows) or start(plan))
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2), progress=False)
    assert rows == [128, 128, 44, 1]
