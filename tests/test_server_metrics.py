"""Metrics: what is counted. docs/metrics.md is written by running this file with PYTHONPATH=. set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Serving, serving
from waiting import wait_for

from skipstone.core.speculation import SpeculationStats
from skipstone.server.acceptance import FEWEST_STEPS, AcceptanceWatch
from skipstone.server.metrics import METRICS, OWN_PREFIX, Metric

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "metrics.md"
DEMO = ROOT / "checkpoints" / "demo"

HEAD = """# Metrics

Written by `PYTHONPATH=. python tests/test_server_metrics.py`; a test compares it with the program.

`GET /metrics` of [the server](server.md) shows them in Prometheus's text format. Names with the prefix `vllm:` are
those of vLLM and mean the same, so its dashboards and benchmark clients work; `--metrics-prefix` changes the prefix.
Names with `skipstone_` are our own. Every metric has the labels `model_name` and `engine` (always 0).

A choice is one text: a request with `n` 3 and two prompts has six. A verify step is a step in which drafts of one
choice were verified. Mean tokens per verify step: 1 + accepted / drafts, from
`vllm:spec_decode_num_accepted_tokens_total` and `vllm:spec_decode_num_drafts_total`.

| name | kind | further label | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(row(metric) for metric in METRICS)


def row(metric: Metric) -> str:
    name = ("vllm:" if metric.peer else OWN_PREFIX) + metric.name + ("_total" if metric.kind == "counter" else "")
    return f"| `{name}` | {metric.kind} | {f'`{metric.label}`' if metric.label else ''} | {metric.help} |\n"


def test_the_page_is_what_the_program_has() -> None:
    assert TARGET.read_text() == page(), "run PYTHONPATH=. python tests/test_server_metrics.py"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    if not any(DEMO.glob("*.safetensors")):
        pytest.skip("the demo checkpoint's weights are not here")
    with serving() as running:
        yield running


def values(server: Serving) -> dict[str, dict[str, float]]:
    """Every sample: name -> the label that is its own (or "") -> value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            own = {key: text for key, text in sample.labels.items() if key not in ("model_name", "engine")}
            assert sample.labels["model_name"] == "demo" and sample.labels["engine"] == "0"
            found.setdefault(sample.name, {})["".join(own.values())] = sample.value
    return found


def test_what_is_counted(server: Serving) -> None:
    body = {"prompt": [[5] * 70, [6, 7]], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "n": 2}
    begun = time.perf_counter()
    answers = [server.post("/v1/completions", body).json() for _ in range(2)]
    assert server.post("/v1/completions", {"prompt": "a", "n": 0}).status_code == 400
    wait_for(lambda: server.idle)
    seconds = time.perf_counter() - begun
    found = values(server)
    drafts = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert found["vllm:generation_tokens_total"][""] == 160
    assert found["vllm:prompt_tokens_total"][""] == 2 * 2 * 72
    assert found["vllm:request_success_total"] == {"stop": 0, "length": 8, "abort": 0}
    assert found["vllm:spec_decode_num_drafts_total"][""] == sum(d["num_spec_steps"] for d in drafts)
    assert found["vllm:spec_decode_num_draft_tokens_total"][""] == sum(d["num_draft_tokens"] for d in drafts)
    accepted = sum(d["num_accepted_draft_tokens"] for d in drafts)
    assert found["vllm:spec_decode_num_accepted_tokens_total"][""] == accepted
    assert sum(found["vllm:spec_decode_num_accepted_tokens_per_pos_total"].values()) == accepted
    assert found["vllm:prefix_cache_hits_total"][""] > 0 and 0 < found["skipstone_prefix_hit_rate"][""] < 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert found[f"vllm:{name}_count"][""] == 8
    assert found["vllm:request_generation_tokens_sum"][""] == 160
    assert found["vllm:kv_cache_usage_perc"][""] == found["vllm:num_requests_running"][""] == 0
    phases = [found[f"skipstone_{phase}_seconds_total"][""] for phase in ("target", "verify", "draft")]
    assert min(phases) > 0 and sum(phases) <= seconds
    assert found["skipstone_http_responses_total"]["400"] == 1
    assert found["skipstone_acceptance_length"][""] > 1 and found["skipstone_acceptance_collapsed"][""] == 0


def test_every_metric_is_shown_and_listed(server: Serving) -> None:
    server.post("/v1/completions", {"prompt": "def f(", "max_tokens": 8, "ignore_eos": True})
    shown = {family.name for family in text_string_to_metric_families(server.get("/metrics").text)}
    assert shown == {("vllm:" if metric.peer else OWN_PREFIX) + metric.name for metric in METRICS}


class TestAcceptanceWatch:
    def run(self, phases: list[tuple[int, float]]) -> AcceptanceWatch:
        """Seconds of steps with one draft each, ten a second, and the share of them that is accepted."""
        watch, stats, now = AcceptanceWatch(), SpeculationStats(), 0.0
        for seconds, rate in phases:
            for i in range(seconds * 10):
                now += 0.1
                stats.record(1, int((i + 1) * rate) - int(i * rate))
                watch.observe(now, stats)
        return watch

    def test_steady(self) -> None:
        watch = self.run([(300, 0.6)])
        assert not watch.collapsed and watch.recent_length == pytest.approx(1.6, abs=0.02)

    def test_a_fall(self) -> None:
        assert self.run([(300, 0.6), (61, 0.2)]).collapsed
        assert not self.run([(300, 0.6), (61, 0.4)]).collapsed

    def test_it_recovers(self) -> None:
        assert not self.run([(300, 0.6), (61, 0.2), (62, 0.6)]).collapsed

    def test_never_any(self) -> None:
        assert self.run([(FEWEST_STEPS // 10 + 2, 0.0)]).collapsed
        assert not self.run([(FEWEST_STEPS // 10 - 2, 0.0)]).collapsed

    def test_nothing_yet(self) -> None:
        watch = AcceptanceWatch()
        watch.observe(1.0, SpeculationStats())
        assert not watch.collapsed and watch.recent_length is None


if __name__ == "__main__":
    TARGET.write_text(page())
