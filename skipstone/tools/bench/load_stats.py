"""From the samples of a run to percentiles, throughput, goodput and acceptance; the JSON keys are vLLM's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from skipstone.errors import ConfigError
from skipstone.tools.bench.load_client import Drafts, Sample

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between events",
    "e2el": "time to the end",
}


def values_of(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Milliseconds of every metric, over the samples that were answered."""
    answered = [sample for sample in samples if sample.error is None]
    per_token = [sample.per_token for sample in answered]
    return {
        "ttft": [1e3 * sample.first for sample in answered],
        "tpot": [1e3 * value for value in per_token if value is not None],
        "itl": [1e3 * gap for sample in answered for gap in sample.gaps],
        "e2el": [1e3 * sample.seconds for sample in answered],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, between two of them in proportion; 0 without values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    place = share / 100 * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def parse_goals(text: str | None) -> dict[str, float]:
    """Read `ttft:200,tpot:40`, in milliseconds. Raises ConfigError."""
    goals: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, limit = part.strip().partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ConfigError(
                f"--goodput {text}: {part!r} is no limit; write ttft:200,tpot:40 (milliseconds)"
            ) from None
        if name not in METRICS or name == "itl":
            raise ConfigError(f"--goodput {text}: {name!r} is no metric of a request; there are ttft, tpot, e2el")
    return goals


def meets(sample: Sample, goals: Mapping[str, float]) -> bool:
    """Whether a request was answered within every limit."""
    if sample.error is not None:
        return False
    own = {"ttft": sample.first, "tpot": sample.per_token or 0.0, "e2el": sample.seconds}
    return all(1e3 * own[name] <= limit for name, limit in goals.items())


def summarize(samples: Sequence[Sample], seconds: float, rate: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Everything but the single requests."""
    answered = [sample for sample in samples if sample.error is None]
    prompt, output = sum(s.prompt_tokens for s in answered), sum(s.output_tokens for s in answered)
    result: dict[str, Any] = {
        "request_rate": rate if rate < float("inf") else "inf",
        "duration": seconds,
        "completed": len(answered),
        "failed": len(samples) - len(answered),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(answered) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "request_goodput": sum(meets(sample, goals) for sample in samples) / seconds if goals else None,
        "max_wait_ms": 1e3 * max(sample.sent - sample.due for sample in samples),
        "errors": _errors(samples),
    }
    for name, values in values_of(samples).items():
        result[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        result[f"median_{name}_ms"] = percentile(values, 50)
        result[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        result |= {f"p{share}_{name}_ms": percentile(values, share) for share in PERCENTILES}
    return result | _acceptance([sample.drafts for sample in answered if sample.drafts is not None])


def _errors(samples: Sequence[Sample]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            counts[sample.error] = counts.get(sample.error, 0) + 1
    return counts


def _acceptance(drafts: Sequence[Drafts]) -> dict[str, Any]:
    """Over all requests that told of theirs; position i counts steps with more than i accepted drafts."""
    steps = sum(each.num_spec_steps for each in drafts)
    if not steps:
        return {}
    drafted, accepted = (sum(getattr(d, f"num_{kind}_tokens") for d in drafts) for kind in ("draft", "accepted_draft"))
    longest = max(len(each.acceptance_histogram) for each in drafts)
    reached = [sum(sum(each.acceptance_histogram[i + 1 :]) for each in drafts) for i in range(longest - 1)]
    return {
        "spec_decode_num_drafts": steps,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,  # percent, as vLLM has it
        "spec_decode_acceptance_length": 1 + accepted / steps,
        "spec_decode_per_position_acceptance_rates": [count / steps for count in reached],
    }
