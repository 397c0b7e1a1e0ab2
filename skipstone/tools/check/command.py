"""`skipstone check`: the tokens and logits of every proposer and number of drafts against those without drafts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skipstone.cli.model import check_engine
from skipstone.cli.options import Command, Settings
from skipstone.cli.output import check_writable, writing
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K

if TYPE_CHECKING:
    from skipstone.tools.check.run import CheckReport

DIFFERENT = 1
DEFAULT_TOKENS = 48
ENGINE_OPTIONS = (
    "model", "dtype", "index_keys", "device", "exact", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "block_size", "num_blocks", "cache_memory_gb", "prefix_caching", "draft_sampling", "num_threads",
)  # fmt: skip


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run every pair; exit code 0 when nothing differs, 1 otherwise."""
    config = settings.engine_config()
    check_engine(config)
    ks = numbers(args.k, "--k", 0, LARGEST_K)
    temperatures = [float(value) for value in reals(args.temperature, "--temperature")]
    if args.json not in (None, "-"):
        check_writable(args.json)
    from skipstone.tools.check.report import render  # torch takes seconds to import; errors above come first
    from skipstone.tools.check.run import check

    report = check(config, ks, args.proposers, temperatures, args.prompts, args.num_prompts, args.max_tokens)
    if args.json == "-":
        print(encode(report))
    else:
        if args.json:
            with writing(args.json):
                Path(args.json).write_text(encode(report) + "\n")
        render(report)
    return 0 if report.equal else DIFFERENT


def encode(report: CheckReport) -> str:
    """As JSON."""
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def numbers(text: str, flag: str, low: int, high: int) -> list[int]:
    """Whole numbers separated by commas, ascending, each once. Raises ConfigError."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"{flag} {text} must list whole numbers, as in 1,3,7") from None
    if values[0] < low or values[-1] > high:
        raise ConfigError(f"{flag} {text}: numbers must be between {low} and {high}")
    return values


def reals(text: str, flag: str) -> list[float]:
    """Numbers separated by commas. Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text} must list numbers, as in 0,1") from None


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def natural(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return value


def seconds(text: str) -> float:
    """A time above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def add_prompt_arguments(group: argparse._ArgumentGroup, count: int, tokens: int) -> None:
    """The flags that choose prompts, for commands that run a model over some."""
    group.add_argument("--prompts", metavar="FILE", help=".txt or .jsonl as for generate [the shipped prompts]")
    group.add_argument(
        "--num-prompts", type=positive, default=count, metavar="N", help=f"that many, spread over the file [{count}]"
    )
    group.add_argument(
        "--max-tokens", type=positive, default=tokens, metavar="N", help=f"longest answer, in tokens [{tokens}]"
    )
    group.add_argument(
        "--proposers",
        metavar="NAMES",
        help="as mtp,ngram,eagle3:FOLDER [mtp if the files hold it, heads beside the model, ngram]",
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    group.add_argument("--k", default="0,1,3,7", metavar="LIST", help="drafts per step [0,1,3,7]")
    add_prompt_arguments(group, 12, DEFAULT_TOKENS)
    group.add_argument("--temperature", default="0,1", metavar="LIST", help="each prompt runs at each of these [0,1]")
    group.add_argument("--json", metavar="FILE", help="write the whole report to this file, or to - (stdout)")


COMMAND = Command(
    summary="prove that speculation changes nothing here: equal tokens, and in exact mode equal logits",
    usage="MODEL [--k LIST] [--proposers NAMES] [options]",
    options={EngineConfig: ENGINE_OPTIONS},
    run=run,
    add_arguments=_add_arguments,
)
