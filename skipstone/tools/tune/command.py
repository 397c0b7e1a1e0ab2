"""`skipstone tune`: measure steps and acceptance, predict every proposer, k and batch size, write the best table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skipstone.cli.model import check_engine
from skipstone.cli.options import Command, Settings
from skipstone.cli.output import check_writable, note, writing
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K, check_rates
from skipstone.tools.check.command import ENGINE_OPTIONS, add_prompt_arguments, numbers, positive, reals

if TYPE_CHECKING:
    from skipstone.tools.tune.run import TuneReport

LARGEST_BATCH = 1024
DEFAULT_CONTEXTS = (128, 768)


class TuneOptions(msgspec.Struct, kw_only=True):
    """What the command line asks of tune."""

    ks: list[int]
    batches: list[int]
    contexts: list[int]  # none: DEFAULT_CONTEXTS, as far as the model goes
    proposers: str | None
    prompts: str | None
    num_prompts: int
    max_tokens: int
    temperature: float
    context: int | None
    rates: dict[str, list[float]]  # by proposer: acceptance that is given, not measured
    validate: bool


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure, predict, print, write."""
    config = settings.engine_config()
    check_engine(config)
    options = read_options(args)
    for flag, target in (("--output", args.output), ("--json", args.json), ("--plot", args.plot)):
        if target is not None and not (flag == "--json" and target == "-"):
            check_writable(target, flag)
    from skipstone.tools.tune.report import plot, render  # torch takes seconds to import; errors above come first
    from skipstone.tools.tune.run import tune

    report = tune(config, options)
    if args.json == "-":
        print(_encoded(report))
    else:
        if args.json:
            with writing(args.json):
                Path(args.json).write_text(_encoded(report) + "\n")
        render(report)
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


def read_options(args: argparse.Namespace) -> TuneOptions:
    """Check the flags. Raises ConfigError."""
    temperatures = reals(args.temperature, "--temperature")
    if len(temperatures) != 1 or temperatures[0] < 0:
        raise ConfigError(f"--temperature {args.temperature} must be one number of at least 0")
    return TuneOptions(
        ks=sorted({0, *numbers(args.k, "--k", 0, LARGEST_K)}),
        batches=numbers(args.batch, "--batch", 1, LARGEST_BATCH),
        contexts=numbers(args.contexts, "--contexts", 1, 2**31) if args.contexts else [],
        proposers=args.proposers,
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        temperature=temperatures[0],
        context=args.context,
        rates=read_profile(args.profile) if args.profile else {},
        validate=args.validate,
    )


def read_profile(path: str) -> dict[str, list[float]]:
    """Acceptance rates by proposer. Raises ConfigError naming the file and what it must hold."""
    try:
        rates = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, list[float]])
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'--profile {path}: {error}; it must hold rates per position, as in {{"mtp": [0.8, 0.6]}}'
        ) from None
    for proposer, values in rates.items():
        check_rates(values, f"--profile {path}: {proposer}")
    return rates


def _encoded(report: TuneReport) -> str:
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--k",
        default="0,1,3,7",
        metavar="LIST",
        help="drafts per step to measure; between them is interpolated [0,1,3,7]",
    )
    group.add_argument("--batch", default="1,4,16", metavar="LIST", help="numbers of requests to measure [1,4,16]")
    group.add_argument(
        "--contexts", metavar="LIST", help="context lengths to measure [128,768, or the longest that fit]"
    )
    add_prompt_arguments(group, 16, 64)
    group.add_argument("--temperature", default="0", metavar="X", help="at which acceptance is measured [0]")
    group.add_argument(
        "--profile", metavar="FILE", help='rates per position instead of measured ones, as in {"mtp": [0.8, 0.6]}'
    )
    group.add_argument("--validate", action="store_true", help="run some of the predicted cells; print the error")
    group = parser.add_argument_group("what comes out")
    group.add_argument("--context", type=positive, metavar="N", help="predict for this context [that of the prompts]")
    group.add_argument("--output", metavar="FILE", help="write the best k by batch size, for --k-table")
    group.add_argument("--plot", metavar="FILE", help="draw a PNG; needs matplotlib [beside --output]")
    group.add_argument("--json", metavar="FILE", help="write all numbers to this file, or to - (stdout)")


COMMAND = Command(
    summary="find which proposer and k pay here: tokens per second for each, and a table for --k-table",
    usage="MODEL [--batch LIST] [--proposers NAMES] [--output FILE] [options]",
    options={EngineConfig: ENGINE_OPTIONS},
    run=run,
    add_arguments=_add_arguments,
)
