"""`skipstone bench decode`: whole decode steps of a slice of a release, against the least that they must read."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
from typing import TYPE_CHECKING, Any

from skipstone.cli.options import Command, Settings
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K
from skipstone.tools.flags import integers, positive

if TYPE_CHECKING:
    from skipstone.runtime.engine import Engine

OPTIONS = (
    "exact", "dtype", "index_keys", "kernels", "cuda_graphs", "overlap", "max_num_batched_tokens", "cache_memory_gb",
)  # fmt: skip
RATES = "0.8,0.6,0.4"  # acceptance length 2.8
HEADINGS = ("k", "batch", "prompt", "prefill tok/s", "step ms", "length", "ms/token", "floor", "share", "experts")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure every cell of k x batch x prompt; the last line of the output is JSON."""
    import torch

    from skipstone.tools.bench.decode_floor import computing_modules, route_alike
    from skipstone.tools.bench.gpu_timing import copy_rate
    from skipstone.tools.bench.slices import slice_engine

    if not torch.cuda.is_available():
        raise ConfigError("bench decode needs a GPU; bench/decode.py of the sources measures a CPU")
    values = {name: settings.values[name] for name in OPTIONS if name in settings.values}
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"slice {args.slice}, routing {args.routing}; copy rate {rate / 1e12:.2f} TB/s")
    print(" ".join(f"{name:>13}" for name in HEADINGS))
    cells, most = [], max(args.batch)
    for k in args.k:
        longest = max(args.prompt) + output_room(k, most, args.steps)
        options = {**values, "max_model_len": longest, "max_num_seqs": most}
        engine = slice_engine(args.slice, f"mtp:{k}" if k else "off", args.acceptance, **options)
        if args.routing == "alike":
            for module in computing_modules(engine):
                route_alike(module)
        for batch, prompt in itertools.product(args.batch, args.prompt):
            cells.append(measure(engine, k, batch, prompt, args, rate))
            shown = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in cells[-1].values())
            print(" ".join(f"{text:>13}" for text in shown), flush=True)
        del engine
        torch.cuda.empty_cache()
    facts = {"bench": "decode", "slice": args.slice, "routing": args.routing, "gpu": torch.cuda.get_device_name()}
    print(json.dumps({**facts, "copy_tb_s": rate / 1e12, "exact": values.get("exact", True), "cells": cells}))
    return 0


def measure(engine: Engine, k: int, batch: int, prompt: int, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One cell. A step's time is that of `steps` steps in which every request decodes and nothing else runs.

    Prompts and steps take turns, as a GPU that reads prompts only soon reaches its power limit.
    """
    from skipstone.tools.bench.decode_floor import decode_floor, touched_experts
    from skipstone.tools.bench.slices import mean_seconds, random_request, reach_decoding

    def start(tokens: int, seed: int) -> None:
        for i in range(batch):
            engine.add(random_request(engine, f"{seed}-{i}", prompt, tokens, seed + i))

    def finish() -> None:
        while engine.has_work:
            engine.step()

    def read_prompts(seed: int) -> float:
        start(1, seed)
        return mean_seconds(finish, 1)

    read_prompts(0)  # compiles
    prefills, steps, lengths = [], [], []
    for seed in range(1, args.rounds + 1):
        prefills.append(read_prompts(seed))
        start(output_room(k, batch, args.steps), seed)
        reach_decoding(engine)
        if seed == 1:
            mean_seconds(engine.step, 8)  # captures
        touched = touched_experts(engine, 4)
        gc.collect()  # not in the middle of what is timed
        stats = engine.scheduler.stats.speculation
        drafted, accepted = stats.steps, stats.accepted
        steps.append(mean_seconds(engine.step, args.steps))
        drafted = stats.steps - drafted
        lengths.append(1 + (stats.accepted - accepted) / drafted if drafted else 1.0)
        floor_bytes, experts = decode_floor(engine, touched + touched_experts(engine, 4), batch, prompt, k)
        for request in list(engine.scheduler.running):
            engine.abort(request)
    seconds, length, prefill = (statistics.median(values) for values in (steps, lengths, prefills))
    least = floor_bytes / rate
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
        "experts": experts,
    }


def output_room(k: int, batch: int, steps: int) -> int:
    """Tokens that a request may write at most: while the others' prompts are read, while it is timed, and after."""
    return (steps + 2 * batch + 32) * (k + 1)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("--slice", default="m3", metavar="NAME", help="m3 (8 layers, 32 experts) or v32 (5 layers, 32 experts) [m3]")
    ks, batches, lengths = integers("--k", 0, LARGEST_K), integers("--batch", 1, 1024), integers("--prompt", 1, 1 << 18)
    add("--k", type=ks, default="0,3", metavar="LIST", help="drafts a step, by the MTP module [0,3]")
    add("--batch", type=batches, default="1,4", metavar="LIST", help="requests at once [1,4]")
    add("--prompt", type=lengths, default="1024,8192", metavar="LIST", help="tokens of a prompt [1024,8192]")
    add("--steps", type=positive, default=128, metavar="N", help="steps that are timed [128]")
    add("--rounds", type=positive, default=3, metavar="N", help="repeats, of which the median counts [3]")
    routing = "alike: all rows choose the same experts [uniform]"
    add("--routing", default="uniform", choices=("uniform", "alike"), help=routing)
    add("--acceptance", default=RATES, metavar="LIST", help=f"simulated acceptance per position [{RATES}]")


COMMAND = Command(
    summary="decode steps of a slice of a release with random weights on a GPU, against their floor",
    usage="[--slice NAME] [--k LIST] [--batch LIST] [--prompt LIST] [options]",
    options={EngineConfig: OPTIONS},
    run=run,
    defaults={"max_num_batched_tokens": 8192},
    add_arguments=_add_arguments,
)
