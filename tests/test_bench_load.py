"""`skipstone bench load` without a GPU: requests arrive on their own, all of them end, and every step is counted."""

from __future__ import annotations

import pytest

from skipstone import LLM
from skipstone.tools.bench.load import Scenario, drive


@pytest.mark.parametrize("rate", [0, 40])
@pytest.mark.parametrize("spec", ["off", "mtp:3"])
def test_a_scenario(spec: str, rate: float) -> None:
    llm = LLM("demo", spec=spec, device="cpu", max_num_seqs=4, max_model_len=128, prefix_caching=False)
    engine, load = llm.engine, Scenario("some", rate, 7, (5, 40), (1, 9), {"logprobs": 1})
    engine.overlap = True
    seen = drive(engine, load, 3)
    assert not engine.has_work and engine.pool.num_used == 0
    names = {f"some-{i}" for i in range(7)}
    assert seen.tokens.keys() == seen.first.keys() == seen.last.keys() == seen.arrivals.keys() == names
    assert sum(seen.tokens.values()) == engine.stats.output_tokens
    assert all(1 <= count <= 9 for count in seen.tokens.values())
    assert all(seen.arrivals[name] < seen.first[name] <= seen.last[name] <= seen.wall for name in names)
    assert (len(set(seen.arrivals.values())) == 7) == (rate > 0)
    assert len(seen.steps) == engine.stats.steps
    summary = seen.summary()
    assert summary["tokens_s"] == pytest.approx(engine.stats.output_tokens / seen.wall, rel=0.01)
    assert {reads for reads, _ in seen.steps} == {False, True}
    assert all(0 < summary[name][0] <= summary[name][1] for name in ("ttft_ms", "decode_step_ms", "mixed_step_ms"))


def test_a_seed_always_means_the_same_requests() -> None:
    found = []
    for _ in range(2):
        llm = LLM("demo", spec="off", device="cpu", max_num_seqs=4, max_model_len=128)
        found.append(drive(llm.engine, Scenario("some", 0, 4, (5, 40), (1, 9)), 3).tokens)
    assert found[0] == found[1]
