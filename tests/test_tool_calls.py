"""Notations of tool calls: read however the text is cut into pieces; their grammars permit them and nothing broken."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.errors import RequestError
from skipstone.server.api.tools import FORMATS
from skipstone.text.messages import plain_messages
from skipstone.text.tokenizer import Tokenizer
from skipstone.text.tool_grammars import GrammarText, dsml_calls, json_calls, minimax_calls
from skipstone.text.tool_readers import DSML, MINIMAX, Call, DsmlReader, JsonReader, MinimaxReader, Reader, Text

TOKENIZER = Path(__file__).resolve().parent.parent / "checkpoints" / "demo" / "tokenizer.json"
MARK = "<|tool_call|>"
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "maximum": 9},
            "tags": {"type": "array", "items": {"type": "string"}},
            "at": {"$ref": "#/$defs/place"},
            "deep": {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "number"}}}},
        },
        "required": ["city", "days", "tags", "at"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "ok": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "none": {"type": "object", "properties": {}, "additionalProperties": False},
}
GET = {"city": "Par</is", "unit": "C", "days": 3, "tags": ["a", "3"], "at": {"x": 1.5, "ok": True}, "deep": {"x": [1]}}


def m3(tags: str) -> str:
    return tags.replace("<", MINIMAX + "<")


def dsml(tags: str) -> str:
    return tags.replace("|", DSML)


TEXTS = {
    "json": f"{MARK}{json.dumps({'name': 'get', 'arguments': GET})}" + MARK + '{"name": "none", "arguments": {}}',
    "minimax": m3("<tool_call>\n")
    + m3('<invoke name="get">\n<city>') + "Par</is" + m3("</city>\n<unit>C</unit>\n<days>3</days>\n<tags>")
    + m3('<item>a</item><item>3</item></tags>\n<at>{"x": 1.5, "ok": true}</at>\n<deep><x><item>1</item></x></deep>\n')
    + m3('</invoke>\n<invoke name="none">\n</invoke>\n</tool_call>'),
    "dsml": dsml(
        '<|function_calls>\n<|invoke name="get">\n<|parameter name="city" string="true">Par</is</|parameter>\n'
        '<|parameter name="unit" string="true">C</|parameter>\n<|parameter name="days" string="false">3</|parameter>\n'
        '<|parameter name="tags" string="false">["a", "3"]</|parameter>\n'
        '<|parameter name="at" string="false">{"x": 1.5, "ok": true}</|parameter>\n'
        '<|parameter name="deep" string="false">{"x": [1]}</|parameter>\n'
        '</|invoke>\n<|invoke name="none">\n</|invoke>\n</|function_calls>'
    ),
}  # fmt: skip
READERS: dict[str, Callable[[], Reader]] = {
    "json": lambda: JsonReader(MARK),
    "minimax": lambda: MinimaxReader(SCHEMAS),
    "dsml": lambda: DsmlReader(SCHEMAS),
}
GRAMMARS = {"json": json_calls(MARK), "minimax": minimax_calls, "dsml": dsml_calls}


def read(reader: Reader, text: str, seed: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """What is said and what is called."""
    rng, pieces, at = random.Random(seed), list[Text | Call](), 0
    while at < len(text):
        end = len(text) if seed is None else at + rng.randint(1, 9)
        pieces += reader.feed(text[at:end])
        at = end
    pieces += reader.finish()
    said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return said, [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, Call)]


@pytest.mark.parametrize("name", TEXTS)
class TestReaders:
    def test_calls_behind_text_however_it_is_cut(self, name: str) -> None:
        for seed in [None, *range(100)]:
            said, calls = read(READERS[name](), "I <will> look.\n" + TEXTS[name], seed)
            assert said.strip() == "I <will> look."
            assert [(call, json.loads(text)) for call, text in calls] == [("get", GET), ("none", {})]

    def test_text_without_calls_passes(self, name: str) -> None:
        marker = READERS[name]().marker
        for text in ("", "a < b", marker[:-1], marker[:-1] + " " + marker[:4], "]" * 9, '{"name": "get"}'):
            for seed in [None, *range(20)]:
                assert read(READERS[name](), text, seed) == (text, [])

    def test_newlines_around_calls_are_not_said(self, name: str) -> None:
        for seed in [None, *range(30)]:
            for before, after in (("", ""), ("a\n b ", ""), ("a", "b\n"), ("\n\n", "")):
                text = f"{before}\n\n{TEXTS[name]}\n\n{after}"
                said, calls = read(READERS[name](), text, seed)
                assert (said, len(calls)) == (before.rstrip("\n") + after, 2)
            assert read(READERS[name](), "a\n\nb\n\n", seed) == ("a\n\nb\n\n", [])

    def test_a_call_comes_whole_or_as_text(self, name: str) -> None:
        """However a text is cut off: what is called can be read and sent back, and the rest is said."""
        text = TEXTS[name]
        for end in range(len(text) + 1):
            reader = READERS[name]()
            said, calls = read(reader, text[:end], seed=end)
            assert [(call, json.loads(arguments)) for call, arguments in calls] == [("get", GET), ("none", {})][
                : len(calls)
            ]
            assert said or calls or not end
            assert reader.cut == bool(said and reader.marker in said)
            if name == "json":
                assert text[:end].endswith(said) and (said != "") == (end not in (0, text.rindex(MARK), len(text)))


@pytest.mark.parametrize(
    "text",
    [
        MARK + " no JSON",
        MARK + '{"name": 3}',
        MARK + '{"name": "f"',
        m3("<tool_call>") + "stray",
        m3('<tool_call><invoke name="f"><a>'),
        f"<{DSML}function_calls>x",
        MARK + '{"name": "f", "arguments": {"a": NaN}}',
        MARK + '{"name": "f", "arguments": {"a": -Infinity}}',
        MARK + '{"name": "f", "arguments": {"a": 1e999}}',
        MARK + '{"name": "f", "arguments": [1]}',
        MARK + '{"name": "f", "arguments": "[1]"}',
        MARK + '{"name": "f", "arguments": {"a": 1]}',
        MARK + '{"name": ["f"], "arguments": {}} more',
        pytest.param(MARK + '{"name": "f", "arguments": {"a": ' + "[" * 999 + "]" * 999 + "}}", id="deep"),
        pytest.param(MARK + '{"name": "f", "arguments": {"a": ' + "[" * 99999 + "]" * 99999 + "}}", id="deeper"),
        pytest.param(m3('<tool_call><invoke name="f">' + "<a>" * 9999 + "</a>" * 9999 + "</invoke>"), id="deep tags"),
        m3('<tool_call><invoke name="f"><a>1</b></invoke>'),
        m3('<tool_call><invoke name="f"><a>1</a></a></invoke>'),
        m3('<tool_call><invoke name="f"><a>1</a>, <b>2</b></invoke>'),
        m3('<tool_call><invoke name="f">nothing</invoke>'),
        m3('<tool_call><invoke name="f">{"a": NaN}</invoke>'),
        m3("<tool_call>stray</tool_call> more"),
        dsml('<|function_calls><|invoke name="f"><|parameter string="true">x</|parameter></|invoke>'),
        dsml('<|function_calls><|invoke name="f"><|parameter name="a" string="true">x</|invoke>'),
        dsml('<|function_calls><|invoke name="f">a: 3</|invoke>'),
        dsml('<|function_calls><|invoke name="f">{"a": 3</|invoke>'),
        dsml('<|function_calls><|invoke name="f">[3]</|invoke>'),
    ],
)
def test_malformed_calls_come_out_as_text(text: str) -> None:
    for seed in (None, 1):
        reader = next(make() for make in READERS.values() if text.startswith(make().marker))
        said, calls = read(reader, text, seed)
        assert said == text and not calls


@pytest.mark.parametrize("name", TEXTS)
def test_a_whole_call_behind_a_broken_one(name: str) -> None:
    reader, text = READERS[name](), TEXTS[name]
    said, calls = read(reader, text[: len(text) // 3] + text)
    assert said == text[: len(text) // 3] and [call for call, _ in calls] == ["get", "none"] and not reader.cut


@pytest.mark.parametrize("name", TEXTS)
def test_long_arguments_are_read_once(name: str) -> None:
    """100,000 characters in pieces of 4: not the whole of it again at every piece."""
    long = TEXTS[name].replace("Par</is", "x{[" * 33_333)
    reader, pieces = READERS[name](), list[Text | Call]()
    start = time.process_time()
    for at in range(0, len(long), 4):
        pieces += reader.feed(long[at : at + 4])
    assert time.process_time() - start < 5
    assert (
        len(pieces) == 2 and isinstance(pieces[0], Call) and json.loads(pieces[0].arguments)["city"] == "x{[" * 33_333
    )


def test_other_orders_and_forms() -> None:
    found = read(JsonReader(MARK), MARK + ' {"arguments": {"a": [1]}, "name": "f"} ' + MARK + '{"name":"g"}')
    assert found[1] == [("f", '{"a": [1]}'), ("g", "{}")]
    assert read(JsonReader(MARK), MARK + '{"name": "f", "arguments": "{\\"a\\": 1}"}')[1] == [("f", '{"a": 1}')]
    assert read(JsonReader(MARK), MARK + '{"name": "f", "parameters": {"a": "}\\""}} more') == (
        " more",
        [("f", '{"a": "}\\""}')],
    )
    bare = m3('<tool_call><invoke name="f"><n>3</n><s>x y</s><l>1</l><l>2</l></invoke></tool_call>')
    assert json.loads(read(MinimaxReader({}), bare)[1][0][1]) == {"n": 3, "s": "x y", "l": [1, 2]}


def test_dsml_in_other_words() -> None:
    """Attributes in any order or left out, JSON instead of parameters; values that are no JSON stay text."""
    schema = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}

    def arguments(body: str) -> Any:
        text = dsml(f'<|function_calls>\n<|invoke name="f">{body}</|invoke>\n</|function_calls>')
        said, calls = read(DsmlReader(schema), text, seed=len(body))
        assert said == "" and len(calls) == 1
        return json.loads(calls[0][1])

    assert arguments('\n<|parameter string="false" name="n">3</|parameter>\n') == {"n": 3}
    assert arguments('<|parameter  string="true"\nname = "s" >3</|parameter>') == {"s": "3"}
    assert arguments('<|parameter name="s">3</|parameter><|parameter name="n">3</|parameter>') == {"s": "3", "n": 3}
    assert arguments(' {"n": 3, "s": "</a>"}\n') == {"n": 3, "s": "</a>"}
    assert arguments("\n\n") == arguments("") == {}
    for text in ("NaN", "Infinity", "-Infinity", "1e999", "[NaN]", "x", "[" * 99999):
        assert arguments(f'<|parameter name="n" string="false">{text}</|parameter>') == {"n": text}
    half = arguments('<|parameter name="n" string="false">"\\ud800"</|parameter>')
    assert half == {"n": "\N{REPLACEMENT CHARACTER}"}


PLACES = {"$defs": {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"const": "1"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["string", "null"]}, '"3"', '"3"'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"oneOf": [{"type": "null"}, {"type": "string", "format": "date"}]}, "2024", "2024"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "1", "1"),
        ({"$ref": "#/$defs/text"}, "3", "3"),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}], "default": None}, "3", "3"),
        ({"$ref": "#/$defs/a~1b"}, "1", "1"),
        ({"$ref": "#/$defs/a~1b", "description": "x"}, "1", "1"),
        ({"const": "3"}, "3", "3"),
        ({"const": 3}, "3", 3),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", None]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"type": ["string", "integer"]}, "3.5", "3.5"),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({"type": ["array", "null"]}, "", []),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, "", {}),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "number"}, "1e999", "1e999"),
        ({}, "3", 3),
        ({}, "x", "x"),
        ({}, "", ""),
        ({"$ref": "#/$defs/loop"}, "3", 3),
        ({"$ref": "#/$defs/none"}, "3", 3),
        ({"$ref": 3}, "3", 3),
        ({"type": [{}, 3], "anyOf": 3, "enum": 3}, "3", 3),
    ],
)
def test_minimax_values_have_the_type_that_the_schema_says(schema: dict[str, Any], text: str, value: Any) -> None:
    """At the top, in lists, and in objects however these are described."""
    inner = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"deep": schema}}]}
    properties = {"v": schema, "l": {"type": ["array", "null"], "items": schema}, "o": inner}
    root = {"f": {"type": "object", "properties": properties | {"more": {"additionalProperties": schema}}} | PLACES}
    tags = m3("<v>~</v><l><item>~</item></l><o><deep>~</deep></o><more><x>~</x></more>").replace("~", text)
    body = m3('<tool_call><invoke name="f">') + tags + m3("</invoke></tool_call>")
    said, calls = read(MinimaxReader(root), body)
    assert said == ""
    assert json.loads(calls[0][1]) == {"v": value, "l": [value], "o": {"deep": value}, "more": {"x": value}}


def test_minimax_items() -> None:
    """A tag named item is a part of a list, unless the schema knows a property of that name."""
    item = m3('<tool_call><invoke name="f"><a><item>1</item></a></invoke></tool_call>')
    for schema, value in (
        ({}, [1]),
        ({"type": "array"}, [1]),
        ({"type": "object"}, {"item": 1}),
        ({"properties": {"item": {"type": "string"}}}, {"item": "1"}),
    ):
        found = read(MinimaxReader({"f": {"properties": {"a": schema}}}), item)[1]
        assert json.loads(found[0][1]) == {"a": value}
    bare = m3('<tool_call><invoke name="f"><item>1</item></invoke></tool_call>')
    assert json.loads(read(MinimaxReader({}), bare)[1][0][1]) == {"item": 1}


def test_endless_schemas_take_no_time() -> None:
    doubling = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(1000)}
    schema = {"properties": {"v": {"$ref": "#/$defs/a0"}}, "$defs": doubling}
    text = m3('<tool_call><invoke name="f"><v>3</v></invoke></tool_call>')
    assert read(MinimaxReader({"f": schema}), text)[1] == [("f", '{"v": 3}')]


KEYWORDS = st.sampled_from(
    [
        "type",
        "$ref",
        "$defs",
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "properties",
        "items",
        "nullable",
        "v",
        "item",
    ]
)
LEAVES = (
    st.none() | st.booleans() | st.sampled_from(["string", "array", "object", "#", "#/$defs/v", "#/v", "", 3, -1.5])
)
SCHEMALIKE = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4), max_leaves=20
)


@settings(max_examples=100)
@given(st.dictionaries(KEYWORDS, SCHEMALIKE, max_size=4), st.sampled_from(["minimax", "dsml"]))
def test_no_schema_breaks_a_reader(schema: dict[str, Any], name: str) -> None:
    """With tools at will nobody has checked it: what is called is read, by whatever the schema says."""
    texts = {
        "minimax": m3('<tool_call><invoke name="f"><v>1</v><w><item>a</item></w></invoke></tool_call>'),
        "dsml": dsml('<|function_calls><|invoke name="f"><|parameter name="v">1</|parameter></|invoke>'),
    }
    readers: dict[str, Callable[[Any], Reader]] = {"minimax": MinimaxReader, "dsml": DsmlReader}
    for inner in (schema, {"properties": {"v": schema, "w": schema}} | schema):
        _, calls = read(readers[name]({"f": inner}), texts[name])
        assert [call for call, _ in calls] == ["f"] and "1" in str(json.loads(calls[0][1])["v"])


# What the notations cannot say: marks in a text, and for MiniMax null, which its template leaves out.
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("invoke", "item")
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: DSML not in text)
SCALARS = TEXT | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
VALUES = st.recursive(
    SCALARS | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
TAGGED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number"}
MINIMAX_TEMPLATE = """
{%- macro tags(value) -%}
{%- if value is mapping -%}
{%- for key, one in value.items() -%}{{ ns ~ '<' ~ key ~ '>' ~ tags(one) ~ ns ~ '</' ~ key ~ '>' }}{%- endfor -%}
{%- elif value is string -%}{{ value }}
{%- elif value is iterable -%}{%- for one in value -%}{{ ns ~ '<item>' ~ tags(one) ~ ns ~ '</item>' }}{%- endfor -%}
{%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- ns ~ '<tool_call>\n' -}}
{%- for call in message.tool_calls -%}
{{- ns ~ '<invoke name="' ~ call.function.name ~ '">' ~ tags(call.function.arguments) ~ ns ~ '</invoke>\n' -}}
{%- endfor -%}
{{- ns ~ '</tool_call>' -}}
{%- endfor -%}"""


def schema_of(value: Any) -> dict[str, Any]:
    """The simplest schema of a value; of a list whose items are alike."""
    match value:
        case dict():
            return {"type": "object", "properties": {name: schema_of(one) for name, one in value.items()}}
        case list():
            return {"type": "array", "items": schema_of(value[0]) if value else {}}
    return {"type": KINDS[type(value)]}


def alike(value: Any) -> Any:
    """Lists with one item only, so that its schema is that of all."""
    if isinstance(value, dict):
        return {name: alike(one) for name, one in value.items()}
    return [alike(value[0])] * 2 if isinstance(value, list) and value else value


@cache
def rendering(name: str) -> Tokenizer:
    """The tokenizer of a folder whose template writes this notation."""
    folder = Path(tempfile.mkdtemp())
    source = TOKENIZER.parent if name == "json" else TOKENIZER.parent.parent / "demo-dsa"
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(source / file, folder)
    if name == "json":
        shutil.copy(source / "chat_template.jinja", folder)
    if name == "minimax":
        (folder / "chat_template.jinja").write_text(f"{{% set ns = '{MINIMAX}' %}}{MINIMAX_TEMPLATE}")
    return Tokenizer(folder)


def rendered(name: str, arguments: dict[str, Any]) -> str:
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    text = rendering(name).render_chat([{"role": "assistant", "tool_calls": [call, call]}], False)
    return text[text.index(READERS[name]().marker) :]


def round_trip(name: str, reader: Reader, arguments: dict[str, Any]) -> None:
    """What a template writes is read as what it was given, and can be given again."""
    _, calls = read(reader, rendered(name, arguments), seed=1)
    assert [(call, json.loads(text)) for call, text in calls] == [("f", arguments)] * 2
    message = {"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": text}} for n, text in calls]}
    (plain,) = plain_messages([message])
    assert [call["function"]["arguments"] for call in plain["tool_calls"]] == [arguments] * 2


@settings(max_examples=60)
@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_round_trip_of_json(arguments: dict[str, Any]) -> None:
    round_trip("json", JsonReader(MARK), arguments)


@settings(max_examples=60)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_round_trip_of_dsml(arguments: dict[str, Any]) -> None:
    round_trip("dsml", DsmlReader({}), arguments)


@settings(max_examples=60)
@given(st.dictionaries(NAMES, TAGGED, max_size=4).map(alike))
def test_round_trip_of_minimax(arguments: dict[str, Any]) -> None:
    round_trip("minimax", MinimaxReader({"f": schema_of(arguments)}), arguments)


@settings(max_examples=100)
@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_whatever_is_called_can_be_sent_back(name: str, data: st.DataObject) -> None:
    """Texts with anything put into or taken out of calls."""
    text = TEXTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        junk = st.sampled_from(["NaN", "{", "}", '"', "\\ud800", "1e999", "]", "<", DSML, MINIMAX, MARK, "\n", "null"])
        text = text[:at] + data.draw(junk) + text[at + data.draw(st.integers(0, 9)) :]
    _, calls = read(READERS[name](), text, seed=1)
    if calls:
        made = [{"id": "c", "function": {"name": call, "arguments": arguments}} for call, arguments in calls]
        try:
            plain_messages([{"role": "assistant", "tool_calls": made}])
        except RequestError as error:
            pytest.fail(f"{text!r}: {error}")


@cache
def vocabulary(special: bool, folder: Path) -> tuple[tokenizers.Tokenizer, Any, dict[str, int]]:
    """The demo's tokenizer; `special`: as the big models have it, with tokens of their own for parts of tags."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    if special:
        tokenizer.add_special_tokens([tokenizers.AddedToken(part, special=True) for part in (MINIMAX, DSML)])
    tokenizer.save(str(folder / f"{special}.json"))
    table = llguidance.LLTokenizer(str(folder / f"{special}.json"), n_vocab=6200, eos_token=[2])
    added = tokenizer.get_added_tokens_decoder()
    return tokenizer, table, {token.content: i for i, token in added.items() if token.special}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabulary")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEXTS)
