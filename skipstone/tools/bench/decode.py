"""`skipstone bench decode`: whole decode steps of a slice of a release, against the least that they must read."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from typing import TYPE_CHECKING, Any

from skipstone.cli.options import Command, Settings
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K
from skipstone.tools.check.command import numbers, positive

if TYPE_CHECKING:
    from skipstone.runtime.engine import Engine

OPTIONS = (
    "exact",
    "dtype",
    "index_keys",
    "kernels",
    "cuda_graphs",
    "overlap",
    "max_num_batched_tokens",
    "cache_memory_gb",
)
RATES = "0.8,0.6,0.4"  # acceptance length 2.8


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure every cell of k x batch x prompt; the last line of the output is JSON."""
    import torch

    from skipstone.runtime.engine import Engine
    from skipstone.tools.bench.decode_floor import computing_modules, copy_rate, route_alike
    from skipstone.tools.bench.slices import slice_info

    if not torch.cuda.is_available():
        raise ConfigError("bench decode needs a GPU; bench/decode.py of the sources measures a CPU")
    ks, batches = numbers(args.k, "--k", 0, LARGEST_K), numbers(args.batch, "--batch", 1, 1024)
    prompts = numbers(args.prompt, "--prompt", 1, 1 << 18)
    values = {name: settings.values[name] for name in OPTIONS if name in settings.values}
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"slice {args.slice}, routing {args.routing}; copy rate {rate / 1e12:.2f} TB/s")
    header = ("k", "batch", "prompt", "prefill tok/s", "step ms", "length", "ms/token", "floor", "share", "experts")
    print(" ".join(f"{name:>13}" for name in header))
    cells = []
    for k in ks:
        longest = max(prompts) + output_room(k, max(batches), args.steps)
        speculation = {"spec": f"mtp:{k}", "simulate_acceptance": args.acceptance} if k else {"spec": "off"}
        options: dict[str, Any] = {**values, **speculation, "max_model_len": longest, "max_num_seqs": max(batches)}
        config = EngineConfig(model=f"slice {args.slice}", prefix_caching=False, **options)
        torch.manual_seed(0)  # the weights
        engine = Engine(slice_info(args.slice), config)
        if args.routing == "alike":
            for module in computing_modules(engine):
                route_alike(module)
        for batch in batches:
            for prompt in prompts:
                cell = measure(engine, k, batch, prompt, args, rate)
                cells.append(cell)
                print(" ".join(f"{_shown(value):>13}" for value in cell.values()), flush=True)
        del engine
        torch.cuda.empty_cache()
    facts = {
        "bench": "decode",
        "slice": args.slice,
        "routing": args.routing,
        "gpu": torch.cuda.get_device_name(),
        "copy_tb_s": rate / 1e12,
    }
    print(json.dumps({**facts, "exact": values.get("exact", True), "cells": cells}))
    return 0


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def measure(engine: Engine, k: int, batch: int, prompt: int, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One cell. A step's time is that of `steps` steps in which every request decodes and nothing else runs.

    Prompts and steps take turns, as a GPU that reads prompts only soon reaches its power limit.
    """
    from skipstone.tools.bench.decode_floor import decode_floor, touched_experts

    _prefill(engine, batch, prompt, 0)  # compiles
    rounds = range(1, args.rounds + 1)
    prefills, steps, lengths = [], [], []
    for seed in rounds:
        prefills.append(_prefill(engine, batch, prompt, seed))
        _start(engine, batch, prompt, output_room(k, batch, args.steps), seed)
        _reach_decoding(engine)
        if seed == 1:
            _timed_steps(engine, 8)  # captures
        touched = touched_experts(engine, 4)
        gc.collect()  # not in the middle of what is timed
        seconds, length = _timed_steps(engine, args.steps)
        steps.append(seconds)
        lengths.append(length)
        floor = decode_floor(engine, touched + touched_experts(engine, 4), batch, prompt, k)
        for request in list(engine.scheduler.running):
            engine.abort(request)
    seconds, length = statistics.median(steps), statistics.median(lengths)
    prefill = statistics.median(prefills)
    least = floor.total / rate
    return {
        "k": k,
        "batch": batch,
        "prompt": prompt,
        "prefill": round(batch * prompt / prefill),
        "step_ms": seconds * 1e3,
        "length": length,
        "ms_per_token": seconds / length * 1e3,
        "floor_ms": least / length * 1e3,
        "share": least / seconds,
        "experts": floor.experts_touched,
    }


def output_room(k: int, batch: int, steps: int) -> int:
    """Tokens that a request may write at most: while the others' prompts are read, while it is timed, and after."""
    return (steps + 2 * batch + 32) * (k + 1)


def _reach_decoding(engine: Engine) -> None:
    """Step until every request has written a few tokens."""
    while engine.scheduler.waiting or any(request.num_output_tokens < 4 for request in engine.scheduler.running):
        engine.step()


def _timed_steps(engine: Engine, count: int) -> tuple[float, float]:
    """Seconds per step over `count` steps, and the acceptance length in them."""
    import torch

    stats = engine.scheduler.stats.speculation
    torch.cuda.synchronize()
    drafted, accepted, started = stats.steps, stats.accepted, time.perf_counter()
    for _ in range(count):
        engine.step()
    torch.cuda.synchronize()
    seconds, drafted = (time.perf_counter() - started) / count, stats.steps - drafted
    return seconds, 1 + (stats.accepted - accepted) / drafted if drafted else 1.0


def _start(engine: Engine, batch: int, prompt: int, tokens: int, seed: int) -> None:
    import torch

    from skipstone.core.request import Request, SamplingParams

    generator = torch.Generator().manual_seed(1000 + seed)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        ids = torch.randint(engine.vocab_size, (prompt,), generator=generator).tolist()
        engine.add(Request(f"{seed}-{i}", ids, params, seed + i, prompt + tokens, num_prompt_tokens=prompt))


def _prefill(engine: Engine, batch: int, prompt: int, seed: int) -> float:
    """Seconds from the requests to the first token of the last one."""
    import torch

    _start(engine, batch, prompt, 1, seed)
    torch.cuda.synchronize()
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("--slice", default="m3", metavar="NAME", help="m3 (8 layers, 32 experts) or v32 (5 layers, 32 experts) [m3]")
    add("--k", default="0,3", metavar="LIST", help="drafts a step, by the MTP module [0,3]")
    add("--batch", default="1,4", metavar="LIST", help="requests at once [1,4]")
    add("--prompt", default="1024,8192", metavar="LIST", help="tokens of a prompt [1024,8192]")
    add("--steps", type=positive, default=128, metavar="N", help="steps that are timed [128]")
    add("--rounds", type=positive, default=3, metavar="N", help="repeats, of which the median counts [3]")
    add(
        "--routing",
        default="uniform",
        choices=("uniform", "alike"),
        help="alike: all rows choose the same experts [uniform]",
    )
    add("--acceptance", default=RATES, metavar="LIST", help=f"simulated acceptance per position [{RATES}]")


COMMAND = Command(
    summary="decode steps of a slice of a release with random weights on a GPU, against their floor",
    usage="[--slice NAME] [--k LIST] [--batch LIST] [--prompt LIST] [options]",
    options={EngineConfig: OPTIONS},
    run=run,
    defaults={"max_num_batched_tokens": 8192},
    add_arguments=_add_arguments,
)
