"""The web page: a few files of the package, read once, served under ``/`` and by their names."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from mimo_vk.server.record import Record

if TYPE_CHECKING:
    from mimo_vk.server.app import Context

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles are the package's own files, nothing is fetched from elsewhere, and no text can become markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """Path of a request to content and type. The names are the package's: no request names a file to be opened."""
    found = {}
    for file in (resources.files("mimo_vk.server") / "web").iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            found["/" if file.name == "index.html" else "/" + file.name] = (file.read_bytes(), kind)
    return found


async def page(context: Context, request: Request, record: Record) -> Response:
    """One of the files."""
    content, kind = files()[request.url.path]
    return Response(content, headers={**HEADERS, "Content-Type": kind})
