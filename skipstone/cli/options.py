"""Command-line flags made from options structs, and the order in which sources of a value win.

Flag, then SKIPSTONE_ variable, then `--config` file, then (sampling only) the checkpoint's generation_config.json, then
the default. An unknown name is an error in every source. Nothing here imports torch: help and errors come at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from skipstone.config import VARIABLE_PREFIX, EngineConfig, Option, make_config, options_of, unknown_option
from skipstone.core.request import SamplingParams
from skipstone.errors import ConfigError
from skipstone.server.config import SECRETS, ServerConfig

# Every struct whose options may stand in a shared variable or file, whichever command reads it.
OPTION_STRUCTS: tuple[type[msgspec.Struct], ...] = (ServerConfig, EngineConfig, SamplingParams)
TITLES = {ServerConfig: "server options", EngineConfig: "engine options", SamplingParams: "sampling options"}

# Other programs' names for a flag.
ALIASES = {"spec": ("--speculative-config",)}

DEFAULT = "default"
# What Kubernetes tells every container of a service whose name begins with skipstone.
_OF_A_SERVICE = re.compile(
    r"SKIPSTONE_(.*_)?(SERVICE_HOST=.*|SERVICE_PORT(_.*)?=\d+|PORT=(tcp|udp|sctp)://.*|PORT_\d+_(TCP|UDP|SCTP)(_.*)?=.*)"
)
_PREFIX = "option_"  # of argparse destinations, so that an option cannot collide with a verb's own argument
_REPEATED = ("texts", "integers", "biases")
_METAVARS = {"integer": "N", "number": "X", "choice": "NAME", "text": "NAME", "texts": "TEXT"} | {
    "integers": "IDS",
    "biases": "ID=BIAS",
}


@dataclass(frozen=True)
class Settings:
    """The value of every option of a command, and where each came from ("default" when nobody set it)."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def engine_config(self) -> EngineConfig:
        """The engine's options. Raises ConfigError without a model."""
        known = options_of(EngineConfig)
        given = {name: value for name, value in self.values.items() if value is not msgspec.NODEFAULT}
        return make_config(**{name: value for name, value in given.items() if name in known})

    def with_checkpoint(self, defaults: Mapping[str, Any]) -> Settings:
        """The same, with the checkpoint's sampling defaults where nobody set a value.

        Raises ConfigError for a default that is no sampling parameter or of the wrong kind.
        """
        known, source = options_of(SamplingParams), "generation_config.json"
        values, sources = dict(self.values), dict(self.sources)
        for name, value in defaults.items():
            if name not in known:
                raise unknown_option(name, known, "sampling parameter", source)
            if self.sources.get(name, DEFAULT).startswith(DEFAULT):
                values[name], sources[name] = known[name].check(value, source), source
        return Settings(values, sources)

    def sampling_params(self, overrides: Mapping[str, Any] | None = None) -> SamplingParams:
        """The sampling parameters, with checked `overrides` of one prompt on top."""
        known = options_of(SamplingParams)
        values = {name: value for name, value in self.values.items() if name in known}
        return SamplingParams(**values | dict(overrides or {}))

    def describe(self) -> str:
        """A YAML file with these values; each line says where its value came from."""
        lines = []
        for name, value in self.values.items():
            if value is msgspec.NODEFAULT:
                lines.append(f"# {name}: not given")
            elif name in SECRETS and value:
                lines.append(f"# {name}: given, not shown".ljust(40) + f" # {self.sources[name]}")
            else:
                lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}".ljust(40) + f" # {self.sources[name]}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Command:
    """One verb: the options it takes, its own arguments, and what runs it. `run` returns the exit code."""

    summary: str
    usage: str  # what follows the verb on the usage line
    options: Mapping[type[msgspec.Struct], tuple[str, ...] | None]  # None: every field
    run: Callable[[argparse.Namespace, Settings], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    reads_stdin: bool = False  # whether a plain "-" is an argument
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where the verb departs from the structs

    def selected(self) -> dict[str, Option]:
        """The options this verb takes, by name."""
        chosen = {}
        for struct, names in self.options.items():
            known = options_of(struct)
            chosen.update({name: known[name] for name in (known if names is None else names)})
        return chosen


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError, takes `_` for `-` in flags, and names the flag nearest to an unknown one."""

    def __init__(self, verb: str, command: Command) -> None:
        super().__init__(f"skipstone {verb}", f"skipstone {verb} {command.usage}", command.summary, allow_abbrev=False)
        self.command = command
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        command.add_arguments(self)
        for struct, names in command.options.items():
            group = self.add_argument_group(TITLES[struct])
            for option in options_of(struct).values():
                if names is None or option.name in names:
                    _add_flag(group, option, command.defaults.get(option.name, option.default))
        group = self.add_argument_group("where options come from")
        if command.options:
            group.add_argument("--config", metavar="FILE", help="YAML file of options, as --print-config prints them")
            group.add_argument("--print-config", action="store_true", help="print every value and its origin, then end")
        group.add_argument("--traceback", action="store_true", help="show where in the program an error was raised")

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError where argparse would print its usage and exit."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read the command line after the verb. Raises ConfigError for a flag or word that does not belong there."""
        args, extra = self.parse_known_intermixed_args([_dashes(argument) for argument in arguments])
        for word in extra:
            if word.startswith("-"):
                flag = word.split("=")[0]
                near = difflib.get_close_matches(flag, self.flags(), n=1)
                hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
                raise ConfigError(f"no option {flag!r}; {hint}")
        words = [*args.words, *extra]
        args.stdin = self.command.reads_stdin and "-" in words
        if args.stdin:
            words.remove("-")
        takes_model = any("model" in options_of(struct) for struct in self.command.options)
        if len(words) > takes_model:
            raise ConfigError(f"unexpected argument {words[takes_model]!r}; usage: {self.usage}")
        if words:
            flagged = vars(args).get(_PREFIX + "model")
            if flagged not in (None, words[0]):
                raise ConfigError(f"two models: {words[0]} and --model {flagged}; keep one")
            vars(args)[_PREFIX + "model"] = words[0]
        return args

    def flags(self) -> list[str]:
        """Every long flag this verb knows."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def resolve(command: Command, args: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Give every option its value and its origin. Raises ConfigError naming the option, its value and its source."""
    if not command.options:
        return Settings({}, {})
    variables, file = _read_variables(environ), _read_file(args.config)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, option in command.selected().items():
        raw = vars(args)[_PREFIX + name]
        if raw is not None:
            sources[name] = option.flag if name != "model" else "command line"
            values[name] = option.check(_read_flag(option, raw, sources[name]), sources[name])
        elif name in variables:
            sources[name] = option.variable
            values[name] = option.check(variables[name], sources[name])
        elif name in file:
            sources[name] = str(args.config)
            values[name] = option.check(file[name], sources[name])
        elif name in command.defaults:
            values[name], sources[name] = command.defaults[name], f"{DEFAULT} of this command"
        else:
            values[name], sources[name] = option.default, DEFAULT
    return Settings(values, sources)


def known_options() -> dict[str, Option]:
    """Every option of every struct: what a variable or a file may name, whichever command reads it."""
    return {name: option for struct in OPTION_STRUCTS for name, option in options_of(struct).items()}


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _add_flag(group: argparse._ArgumentGroup, option: Option, default: Any) -> None:
    text = option.help
    if option.kind == "choice":
        text += f" ({option.allowed})"
    if default is not msgspec.NODEFAULT and default not in ([], {}, None):
        text += f" [{str(default).lower() if isinstance(default, bool) else default}]"
    dest, text = _PREFIX + option.name, text.replace("%", "%%")
    if option.kind == "flag":
        group.add_argument(option.flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        action = "append" if option.kind in _REPEATED else "store"
        flags = (option.flag, *ALIASES.get(option.name, ()))
        group.add_argument(*flags, dest=dest, action=action, metavar=_METAVARS[option.kind], help=text)


def _read_flag(option: Option, raw: Any, source: str) -> Any:
    """What argparse collected, as one value: a repeated flag adds up."""
    if option.kind not in _REPEATED:
        return raw
    try:
        if option.kind == "biases":
            return option.read(",".join(raw))
        return [item for text in raw for item in option.read(text)]
    except ValueError:
        raise ConfigError(f"{option.name}={','.join(raw)} (from {source}) must be {option.allowed}") from None


def _read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    known = {option.variable: name for name, option in known_options().items()}
    given = {
        name: text
        for name, text in environ.items()
        if name.startswith(VARIABLE_PREFIX) and not _OF_A_SERVICE.fullmatch(f"{name}={text}")
    }
    for name in given:
        if name not in known:
            raise unknown_option(name, known, "environment variable")
    return {known[name]: text for name, text in given.items()}


def _repeated_key(text: bytes) -> str | None:
    """A key that a YAML map has twice, which reading it does not show."""
    import yaml

    def search(node: yaml.Node | None) -> str | None:
        if not isinstance(node, yaml.MappingNode):
            return None
        keys = [str(key.value) for key, _ in node.value]
        repeated = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        return repeated or next(filter(None, (search(value) for _, value in node.value)), None)

    return search(yaml.compose(text, Loader=yaml.SafeLoader))


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = Path(path).read_bytes()
        content = msgspec.yaml.decode(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {detail}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map option names to values, like max_num_seqs: 8")
    if repeated := _repeated_key(text):
        raise ConfigError(f"--config {path} sets {repeated} twice; keep one")
    known, options = known_options(), {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise unknown_option(str(key), known, source=path)
        if name in options:
            raise ConfigError(f"--config {path} sets {name} twice; keep one")
        options[name] = value
    return options
