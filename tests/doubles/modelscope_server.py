"""ModelScope on a local port: the routes that its package asks when it fetches a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.doubles.http_service import serving

_API = re.compile(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?$")
REVISIONS = ("master", "v1")


@dataclass
class ModelScope:
    """What the server has, and what it was asked.

    Attributes:
        files: of every repository, at every revision.
        fetched: files, once per answer.
        num_asked: requests.
    """

    files: dict[str, Mapping[str, bytes]]
    fetched: list[str] = field(default_factory=list)
    num_asked: int = 0
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ModelScope

    def do_GET(self) -> None:
        self.hub.num_asked += 1
        target = urlsplit(self.path)
        query, match = parse_qs(target.query), _API.match(target.path)
        files = self.hub.files.get(match[1]) if match else None
        if match is None or files is None or query.get("Revision", ["master"])[0] not in REVISIONS:
            self._send(404, json.dumps({"Code": 10010205001, "Message": "no such thing", "Success": False}).encode())
        elif match[2]:
            listed = [
                {"Path": name, "Name": name.rpartition("/")[2], "Type": "blob", "Size": len(data), "Sha256": _sha(data)}
                for name, data in files.items()
            ]
            self._send(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode())
        else:
            name = query["FilePath"][0]
            self.hub.fetched.append(name)
            self._send(200, files[name])

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the hub has it."""

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def running_modelscope(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[ModelScope]:
    """Serve repositories for the duration of the block."""
    hub = ModelScope(dict(files))
    with serving(_Handler, hub) as hub.url:
        yield hub
