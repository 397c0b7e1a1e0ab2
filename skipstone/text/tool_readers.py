"""Tool calls in a model's text: three notations, read as the text arrives.

Knows text only. Does not know requests, tokens or the API's structs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from skipstone.text.tool_schemas import Schema, bare, declares, kinds, kinds_of, part

Schemas = Mapping[str, Schema]  # of the arguments, by function
DEEPEST = 100
"""Levels of a call's arguments; below the limits of what clients and templates can take."""


class Text(NamedTuple):
    """What the model says beside its calls."""

    text: str


class Call(NamedTuple):
    """A whole call; `arguments`: a JSON object."""

    name: str
    arguments: str


Piece = Text | Call


class Reader:
    """Takes text, gives pieces. What may be the start of a call is held back until that is certain.

    A call comes whole or not at all: a client could neither run a part of one nor send it back. Calls that are
    malformed or cut off come out as the text that they are. Newlines around calls belong to the notation.
    """

    def __init__(self, marker: str) -> None:
        self.marker = marker
        """What all calls begin with."""
        self.cut = False
        """Whether the end of the text has cut off a call."""
        self._rest = ""
        self._in_calls = False  # behind a marker
        self._given = False  # something for the marker, and no text since
        self._searched = 0  # how much of the rest cannot end a call

    def feed(self, text: str) -> list[Piece]:
        """Go on reading."""
        self._rest += text
        pieces: list[Piece] = []
        while self._read_calls(pieces) if self._in_calls else self._read_text(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """No more text comes."""
        pieces: list[Piece] = []
        while self._in_calls:
            if self._given and self._may_end(self._rest.strip()):
                return pieces
            another = self._rest.find(self.marker)
            self.cut = another < 0
            end = len(self._rest) if self.cut else another
            self._take(pieces, Text(self.marker + self._rest[:end]), end, in_calls=False)
            pieces += self.feed("")
        return pieces + ([Text(self._rest)] if self._rest else [])

    def _take(self, pieces: list[Piece], piece: Piece, end: int, in_calls: bool) -> bool:
        """Give a piece for what stands up to `end`. Always true: it got further."""
        pieces.append(piece)
        self._given = in_calls or isinstance(piece, Call)
        self._rest, self._searched, self._in_calls = self._rest[end:], 0, in_calls
        return True

    def _read_text(self, pieces: list[Piece]) -> bool:
        if self._given:
            self._rest = self._rest.lstrip("\n")
        begin = self._rest.find(self.marker)
        said = self._rest[: begin if begin >= 0 else len(self._rest) - _num_held(self._rest, self.marker)].rstrip("\n")
        if said:
            self._take(pieces, Text(said), len(said), in_calls=False)
        if begin < 0:
            return False
        self._rest = self._rest.lstrip("\n").removeprefix(self.marker)
        self._in_calls, self._given, self._searched = True, False, 0
        return True

    def _read_calls(self, pieces: list[Piece]) -> bool:
        """Behind the marker. Returns whether it got further."""
        raise NotImplementedError

    def _may_end(self, rest: str) -> bool:
        """Whether nothing is lost when the text ends like this, behind a whole call."""
        return not rest


def _num_held(text: str, marker: str) -> int:
    """Length of the longest ending of the text that begins the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


class JsonReader(Reader):
    """Marker, then {"name": ..., "arguments": {...}}; for every call again."""

    def _read_calls(self, pieces: list[Piece]) -> bool:
        """Up to the brace that closes the first."""
        if not self._searched:
            self._depth, self._in_string, self._escaped = 0, False, False
        for at in range(self._searched, len(self._rest)):
            character = self._rest[at]
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif not self._depth and character != "{" and not character.isspace():
                return self._take(pieces, Text(self.marker + self._rest[:at]), at, in_calls=False)
            elif character == '"':
                self._in_string = True
            elif character in "{[}]":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    text = self._rest[: at + 1]
                    return self._take(pieces, _json_call(text) or Text(self.marker + text), at + 1, in_calls=False)
        self._searched = len(self._rest)
        return False


def _json_call(text: str) -> Call | None:
    try:
        value = load(text)
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = load(arguments or "{}")
        return Call(_clean(value["name"]), encode({} if arguments is None else arguments))
    except (ValueError, LookupError, TypeError):
        return None


def load(text: str) -> Any:
    """JSON without NaN and infinite numbers, which are none. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    if abs(number := float(text)) == float("inf"):
        raise ValueError(f"{text} is too large")
    return number


def encode(arguments: Any) -> str:
    """Arguments as JSON that every client can read. Raises ValueError when they are no object, or too deep."""
    if not isinstance(arguments, dict) or _is_deep(arguments, DEEPEST):
        raise ValueError("not an object of reasonable depth")
    return _clean(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _is_deep(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(one, left - 1) for one in inner)


def _clean(text: str) -> str:
    """Halves of surrogate pairs have no UTF-8."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


class Tags(NamedTuple):
    """What stands before the name of a tag that opens, or closes; and the name of the one around all calls."""

    opening: str
    closing: str
    block: str


class TagReader(Reader):
    """Calls written with tags: all of them between two tags, each with a tag for itself, or JSON there."""

    tags: Tags

    def __init__(self, schemas: Schemas) -> None:
        opening, closing, block = self.tags
        super().__init__(f"{opening}{block}>")
        self._end = f"{closing}{block}>"
        self._over = re.compile(rf"\s*{re.escape(self._end)}")
        self._closing = re.compile(f"{re.escape(closing)}(invoke|{block})>")
        self._invoke = re.compile(
            rf"\s*{re.escape(opening)}invoke({ATTRIBUTES})>(.*?){re.escape(closing)}invoke>", re.DOTALL
        )
        self._schemas = schemas

    def _read_calls(self, pieces: list[Piece]) -> bool:
        if self._given and (over := self._over.match(self._rest)):
            self._rest, self._in_calls = self._rest[over.end() :], False
            return True
        closing = self._closing.search(self._rest, self._searched)
        if closing is None:
            self._searched = max(0, len(self._rest) - len(self._end))
            return False
        text, inside = self._rest[: closing.end()], closing[1] == "invoke"
        call, another = self._call(text), text.find(self.marker)
        if call is None and another >= 0:
            return self._take(pieces, Text(self.marker + text[:another]), another, in_calls=False)
        return self._take(pieces, call or Text(self.marker + text), len(text), in_calls=inside)

    def _call(self, text: str) -> Call | None:
        if (found := self._invoke.fullmatch(text)) is None:
            return None
        try:
            name, body = _attributes(found[1])["name"], found[2]
            schema = {"type": "object"} | self._schemas.get(name, {})
            return Call(name, encode(load(body) if body.lstrip().startswith("{") else self._arguments(body, schema)))
        except (ValueError, LookupError, RecursionError):
            return None

    def _may_end(self, rest: str) -> bool:
        return self._end.startswith(rest)

    def _arguments(self, body: str, schema: Schema) -> Any:
        """Those of one call. Raises ValueError or LookupError when they are malformed."""
        raise NotImplementedError


ATTRIBUTES = r'(?:\s+\w+\s*=\s*"[^"]*")*\s*'


def _attributes(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)\s*=\s*"([^"]*)"', text))


DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"  # in every tag


class DsmlReader(TagReader):
    """DeepSeek-V3.2: a parameter is a tag with its name, which says whether the value is bare text or JSON."""

    tags = Tags(f"<{DSML}", f"</{DSML}", "function_calls")
    _PARAMETER = re.compile(rf"\s*<{DSML}parameter({ATTRIBUTES})>(.*?)</{DSML}parameter>\s*", re.DOTALL)

    def _arguments(self, body: str, schema: Schema) -> dict[str, Any]:
        values, at = dict[str, Any](), 0
        body = body.strip()
        while at < len(body):
            if (found := self._PARAMETER.match(body, at)) is None:
                raise ValueError("not a parameter")
            attributes, text, at = _attributes(found[1]), found[2], found.end()
            name, string = attributes["name"], attributes.get("string")
            inner = {} if string == "false" else part(schema, name, schema)
            values[name] = text if string == "true" else read_value(text, inner, schema)
        return values


MINIMAX = "]<]minimax[>["  # before every tag


class MinimaxReader(TagReader):
    """MiniMax-M3: a value is a tag named like it; objects hold further tags, lists hold tags named item."""

    tags = Tags(f"{MINIMAX}<", f"{MINIMAX}</", "tool_call")
    _TAG = re.compile(re.escape(MINIMAX) + r"<(/?)([^<>]+)>")

    def _arguments(self, body: str, schema: Schema) -> Any:
        pieces = self._TAG.split(body)  # text, "/" or "", name, text, ...
        value, at = self._value(pieces, 0, schema, schema)
        if at + 1 < len(pieces):
            raise ValueError("a tag is closed that is not open")
        return value

    def _value(self, pieces: list[str], at: int, schema: Schema, root: Schema) -> tuple[Any, int]:
        """The value that begins with the text at `at`, and where the text before its closing tag is."""
        fields, items, beside = dict[str, Any](), list[Any](), pieces[at]
        listed = "array" in kinds(schema, root) and not declares(schema, "item", root)
        while at + 1 < len(pieces) and not pieces[at + 1]:
            name = pieces[at + 2]
            inner = part(schema, None if listed and name == "item" else name, root)
            value, at = self._value(pieces, at + 3, inner, root)
            if pieces[at + 1 : at + 3] != ["/", name]:
                raise ValueError(f"{name} is not closed")
            at += 3
            beside += pieces[at]
            if listed and name == "item":
                items.append(value)
            elif name in fields:
                before = fields[name]
                fields[name] = [*before, value] if isinstance(before, list) else [before, value]
            else:
                fields[name] = value
        if not fields and not items:
            return read_value(beside, schema, root), at
        if beside.strip() or (fields and items):
            raise ValueError("a value is two things at once")
        return items or fields, at


def read_value(text: str, schema: Schema, root: Schema) -> Any:
    """A value written without quotes: bare text where the schema wants that, else JSON if it is any that fits."""
    possible = kinds(schema, root)
    if not text.strip() and "string" not in possible:
        return {} if "object" in possible else [] if "array" in possible else text
    if bare(possible):
        return None if text == "null" and "null" in possible else text
    try:
        value = load(text)
    except ValueError:
        return text
    return text if "string" in possible and not kinds_of(value) & possible else value
