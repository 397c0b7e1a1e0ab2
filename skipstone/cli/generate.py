"""`skipstone generate`: complete prompts from the command line, from files or from standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from skipstone.cli.model import check_engine, check_params, open_model
from skipstone.cli.options import Command, Settings
from skipstone.cli.output import Results, check_writable, cut_short, note, show_card, stats_rows
from skipstone.cli.prompts import Prompt, check_sampling, read_prompts, read_vocab_size
from skipstone.config import EngineConfig
from skipstone.core.request import SamplingParams
from skipstone.errors import RequestError

if TYPE_CHECKING:
    from skipstone.llm import LLM
    from skipstone.outputs import RequestOutput

MAX_TOKENS = 256


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Complete every prompt; raises before the model is loaded if any prompt, option or target is wrong."""
    prompts = read_prompts(args)
    config = settings.engine_config()
    folder = check_engine(config)
    if args.json not in (None, "-"):
        check_writable(args.json)
    params = [settings.sampling_params(prompt.overrides) for prompt in prompts]
    check_sampling(prompts, params, read_vocab_size(folder))
    check_params(config, folder, params)
    with open_model(settings, args.quiet) as (llm, resolved):
        params = [resolved.sampling_params(prompt.overrides) for prompt in prompts]
        inputs = [encoded(llm, prompt) for prompt in prompts]
        _check_constraints(llm, prompts, inputs, params)
        streams = len(prompts) == 1 and params[0].n == 1 and args.json is None and sys.stdout.isatty()
        if streams:
            outputs = [_stream(llm, inputs[0], params[0])]
        else:
            several = sum(chosen.n for chosen in params) > 1
            # A progress bar is no result.
            with Results(args.json, prompts, several) as results, redirect_stdout(sys.stderr):
                bar = not args.quiet and sys.stderr.isatty()
                outputs = llm.generate(inputs, params, progress=bar, on_output=results.take)
        remark = cut_short(llm, outputs)
        if remark and not args.quiet:
            note(remark)
        if args.stats:
            show_card(stats_rows(llm.stats(), outputs, llm.proposer), "this run")
    _check_ends(prompts, outputs)
    return 0


def _check_ends(prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> None:
    """Raise RequestError when an answer ended because nothing could follow."""
    pairs = zip(prompts, outputs, strict=True)
    failed = [(prompt, choice.error) for prompt, output in pairs for choice in output.outputs if choice.error]
    if failed:
        (prompt, error), more = failed[0], len(failed) - 1
        raise RequestError(f"{prompt.source}: {error}" + (f"; so did {more} more" if more else ""))


def encoded(llm: LLM, prompt: Prompt) -> list[int]:
    """The prompt's token ids. Raises RequestError naming its line when it does not fit or cannot be encoded."""
    token_ids = prompt.token_ids
    if token_ids is None and llm.tokenizer is None:
        raise RequestError(f"{prompt.source}: no tokenizer.json, so only prompt_token_ids can be used")
    try:
        if token_ids is None and llm.tokenizer is not None:
            encoded = llm.tokenizer.encode_chat(prompt.messages) if prompt.messages else None
            token_ids = encoded or llm.tokenizer.encode(prompt.text or "")
        token_ids = token_ids or []
        llm.engine.caches.check_length(len(token_ids))
    except RequestError as error:
        raise RequestError(f"{prompt.source}: {error}") from None
    return token_ids


def _check_constraints(llm: LLM, prompts: list[Prompt], inputs: list[list[int]], params: list[SamplingParams]) -> None:
    """Raise RequestError naming the line of a conversation that begins with a thought, where no constraint holds."""
    for prompt, token_ids, chosen in zip(prompts, inputs, params, strict=True):
        if prompt.messages and llm.tokenizer is not None and chosen.structured_output is not None:
            try:
                llm.tokenizer.check_constraint(token_ids, chosen.structured_output[0])
            except RequestError as error:
                raise RequestError(f"{prompt.source}: {error}") from None


def _stream(llm: LLM, token_ids: list[int], params: SamplingParams) -> RequestOutput:
    """Print the text as it becomes certain; return the finished output."""
    output: RequestOutput | None = None
    for event in llm.stream(token_ids, params):
        print(event.text, end="", flush=True)
        output = event.output
    print()
    assert output is not None
    return output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and results")
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    group.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help=".txt: one prompt a line; .jsonl: one object a line with prompt, prompt_token_ids or messages, an id if "
        "wanted, and any sampling field (kind and reference are skipped); blank lines do not count; may be repeated",
    )
    group.add_argument("--json", metavar="OUT", help="write one JSON object a line to this file, or to - (stdout)")
    group.add_argument(
        "--stats", action="store_true", help="at the end: tokens, tokens/s, steps, accepted drafts, cache use"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="no start-up card, no progress, no remarks")


COMMAND = Command(
    summary="complete prompts: -p TEXT, -f FILE, or - for one prompt from standard input",
    usage="MODEL [-p TEXT] [-f FILE] [-] [options]",
    options={EngineConfig: None, SamplingParams: None},
    run=run,
    add_arguments=_add_arguments,
    reads_stdin=True,
    defaults={"max_tokens": MAX_TOKENS},
)
