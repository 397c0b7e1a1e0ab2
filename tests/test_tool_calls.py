"""Notations of tool calls: read however the text is cut into pieces; their grammars permit them and nothing broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
import tokenizers

from skipstone.serve.api_tools import FORMATS
from skipstone.serve.tool_grammars import GrammarText, dsml_calls, json_calls, minimax_calls
from skipstone.serve.tool_readers import (
    DSML,
    MINIMAX,
    Arguments,
    Begin,
    DsmlReader,
    JsonReader,
    MinimaxReader,
    Piece,
    Reader,
    Text,
)

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


TEXTS = {
    "json": f"{MARK}{json.dumps({'name': 'get', 'arguments': GET})}" + MARK + '{"name": "none", "arguments": {}}',
    "minimax": m3("<tool_call>\n")
    + m3('<invoke name="get">\n<city>') + "Par</is" + m3("</city>\n<unit>C</unit>\n<days>3</days>\n<tags>")
    + m3('<item>a</item><item>3</item></tags>\n<at>{"x": 1.5, "ok": true}</at>\n<deep><x><item>1</item></x></deep>\n')
    + m3('</invoke>\n<invoke name="none">\n</invoke>\n</tool_call>'),
    "dsml": (
        '<|function_calls>\n<|invoke name="get">\n<|parameter name="city" string="true">Par</is</|parameter>\n'
        '<|parameter name="unit" string="true">C</|parameter>\n<|parameter name="days" string="false">3</|parameter>\n'
        '<|parameter name="tags" string="false">["a", "3"]</|parameter>\n'
        '<|parameter name="at" string="false">{"x": 1.5, "ok": true}</|parameter>\n'
        '<|parameter name="deep" string="false">{"x": [1]}</|parameter>\n'
        '</|invoke>\n<|invoke name="none">\n</|invoke>\n</|function_calls>'
    ).replace("|", DSML),
}  # fmt: skip
READERS: dict[str, Callable[[], Reader]] = {
    "json": lambda: JsonReader(MARK),
    "minimax": lambda: MinimaxReader(SCHEMAS),
    "dsml": lambda: DsmlReader(SCHEMAS),
}
GRAMMARS = {"json": json_calls(MARK), "minimax": minimax_calls, "dsml": dsml_calls}


def read(reader: Reader, text: str, seed: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """What is said and what is called."""
    rng, pieces, at = random.Random(seed), list[Piece](), 0
    while at < len(text):
        end = len(text) if seed is None else at + rng.randint(1, 9)
        pieces += reader.feed(text[at:end])
        at = end
    said, calls = "", list[tuple[str, str]]()
    for piece in pieces + reader.finish():
        match piece:
            case Text(more):
                said += more
            case Begin(name):
                calls.append((name, ""))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return said, calls


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

    def test_what_is_cut_off_is_not_lost_silently(self, name: str) -> None:
        """Every prefix is read without an error; whole calls stay, and a cut one is text or a beginning of JSON."""
        text = TEXTS[name]
        for end in range(len(text)):
            said, calls = read(READERS[name](), text[:end], seed=end)
            for i, (call, arguments) in enumerate(calls):
                whole = json.dumps([GET, {}][i], ensure_ascii=False)
                assert call == ["get", "none"][i] and whole.startswith(arguments)
            assert said or calls or text[:end].strip() in ("", READERS[name]().marker)


@pytest.mark.parametrize(
    "text",
    [
        MARK + "no JSON",
        MARK + '{"name": 3}',
        MARK + '{"name": "f"',
        m3("<tool_call>") + "stray",
        m3('<tool_call><invoke name="f"><a>'),
        f"<{DSML}function_calls>x",
    ],
)
def test_malformed_calls_come_out_as_text(text: str) -> None:
    reader = next(make() for make in READERS.values() if text.startswith(make().marker))
    said, calls = read(reader, text)
    assert said == text and not calls


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


def test_formats_are_told_apart_by_their_signs() -> None:
    for one in FORMATS:
        (name,) = [name for name, text in TEXTS.items() if one.sign in text]
        assert type(one.reader(SCHEMAS)) is type(READERS[name]())
