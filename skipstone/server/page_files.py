"""The page at /: files of this package, sent as they are."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """The page's addresses, all of them open: nothing in the files is secret."""
    return [
        Route(
            "/" if file.name == INDEX else f"/page/{file.name}",
            Response(file.read_bytes(), media_type=kind, headers=HEADERS),
            methods=["GET"],
        )
        for file in files("skipstone.server").joinpath("page").iterdir()
        if (kind := KINDS.get(file.name.rpartition(".")[2]))
    ]
