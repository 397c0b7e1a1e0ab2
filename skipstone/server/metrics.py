"""What /metrics shows. `METRICS` is the one list of names; docs/metrics.md is made from it.

Names that vLLM also has mean the same there. Totals are read from the engine when somebody asks; only histograms cost
something in a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from skipstone.llm import LLM
from skipstone.server.acceptance import AcceptanceWatch
from skipstone.server.generation import Generation
from skipstone.server.online_check import OnlineCheck
from skipstone.server.step_observer import StepObserver
from skipstone.session import Choice

OWN_PREFIX = "skipstone_"
LABELS = ("model_name", "engine")
FINE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LONG = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0)


class Metric(NamedTuple):
    """One name. Counters are exported with `_total` behind it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    peer: bool = True  # whether vLLM has it too
    label: str | None = None
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric("num_requests_running", "gauge", "choices that take part in steps"),
    Metric("num_requests_waiting", "gauge", "choices that wait for a place or for blocks"),
    Metric("kv_cache_usage_perc", "gauge", "share of the cache blocks in use, 0 to 1"),
    Metric("num_preemptions", "counter", "requests whose blocks were taken away, to be computed again"),
    Metric("prompt_tokens", "counter", "prompt tokens of the choices that got a first token"),
    Metric("generation_tokens", "counter", "tokens emitted; rejected drafts are not among them"),
    Metric("prefix_cache_queries", "counter", "prompt tokens looked up in the prefix cache"),
    Metric("prefix_cache_hits", "counter", "prompt tokens found there"),
    Metric("request_success", "counter", "choices that have ended, by reason", label="finished_reason"),
    Metric("spec_decode_num_drafts", "counter", "verify steps with at least one draft"),
    Metric("spec_decode_num_draft_tokens", "counter", "drafts that were verified"),
    Metric("spec_decode_num_accepted_tokens", "counter", "drafts that were emitted"),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos", "counter", "the same by place in the run, from 0", label="position"
    ),
    Metric("time_to_first_token_seconds", "histogram", "from the request's arrival to its first token", buckets=FINE),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "between two steps that gave a choice tokens; a step may give several",
        buckets=FINE,
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "time after the first token, per further token",
        buckets=FINE,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "from the request's arrival to a choice's end", buckets=LONG),
    Metric(
        "request_queue_time_seconds", "histogram", "from the request's arrival to the first step on it", buckets=LONG
    ),
    Metric("request_prefill_time_seconds", "histogram", "from that step to the first token", buckets=LONG),
    Metric("request_decode_time_seconds", "histogram", "from the first token to a choice's end", buckets=LONG),
    Metric("request_prompt_tokens", "histogram", "prompt tokens of a choice that has ended", buckets=COUNTS),
    Metric("request_generation_tokens", "histogram", "emitted tokens of a choice that has ended", buckets=COUNTS),
    Metric("iteration_tokens_total", "histogram", "rows of a step", buckets=COUNTS),
    Metric("steps", "counter", "engine steps", peer=False),
    Metric("late_compilations", "counter", "kernels compiled or loaded, graphs captured since the warm-up", peer=False),
    Metric("target_seconds", "counter", "time in the target model and in planning; not measured on a GPU", peer=False),
    Metric("verify_seconds", "counter", "time in sampling and verification; not measured on a GPU", peer=False),
    Metric("draft_seconds", "counter", "time in the proposer; not measured on a GPU", peer=False),
    Metric("acceptance_length", "gauge", "tokens per verify step since the start, the added one included", peer=False),
    Metric("recent_acceptance_length", "gauge", "the same over the last minute", peer=False),
    Metric(
        "acceptance_collapsed",
        "gauge",
        "1: over the last minute under half as many drafts were accepted as before, or hardly any; alarm on it",
        peer=False,
    ),
    Metric("prefix_hit_rate", "gauge", "share of the prompt tokens found in the prefix cache", peer=False),
    Metric("online_checks", "counter", "verify steps that `--online` has computed again without drafts", peer=False),
    Metric(
        "online_mismatches", "counter", "those in which other tokens came out; alarm on anything above 0", peer=False
    ),
    Metric("http_responses", "counter", "answers by HTTP status", peer=False, label="status"),
)
BY_NAME = {metric.name: metric for metric in METRICS}


