"""`skipstone bench load`: requests that arrive on their own, in process, and what every kind of step takes."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skipstone.cli.options import Command, Settings
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K
from skipstone.tools.flags import integers, positive

if TYPE_CHECKING:
    from skipstone.runtime.engine import Engine

OPTIONS = ("exact", "dtype", "device", "kernels", "cuda_graphs", "overlap", "max_num_batched_tokens", "max_num_seqs")
RATES = "0.8,0.6,0.38"  # acceptance length 2.78
STALL = 0.2  # seconds
KINDS = (("decode", False), ("mixed", True))


@dataclass(frozen=True)
class Scenario:
    """Requests of one scenario. `rate` a second; 0: all at once."""

    name: str
    rate: float
    count: int
    prompt: tuple[int, int]  # tokens, least and most
    output: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)


SCENARIOS = (
    Scenario("closed", 0, 64, (1024, 1024), (256, 256)),
    Scenario("arrivals 6", 6, 60, (512, 8192), (64, 512)),
    Scenario("arrivals 14", 14, 120, (512, 8192), (64, 512)),
    Scenario("plain", 0, 64, (512, 1024), (128, 256)),
    Scenario("logprobs", 0, 64, (512, 1024), (128, 256), {"logprobs": 1}),
    Scenario("presence", 0, 64, (512, 1024), (128, 256), {"presence_penalty": 0.5}),
    Scenario("bias", 0, 64, (512, 1024), (128, 256), {"logit_bias": dict.fromkeys(range(100), 1.0)}),
)


@dataclass
class Observed:
    """What was seen of one scenario; seconds since its start."""

    arrivals: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    steps: list[tuple[bool, float]] = field(default_factory=list)  # whether a prompt was read, seconds
    wall: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Rates and times in ms: medians, and 90 % or 99 %."""
        import numpy as np

        def spread(values: list[float], percent: int) -> list[float]:
            return [round(1e3 * float(value), 2) for value in np.percentile(values or [0.0], (50, percent))]

        several = [r for r in self.first if self.tokens[r] > 1]
        tpot = [(self.last[r] - self.first[r]) / (self.tokens[r] - 1) for r in several]
        ttft = [self.first[r] - self.arrivals[r] for r in self.first]
        kinds = {name: [seconds for reads, seconds in self.steps if reads == mixed] for name, mixed in KINDS}
        return {
            "tokens_s": round(sum(self.tokens.values()) / self.wall, 1),
            "tpot_ms": spread(tpot, 90),
            "ttft_ms": spread(ttft, 90),
            **{f"{kind}_step_ms": spread(times, 99) for kind, times in kinds.items()},
            "stalls": sum(seconds > STALL for _, seconds in self.steps),
            "wall_s": round(self.wall, 2),
        }


def drive(engine: Engine, scenario: Scenario, seed: int) -> Observed:
    """Run a scenario; request i arrives whether or not those before it have ended."""
    from skipstone.tools.bench.slices import random_request

    rng, due, jobs = random.Random(seed), 0.0, []
    for i in range(scenario.count):
        due += rng.expovariate(scenario.rate) if scenario.rate else 0.0
        lengths = rng.randint(*scenario.prompt), rng.randint(*scenario.output)
        jobs.append((due, random_request(engine, f"{scenario.name}-{i}", *lengths, seed + i, **scenario.options)))
    seen, started = Observed(), time.perf_counter()
    while jobs or engine.has_work:
        now = time.perf_counter() - started
        while jobs and jobs[0][0] <= now:
            arrival, request = jobs.pop(0)
            engine.add(request)
            seen.arrivals[request.request_id] = arrival
        if not engine.has_work:
            time.sleep(max(jobs[0][0] - (time.perf_counter() - started), 0.0))
            continue
        reads = bool(engine.scheduler.waiting) or any(r.num_output_tokens == 0 for r in engine.scheduler.running)
        began = time.perf_counter()
        committed = engine.step()
        ended = time.perf_counter()
        seen.steps.append((reads, ended - began))
        for request, tokens in committed:
            name = request.request_id
            seen.first.setdefault(name, ended - started)
            seen.last[name] = ended - started
            seen.tokens[name] = seen.tokens.get(name, 0) + len(tokens)
    seen.wall = time.perf_counter() - started
    return seen


