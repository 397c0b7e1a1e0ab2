"""Errors as the OpenAI API words them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from skipstone.errors import SkipstoneError

SLOWEST = 10_000  # bytes per second of a body, below which its client is given up
TYPES = {401: "authentication_error", 408: "timeout", 429: "rate_limit_error", 499: "aborted"}
# How a message of the engine begins when it is about one parameter.
_PARAMETER = re.compile(r"([a-z_]+)(?:=|\[| contains | cannot be used| needs )")


class ErrorBody(msgspec.Struct):
    """What went wrong; `param` is the field's path, `code` a word that programs can compare."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """Every answer that is not a success."""

    error: ErrorBody


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        usual = "server_error" if status >= 500 else "invalid_request_error"
        self.body = ErrorBody(message, TYPES.get(status, usual), param, code)
        self.headers = dict(headers or {})

    def encode(self) -> bytes:
        """The body of the answer, as JSON."""
        return msgspec.json.encode(ErrorResponse(self.body))

    def response(self) -> Response:
        """The answer, an ASGI application."""
        return Response(self.encode(), self.status, self.headers, "application/json")


class ClientLeft(Exception):  # noqa: N818 (nobody is there to be told)
    """The client closed the connection; what it asked for has been aborted."""


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error for a request whose sender must change it."""
    return ApiError(400, message, param=param, code=code)


def from_engine(error: SkipstoneError, names: Mapping[str, str]) -> ApiError:
    """A request that the engine refuses; `names`: what the API calls the engine's parameters."""
    text = str(error)
    match = _PARAMETER.match(text)
    if match is None or match[1] not in names:
        return bad_request(text)
    name = names[match[1]]
    return bad_request(name + text[len(match[1]) :], param=name)


def too_slow() -> ApiError:
    """A client that takes too long to send its request."""
    return ApiError(408, "the request was not sent in time", code="request_timeout")


def busy(message: str, wait_s: float) -> ApiError:
    """The error for work beyond the limits; `wait_s`: when to try again."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(max(1, min(60, round(wait_s))))})


def unavailable(message: str, code: str) -> ApiError:
    """The server is starting, ending or broken."""
    return ApiError(503, message, code=code, headers={"Retry-After": "5"})


def engine_failed(request_id: str) -> ApiError:
    """A fault of ours; the log has the rest."""
    message = f"the server failed on this request; its log has more under {request_id}"
    return ApiError(500, message, code="engine_error")
