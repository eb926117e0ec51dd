"""A model hub on a local port: the routes of Hugging Face's that its package asks when it fetches a model.

Connections can be cut in the middle of a file, and repositories may be gated, private or without a revision.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.doubles.http_service import serving

COMMIT = "c0ffee" + "0" * 34
OLDER_COMMIT = "0ddba11" + "0" * 33
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?$")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


@dataclass
class Hub:
    """What the server has, and what it was asked.

    Attributes:
        files: of every repository at COMMIT (branch main) and OLDER_COMMIT (tag v1).
        refusals: repository -> (status, code) of Hugging Face's.
        cuts: file -> bytes of its first answer, after which the connection breaks.
        asked: (method, path, Range header) of every request.
        is_broken: every answer is 500.
    """

    files: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    is_broken: bool = False
    url: str = ""

    def fetched(self) -> list[str]:
        """The files that were downloaded, once per answer."""
        found = [_FILE.match(path) for method, path, _ in self.asked if method == "GET"]
        return [match[3] for match in found if match is not None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: `asked` has it."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        api, file = _API.match(path), _FILE.match(path)
        match = api or file
        if self.hub.is_broken or match is None:
            self._send(500, {})
            return
        repository, revision = match[1], (api[3] if api else file[2] if file else None) or "main"
        commit = {"main": COMMIT, "v1": OLDER_COMMIT, COMMIT: COMMIT, OLDER_COMMIT: OLDER_COMMIT}.get(revision)
        if repository in self.hub.refusals or repository not in self.hub.files:
            status, code = self.hub.refusals.get(repository, (404, "RepoNotFound"))
            self._send(status, {"X-Error-Code": code})
        elif commit is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        elif api:
            self._send_api(repository, commit, api[2])
        elif file:
            self._send_file(repository, commit, file[3])

    def _send_api(self, repository: str, commit: str, kind: str | None) -> None:
        files = self.hub.files[repository]
        value: Any = [
            {"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()
        ]
        if kind != "tree":
            has_sizes = "blobs" in parse_qs(urlsplit(self.path).query)
            siblings = [{"rfilename": f["path"], **({"size": f["size"]} if has_sizes else {})} for f in value]
            value = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send_file(self, repository: str, commit: str, name: str) -> None:
        data = self.hub.files[repository].get(name)
        if data is None:
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            headers["Content-Range"] = f"bytes {wanted[1]}-{len(data) - 1}/{len(data)}"
        content = data[int(wanted[1]) :] if wanted else data
        cut = self.hub.cuts.pop(name, None) if self.command == "GET" else None
        self._send(206 if wanted else 200, headers, content, cut)

    def _send(self, status: int, headers: Mapping[str, str], content: bytes = b"", cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def running_hub(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve repositories for the duration of the block."""
    hub = Hub(dict(files))
    with serving(_Handler, hub) as hub.url:
        yield hub
