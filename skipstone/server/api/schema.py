"""/openapi.json, made from the table of addresses and the structs of bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from skipstone.server.api.errors import ErrorResponse
from skipstone.server.api.requests import CompletionRequest
from skipstone.server.api.responses import Health
from skipstone.server.api.routes import Endpoint

REFERENCE = "#/components/schemas/{name}"
MEANINGS = {
    400: "the request is wrong; `param` names the field",
    401: "the API key is missing or wrong",
    403: "the Host header has a name that is not the server's",
    404: "no such model",
    408: "the request took too long",
    413: "the body is too long",
    415: "the body is not JSON",
    429: "too much is waiting; see Retry-After",
    499: "the request was ended by /abort",
    500: "a fault of the server",
    503: "the server is ending, or its engine was given up",
}


def openapi(endpoints: Iterable[Endpoint], version: str, needs_key: bool) -> bytes:
    """The OpenAPI document as JSON; `needs_key`: whether addresses that are not open need one."""
    endpoints = list(endpoints)
    structs: list[Any] = [ErrorResponse]
    for endpoint in endpoints:
        structs += [kind for kind in (endpoint.body, endpoint.response, endpoint.events) if kind is not None]
    _, schemas = msgspec.json.schema_components(structs, ref_template=REFERENCE)
    schemas[CompletionRequest.__name__]["properties"]["prompt"] = _prompt_schema()
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, needs_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "skipstone", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(document)


def _prompt_schema() -> dict[str, Any]:
    """A list holds one kind of item, which the decoder's types cannot say."""
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    texts = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    lists = {"type": "array", "minItems": 1, "items": ids}
    return {"anyOf": [{"type": "string"}, texts, ids, lists]}


def _operation(endpoint: Endpoint, needs_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handle.__name__,
        "responses": _responses(endpoint, needs_key),
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(endpoint.body)}}
    if "{model}" in endpoint.path:
        parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if needs_key and not endpoint.is_open:
        operation["security"] = [{"key": []}]
    return operation


def _responses(endpoint: Endpoint, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media: _schema(endpoint.response)}
    if endpoint.events is not None:
        data = {"type": "string", "description": f"a {endpoint.events.__name__} as JSON; the last is [DONE]"}
        content["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
        }
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    statuses = [*endpoint.errors]
    if not endpoint.is_open:
        statuses += [401, 403] if needs_key else [403]
    for status in statuses:
        responses[str(status)] = {
            "description": MEANINGS[status],
            "content": {"application/json": _schema(ErrorResponse)},
        }
    if endpoint.response is Health:
        responses["503"] = {"description": MEANINGS[503], "content": {"application/json": _schema(Health)}}
    return responses


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    return {"schema": {"$ref": REFERENCE.format(name=kind.__name__)} if kind else {}}
