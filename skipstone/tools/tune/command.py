"""`skipstone tune`: measure steps and acceptance, predict every proposer, k and batch size, write the best table."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from skipstone.cli.model import check_engine
from skipstone.cli.options import Command, Settings
from skipstone.cli.output import check_writable, note, writing
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K, check_rates
from skipstone.tools.flags import ENGINE_OPTIONS, add_prompt_arguments, integers, positive, reals
from skipstone.tools.report import check_target, publish


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure, predict, print, write."""
    config = settings.engine_config()
    check_engine(config)
    check_target(args.json)
    for flag, target in (("--output", args.output), ("--plot", args.plot)):
        if target is not None:
            check_writable(target, flag)
    from skipstone.tools.tune.run import TuneOptions, plot, render, tune  # imports torch; errors above come first

    report = tune(config, msgspec.convert(vars(args), TuneOptions))
    publish(report, args.json, render)
    if args.output:
        with writing(args.output, "--output"):
            Path(args.output).write_bytes(msgspec.json.format(msgspec.json.encode(report.table)) + b"\n")
        note(f"wrote {args.output}; use it with --k-table {args.output}")
    picture = args.plot or (str(Path(args.output).with_suffix(".png")) if args.output else None)
    if picture:
        with writing(picture, "--plot"):
            remark = plot(report, picture)
        note(remark)
    return 0


def _temperature(text: str) -> float:
    values = reals("--temperature", "0.7")(text)
    if len(values) != 1 or not values[0] >= 0:
        raise ConfigError(f"--temperature {text} must be one number of at least 0")
    return values[0]


def _profile(path: str) -> dict[str, list[float]]:
    """Acceptance rates by proposer. Raises ConfigError naming the file and what it must hold."""
    try:
        rates = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, list[float]])
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        wanted = 'it must hold rates per position, as in {"mtp": [0.8, 0.6]}'
        raise ConfigError(f"--profile {path}: {error}; {wanted}") from None
    for proposer, values in rates.items():
        check_rates(values, f"--profile {path}: {proposer}")
    return rates


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    # Each dest is a field of `TuneOptions`.
    group = parser.add_argument_group("what is measured")
    add = group.add_argument
    ks, batches, contexts = (
        integers("--k", 0, LARGEST_K),
        integers("--batch", 1, 1024),
        integers("--contexts", 1, 2**31),
    )
    k_help = "drafts per step to measure; between them is interpolated [0,1,3,7]"
    add("--k", dest="ks", type=ks, default="0,1,3,7", metavar="LIST", help=k_help)
    batch_help = "numbers of requests to measure [1,4,16]"
    add("--batch", dest="batches", type=batches, default="1,4,16", metavar="LIST", help=batch_help)
    context_help = "context lengths to measure [128,768, or the longest that fit]"
    add("--contexts", type=contexts, default=[], metavar="LIST", help=context_help)
    add_prompt_arguments(group, 16, 64)
    add("--temperature", type=_temperature, default=0.0, metavar="X", help="at which acceptance is measured [0]")
    rates_help = 'rates per position instead of measured ones, as in {"mtp": [0.8, 0.6]}'
    add("--profile", dest="rates", type=_profile, default={}, metavar="FILE", help=rates_help)
    add("--validate", action="store_true", help="run some of the predicted cells; print the error")
    add = parser.add_argument_group("what comes out").add_argument
    add("--context", type=positive, metavar="N", help="predict for this context [that of the prompts]")
    add("--output", metavar="FILE", help="write the best k by batch size, for --k-table")
    add("--plot", metavar="FILE", help="draw a PNG; needs matplotlib [beside --output]")
    add("--json", metavar="FILE", help="write all numbers to this file, or to - (stdout)")


COMMAND = Command(
    summary="find which proposer and k pay here: tokens per second for each, and a table for --k-table",
    usage="MODEL [--batch LIST] [--proposers NAMES] [--output FILE] [options]",
    options={EngineConfig: ENGINE_OPTIONS},
    run=run,
    add_arguments=_add_arguments,
)
