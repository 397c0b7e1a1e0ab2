"""`skipstone trace`: where each token of an answer came from, and what the row behind it read."""

from __future__ import annotations

import argparse

from skipstone.cli.model import check_engine
from skipstone.cli.options import Command, Settings
from skipstone.cli.prompts import Prompt, check_sampling, read_stdin, read_vocab_size
from skipstone.config import EngineConfig
from skipstone.core.request import SamplingParams
from skipstone.errors import RequestError
from skipstone.tools.report import check_target, publish

MAX_TOKENS = 64


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Complete one prompt and print its trace."""
    prompt = _read_prompt(args)
    config, params = settings.engine_config(), settings.sampling_params()
    folder = check_engine(config)
    check_target(args.json)
    if params.n != 1:
        raise RequestError(f"n={params.n} cannot be traced; leave --n out")
    check_sampling([prompt], [params], read_vocab_size(folder))
    from skipstone.tools.trace.run import render, trace  # torch takes seconds to import; errors above come first

    publish(trace(config, prompt, settings), args.json, render, indent=-1)
    return 0


def _read_prompt(args: argparse.Namespace) -> Prompt:
    if (args.prompt is None) == (not args.stdin):
        raise RequestError("trace takes one prompt: pass -p TEXT, or - to read it from standard input")
    text = args.prompt if args.prompt is not None else read_stdin()
    if not text:
        raise RequestError("the prompt is empty; a completion needs at least one token")
    if args.chat:
        return Prompt("0", "the prompt", messages=[{"role": "user", "content": text}])
    return Prompt("0", "the prompt", text=text)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt and result")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    group.add_argument("--chat", action="store_true", help="send it as a message, through the chat template")
    group.add_argument("--json", metavar="FILE", help="write every token, logit and selection, to a file or - (stdout)")


COMMAND = Command(
    summary="explain each token: accepted draft, recovered, bonus or sampled, and what each layer read for it",
    usage="MODEL -p TEXT [options]",
    options={EngineConfig: None, SamplingParams: None},
    run=run,
    add_arguments=_add_arguments,
    reads_stdin=True,
    defaults={"max_tokens": MAX_TOKENS},
)
