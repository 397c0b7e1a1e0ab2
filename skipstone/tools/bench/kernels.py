"""`skipstone bench kernels`: every kernel at the sizes of the releases, against the least time that its work takes."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING

from skipstone.cli.options import Command, Settings
from skipstone.errors import ConfigError
from skipstone.tools.flags import positive

if TYPE_CHECKING:
    from skipstone.tools.bench.kernel_run import Measured

ROUNDS = 7


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure every chosen kernel; the last line is JSON. Exit code 1 when one computed something else."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench kernels needs a GPU, and torch sees none here")
    from skipstone.kernels.dispatch import triton_refusal
    from skipstone.tools.bench.gpu_timing import copy_rate, matmul_rate
    from skipstone.tools.bench.kernel_cells import CELLS
    from skipstone.tools.bench.kernel_peer import load_peer
    from skipstone.tools.bench.kernel_run import Ceilings, compile_all, measure

    refusal = triton_refusal(torch.device("cuda"))
    if refusal is not None:
        raise ConfigError(f"bench kernels needs Triton: {refusal}")
    cells = [cell for cell in CELLS if args.only in cell.name and (cell.quick or not args.quick)]
    if not cells:
        kinds = dict.fromkeys(" ".join(cell.name.split()[:2]) for cell in CELLS)
        raise ConfigError(f"--only {args.only}: no kernel has that in its name; as {', '.join(kinds)}")
    peer = None if args.peer is None else load_peer(args.peer)
    end = time.monotonic() + args.seconds
    limits = Ceilings(copy_rate(), matmul_rate())
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    rates = f"copy {limits.bytes / 1e12:.2f} TB/s, bf16 products {limits.flops / 1e12:.0f} TFLOP/s"
    print(f"{name}, torch {torch.__version__}; {rates}")
    compile_all(cells, min(os.cpu_count() or 1, 12))
    print(_header(peer is not None), flush=True)
    measured: list[Measured] = []
    for cell in cells:
        if time.monotonic() > end:
            print(f"stopped after {args.seconds} seconds: {len(cells) - len(measured)} kernels were not measured")
            break
        measured.append(measure(cell, limits, args.rounds, peer))
        print(_line(measured[-1], peer is not None), flush=True)
    facts = {"bench": "kernels", "gpu": name, "torch": torch.__version__, "rounds": args.rounds}
    facts |= {"copy_tb_s": limits.bytes / 1e12, "matmul_tflop_s": limits.flops / 1e12, "peer": args.peer}
    print(json.dumps({**facts, "kernels": [item._asdict() for item in measured]}))
    return int(any(item.failure for item in measured))


def _header(peer: bool) -> str:
    head = f"{'kernel':<34}{'exact us':>10}{'fast us':>10}{'cost':>8}{'floor us':>10}{'share':>7}  {'bound':<8}"
    return head + f"{'spread':>7}{'error':>9}" + (f"{'peer us':>10}{'ratio':>7}" if peer else "")


def _line(item: Measured, peer: bool) -> str:
    if item.exact_us is None or item.fast_us is None:
        return f"{item.name:<34} FAILED: {item.failure}"
    cost = f"{item.exact_us / item.fast_us - 1:+.1%}" if item.has_exact else ""
    line = f"{item.name:<34}{item.exact_us:>10.1f}{item.fast_us:>10.1f}{cost:>8}{item.floor_us:>10.1f}"
    line += f"{item.share:>7.0%}  {item.bound:<8}{item.spread:>7.1%}{item.error:>9.1e}"
    if peer and item.peer_us is not None:
        line += f"{item.peer_us:>10.1f}{item.peer_us / item.exact_us:>7.2f}"
    return line + (f"  WRONG: {item.failure}" if item.failure else "")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("--only", default="", metavar="TEXT", help="kernels with this in their name, as 'attention 64' [all]")
    add("--quick", action="store_true", help="a third of them")
    add("--rounds", type=positive, default=ROUNDS, metavar="N", help=f"replays, of which the median counts [{ROUNDS}]")
    add("--seconds", type=positive, default=3600, metavar="N", help="start no further kernel after this time [3600]")
    add("--peer", metavar="FOLDER", help="a folder with vLLM's Triton files for MiniMax-M3, timed beside ours")


COMMAND = Command(
    summary="every kernel on a GPU against the least time of its work, exact and fast",
    usage="[--only TEXT] [--quick] [--peer FOLDER]",
    options={},
    run=run,
    add_arguments=_add_arguments,
)
