"""The HTTP application: keys, request ids, the log line of every request, every error in one shape, the page at /."""

from __future__ import annotations

import functools
import hmac
import logging
import re
import secrets
import time
from importlib.resources import files
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipstone.server.api.errors import ApiError, ClientLeft, engine_failed, unavailable
from skipstone.server.api.routes import ENDPOINTS
from skipstone.server.api.schema import openapi
from skipstone.server.service import Service, program_version

LOG = logging.getLogger("skipstone.http")
OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_open)
QUIET_PATHS = OPEN_PATHS | {"/metrics", "/v1/stats"}  # asked for every few seconds, so not logged
LONGEST_PATH = 200  # of which the log shows
PAGE_INDEX = "index.html"
PAGE_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def make_app(service: Service) -> ASGIApp:
    """The application of a service whose engine runs."""
    app: ASGIApp = CheckedApp(service)
    origins = service.config.cors_origins
    if origins:
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
        )
    return app


class CheckedApp:
    """The routes, behind the checks that every request passes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.openapi = openapi(ENDPOINTS, program_version(), bool(service.config.api_keys))
        self._keys = [key.encode() for key in service.config.api_keys]
        self._hosts = {host.lower() for host in service.config.hosts}
        routes = [
            Route(
                endpoint.path.replace("{model}", "{model:path}"),
                functools.partial(endpoint.answer, service),
                methods=[endpoint.method],
            )
            for endpoint in ENDPOINTS
        ]
        self._open_paths = OPEN_PATHS
        if service.config.ui:
            page = _page_routes()
            routes += page
            self._open_paths = OPEN_PATHS | {route.path for route in page}
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, route it, answer its errors and log it."""
        if scope["type"] != "http":
            return
        headers, started = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        path = scope["path"][:LONGEST_PATH]
        log: dict[str, Any] = {"request_id": request_id, "method": scope["method"], "path": path}
        scope.update(app=self, request_id=request_id, log=log)
        sender = functools.partial(self._send, send, log)
        try:
            if scope.get("crowded") and scope["path"] not in OPEN_PATHS:
                raise unavailable("there are too many connections; try again later", "too_many_connections")
            self._check_host(scope, headers)
            scope["owner"] = self._check_key(scope, headers)
            await self._router(scope, receive, sender)
        except ClientLeft:
            pass
        except (ApiError, HTTPException) as error:
            await self._refuse(_as_api_error(error, scope), scope, receive, sender)
        except Exception:
            LOG.exception("request failed", extra={"request_id": request_id})
            await self._refuse(engine_failed(request_id), scope, receive, sender)
        finally:
            self.service.release(scope)
            log["ms"] = round((time.perf_counter() - started) * 1000, 1)
            if scope["path"] not in QUIET_PATHS:
                LOG.info("request", extra=log)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        """A page of another site can make its own name mean this machine, and then be of the server's origin."""
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        if not name or "*" in self._hosts or name.lower() in self._hosts or scope["path"] in OPEN_PATHS:
            return
        name = name[:200]
        message = f"{name!r} is not a name of this server; start it with --allowed-host {name} if it should be"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_key(self, scope: Scope, headers: Headers) -> int | None:
        """Which of the keys was sent; None where none is needed."""
        if not self._keys or scope["path"] in self._open_paths:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # All keys are compared, so that the time taken does not tell which one was near.
        matches = [hmac.compare_digest(key.strip().encode("latin-1", "replace"), known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return matches.index(True)

    async def _send(self, send: Send, log: dict[str, Any], message: Message) -> None:
        """Pass a message on, with the request's id in the headers."""
        if message["type"] == "http.response.start":
            log["status"] = message["status"]
            self.service.metrics.on_response(message["status"])
            request_id = (b"x-request-id", log["request_id"].encode())
            message["headers"] = [*message.get("headers", ()), request_id]
        await send(message)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        scope["log"]["error"] = error.body.code
        if "status" not in scope["log"]:  # else the answer has begun; cutting it off is all that is left
            await error.response()(scope, receive, send)


def _as_api_error(error: ApiError | HTTPException, scope: Scope) -> ApiError:
    """The router's own errors in the API's shape."""
    if isinstance(error, ApiError):
        return error
    method, path = scope["method"], scope["path"][:LONGEST_PATH]
    if error.status_code == 404:
        return ApiError(404, f"there is no {method} {path}; /openapi.json lists what there is", code="not_found")
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    message = f"{path} does not take {method}, only {headers.get('allow', '')}"
    return ApiError(error.status_code, message, code="method_not_allowed", headers=headers)


def _page_routes() -> list[Route]:
    """The page at /: files of this package, sent as they are. All are open: nothing in them is secret."""
    return [
        Route(
            "/" if file.name == PAGE_INDEX else f"/page/{file.name}",
            Response(file.read_bytes(), media_type=kind, headers=PAGE_HEADERS),
            methods=["GET"],
        )
        for file in files("skipstone.server").joinpath("page").iterdir()
        if (kind := PAGE_KINDS.get(file.name.rpartition(".")[2]))
    ]
