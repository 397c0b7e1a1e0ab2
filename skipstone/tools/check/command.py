"""`skipstone check`: the tokens and logits of every proposer and number of drafts against those without drafts."""

from __future__ import annotations

import argparse

from skipstone.cli.model import check_engine
from skipstone.cli.options import Command, Settings
from skipstone.config import EngineConfig
from skipstone.spec_config import LARGEST_K
from skipstone.tools.flags import ENGINE_OPTIONS, add_prompt_arguments, integers, reals
from skipstone.tools.report import check_target, publish

DIFFERENT = 1
DEFAULT_TOKENS = 48


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run every pair; exit code 0 when nothing differs, 1 otherwise."""
    config = settings.engine_config()
    check_engine(config)
    check_target(args.json)
    from skipstone.tools.check.run import check, render  # torch takes seconds to import; errors above come first

    report = check(config, args.k, args.proposers, args.temperature, args.prompts, args.num_prompts, args.max_tokens)
    publish(report, args.json, render)
    return 0 if report.equal else DIFFERENT


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    ks, temperatures = integers("--k", 0, LARGEST_K), reals("--temperature", "0,1")
    group.add_argument("--k", type=ks, default="0,1,3,7", metavar="LIST", help="drafts per step [0,1,3,7]")
    add_prompt_arguments(group, 12, DEFAULT_TOKENS)
    each = "each prompt runs at each of these [0,1]"
    group.add_argument("--temperature", type=temperatures, default="0,1", metavar="LIST", help=each)
    group.add_argument("--json", metavar="FILE", help="write the whole report to this file, or to - (stdout)")


COMMAND = Command(
    summary="prove that speculation changes nothing here: equal tokens, and in exact mode equal logits",
    usage="MODEL [--k LIST] [--proposers NAMES] [options]",
    options={EngineConfig: ENGINE_OPTIONS},
    run=run,
    add_arguments=_add_arguments,
)