def mixed_steps(engine: Engine, running: int, steps: int) -> dict[str, float]:
    """Wall and busy time (ms) of steps in which `running` requests decode beside chunks of prompts.

    Busy time is the sum of all kernels' times, from a profile of as many further steps.
    """
    from torch.profiler import ProfilerActivity, profile

    from skipstone.tools.bench.slices import mean_seconds, random_request, reach_decoding

    for i in range(running):
        engine.add(random_request(engine, f"decoding {i}", 512, 16 * (steps + 64), i))
    reach_decoding(engine)
    numbers = itertools.count()

    def once() -> None:
        if not engine.scheduler.waiting and all(r.num_output_tokens for r in engine.scheduler.running):
            name, length = f"prompt {next(numbers)}", min(4 * engine.scheduler.max_rows, 8192)
            engine.add(random_request(engine, name, length, 1, running))
        engine.step()

    mean_seconds(once, 12)  # compiles and captures
    wall = mean_seconds(once, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        mean_seconds(once, steps)
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / steps / 1e6
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(request)
    return {"wall_ms": wall * 1e3, "busy_ms": busy * 1e3, "ratio": wall / busy}


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run the scenarios for every k; the last line of the output is JSON."""
    import torch

    from skipstone.tools.bench.slices import slice_engine

    names = [*(scenario.name for scenario in SCENARIOS), "mixed"]
    wanted = args.loads.split(",") if args.loads else names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise ConfigError(f"--loads names {unknown[0]!r}; it may name {', '.join(names)}")
    if not torch.cuda.is_available():
        raise ConfigError("bench load needs a GPU; bench serve measures any server")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    cells: list[dict[str, Any]] = []

    def show(cell: dict[str, Any]) -> None:
        cells.append(cell)
        print(json.dumps(cell), flush=True)

    for k in [*args.k, *(["auto"] if args.auto else [])]:
        spec = "auto" if k == "auto" else f"mtp:{k}" if k else "off"
        began = time.perf_counter()
        engine = slice_engine(args.slice, spec, args.acceptance, max_model_len=16384, **settings.values)
        built = time.perf_counter() - began
        if args.warmup == "all":
            engine.warm_up()
        ready = time.perf_counter() - began
        print(f"k = {k}: built in {built:.1f} s, ready after {ready:.1f} s", flush=True)
        for scenario in SCENARIOS:
            for turn in range(args.rounds if scenario.name in wanted else 0):
                made = engine.late_compilations
                summary = drive(engine, scenario, turn).summary()
                late = {"compilations": engine.late_compilations - made}
                show({"k": k, "load": scenario.name, "turn": turn, **summary, **late})
        if "mixed" in wanted:
            show({"k": k, "load": "mixed", **mixed_steps(engine, args.running, args.steps)})
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    facts = {"bench": "load", "slice": args.slice, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({**facts, "cells": cells}))
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("--slice", default="m3", metavar="NAME", help="m3 (8 layers, 32 experts) or v32 (5 layers, 32 experts) [m3]")
    ks = integers("--k", 0, LARGEST_K)
    add("--k", type=ks, default="0,3", metavar="LIST", help="drafts a step, by the MTP module [0,3]")
    add("--auto", action="store_true", help="spec=auto as well")
    add("--loads", metavar="LIST", help="scenarios, by name, and mixed; none: all of them")
    add("--rounds", type=positive, default=2, metavar="N", help="times that each is run, the first one cold [2]")
    add("--warmup", default="all", choices=("all", "none"), help="before the first scenario [all]")
    add("--running", type=positive, default=56, metavar="N", help="mixed: requests that decode [56]")
    add("--steps", type=positive, default=24, metavar="N", help="mixed: steps that are timed [24]")
    add("--acceptance", default=RATES, metavar="LIST", help=f"simulated acceptance per position [{RATES}]")


COMMAND = Command(
    summary="requests that arrive on their own, on a slice of a release with random weights on a GPU",
    usage="[--slice NAME] [--k LIST] [--loads LIST] [options]",
    options={EngineConfig: OPTIONS},
    run=run,
    add_arguments=_add_arguments,
)
