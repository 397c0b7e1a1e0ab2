"""Tokens per second of every proposer and k at batch 1, against k = 0 in the same run; used by decode.py.

The engines take turns on the same prompts, prompt by prompt, so that a disturbance of the machine hits all alike; the
ratio to k = 0 is taken within each turn, and its median is quoted. Prefill is not counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from skipstone import LLM, SamplingParams
from skipstone.errors import SkipstoneError

# k = 0 with a proposer loaded must cost nothing.
CANDIDATES = {"mtp": (0, 1, 2, 3, 4, 5), "eagle3": (0, 2, 3, 4, 5, 7), "dflash": (0, 3, 5, 7), "ngram": (0, 2, 4, 8)}


def engines(model: str, options: dict[str, Any]) -> dict[str, LLM]:
    """One engine per proposer, with its largest k; `off` first. Proposers that the model lacks are left out."""
    out = {"off": LLM(model, spec="off", **options)}
    for name, ks in CANDIDATES.items():
        try:
            out[name] = LLM(model, spec=f"{name}:{max(ks)}", **options)
        except SkipstoneError as error:
            print(f"{name} is left out: {error}")
    return out


def decode_seconds(llm: LLM, prompt: list[int], k: int, tokens: int) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, num_speculative_tokens=k)
    session = llm.add(prompt, params)
    while not session.choices[0].token_ids:
        llm.step()
    started = time.perf_counter()
    while not session.finished:
        llm.step()
    return time.perf_counter() - started, session.choices[0].token_ids


def measure_proposers(
    model: str, options: dict[str, Any], prompts: list[list[int]], rounds: int, tokens: int
) -> dict[str, dict[str, float]]:
    """Per "proposer:k": tokens/s, ratio to k = 0 and acceptance length. Raises AssertionError if a text differs."""
    loaded = engines(model, options)
    cases = [("off", 0)] + [(name, k) for name in loaded if name != "off" for k in CANDIDATES[name]]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    lengths: dict[tuple[str, int], float] = {}
    for turn in range(rounds + 1):
        total = dict.fromkeys(cases, 0.0)
        counts = {case: [0, 0] for case in cases}
        for prompt in prompts:
            expected = None
            first = turn * 5 % len(cases)  # no case always follows the same one
            for case in cases[first:] + cases[:first]:
                stats = loaded[case[0]].engine.scheduler.stats.speculation
                before = (stats.steps, stats.accepted)
                spent, ids = decode_seconds(loaded[case[0]], prompt, case[1], tokens)
                expected = expected or ids
                assert ids == expected, f"{case} changed the text"
                total[case] += spent
                counts[case][0] += stats.steps - before[0]
                counts[case][1] += stats.accepted - before[1]
        if turn:  # the first turn warms up
            for case in cases:
                seconds[case].append(total[case])
        lengths = {case: 1 + accepted / steps if steps else 1.0 for case, (steps, accepted) in counts.items()}
    made = len(prompts) * (tokens - 1)
    results = {}
    for case in cases:
        ratios = [base / own for base, own in zip(seconds["off", 0], seconds[case], strict=True)]
        results["off" if case[0] == "off" else f"{case[0]}:{case[1]}"] = {
            "tokens_per_s": round(made / statistics.median(seconds[case]), 1),
            "ratio": round(statistics.median(ratios), 2),
            "acceptance_length": round(lengths[case], 2),
        }
    return results


def measure_auto(
    model: str, options: dict[str, Any], prompts: list[list[int]], rounds: int
) -> dict[str, dict[str, float]]:
    """Print and return, per batch size, times of `auto` and `mtp` to k = 0 for whole calls, prompts included.

    The first of the rounds is shown apart, as `auto` learns most in it. Raises AssertionError if a text differs.
    """
    specs = ("off", "mtp", "auto")
    loaded = {spec: LLM(model, spec=spec, **options) for spec in specs}
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    results: dict[str, dict[str, float]] = {}
    print(f"{'to k = 0':12}{'mtp':>10}{'auto':>10}{'auto, first round':>20}")
    for size in (1, 4, 16):
        spent: dict[str, list[float]] = {spec: [] for spec in specs}
        for _ in range(rounds + 1):
            total = dict.fromkeys(specs, 0.0)
            for first in range(0, len(prompts), size):
                texts = []
                for spec, llm in loaded.items():
                    started = time.perf_counter()
                    outputs = llm.generate(prompts[first : first + size], params, progress=False)
                    total[spec] += time.perf_counter() - started
                    texts.append([output.outputs[0].token_ids for output in outputs])
                assert texts[0] == texts[1] == texts[2], "speculation changed the text"
            for spec in specs:
                spent[spec].append(total[spec])
        ratio = {
            spec: statistics.median(a / b for a, b in zip(spent["off"][1:], spent[spec][1:], strict=True))
            for spec in specs
        }
        early = spent["off"][0] / spent["auto"][0]
        print(f"batch {size:<6}{ratio['mtp']:9.2f}x{ratio['auto']:9.2f}x{early:19.2f}x")
        results[f"auto, batch {size}"] = {
            "mtp": round(ratio["mtp"], 2),
            "auto": round(ratio["auto"], 2),
            "first": round(early, 2),
        }
    return results


def print_proposers(results: dict[str, dict[str, float]]) -> None:
    """The table, the best k of each proposer marked."""
    best: dict[str, str] = {}
    for name, row in results.items():
        method = name.split(":")[0]
        if method not in best or row["ratio"] > results[best[method]]["ratio"]:
            best[method] = name
    print(f"{'batch 1, greedy':20}{'tokens/s':>10}{'to k = 0':>10}{'accept. length':>16}")
    for name, row in results.items():
        mark = "  best k" if name in best.values() and name != "off" else ""
        print(f"{name:20}{row['tokens_per_s']:10.0f}{row['ratio']:9.2f}x{row['acceptance_length']:16.2f}{mark}")
