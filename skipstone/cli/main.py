"""The command line: finds the verb, reads its options, and turns errors into one line and an exit code.

Exit codes: 0 done; 1 a bug of ours, with its traceback, or one that `check` has found; 2 an error in what was asked;
3 a checkpoint that does not load; 130 Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import traceback
from collections.abc import Sequence

from skipstone.cli.model import with_generation_config
from skipstone.cli.options import Command, Parser, resolve
from skipstone.core.request import SamplingParams
from skipstone.errors import ConfigError, SkipstoneError
from skipstone.registry import Registry

COMMANDS = Registry(
    "command",
    {
        "generate": "cli.generate:COMMAND",
        "chat": "cli.chat:COMMAND",
        "serve": "cli.serve:COMMAND",
        "check": "tools.check.command:COMMAND",
        "tune": "tools.tune.command:COMMAND",
        "trace": "tools.trace.command:COMMAND",
        "inspect": "tools.inspect.command:COMMAND",
        "doctor": "tools.doctor.command:COMMAND",
        "bench kernels": "tools.bench.kernels:COMMAND",
        "bench decode": "tools.bench.decode:COMMAND",
        "bench load": "tools.bench.load:COMMAND",
        "bench serve": "tools.bench.serve:COMMAND",
        "version": "cli.version:COMMAND",
    },
)
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit code. Only a bug of ours raises."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 (the same)
    try:
        if sys.stdout is None:
            raise ConfigError("standard output is closed; redirect it to a file, or to /dev/null")
        code = _dispatch(list(arguments))
        sys.stdout.flush()
        return code
    except SkipstoneError as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        _drop_output()  # the reader has left, as `| head` does
        return BROKEN_PIPE
    except OSError as error:
        # Files are written by who names them in its errors, so this is standard output.
        if error.filename is not None or error.errno not in CANNOT_WRITE:
            raise
        print(f"error: standard output cannot be written: {error.strerror}; send it elsewhere", file=sys.stderr)
        _drop_output()
        return ConfigError.exit_code


def _drop_output() -> None:
    """Nothing more can be written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_command(verb: str) -> Command:
    """The command behind a verb. Raises ConfigError naming the nearest verb."""
    if verb not in COMMANDS.entries:
        parts = [known for known in COMMANDS.entries if known.split()[0] == verb.split()[0]]
        near = difflib.get_close_matches(verb, parts or COMMANDS.entries, n=1, cutoff=0.0 if parts else 0.6)
        hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(COMMANDS.entries)
        raise ConfigError(f"no command {verb!r}; {hint}")
    command: Command = COMMANDS.load(verb)
    return command


def overview(verbs: Sequence[str] = tuple(COMMANDS.entries)) -> str:
    """What `skipstone --help` prints; `skipstone bench --help` with that command's own verbs."""
    lines = ["usage: skipstone COMMAND ...", "", "Inference for sparse-attention language models.", "", "commands:"]
    lines += [f"  {verb:<12} {load_command(verb).summary}" for verb in verbs]
    return "\n".join([*lines, "", "`skipstone COMMAND --help` shows a command's options."])


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    group = [known for known in COMMANDS.entries if known.startswith(arguments[0] + " ")]
    if group and arguments[1:] in ([], ["-h"], ["--help"]):
        print(overview(group))
        return 0 if arguments[1:] else 2
    verb = "version" if arguments[0] in ("--version", "-V") else arguments[0]
    words = 1
    if group:  # the first of two words
        verb, words = " ".join(arguments[:2]), 2
    command = load_command(verb)
    parser = Parser(verb, command)
    try:
        args = parser.parse(arguments[words:])
    except SystemExit:  # argparse has printed the help
        return 0
    settings = resolve(command, args, os.environ)
    if getattr(args, "print_config", False):
        print((with_generation_config(settings) if SamplingParams in command.options else settings).describe())
        return 0
    return command.run(args, settings)
