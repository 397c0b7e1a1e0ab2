"""`skipstone chat`: a conversation in the terminal, or over standard input one turn a line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from skipstone.cli.model import check_engine, check_params, open_model
from skipstone.cli.options import Command, Settings
from skipstone.cli.output import cut_short, note, speculation_line
from skipstone.cli.prompts import read_vocab_size
from skipstone.config import EngineConfig
from skipstone.core.request import SamplingParams
from skipstone.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from skipstone.llm import LLM

HELP = """/reset  forget the conversation
/exit   leave (so does Ctrl-D)
/help   this text
Ctrl-C stops an answer; twice in a row it ends the program. Other lines are sent to the model."""


@contextmanager
def counted_interrupts() -> Iterator[Event]:
    """The first Ctrl-C in the block sets the event, to stop an answer between steps; the second ends the program."""
    requested = Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages so far, and one turn after another."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, stats: bool) -> None:
        self.llm = llm
        self.params = params
        self.stats = stats
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)

    def reset(self) -> None:
        """Back to the first message."""
        self.messages = list(self.start)

    def turn(self, text: str) -> bool:
        """Print the answer as it comes; return False if Ctrl-C stopped it. What was printed stays in the conversation.

        Raises RequestError when the conversation no longer fits, or the template refuses it; the turn is then undone.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        remark, spoken = None, None
        # Closing the stream aborts what is left of the request.
        with counted_interrupts() as interrupted, closing(self.llm.stream_chat(messages, self.params)) as events:
            for event in events:
                answer += event.text
                print(event.text, end="", flush=True)
                if event.output is not None:
                    spoken = event.output.outputs[0]
                    remark = spoken.error or cut_short(self.llm, [event.output])
                if interrupted.is_set():
                    break
        print(flush=True)
        if remark:
            note(remark)
        if self.stats and spoken is not None and spoken.speculation is not None:
            note(f"speculation, {self.llm.proposer}: {speculation_line(spoken.speculation)}")
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return not interrupted.is_set()


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Converse until the end of input, /exit, or Ctrl-C twice."""
    config, params = settings.engine_config(), settings.sampling_params()
    folder = check_engine(config)
    params.validate(read_vocab_size(folder) or 2**31)
    check_params(config, folder, [params])
    if settings.values["n"] != 1:
        raise RequestError(f"n={settings.values['n']} has no meaning in a conversation; leave --n out")
    with open_model(settings, args.quiet) as (llm, resolved):
        if llm.tokenizer is None:
            raise RequestError(f"{folder} has no tokenizer.json, so it cannot chat; use generate with prompt_token_ids")
        conversation = Conversation(llm, resolved.sampling_params(), args.system, args.stats)
        if sys.stdin.isatty() and not args.quiet:
            note("type a message, or /help")
        return _converse(conversation)


def _converse(conversation: Conversation) -> int:
    interrupted = False
    while True:
        try:
            line = _read_line()
        except KeyboardInterrupt:
            note("")
            if interrupted:
                raise
            interrupted = True
            note("Ctrl-C again ends the program")
            continue
        if line is None or line.strip() == "/exit":
            return 0
        interrupted = False
        command = line.strip()
        if command == "/reset":
            conversation.reset()
            note("the conversation starts anew")
        elif command.startswith("/"):
            note(HELP if command == "/help" else f"no command {command}\n{HELP}")
        elif command:
            try:
                interrupted = not conversation.turn(line)
            except RequestError as error:
                note(f"error: {error}\n/reset starts anew")


def _read_line() -> str | None:
    """One line without its end, None at the end of input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())

        try:
            return input("> ")
        except EOFError:
            return None
    try:
        line = sys.stdin.readline()
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror or error}; open it for reading") from None
    return line.rstrip("\r\n") if line else None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="a system message before the first turn")
    group.add_argument("--stats", action="store_true", help="after each answer: how many drafts were accepted")
    group.add_argument("-q", "--quiet", action="store_true", help="no start-up card, no remarks")


COMMAND = Command(
    summary="talk to a model; /help there lists what can be typed",
    usage="MODEL [options]",
    options={EngineConfig: None, SamplingParams: None},
    run=run,
    add_arguments=_add_arguments,
)
