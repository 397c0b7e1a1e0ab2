"""What a request asks its text to be: from the API's several ways of saying so to the engine's one."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from skipstone.server.api.errors import bad_request
from skipstone.server.api.requests import ResponseFormat, Sampling, Schema, StructuredOutputs

ANY_OBJECT: Schema = {"type": "object"}


class Constraint(NamedTuple):
    """A field of the engine's parameters with its value, and what the request calls it."""

    field: str
    value: str | list[str]
    path: str


def constraint(body: Sampling) -> Constraint | None:
    """What constrains the whole text, if anything. Raises ApiError when two fields do."""
    by_format = body.response_format and _of_format(body.response_format)
    by_extra = body.structured_outputs and _of_extra(body.structured_outputs)
    if by_format and by_extra:
        raise bad_request(
            "response_format and structured_outputs cannot be combined; keep one of them", "structured_outputs"
        )
    return by_format or by_extra or None


def _of_format(asked: ResponseFormat) -> Constraint | None:
    """`strict` changes nothing: the text follows the schema in any case."""
    path = "response_format.json_schema"
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise bad_request(f"{path} needs response_format.type='json_schema', not {asked.type!r}", path)
        return None if asked.type == "text" else schema_constraint(ANY_OBJECT, "response_format")
    if asked.json_schema is None:
        raise bad_request(f"{path} is missing", path, "missing_required_parameter")
    if asked.json_schema.schema is None:
        raise bad_request(f"{path}.schema is missing", f"{path}.schema", "missing_required_parameter")
    return schema_constraint(asked.json_schema.schema, f"{path}.schema")


def _of_extra(asked: StructuredOutputs) -> Constraint:
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise bad_request(
            f"structured_outputs needs exactly one of {', '.join(asked.__struct_fields__)}, and has {found}",
            "structured_outputs",
        )
    (name,) = given
    path = f"structured_outputs.{name}"
    if name == "json_object":
        return schema_constraint(ANY_OBJECT, path)
    if name == "json":
        schema = asked.json
        return Constraint("json_schema", schema, path) if isinstance(schema, str) else schema_constraint(schema, path)
    return Constraint(name, getattr(asked, name), path)


def schema_constraint(schema: Schema | bool | None, path: str) -> Constraint:
    """A JSON schema as the engine takes it."""
    return Constraint("json_schema", msgspec.json.encode(schema).decode(), path)
