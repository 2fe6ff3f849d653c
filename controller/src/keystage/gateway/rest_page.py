"""The live page: files of the folder `ui`, as they are, behind the credentials of the management API.

Before it: `gateway.rest`. The files are part of the package and are read once; what is shown comes from
`gateway.rest_report`. The page may load nothing from anywhere else, run no script that is not one of these
files, and be shown in no other page's frame. It must not know what a file holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from fastapi import Request, Response

from keystage.gateway.backend import GatewayError

FOLDER = Path(__file__).with_name("ui")
INDEX = "index.html"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_RULES = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src 'self'",
    "script-src 'self'",
    "style-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
POLICY = "; ".join(_RULES)
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for again: an ETag's answer is a few bytes
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_SHOWN = 80


class UnknownFile(GatewayError):
    """No file of the page."""

    status = 404


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media: str
    etag: str


class Page:
    """Handlers; names are those of the route table.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {file.name: _read(file) for file in folder.iterdir() if file.suffix in TYPES}

    async def ui(self, _: Request) -> Response:
        """To the page's folder, against which its files are named."""
        return Response(status_code=308, headers={"Location": "ui/"})

    async def ui_page(self, request: Request) -> Response:
        """The page."""
        return self._answer(request, INDEX)

    async def ui_file(self, request: Request) -> Response:
        """One of its files."""
        return self._answer(request, request.path_params["file"])

    def _answer(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise UnknownFile(f"the page has no file {name[:_SHOWN]!r}, but {', '.join(sorted(self._files))}")
        headers = {**HEADERS, "ETag": file.etag}
        if _has(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "Content-Type": file.media})


def _read(file: Path) -> _File:
    content = file.read_bytes()
    return _File(content, TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _has(condition: str, etag: str) -> bool:
    """Whether an If-None-Match names it (RFC 9110, 13.1.2: compared weakly)."""
    tags = [tag.strip().removeprefix("W/") for tag in condition.split(",")]
    return etag in tags or tags == ["*"]
