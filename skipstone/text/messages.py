"""Conversations as they are sent, to conversations as chat templates know them: for Python, files and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from skipstone.errors import RequestError

KINDS: dict[str, Any] = {"role": str, "content": (str, list), "name": str, "tool_calls": list, "tool_call_id": str}


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates know them: `content` a text (parts of text are joined), arguments of calls an object.

    `content` may be missing beside `tool_calls`; the role developer counts as system. Fields that are None count as
    left out. Raises RequestError that begins with the path of the field that makes no sense.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one message with role and content")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} is a {type(message).__name__}; expected an object")
    given = {key: value for key, value in message.items() if value is not None}
    for key, value in given.items():
        if key not in KINDS:
            raise RequestError(f"{path}.{key} is no field of a message; those are {', '.join(KINDS)}")
        if not isinstance(value, KINDS[key]):
            wanted = "a list" if key == "tool_calls" else "text"
            raise RequestError(f"{path}.{key}={value!r:.60} must be {wanted}")
    role, calls = given.get("role"), given.get("tool_calls")
    if role is None:
        raise RequestError(f"{path}.role is missing; add one such as system, user or assistant")
    if "content" not in given and not calls:
        raise RequestError(f"{path}.content is missing; expected text")
    if calls and role != "assistant":
        raise RequestError(f"{path}.tool_calls belongs into messages of the assistant")
    if "tool_call_id" in given and role != "tool":
        raise RequestError(f"{path}.tool_call_id belongs into messages of the role tool")
    plain = {key: given[key] for key in ("role", "content", "name", "tool_call_id") if key in given}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _joined(given.get("content", ""), f"{path}.content")
    if calls:
        plain["tool_calls"] = [_plain_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _joined(content: str | list[Any], path: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        known = isinstance(part, Mapping) and part.keys() == {"type", "text"} and part["type"] == "text"
        if not known or not isinstance(part["text"], str):
            raise RequestError(f'{path}[{i}]={part!r:.60} is not supported; send {{"type": "text", "text": ...}}')
    return "\n".join(part["text"] for part in content)


def _plain_call(call: Any, path: str) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path}.function.name is missing")
    arguments, path = function.get("arguments") or {}, f"{path}.function.arguments"
    try:
        decoded = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        plain = msgspec.convert(decoded, dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"{path} is not a JSON object: {error}") from None
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": plain}}
