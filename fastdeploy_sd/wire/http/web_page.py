"""The web page's files, and the headers that keep everything else out of it. Knows nothing of the API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = Path(__file__).resolve().parents[2] / "web_page"
PREFIX = "/web_page/"
_HTML = "text/html"
_TYPES = {".html": _HTML, ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Text of a model is shown there: nothing in the page may run or load what is not one of its own files.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        return cls(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def response(self, known_tag: str) -> Response:
        headers = _HEADERS | {"ETag": self.tag}
        if known_tag == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


class WebPage:
    """Answers GET / to clients that accept HTML, and GET of the page's files; all else goes on to the application.

    The files are read once: a request names one of them or gets nothing of the file system.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = {PREFIX + path.name: _File.read(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._file(scope) if scope["type"] == "http" and scope["method"] == "GET" else None
        if file is None:
            await self._app(scope, receive, send)
            return
        await file.response(Headers(scope=scope).get("if-none-match", ""))(scope, receive, send)

    def _file(self, scope: Scope) -> _File | None:
        path = scope["path"]
        if path == "/" and _HTML in Headers(scope=scope).get("accept", "").lower():
            return self._files[f"{PREFIX}index.html"]
        return self._files.get(path)
