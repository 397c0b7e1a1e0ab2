"""From the bytes of a body to a request struct; what is wrong with it becomes a 400 that names the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from skipstone.server.api.errors import ApiError, ClientLeft, bad_request
from skipstone.server.api.requests import UNSUPPORTED, Body

if TYPE_CHECKING:
    from skipstone.server.service import Service

T = TypeVar("T", bound=Body)
MOST_VALUES = 250_000
SHOWN = 80  # characters of a value in a message
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `\$(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`( - at `\$(.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"(.*?)( - at `\$(.*)`)?$", re.DOTALL)


async def read_body(request: Request, service: Service) -> bytes:
    """The request's body, JSON by its own account. Raises ApiError; ClientLeft when the client does not wait."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        message = f"content-type is {media or 'missing'}; send application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    limit = service.config.max_body_bytes
    message = f"the body is longer than {limit} bytes; shorten it, or start the server with a larger --max-body-bytes"
    too_long = ApiError(413, message, code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    body = bytearray()
    try:
        async for part in request.stream():
            if len(body) + len(part) > limit:
                raise too_long
            service.hold(request.scope, len(part))
            body += part
    except ClientDisconnect:
        raise ClientLeft from None
    return bytes(body)


def decode(body: bytes, kind: type[T]) -> T:
    """Check a JSON body against a struct. Raises ApiError naming the first field that is wrong."""
    if num_values(body) > MOST_VALUES:
        raise bad_request(f"the body has more than {MOST_VALUES} lists, objects and texts", code="invalid_json")
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request(f"the body must be a JSON object, not {_shown(raw)}", code="invalid_type")
    raw = {name: value for name, value in raw.items() if not _asks_for_nothing(name, value, kind)}
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw, kind) from None


def num_values(body: bytes) -> int:
    """Lists, objects and texts, names of fields included; more, if the text of strings looks like a few of them.

    Reading millions of them holds the GIL for seconds, and `[],` needs three bytes for one.
    """
    most = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    if most <= MOST_VALUES:
        return most
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts > MOST_VALUES:
        return texts
    outside = b"".join(bare.split(b'"')[::2])
    return texts + outside.count(b"[") + outside.count(b"{")


def _asks_for_nothing(name: str, value: Any, kind: type[Body]) -> bool:
    """Whether an unsupported field may be passed over. Raises ApiError when it may not."""
    if name not in UNSUPPORTED or name in kind.__struct_fields__:
        return False
    neutral, instead = UNSUPPORTED[name]
    # 1 == True in Python, but not here.
    if value is None or any(value == other and type(value) is type(other) for other in neutral):
        return True
    raise bad_request(f"{name}={_shown(value)} is not supported: {instead}", name, "unsupported_parameter")


def _explain(text: str, raw: dict[str, Any], kind: type[Body]) -> ApiError:
    """What a decoder's message means to the sender."""
    if match := _UNKNOWN.match(text):
        path = _join(match[3], match[1])
        known = kind.__struct_fields__ if not match[3] else ()
        return bad_request(f"no field {path!r:.200}{_hint(match[1], known)}", path[:200], "unknown_parameter")
    if match := _MISSING.match(text):
        path = _join(match[3], match[1])
        return bad_request(f"{path} is missing", path, "missing_required_parameter")
    match = _WRONG.match(text)
    assert match is not None
    path = (match[3] or "").lstrip(".")
    if path.endswith("[...]") and (entry := _wrong_entry(raw, path.removesuffix("[...]"), kind)):
        path = path.removesuffix("[...]")
        shown = f"{path}[{_shown(entry[0])}]={_shown(entry[1])}"
    else:
        found, value = _value_at(raw, path)
        shown = f"{path}={_shown(value)}" if found else path
    code = "invalid_type" if ", got" in match[1] else "invalid_value"
    return bad_request(f"{shown} is not allowed: {match[1].replace('`', '')}", path or None, code)


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _join(path: str | None, name: str) -> str:
    return f"{path}.{name}".lstrip(".") if path else name


def _value_at(raw: Any, path: str) -> tuple[bool, Any]:
    """What stands at a path like messages[0].content; the decoder does not say which entry of a map it means."""
    if not path:
        return False, None
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        try:
            raw = raw[int(index)] if index else raw[name]
        except (KeyError, IndexError, TypeError, ValueError):
            return False, None
    return True, raw


def _wrong_entry(raw: dict[str, Any], name: str, kind: type[Body]) -> tuple[str, Any] | None:
    """The first entry of a map in the body that is not as declared."""
    declared = {field.name: field.type for field in msgspec.structs.fields(kind)}
    entries = raw.get(name) if name in declared else None
    for key, value in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert({key: value}, declared[name], strict=True)
        except msgspec.ValidationError:
            return key, value
    return None


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
