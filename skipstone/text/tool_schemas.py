"""What JSON schemas of arguments say of a value, where the notation of a call does not: text, number or list."""

from __future__ import annotations

from collections.abc import Set
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
KINDS = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
KINDS_OF = {type(None): {"null"}, bool: {"boolean"}, int: {"integer", "number"}, str: {"string"}, list: {"array"}}
KINDS_OF |= {dict: {"object"}}
MOST_STEPS = 100


def variants(schema: Any, root: Schema) -> list[Schema]:
    """Schemas without references and alternatives; a value fits one of them. [{}], which all fit, for endless ones."""
    plain, todo = list[Schema](), [schema]
    for _ in range(MOST_STEPS):
        if not todo:
            return plain
        one = todo.pop()
        if not isinstance(one, dict):
            plain.append({})
            continue
        found = next((key for key in ("$ref", "allOf", "anyOf", "oneOf") if key in one), None)
        if found is None:
            plain.append(one)
            continue
        rest, inner = {key: value for key, value in one.items() if key != found}, one[found]
        if found == "$ref":
            todo.append(_merged(rest, _target(str(inner), root)))
        elif found == "allOf":
            for each in inner if isinstance(inner, list) else ():
                rest = _merged(rest, each)
            todo.append(rest)
        else:
            todo += [_merged(rest, each) for each in reversed(inner)] if isinstance(inner, list) else [rest]
    return [{}]


def _merged(first: Schema, second: Any) -> Schema:
    if not isinstance(second, dict):
        return first
    properties = [one["properties"] for one in (first, second) if isinstance(one.get("properties"), dict)]
    both = {"properties": properties[0] | properties[1]} if len(properties) == 2 else {}
    return first | second | both


def _target(reference: str, root: Schema) -> Any:
    """What a reference within the root points to; {} for others."""
    found: Any = root if reference.startswith("#") else {}
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found


def kinds_of(value: Any) -> Set[str]:
    """The types that a value has."""
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    return KINDS_OF[type(value)]


def kinds(schema: Any, root: Schema) -> Set[str]:
    """The types that a value may have."""
    found = set[str]()
    for one in variants(schema, root):
        values, named = choices(one), one.get("type", list(KINDS))
        if values is not None:
            found.update(*map(kinds_of, values))
        else:
            found |= KINDS & {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        found |= {"null"} if one.get("nullable") is True else set()
    return found or KINDS


def choices(variant: Schema) -> list[Any] | None:
    """The only values of a variant, if it lists them."""
    if "const" in variant:
        return [variant["const"]]
    return variant["enum"] if isinstance(variant.get("enum"), list) else None


def bare(possible: Set[str]) -> bool:
    """Whether such a value is written as text without quotes."""
    return "string" in possible and possible <= {"string", "null"}


def declares(schema: Any, name: str, root: Schema) -> bool:
    """Whether an object has a property of this name."""
    return any(name in one["properties"] for one in variants(schema, root) if isinstance(one.get("properties"), dict))


def part(schema: Any, name: str | None, root: Schema) -> Schema:
    """The schema of a property, or without a name of a list's items; {} when nothing is said of it."""
    found = []
    for one in variants(schema, root):
        properties = one.get("properties")
        if name is None:
            found.append(one.get("items"))
        elif isinstance(properties, dict) and name in properties:
            found.append(properties[name])
        else:
            found.append(one.get("additionalProperties"))
    said = [one for one in found if isinstance(one, dict)]
    return said[0] if len(said) == 1 else {"anyOf": said} if said else {}
