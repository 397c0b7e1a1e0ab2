"""`skipstone bench decode`: whole decode steps of a slice of a release, against the least that they must read."""

from __future__ import annotations

import argparse
import itertools
import json
import platform

from skipstone.cli.options import Command, Settings
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K
from skipstone.tools.flags import integers, positive

OPTIONS = (
    "exact", "dtype", "index_keys", "kernels", "cuda_graphs", "overlap", "max_num_batched_tokens", "cache_memory_gb",
)  # fmt: skip
RATES = "0.8,0.6,0.4"  # acceptance length 2.8
HEADINGS = ("k", "batch", "prompt", "prefill tok/s", "step ms", "length", "ms/token", "floor", "share", "experts")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure every cell of k x batch x prompt; the last line of the output is JSON."""
    import torch

    from skipstone.tools.bench.decode_run import computing_modules, measure, output_room, route_alike
    from skipstone.tools.bench.gpu_timing import copy_rate
    from skipstone.tools.bench.slices import slice_engine

    if not torch.cuda.is_available():
        raise ConfigError("bench decode needs a GPU; bench/decode.py of the sources measures a CPU")
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"slice {args.slice}, routing {args.routing}; copy rate {rate / 1e12:.2f} TB/s")
    print(" ".join(f"{name:>13}" for name in HEADINGS))
    cells, most = [], max(args.batch)
    for k in args.k:
        longest = max(args.prompt) + output_room(k, most, args.steps)
        options = {**settings.values, "max_model_len": longest, "max_num_seqs": most}
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
    print(json.dumps({**facts, "copy_tb_s": rate / 1e12, "exact": settings.values["exact"], "cells": cells}))
    return 0


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
