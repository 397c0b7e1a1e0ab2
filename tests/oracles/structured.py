"""Grammars that a test controls: an automaton written by hand, random JSON schemas, and a validator for them.

None of it uses llguidance, so that masks and answers are judged by something else than what made them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from oracles.drafters import Drafting, Script
from oracles.speculation import Folders, Way
from oracles.tiny import EOS, VOCAB
from skipstone import SamplingParams

PIECES = [
    '":', '",', '","', '{"', '"}', '"]', '["', "[]", "{}", "},", "],", "}}", "]]", "}]", "tr", "ue", "fal", "se",
    "null", "abc", "xyz", "no", "yes", "10", "00", "\\u", "\\n", "aa", "b-", ":[", "e+", ", ",
]  # fmt: skip
CHARACTERS = [chr(code) for code in range(32, 127)]
TEXTS = [*CHARACTERS, *PIECES]  # of the tokens below EOS
assert len(TEXTS) == EOS


def ascii_tokenizer() -> Tokenizer:
    """Printable characters, and pieces that lie across the borders of JSON's parts."""
    visible = [text.replace(" ", "Ġ") for text in TEXTS]  # byte-level tokenizers write blanks so
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(visible)} | {"<eos>": EOS}, []))
    # The library asks for the tokens of a text that must follow.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


class AsciiFolders(Folders):
    """Tiny checkpoints that write ASCII."""

    def target(self, name: str, modules: int = 1) -> Path:
        folder = super().target(name, modules)
        ascii_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    def spec(self, way: Way, name: str, k: int) -> str:
        """A draft model has the target's tokenizer."""
        spec = super().spec(way, name, k)
        for folder in self.root.glob("draft_*"):
            ascii_tokenizer().save(str(folder / "tokenizer.json"))
        return spec


def follow(text: list[int], length: int) -> set[int]:
    """A third of the vocabulary, another one after every text; nothing after `length` tokens."""
    if len(text) >= length:
        return set()
    shift = 7 * len(text) + sum(text[-2:])
    return {token for token in range(VOCAB) if (token * 5 + shift) % 3 == 0}


class Automaton:
    """A grammar whose texts have exactly `length` tokens. Remembers what it was advanced by."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.text: list[int] = []
        self.failure: str | None = None

    def allowed(self, further: list[int]) -> Tensor | None:
        if self.legal(further) < len(further):
            return None
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[sorted(follow(self.text + further, self.length))] = True
        return mask

    def legal(self, further: list[int]) -> int:
        for count, token in enumerate(further):
            if token not in follow(self.text + further[:count], self.length):
                return count
        return len(further)

    def advance(self, token: int) -> bool:
        if token not in follow(self.text, self.length):
            return False
        self.text.append(token)
        return True

    @property
    def ended(self) -> bool:
        return len(self.text) >= self.length


class Automata:
    """Takes the place of the compiler: `regex` holds the length of the text."""

    def compile(self, params: SamplingParams) -> Automaton | None:
        return None if params.regex is None else Automaton(int(params.regex))


def changed_at(index: int, legal: bool) -> Script:
    """Right drafts but one, which an automaton that goes on allows or not."""

    def script(right: list[int], request: Drafting) -> list[int]:
        if index >= len(right):
            return right
        before = request.text + right[:index]
        fitting = follow(before, len(before) + 1)
        tokens = [t for t in range(VOCAB) if (t in fitting) == legal and t != right[index]]
        return [*right[:index], tokens[0], *right[index + 1 :]] if tokens else right

    return script


def any_drafts(seed: int) -> Script:
    """Right ones, random ones, and any number of them; the same for equal texts."""

    def script(right: list[int], request: Drafting) -> list[int]:
        draw = random.Random(seed * 1000 + request.length)
        some = right[: draw.randint(0, len(right))]
        return [token if draw.random() < 0.8 else draw.randrange(VOCAB) for token in some]

    return script


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """Bounded everywhere, so that most texts end."""
    kinds = ["enum", "integer", "number", "string", "boolean", "const", "null"]
    kind = draw.choice((["object", "array", "anyOf"] * 3 if depth else []) + kinds)
    if kind == "object":
        names = draw.sample(["a", "b1", "key", "x y", 'q"'], draw.randint(1, 3))
        return {
            "type": "object", "properties": {name: random_schema(draw, depth - 1) for name in names},
            "required": names[: draw.randint(0, len(names))], "additionalProperties": False,
        }  # fmt: skip
    if kind == "array":
        least = draw.randint(0, 2)
        return {
            "type": "array", "items": random_schema(draw, depth - 1), "minItems": least,
            "maxItems": least + draw.randint(0, 2),
        }  # fmt: skip
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
    low = draw.randint(-20, 100)
    return {
        "enum": {"enum": draw.sample(["yes", "no", "\\", "a\nb", 3, None, True, [1, "x"]], 3)},
        "const": {"const": draw.choice(["abc", 0, {"a": [False]}])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + draw.choice([0, 5, 1000])},
        "number": {"type": "number", "minimum": 0, "maximum": 9.5},
        "string": {"type": "string", "minLength": draw.randint(0, 1), "maxLength": draw.randint(1, 6)},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
    }[kind]


def valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether the value fits; the keywords of `random_schema` only."""
    if "anyOf" in schema:
        return any(valid(part, value) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(same(value, option) for option in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        parts = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(parts)
            and all(valid(parts[name], item) for name, item in value.items())
        )
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(valid(schema["items"], item) for item in value)
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        whole = kind == "number" or (number and value == int(value))
        return number and whole and schema["minimum"] <= value <= schema["maximum"]
    return isinstance(value, bool) if kind == "boolean" else value is None


def same(left: Any, right: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return type(left) is type(right) and left == right
