"""Tool calls in a model's text: three notations, read as the text arrives.

Knows text only. Does not know requests, tokens or the API's structs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schema = dict[str, Any]
Schemas = Mapping[str, Schema]  # of the arguments, by function


class Text(NamedTuple):
    """What the model says beside its calls."""

    text: str


class Begin(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """A further part of the newest call's arguments, which are JSON."""

    text: str


Piece = Text | Begin | Arguments


class Reader:
    """Takes text, gives pieces. What may be the start of a call is held back until that is certain.

    Calls that are malformed or cut off before they are understood come out as the text that they are.
    """

    def __init__(self, marker: str) -> None:
        self.marker = marker
        """What all calls begin with."""
        self._rest = ""
        self._state: Callable[[list[Piece]], bool] = self._read_text

    def feed(self, text: str) -> list[Piece]:
        """Go on reading."""
        self._rest += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """No more text comes."""
        rest, self._rest = self._rest, ""
        if self._state == self._read_text:
            return [Text(rest)] if rest else []
        return self._cut_off(rest)

    def _read_text(self, pieces: list[Piece]) -> bool:
        begin = self._rest.find(self.marker)
        end = begin if begin >= 0 else len(self._rest) - _num_held(self._rest, self.marker)
        if end:
            pieces.append(Text(self._rest[:end]))
        if begin < 0:
            self._rest = self._rest[end:]
            return False
        self._rest = self._rest[begin + len(self.marker) :]
        self._state = self._read_call
        return True

    def _read_call(self, pieces: list[Piece]) -> bool:
        """Behind the marker. Returns whether it got further."""
        raise NotImplementedError

    def _cut_off(self, rest: str) -> list[Piece]:
        """What becomes of a call that the text's end has cut off."""
        return [Text(self.marker + rest)]


def _num_held(text: str, marker: str) -> int:
    """Length of the longest ending of the text that begins the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class JsonReader(Reader):
    """Marker, then {"name": ..., "arguments": {...}}; for every call again. Arguments come as they are written."""

    _HEAD = re.compile(
        r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
    )

    def _read_call(self, pieces: list[Piece]) -> bool:
        head = self._HEAD.match(self._rest)
        if head is not None:
            pieces.append(Begin(json.loads(head[1])))
            self._rest = self._rest[head.end() :]
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._read_arguments
            return True
        call, end = _whole_call(self._rest)
        if call is None:
            another = self._rest.find(self.marker)
            if another < 0:
                return False
            pieces.append(Text(self.marker + self._rest[:another]))
            self._rest = self._rest[another:]
        else:
            pieces += [Begin(call[0]), Arguments(call[1])]
            self._rest = self._rest[end:]
        self._state = self._read_text
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        """Up to the brace that closes them."""
        end = 0
        for character in self._rest:
            end += 1
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
            if self._depth == 0:
                break
        if end:
            pieces.append(Arguments(self._rest[:end]))
        self._rest = self._rest[end:]
        if end == 0 or self._depth:
            return False
        self._state = self._read_tail
        return True

    def _read_tail(self, pieces: list[Piece]) -> bool:
        """The brace that closes the call."""
        rest = self._rest.lstrip()
        if not rest:
            return False
        self._rest = rest.removeprefix("}")
        self._state = self._read_text
        return True

    def _cut_off(self, rest: str) -> list[Piece]:
        """Arguments have been given out as they came."""
        return super()._cut_off(rest) if self._state == self._read_call else []


def _whole_call(text: str) -> tuple[tuple[str, str] | None, int]:
    """Name and arguments of a call with its fields in another order, and where it ends."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, 0
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, 0
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments if isinstance(arguments, str) else _encode(arguments)), end


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class TagReader(Reader):
    """Calls written with tags: all of them between two tags, each with a tag for itself. A call comes in one piece."""

    def __init__(self, marker: str, end: str, invoke: str, invoke_end: str, schemas: Schemas) -> None:
        """`invoke`: a call's opening tag, a pattern with the name in a group."""
        super().__init__(marker)
        self._end = end
        self._invoke = re.compile(rf"\s*{invoke}(.*?){re.escape(invoke_end)}", re.DOTALL)
        self._schemas = schemas

    def _read_call(self, pieces: list[Piece]) -> bool:
        rest = self._rest.lstrip()
        if rest.startswith(self._end):
            self._rest = rest.removeprefix(self._end)
            self._state = self._read_text
            return True
        call = self._invoke.match(self._rest)
        if call is None:
            return False
        arguments = self.arguments(call[2], self._schemas.get(call[1], {}))
        pieces += [Begin(call[1]), Arguments(_encode(arguments))]
        self._rest = self._rest[call.end() :]
        return True

    def _cut_off(self, rest: str) -> list[Piece]:
        """Whole calls have been given out."""
        return super()._cut_off(rest) if rest.strip() else []

    def arguments(self, body: str, schema: Schema) -> dict[str, Any]:
        """What stands in a call."""
        raise NotImplementedError


DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"  # in every tag


class DsmlReader(TagReader):
    """DeepSeek-V3.2: a parameter is a tag with its name, which says whether the value is bare text or JSON."""

    _PARAMETER = re.compile(
        rf'<{DSML}parameter name="([^"]*)"(?: string="(true|false)")?>(.*?)</{DSML}parameter>', re.DOTALL
    )

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(
            f"<{DSML}function_calls>",
            f"</{DSML}function_calls>",
            rf'<{DSML}invoke name="([^"]*)">',
            f"</{DSML}invoke>",
            schemas,
        )

    def arguments(self, body: str, schema: Schema) -> dict[str, Any]:
        """The parameters."""
        return {
            name: text if string == "true" else read_value(text, {})
            for name, string, text in self._PARAMETER.findall(body)
        }


MINIMAX = "]<]minimax[>["  # before every tag


class MinimaxReader(TagReader):
    """MiniMax-M3: a value is a tag named like it; objects hold further tags, lists hold tags named item."""

    _TAG = re.compile(re.escape(MINIMAX) + r"<(/?)([^<>]+)>")

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(
            f"{MINIMAX}<tool_call>",
            f"{MINIMAX}</tool_call>",
            re.escape(MINIMAX) + r'<invoke name="([^"]*)">',
            f"{MINIMAX}</invoke>",
            schemas,
        )

    def arguments(self, body: str, schema: Schema) -> dict[str, Any]:
        """The elements of a call."""
        pieces = self._TAG.split(body)  # text, "/" or "", name, text, ...
        children, _ = self._children(pieces, 0, schema)
        return children if isinstance(children, dict) else {}

    def _children(self, pieces: list[str], at: int, schema: Schema) -> tuple[Any, int]:
        """The value that begins with the text at `at`, and where the text behind its closing tag is."""
        text, names = pieces[at], 0
        fields: dict[str, Any] = {}
        items: list[Any] = []
        while at + 1 < len(pieces) and not pieces[at + 1]:
            name = pieces[at + 2]
            value, at = self._children(pieces, at + 3, _part(schema, name))
            names += 1
            if name == "item" and (schema.get("type") == "array" or "properties" not in schema):
                items.append(value)
            elif name in fields:
                before = fields[name]
                fields[name] = [*before, value] if isinstance(before, list) else [before, value]
            else:
                fields[name] = value
        after = min(at + 3, len(pieces) - 1)
        if not names and at + 1 < len(pieces):  # at the top there is always an object
            return read_value(text, schema), after
        return items if items and not fields else fields, after


def _part(schema: Schema, name: str) -> Schema:
    """Schema of what stands below; {} when the schema does not say."""
    found = schema.get("items") if schema.get("type") == "array" else schema.get("properties", {}).get(name)
    return found if isinstance(found, dict) else {}


def read_value(text: str, schema: Schema) -> Any:
    """A value written without quotes: bare text where the schema wants that, else JSON if it is any."""
    kind = schema.get("type")
    if kind == "string" or all(isinstance(one, str) for one in schema.get("enum", [0])):
        return text
    if not text.strip():
        return {"object": {}, "array": []}.get(str(kind), text)
    try:
        return json.loads(text)
    except ValueError:
        return text
