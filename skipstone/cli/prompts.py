"""The prompts of `skipstone generate`: from -p, from files, from standard input; all are checked before work starts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skipstone.config import options_of, unknown_option
from skipstone.core.request import SamplingParams
from skipstone.errors import ConfigError, RequestError

# What a line may give as its prompt: the field of Prompt that takes it, its type, and what is allowed.
PROMPT_KEYS: dict[str, tuple[str, Any, str]] = {
    "prompt": ("text", str, "text"),
    "prompt_token_ids": ("token_ids", list[int], "a list of token ids"),
    "messages": ("messages", list[dict[str, Any]], "a list of {role, content} objects"),
}
LABELS = ("id", "kind", "reference")  # of a line; the last two are for its reader
HEADING_LENGTH = 80
_ANY_VOCABULARY = 2**31


@dataclass(frozen=True)
class Prompt:
    """One prompt: exactly one of text, token ids and messages; with the sampling fields its line sets."""

    request_id: str
    source: str  # where it came from, for error messages: "prompts.jsonl:3"
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id its line gives it, or where it stands."""
        return self.source if self.request_id.isdigit() else self.request_id

    @property
    def heading(self) -> str:
        """Its beginning, on one line."""
        said = self.text or (str(self.messages[-1].get("content", "")) if self.messages else str(self.token_ids))
        return " ".join(said.split())[:HEADING_LENGTH]


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Every prompt of the command line, in its order. Raises ConfigError naming a file, a line and a field."""
    prompts = [Prompt(f"{i}", "-p", text=text) for i, text in enumerate(args.prompt)]
    for name in args.file:
        prompts += read_file(name, len(prompts))
    if args.stdin:
        prompts.append(Prompt(f"{len(prompts)}", "standard input", text=read_stdin()))
    if not prompts:
        raise ConfigError("no prompt given; pass -p TEXT, -f FILE, or - to read one from standard input")
    for prompt in prompts:
        if prompt.text == "" or prompt.token_ids == [] or prompt.messages == []:
            raise ConfigError(f"{prompt.source}: the prompt is empty; a completion needs at least one token")
    return prompts


def read_stdin() -> str:
    """Everything on standard input. Raises ConfigError when it cannot be read, or is no UTF-8 text."""
    try:
        return _decode(sys.stdin.buffer.read(), "standard input")
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror or error}; open it for reading") from None


def check_sampling(prompts: list[Prompt], params: list[SamplingParams], vocab_size: int | None) -> None:
    """Check ranges and token ids, as far as they can be checked without the model.

    Raises ConfigError naming the line and the field.
    """
    limit = vocab_size or _ANY_VOCABULARY
    for prompt, chosen in zip(prompts, params, strict=True):
        try:
            chosen.validate(limit)
        except RequestError as error:
            where = f"{prompt.source}: " if prompt.overrides else ""
            raise ConfigError(f"{where}{error}") from None
        for token in prompt.token_ids or []:
            if not 0 <= token < limit:
                raise ConfigError(f"{prompt.source}: prompt_token_ids contains {token}; ids are 0 to {limit - 1}")


def read_vocab_size(folder: Path) -> int | None:
    """The vocabulary size in config.json, None when it cannot be read: loading the model then says why."""
    try:
        raw = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    size = raw.get("text_config", raw).get("vocab_size") if isinstance(raw.get("text_config", raw), dict) else None
    return size if isinstance(size, int) else None


def read_file(name: str, first: int = 0, flag: str = "-f") -> list[Prompt]:
    """The prompts of one file, ids counted from `first`. Raises ConfigError naming the flag, a line and a field."""
    if name == "-":
        raise ConfigError(f"{flag} - is not supported; name a file")
    path = Path(name)
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"{flag} {name}: the name must end in .txt (one prompt a line) or .jsonl (one object a line)")
    try:
        content = _decode(path.read_bytes(), name)
    except OSError as error:
        raise ConfigError(f"{flag} {name} cannot be read: {error.strerror}") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            request_id, source = str(first + len(prompts)), f"{name}:{number}"
            text = line.removesuffix("\r")
            is_text = path.suffix == ".txt"
            prompts.append(Prompt(request_id, source, text) if is_text else _read_object(request_id, source, text))
    if not prompts:
        raise ConfigError(f"{flag} {name} holds no prompt; blank lines do not count")
    return prompts


def _read_object(request_id: str, source: str, line: str) -> Prompt:
    try:
        raw = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: not a JSON object ({error})") from None
    known = options_of(SamplingParams)
    for key in raw:
        if key not in known and key not in (*PROMPT_KEYS, *LABELS):
            raise unknown_option(key, [*PROMPT_KEYS, *LABELS, *known], "field", source)
    given = [key for key in PROMPT_KEYS if key in raw]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise ConfigError(f"{source}: give exactly one of {', '.join(PROMPT_KEYS)}; found {found}")
    overrides = {key: known[key].check(value, source) for key, value in raw.items() if key in known}
    name, kind, allowed = PROMPT_KEYS[given[0]]
    try:
        content = {name: msgspec.convert(raw[given[0]], kind)}
    except msgspec.ValidationError:
        raise ConfigError(f"{source}: {given[0]}={raw[given[0]]!r:.60} must be {allowed}") from None
    return Prompt(str(raw.get("id", request_id)), source, overrides=overrides, **content)


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}") from None
