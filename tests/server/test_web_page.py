"""The web page without a browser: its files, its headers, who gets it, and that it is no way round the API key."""

from __future__ import annotations

import re

import httpx
import pytest

from fastdeploy_sd.cluster.router.options import make_router_config
from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.wire.http.web_page import FOLDER, PREFIX
from tests.server.test_api import COMPLETION
from tests.server.toy_server import serve, server_config

pytestmark = pytest.mark.slow

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PROMPT = {"prompt": [5, 6], "max_tokens": 1}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


async def test_browsers_get_the_page_and_programs_the_facts() -> None:
    async with serve() as s:
        page = await s.http.get("/", headers=BROWSER)
        assert page.text == (FOLDER / "index.html").read_text(encoding="utf-8")
        for accept in ("*/*", "application/json"):
            facts = (await s.http.get("/", headers={"Accept": accept})).json()
            assert facts["name"] == "fastdeploy_sd"
        head = await s.http.head("/", headers=BROWSER)
        assert (head.status_code, head.content, head.headers["ETag"]) == (200, b"", page.headers["ETag"])
        again = await s.http.get("/", headers=BROWSER | {"If-None-Match": page.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await s.http.post("/", headers=BROWSER)).status_code == 405


async def test_every_file_has_its_type_and_may_load_nothing_else() -> None:
    async with serve() as s:
        for path in sorted(FOLDER.iterdir()):
            answer = await s.http.get(PREFIX + path.name)
            assert answer.content == path.read_bytes()
            assert answer.headers["Content-Type"] == TYPES[path.suffix], path.name
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
            assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
            assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
            assert "unsafe" not in answer.headers["Content-Security-Policy"]


def test_the_files_name_no_other_site_and_no_markup_from_text() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            path
        )
        assert not re.search(r"\b(?:src|href|action)=\"(?!web_page/|#)|\bon\w+=\"|<style|<script(?! type)", text), path
        others = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not others, path


async def test_no_other_file_can_be_read() -> None:
    async with serve() as s:
        for path in (
            b"/web_page/", b"/web_page/nothing.js", b"/web_page/../pyproject.toml", b"/web_page/%2e%2e/errors.py",
            b"/web_page/..%2ferrors.py", b"/web_page//etc/passwd", b"/web_page/index.html%00",
        ):  # fmt: skip
            url = httpx.URL(str(s.http.base_url)).copy_with(raw_path=path)
            assert (await s.http.get(url)).status_code == 404, path


async def test_the_key_opens_the_api_and_not_the_page() -> None:
    async with serve(server_config(ServerConfig(api_key=("k",)))) as s:
        assert (await s.http.get("/", headers=BROWSER)).status_code == 200
        assert (await s.http.get(f"{PREFIX}app.js")).status_code == 200
        for path in ("/", "/v1/models", "/metrics", "/web_page/nothing.js"):
            assert (await s.http.get(path, headers={"Accept": "*/*"})).status_code == 401


async def test_it_can_be_turned_off() -> None:
    async with serve(server_config(ServerConfig(web_page=False))) as s:
        assert (await s.http.get("/", headers=BROWSER)).json()["name"] == "fastdeploy_sd"
        assert (await s.http.get(f"{PREFIX}app.js")).status_code == 404
    assert not make_router_config(web_page=False).server.web_page


async def test_without_keys_its_requests_are_those_of_an_address() -> None:
    """Also on an address that others reach: a name of the Internet may be another page's, by DNS rebinding."""
    cases = [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", 403),
        ("127.0.0.1:8000", "http://localhost:8000", 403),
        ("evil.example:8000", "http://evil.example:8000", 403),
    ]
    for listening in ("127.0.0.1", "0.0.0.0"):
        async with serve(server_config(ServerConfig(host=listening))) as s:
            for host, origin, status in cases:
                answer = await s.http.post(COMPLETION, json=PROMPT, headers={"Host": host, "Origin": origin})
                assert answer.status_code == status, (listening, host, origin)
