"""CPU decode and prefill against transformers on the same weights, and every proposer against k = 0, in one run.

    python bench/decode.py [--model demo] [--rounds 5] [--threads N] [--only peer | proposers | auto]

Rows: batch 1, batch 16 (prompts of different lengths) and a prefill of 2,000 tokens. Columns: exact mode, exact mode
off (plain matrix products), transformers. The rounds alternate between the three, medians are shown. Decode time is the
time of NEW_TOKENS + 1 tokens minus that of one token, so that prefill is not in it. The first tables run without
speculation (`spec="off"`); the next one compares proposers and k at batch 1 in exact mode. With `--only auto` one
compares `auto`, which learns while it is timed, with k = 0. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from peer import ROOT, load_peer, peer_generate
from proposers import measure_auto, measure_proposers, print_proposers

from skipstone import LLM, SamplingParams

NEW_TOKENS = 48
PREFILL_TOKENS = 2000
Generate = Callable[[list[list[int]], int], list[list[int]]]


def ours(llm: LLM) -> Generate:
    """Greedy continuations by Skipstone."""

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)]

    return generate


def seconds(generate: Generate, prompts: list[list[int]], new_tokens: int) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    generate(prompts, new_tokens)
    return time.perf_counter() - started


def measure(engines: dict[str, Generate], prompts: list[list[int]], rounds: int, decode: bool) -> dict[str, float]:
    """Tokens per second of each engine, the engines taking turns: decoded tokens, or prompt tokens of a prefill."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, generate in engines.items():
            first = seconds(generate, prompts, 1)
            if decode:
                rate = NEW_TOKENS * len(prompts) / (seconds(generate, prompts, NEW_TOKENS + 1) - first)
            else:
                rate = sum(map(len, prompts)) / first
            if turn:  # the first turn warms up
                rates[name].append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


def prompt_ids(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """16 held-out prompts of different lengths, and one of PREFILL_TOKENS tokens."""
    lines = (ROOT / "checkpoints" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert llm.tokenizer is not None
    encoded = sorted((llm.tokenizer.encode(json.loads(line)["prompt"]) for line in lines), key=len)
    short = [ids for ids in encoded if len(ids) < 600]
    long = [token for ids in encoded if len(ids) >= 600 for token in ids]
    return short[:: len(short) // 16][:16], long[:PREFILL_TOKENS]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", choices=["peer", "proposers", "auto"], default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    # Prefix caching off: a repeated prompt must be computed again, as transformers does.
    options = {"prefix_caching": False, "max_num_batched_tokens": 512}
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    )
    print(
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; {versions}"
    )
    results: dict[str, dict[str, float]] = {}
    exact = LLM(args.model, exact=True, spec="off", **options)
    batch, long = prompt_ids(exact)
    print(f"{args.model}, float32; prompts of {len(batch[0])} to {len(batch[-1])} tokens")
    if args.only in (None, "peer"):
        results |= against_peer(args.model, exact, options, (batch, long), args.rounds)
    if args.only == "auto":
        results |= measure_auto(args.model, options, batch, args.rounds)
    if args.only in (None, "proposers"):
        proposers = measure_proposers(args.model, options, batch[2::3], args.rounds, 2 * NEW_TOKENS)
        print_proposers(proposers)
        results |= proposers
    print(json.dumps({"bench": "decode", "model": args.model, "threads": torch.get_num_threads(), "results": results}))


def against_peer(
    model: str, exact: LLM, options: dict[str, Any], prompts: tuple[list[list[int]], list[int]], rounds: int
) -> dict[str, dict[str, float]]:
    """Print and return rates of exact mode, plain products and transformers."""
    batch, long = prompts
    fast = LLM(model, exact=False, spec="off", **options)
    peer = load_peer(Path(exact.folder))
    engines: dict[str, Generate] = {
        "exact": ours(exact),
        "fast": ours(fast),
        "transformers": lambda prompts, n: peer_generate(peer, prompts, n),
    }
    agree = sum(
        a == b
        for a, b in zip(engines["exact"]([batch[8]], 32)[0], engines["transformers"]([batch[8]], 32)[0], strict=True)
    )
    print(f"greedy tokens equal to transformers': {agree} of 32")
    cases = {"batch 1": ([batch[8]], True), "batch 16": (batch, True), "prefill 2000": ([long], False)}
    results = {}
    print(f"{'tokens/s':14}{'exact':>10}{'fast':>10}{'transf.':>10}{'exact/transf.':>15}{'cost of exact':>15}")
    for name, (some, decode) in cases.items():
        rates = measure(engines, some, rounds, decode)
        ratio, cost = rates["exact"] / rates["transformers"], 1 - rates["exact"] / rates["fast"]
        print(
            f"{name:14}{rates['exact']:10.0f}{rates['fast']:10.0f}{rates['transformers']:10.0f}{ratio:14.2f}x{cost:15.1%}"
        )
        results[name] = {key: round(value, 1) for key, value in rates.items()} | {"ratio": round(ratio, 2)}
    return results


if __name__ == "__main__":
    main()