class TestGrammars:
    def legal(self, grammar: str, text: str, special: bool, folder: Path) -> tuple[bool, bool]:
        """Whether the text is possible, and whether it may end there."""
        tokenizer, table, _ = vocabulary(special, folder)
        matcher = llguidance.LLMatcher(table, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        taken = matcher.try_consume_tokens(ids)
        return taken == len(ids), taken == len(ids) and matcher.is_accepting()

    def rules(self, name: str, special: bool, folder: Path, several: bool = True) -> tuple[GrammarText, str, str]:
        grammar = GrammarText(vocabulary(special, folder)[2])
        return grammar, READERS[name]().marker, GRAMMARS[name](grammar, SCHEMAS, several)

    def test_calls_only(self, name: str, special: bool, folder: Path) -> None:
        grammar, marker, calls = self.rules(name, special, folder)
        text = grammar.text(f"{grammar.literal(marker)} {calls}")
        assert self.legal(text, TEXTS[name], special, folder) == (True, True)
        assert self.legal(text, TEXTS[name][:-1], special, folder)[0]
        for before, after in (("days", "dais"), (": 3", ": x"), ("none", "nine"), ("days>3", "days>x"), ("[1]", "[x]")):
            broken = TEXTS[name].replace(before, after)
            assert broken == TEXTS[name] or not self.legal(text, broken, special, folder)[1]
        assert not self.legal(text, "I will", special, folder)[0]

    def test_one_call_only(self, name: str, special: bool, folder: Path) -> None:
        grammar, marker, calls = self.rules(name, special, folder, several=False)
        text = grammar.text(f"{grammar.literal(marker)} {calls}")
        assert not self.legal(text, TEXTS[name], special, folder)[0]

    def test_text_then_calls(self, name: str, special: bool, folder: Path) -> None:
        grammar, marker, calls = self.rules(name, special, folder)
        text = grammar.text(f"{grammar.without(marker)} | {grammar.until(marker)} {calls}")
        for said in ("", "I <will> look.\n", "a ]<]mini < |"):
            assert self.legal(text, said, special, folder) == (True, True)
            assert self.legal(text, said + TEXTS[name], special, folder) == (True, True)
        assert not self.legal(text, "a " + marker + " not a call", special, folder)[0]


TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("schema", "legal", "values"),
    [
        ({"type": "string"}, True, {"minimax": ["a<b", "3", "null"], "dsml": ["a<b", "3", "null"]}),
        ({"$ref": "#/$defs/text"}, True, {"minimax": ["a<b", "3"], "dsml": ["a<b", "3"]}),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, True, {"minimax": ["3"], "dsml": ["3"]}),
        ({"$ref": "#/$defs/a~1b"}, True, {"minimax": ["1"], "dsml": ["1"]}),
        ({"$ref": "#/$defs/a~1b"}, False, {"minimax": ["2", '"1"'], "dsml": ["2", 1]}),
        ({"anyOf": [{"const": "x"}, {"enum": ["y"]}]}, True, {"minimax": ["x", "y"], "dsml": ["x", "y"]}),
        ({"anyOf": [{"const": "x"}, {"enum": ["y"]}]}, False, {"minimax": ["z"], "dsml": ["z"]}),
        (TEXT_OR_NULL, True, {"minimax": ["a<b", "3", '"', None], "dsml": [None]}),
        ({"enum": ["1", None]}, True, {"minimax": ["1", None], "dsml": [None]}),
        ({"enum": ["1", None]}, False, {"minimax": ["2", ""], "dsml": [1]}),
        ({"type": ["integer", "null"]}, True, {"minimax": [3, None], "dsml": [3, None]}),
        ({"type": ["integer", "null"]}, False, {"minimax": ["x", 1.5], "dsml": ["x", 1.5]}),
    ],
)
@pytest.mark.parametrize("name", ["minimax", "dsml"])
def test_what_is_legal_is_read_as_what_the_schema_says(
    folder: Path, name: str, schema: dict[str, Any], legal: bool, values: dict[str, list[Any]]
) -> None:
    schemas = {"f": {"type": "object", "properties": {"v": schema}, "required": ["v"]} | PLACES}
    tokenizer, table, special = vocabulary(True, folder)
    grammar, reader = GrammarText(special), {"minimax": MinimaxReader, "dsml": DsmlReader}[name]
    text = grammar.text(f"{grammar.literal(reader(schemas).marker)} {GRAMMARS[name](grammar, schemas, False)}")
    for value in values[name]:
        bare = value if isinstance(value, str) else json.dumps(value)
        if name == "minimax":
            call = m3('<tool_call>\n<invoke name="f">\n<v>') + bare + m3("</v>\n</invoke>\n</tool_call>")
        else:
            head = f'<|parameter name="v" string="{"true" if isinstance(value, str) else "false"}">'
            call = f'<|function_calls>\n<|invoke name="f">\n{head}~</|parameter>\n</|invoke>\n</|function_calls>'
            call = dsml(call).replace("~", bare)
        matcher = llguidance.LLMatcher(table, text)
        ids = tokenizer.encode(call, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == legal, call
        if legal:
            assert [json.loads(arguments) for _, arguments in read(reader(schemas), call)[1]] == [{"v": value}]


def test_formats_are_told_apart_by_their_signs() -> None:
    for one in FORMATS:
        (name,) = [name for name, text in TEXTS.items() if one.sign in text]
        assert type(one.reader(SCHEMAS)) is type(READERS[name]())