class ServerMetrics(Collector):
    """Counts what the engine does not, and shows all of it."""

    def __init__(
        self, llm: LLM, model_name: str, prefix: str, observer: StepObserver, online: OnlineCheck, engine: str
    ) -> None:
        self._llm = llm
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": engine}
        self._observer = observer
        self._online = online
        self.acceptance = AcceptanceWatch()
        self.prompt_tokens = 0
        """Prompt tokens of the choices that got a first token."""
        self._rows = 0
        self._ended = dict.fromkeys(("stop", "length", "abort"), 0)
        self._responses: dict[str, int] = {}
        self._latest: dict[str, float] = {}  # when a running choice last got tokens
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every histogram, which nothing reads
        self._registry = CollectorRegistry()
        self._histograms = {
            metric.name: Histogram(
                self.full_name(metric), metric.help, LABELS, buckets=metric.buckets, registry=self._registry
            ).labels(**self._labels)
            for metric in METRICS
            if metric.kind == "histogram"
        }
        self._registry.register(self)

    def full_name(self, metric: Metric) -> str:
        """The name with its prefix."""
        return (self._prefix if metric.peer else OWN_PREFIX) + metric.name

    def text(self) -> bytes:
        """The page at /metrics, in Prometheus's text format."""
        return generate_latest(self._registry)

    def on_response(self, status: int) -> None:
        """Count an HTTP answer by its status."""
        self._responses[str(status)] = self._responses.get(str(status), 0) + 1

    # On the engine's thread.

    def on_step(self) -> None:
        """Count a step's rows, and read the counters of acceptance."""
        rows, self._rows = self._llm.engine.stats.rows - self._rows, self._llm.engine.stats.rows
        self._histograms["iteration_tokens_total"].observe(rows)
        self.acceptance.observe(time.monotonic(), self._llm.engine.scheduler.stats.speculation)

    def on_tokens(self, generation: Generation, choice: Choice, num_tokens: int) -> None:
        """Measure the time to a choice's first token, or since its last ones."""
        now, name = time.perf_counter(), choice.request.request_id
        before = self._latest.get(name)
        self._latest[name] = now
        if before is not None:
            self._histograms["inter_token_latency_seconds"].observe(now - before)
            return
        self.prompt_tokens += choice.request.num_prompt_tokens
        self._histograms["time_to_first_token_seconds"].observe(now - generation.timing.arrival)

    def on_end(self, generation: Generation, choice: Choice) -> None:
        """A choice has ended, or was aborted."""
        request, now = choice.request, time.perf_counter()
        self._latest.pop(request.request_id, None)
        reason = request.finish_reason.value if request.finish_reason else "abort"
        self._ended[reason] += 1
        if reason == "abort":
            return
        timing, tokens = generation.timing, len(choice.token_ids)
        self._histograms["e2e_request_latency_seconds"].observe(now - timing.arrival)
        self._histograms["request_prompt_tokens"].observe(request.num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(tokens)
        started, first = timing.started, timing.first_token
        if started is not None and first is not None:
            self._histograms["request_queue_time_seconds"].observe(started - timing.arrival)
            self._histograms["request_prefill_time_seconds"].observe(first - started)
            self._histograms["request_decode_time_seconds"].observe(now - first)
        if tokens > 1 and timing.first_token is not None:
            per_token = (now - timing.first_token) / (tokens - 1)
            self._histograms["request_time_per_output_token_seconds"].observe(per_token)

    # When somebody asks.

    def collect(self) -> Iterator[Family]:
        """Everything but the histograms."""
        for name, value in self._values().items():
            metric = BY_NAME[name]
            labels = (*LABELS, metric.label) if metric.label else LABELS
            kind: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(self.full_name(metric), metric.help, labels=labels)
            for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
                family.add_metric([*self._labels.values(), *([key] if key is not None else [])], number)
            yield family

    def _values(self) -> dict[str, float | dict[str, int]]:
        engine = self._llm.engine
        scheduler, pool, speculation = engine.scheduler, engine.pool, engine.scheduler.stats.speculation
        looked_up, found = scheduler.stats.prefix_query_tokens, scheduler.stats.prefix_hit_tokens
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": pool.num_used / pool.num_ownable,
            "num_preemptions": scheduler.stats.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": engine.stats.output_tokens,
            "prefix_cache_queries": looked_up,
            "prefix_cache_hits": found,
            "request_success": dict(self._ended),
            "spec_decode_num_drafts": speculation.steps,
            "spec_decode_num_draft_tokens": speculation.drafted,
            "spec_decode_num_accepted_tokens": speculation.accepted,
            "spec_decode_num_accepted_tokens_per_pos": _numbered(speculation.accepted_per_position),
            "steps": engine.stats.steps,
            "late_compilations": engine.late_compilations,
            **{f"{phase}_seconds": seconds for phase, seconds in self._observer.seconds.items()},
            "acceptance_length": speculation.acceptance_length or 1.0,
            "recent_acceptance_length": self.acceptance.recent_length or 1.0,
            "acceptance_collapsed": self.acceptance.collapsed,
            "prefix_hit_rate": found / looked_up if looked_up else 0.0,
            "online_checks": self._online.checks,
            "online_mismatches": self._online.mismatches,
            "http_responses": dict(self._responses),
        }


def _numbered(counts: Iterable[int]) -> dict[str, int]:
    return {str(position): count for position, count in enumerate(counts)}
