"""Grammars of tool calls, as Lark: what a model may write when it must call a tool.

Every notation of tool_readers has its grammar here; what obeys the grammar is read as JSON that fits the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from skipstone.text.tokenizer import special_pattern
from skipstone.text.tool_readers import DSML, MINIMAX, DsmlReader, MinimaxReader, Schemas, Tags
from skipstone.text.tool_schemas import Schema, bare, choices, kinds, variants

ANY_TEXT = "(?s:.*)"
PYTHON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarText:
    """Rules under names. `special`: ids of the tokens that are no text, by what they are called."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._pattern = special_pattern(special)
        self._rules: list[str] = []

    def add(self, content: str, attributes: str = "") -> str:
        """A new rule; returns its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {content}")
        return name

    def text(self, start: str) -> str:
        """The grammar that begins with this rule."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def literal(self, text: str) -> str:
        """Exactly this, special tokens as such."""
        parts = self._pattern.split(text)  # every second one is a special token
        return " ".join(
            f"<[{self._special[part]}]>" if i % 2 else json.dumps(part, ensure_ascii=False)
            for i, part in enumerate(parts)
            if part
        )

    def until(self, end: str) -> str:
        """Any text, and this at its end, which the text does not contain."""
        found = self._pattern.search(end)
        if found is None:
            return self.add(f"/{ANY_TEXT}/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        # A special token ends whatever text stands before it.
        return f"/{ANY_TEXT}{_escaped(end[: found.start()])}/ {self.literal(end[found.start() :])}"

    def without(self, part: str) -> str:
        """Any text that does not contain this."""
        if self._pattern.search(part):
            return self.add(f"/{ANY_TEXT}/")
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: /{ANY_TEXT}/ & ~/{ANY_TEXT}{_escaped(part)}{ANY_TEXT}/")
        return name

    def json(self, schema: Schema) -> str:
        """JSON by a schema."""
        # The schema may refer to its own parts, so it stays a document of its own.
        return self.add("%json " + json.dumps(schema | {"x-guidance": PYTHON_STYLE}))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


Calls = Callable[[GrammarText, Schemas, bool], str]
"""Makes a rule for the calls of some functions, one or several, without the marker that everything begins with."""


def json_calls(marker: str) -> Calls:
    """Calls as tool_readers.JsonReader reads them."""

    def rule(grammar: GrammarText, schemas: Schemas, several: bool) -> str:
        calls = []
        for name, schema in schemas.items():
            head = f'{{"name": {json.dumps(name)}, "arguments": '
            calls.append(f'{json.dumps(head)} {grammar.json(schema)} "}}"')
        call = grammar.add(_either(calls))
        return grammar.add(f"{call} ({grammar.literal(marker)} {call})*" if several else call)

    return rule


def dsml_calls(grammar: GrammarText, schemas: Schemas, several: bool) -> str:
    """Calls as tool_readers.DsmlReader reads them."""

    def parameter(root: Schema, name: str, schema: Schema) -> str:
        text = kinds(schema, root) == {"string"}
        head = grammar.literal(f'<{DSML}parameter name="{name}" string="{"true" if text else "false"}">')
        return f'{head} {_value(grammar, schema, root, f"</{DSML}parameter>", text)} "\\n"'

    # An empty line stands where there are no parameters.
    bodies = {
        name: _sequence(schema, partial(parameter, schema)) + ("" if schema.get("required") else ' "\\n"?')
        for name, schema in schemas.items()
    }
    return _in_tags(grammar, DsmlReader.tags, bodies, several)


def minimax_calls(grammar: GrammarText, schemas: Schemas, several: bool) -> str:
    """Calls as tool_readers.MinimaxReader reads them."""

    def element(root: Schema, name: str, schema: Schema) -> str:
        head, end = grammar.literal(f"{MINIMAX}<{name}>"), f"{MINIMAX}</{name}>"
        inner: str | None = None
        if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
            inner = _sequence(schema, partial(element, root))
        elif schema.get("type") == "array" and isinstance(schema.get("items"), dict):
            most = f"{{{schema.get('minItems', 0)},{schema.get('maxItems', '')}}}"
            inner = f"{grammar.add(element(root, 'item', schema['items']))}{most}"
        if inner is None:
            return f"{head} {_value(grammar, schema, root, end, bare(kinds(schema, root)))}"
        return f"{head} {inner} {grammar.literal(end)}"

    def line(root: Schema, name: str, schema: Schema) -> str:
        return element(root, name, schema) + ' "\\n"'

    bodies = {name: _sequence(schema, partial(line, schema)) for name, schema in schemas.items()}
    return _in_tags(grammar, MinimaxReader.tags, bodies, several)


def _in_tags(grammar: GrammarText, tags: Tags, bodies: Mapping[str, str], several: bool) -> str:
    """A rule for calls with these arguments, by the name of the function, and the tag that closes them all."""
    opening, closing, block = tags
    end = grammar.literal(f"{closing}invoke>\n")
    calls = [grammar.literal(f'{opening}invoke name="{name}">\n') + f" {body} {end}" for name, body in bodies.items()]
    return grammar.add(f'"\\n" ({_either(calls)}){"+" if several else ""} {grammar.literal(f"{closing}{block}>")}')


def _either(options: Sequence[str]) -> str:
    return " | ".join(f"({option})" for option in options)


def _sequence(schema: Schema, part: Callable[[str, Schema], str]) -> str:
    """The properties in their order, those that are not required at will."""
    required = schema.get("required")
    parts = []
    for name, inner in schema.get("properties", {}).items():
        text = part(name, inner if isinstance(inner, dict) else {})
        parts.append(f"({text})" if isinstance(required, list) and name in required else f"({text})?")
    return " ".join(parts)


def _value(grammar: GrammarText, schema: Schema, root: Schema, end: str, text: bool) -> str:
    """A value and the tag that closes it: JSON, or text without quotes, which may be anything but that tag."""
    if not text:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{grammar.json(schema | shared)} {grammar.literal(end)}"
    listed = [[None] if one.get("type") == "null" else choices(one) for one in variants(schema, root)]
    if None in listed:
        return grammar.until(end)
    options = ["null" if option is None else option for some in listed for option in some or ()]
    return f"({_either([grammar.literal(option) for option in options])}) {grammar.literal(end)}"
