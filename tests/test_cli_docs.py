"""docs/cli.md lists every flag, variable and default as the program has them. Run this file to write it anew."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from skipstone.cli.main import COMMANDS, load_command
from skipstone.cli.options import ALIASES, TITLES, Command, Parser, known_options

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEAD = """# Command line

Written by `python tests/test_cli_docs.py`; a test compares it with the program.

Every option below exists as a flag, as an environment variable and as a key of a `--config` file. A flag wins over a
variable, a variable over the file, the file over the checkpoint's `generation_config.json` (sampling options only), and
that over the default. `--print-config` prints every value with its origin, in the format that `--config` reads. An
unknown flag, key, or variable that begins with `SKIPSTONE_` is an error, but for those that Kubernetes sets for a
service of such a name (`SKIPSTONE_SERVICE_HOST`, `SKIPSTONE_PORT=tcp://...`). In flags `_` and `-` are the same. Whole
numbers may end in k, m, g (powers of 1000) or K, M, G (powers of 1024).

Results go to standard output, everything else to standard error.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a fault of the program, with its traceback; or `check` has found a difference |
| 2 | an error in what was asked: one line with the field, its value and the way out (`--traceback` shows more) |
| 3 | a check failed: `inspect` found a checkpoint that does not load |
| 130 | ended by Ctrl-C |
| 141 | the reader of standard output closed it |
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for verb in COMMANDS.entries:
        command = load_command(verb)
        parts.append(f"## skipstone {verb} {command.usage}".rstrip() + f"\n\n{sentence(command.summary)}\n")
        parts.append(own_arguments(verb, command))
        if command.options:
            names = [f"[{TITLES[struct]}](#{TITLES[struct].replace(' ', '-')})" for struct in command.options]
            chosen = {name for fields in command.options.values() for name in fields or ()}
            only = f" (only {', '.join(f'`--{name}`' for name in sorted(chosen))})" if chosen else ""
            own = "".join(f" Here `{name}` is {value} by default." for name, value in command.defaults.items())
            parts.append(f"It takes the {' and the '.join(names)}{only}.{own}\n")
    parts += [option_table(struct) for struct in TITLES]
    return "\n".join(parts).rstrip() + "\n"


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[0].upper() + text[1:] + "."


def own_arguments(verb: str, command: Command) -> str:
    """The flags of one verb that are not made from options."""
    rows = []
    for action in Parser(verb, command)._actions:
        if action.option_strings and not action.dest.startswith("option_"):
            value = f" {action.metavar}" if action.metavar else ""
            flags = ", ".join(f"`{flag}{value}`" for flag in action.option_strings)
            rows.append(f"| {flags} | {action.help} |")
    return "\n".join(["| flag | meaning |", "|---|---|", *rows]) + "\n"


def option_table(struct: type[msgspec.Struct]) -> str:
    """Every field of an options struct."""
    lines = [f"## {TITLES[struct]}", "", "| flag | variable | value | default | meaning |", "|---|---|---|---|---|"]
    for name, option in known_options().items():
        if name in struct.__struct_fields__:
            flag = ", ".join(f"`{name}`" for name in (option.flag, *ALIASES.get(name, ())))
            flag += f", `--no-{option.flag[2:]}`" if option.kind == "flag" else ""
            shown = "" if option.default is msgspec.NODEFAULT else f"`{msgspec.json.encode(option.default).decode()}`"
            default = {"`null`": "none", "`[]`": "none", "`{}`": "none"}.get(shown, shown)
            lines.append(f"| {flag} | `{option.variable}` | {option.allowed} | {default} | {option.help} |")
    return "\n".join([*lines, ""])


def test_the_page_is_what_the_program_has() -> None:
    assert TARGET.read_text() == reference(), "run python tests/test_cli_docs.py"


def test_every_flag_of_every_help_is_on_the_page() -> None:
    page = TARGET.read_text()
    for verb in COMMANDS.entries:
        parser: argparse.ArgumentParser = Parser(verb, load_command(verb))
        for action in parser._actions:
            assert all(f"`{flag}" in page for flag in action.option_strings), action.option_strings


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(reference())
