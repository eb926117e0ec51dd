"""What holds for every request before any route: its form, its one answer, its one line, and who may ask."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import httpx
import pytest

import fastdeploy_sd
from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.errors import ConfigError
from tests.server.test_api_errors import COMPLETION, PROMPT, error_of
from tests.server.toy_server import DEADLINE_S, MODEL, Served, serve, server_config

pytestmark = pytest.mark.slow


@pytest.fixture
async def served() -> Any:
    async with serve() as s:
        yield s


async def exchange(served: Served, sent: bytes) -> bytes:
    """What comes back on a raw connection until the server closes it."""
    host, port = served.url.removeprefix("http://").split(":")
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


# ---- forms of a request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/v1/models", "/metrics", "/version"])
async def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    head, get = await served.http.head(path), await served.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")


async def test_head_of_a_route_for_post_is_405(served: Served) -> None:
    assert (await served.http.head(COMPLETION)).status_code == 405


@pytest.mark.parametrize("target", [b"http://x/health", b"HTTPS://x:1/health", b"http://x/health?a=http://y/z"])
async def test_a_target_may_be_absolute(served: Served, target: bytes) -> None:
    answer = await exchange(served, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("target", [b"http://x", b"http://x?a", b"http://"])
async def test_an_absolute_target_without_a_path_is_the_root(served: Served, target: bytes) -> None:
    answer = await exchange(served, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b'"name":"fastdeploy_sd"' in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health?" + b"x" * 70_000 + b" HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: %s\r\n" % (i, bytes([97]) * 100) for i in range(700)),
    ],
    ids=["target", "headers"],
)
async def test_a_large_head_is_431_also_where_it_comes_at_once(served: Served, head: bytes) -> None:
    answer = await exchange(served, head + b"Host: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"expected at most 65536 bytes of request line and headers, got 7" in answer


async def test_a_body_with_two_ends_is_refused_and_nothing_is_read_behind_it(served: Served) -> None:
    """What a proxy takes for the body could be a request of its own here."""
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await exchange(served, head.encode() + b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"expected either Content-Length or Transfer-Encoding, got both" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x" * 1000])
async def test_an_encoded_body_is_refused_by_the_name_of_its_encoding(served: Served, encoding: str) -> None:
    response = await served.http.post(COMPLETION, json=PROMPT, headers={"Content-Encoding": encoding})
    assert response.status_code == 415
    message = error_of(response)["message"]
    assert message.startswith("Content-Encoding: expected identity, got")
    assert encoding[:50] in message
    assert len(message) < 300


@pytest.mark.parametrize("content_type", [None, "application/json", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_is_json_whatever_its_type_says(served: Served, content_type: str | None) -> None:
    """`curl -d` sends the last of these."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await served.http.post(COMPLETION, content=b'{"prompt":[5],"max_tokens":1}', headers=headers)
    assert response.status_code == 200


# ---- what the server tells about itself ---------------------------------------------------------------------------


async def test_the_root_names_server_model_and_routes(served: Served) -> None:
    about = (await served.http.get("/")).json()
    assert (about["name"], about["version"], about["model"]) == ("fastdeploy_sd", fastdeploy_sd.__version__, MODEL)
    assert {"GET /health", "POST /v1/chat/completions"} <= set(about["routes"])
    assert (await served.http.get("/version")).json() == {"version": fastdeploy_sd.__version__}


async def test_a_wrong_method_is_told_the_right_one(served: Served) -> None:
    response = await served.http.get(COMPLETION)
    assert response.headers["Allow"] == "POST"
    assert error_of(response)["message"] == f"method: expected POST {COMPLETION}, got GET {COMPLETION}"
    assert "GET /ping or POST /ping" in error_of(await served.http.delete("/ping"))["message"]


# ---- failures and the log -----------------------------------------------------------------------------------------


class PanicError(BaseException):
    """As the panic of a Rust extension, which is no Exception either."""


@pytest.mark.parametrize("fault", [PanicError("called `Option::unwrap()`"), RuntimeError("a bug")])
async def test_any_failure_is_500_in_json_and_one_traceback(fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise fault

    async with serve() as s:
        kept = s.client.stats
        s.client.stats = fail  # type: ignore[assignment, method-assign]
        response = await s.http.get("/load")
        s.client.stats = kept  # type: ignore[method-assign]
        assert (await s.http.get("/load")).status_code == 200
    assert response.status_code == 500
    assert error_of(response)["message"] == "the server failed on this request; its log says why"
    [record] = [r for r in caplog.records if r.exc_info]
    assert record.getMessage() == "GET /load failed"


async def test_a_client_that_leaves_inside_its_body_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as s:
        host, port = s.url.removeprefix("http://").split(":")
        for _ in range(5):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            await s.http.get("/health")
            writer.close()
            await writer.wait_closed()
        await s.http.get("/health")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_the_access_log_has_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serve(server_config(ServerConfig(access_log=True))) as s:
        assert (await s.http.post(COMPLETION, json=PROMPT | {"request_id": "mine"})).status_code == 200
        async with s.http.stream("POST", COMPLETION, json=PROMPT | {"stream": True, "request_id": "two"}) as response:
            await response.aread()
        await s.http.post(COMPLETION, json=PROMPT | {"temperature": "hot"})
        await s.http.get("/nowhere?secret=1")
    lines = [r.getMessage() for r in caplog.records if r.name.endswith(".request_middleware")]
    time, tokens = r"duration_s=\d+\.\d{3}", r"prompt_tokens=\d+ completion_tokens=4"
    expected = [
        rf"method=POST path=/v1/completions status=200 {time} id=mine model=toy-model {tokens}",
        rf"method=POST path=/v1/completions status=200 {time} id=two model=toy-model {tokens}",
        rf"method=POST path=/v1/completions status=400 {time} error=invalid_request_error",
        rf"method=GET path=/nowhere status=404 {time} error=route_not_found",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(r"client=127\.0\.0\.1:\d+ " + pattern, line), line


# ---- who may ask --------------------------------------------------------------------------------------------------

PAGE, OTHER = "https://chat.example", "http://evil.example:8000"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


@pytest.mark.parametrize("origin", [OTHER, "null", "http://127.0.0.1:1"])
async def test_without_keys_a_web_page_is_refused(served: Served, origin: str) -> None:
    response = await served.http.post(COMPLETION, json=PROMPT, headers={"Origin": origin, "Content-Type": "text/plain"})
    assert response.status_code == 403
    assert error_of(response)["code"] == "origin_not_allowed"
    assert served.client.submitted == []


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example:8000", 403), ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("gpu-box", 200)],
)
async def test_without_keys_a_loopback_address_answers_to_no_name_of_the_internet(
    served: Served, host: str, status: int
) -> None:
    """DNS rebinding: a page of evil.example asks its own host, which is this machine by now, and sends no origin."""
    assert (await served.http.get("/v1/models", headers={"Host": host})).status_code == status


async def test_behind_a_proxy_a_name_can_be_allowed() -> None:
    async with serve(server_config(ServerConfig(allowed_origins=(PAGE,)))) as s:
        assert (await s.http.get("/v1/models", headers={"Host": "chat.example"})).status_code == 200
        assert (await s.http.get("/v1/models", headers={"Host": "evil.example"})).status_code == 403


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_an_allowed_page_gets_what_a_browser_wants_to_see(allowed: str) -> None:
    async with serve(server_config(ServerConfig(allowed_origins=(allowed,), api_key=("k",)))) as s:
        preflight = await s.http.options(COMPLETION, headers={"Origin": PAGE, **PREFLIGHT})
        assert preflight.status_code == 200, "without a key: a browser sends none"
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
        assert preflight.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        right = {"Origin": PAGE, "Authorization": "Bearer k"}
        answers = [
            preflight,
            await s.http.post(COMPLETION, json=PROMPT, headers=right),
            await s.http.post(COMPLETION, json=PROMPT, headers={"Origin": PAGE}),
        ]
        assert [a.status_code for a in answers] == [200, 200, 401]
        for answer in answers:
            assert answer.headers["Access-Control-Allow-Origin"] in (allowed, PAGE)


async def test_what_an_allowed_page_may_do_is_said_by_options() -> None:
    rules = ServerConfig(
        allowed_origins=(PAGE,), allowed_methods=("POST",), allowed_headers=("x-a",), allow_credentials=True
    )
    async with serve(server_config(rules)) as s:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        preflight = await s.http.options(COMPLETION, headers=asked)
        refused = [
            await s.http.options(COMPLETION, headers=asked | {f"Access-Control-Request-{name}": value})
            for name, value in (("Method", "GET"), ("Headers", "x-b"))
        ]
    assert (preflight.status_code, [answer.status_code for answer in refused]) == (200, [400, 400])
    assert preflight.headers["Access-Control-Allow-Credentials"] == "true"
    assert preflight.headers["Access-Control-Allow-Methods"] == "POST"


async def test_with_a_key_an_unknown_page_gets_no_permission_but_its_key_counts() -> None:
    async with serve(server_config(ServerConfig(api_key=("k",)))) as s:
        assert (await s.http.options(COMPLETION, headers={"Origin": OTHER, **PREFLIGHT})).status_code == 403
        headers = {"Origin": OTHER, "Authorization": "Bearer k", "Host": "llm.example"}
        response = await s.http.post(COMPLETION, json=PROMPT, headers=headers)
        assert response.status_code == 200
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize("key", ["schlüssel", "two words", " lead", "tab\t", "\x7f"])
def test_a_key_that_clients_cannot_send_alike_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key: expected visible ASCII characters") as caught:
        ServerConfig(api_key=("good", key))
    assert key not in caught.value.message


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", "HTTPS://x", "https://a b"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins: expected"):
        ServerConfig(allowed_origins=(origin,))


async def test_other_bytes_than_ascii_in_a_header_are_no_key() -> None:
    async with serve(server_config(ServerConfig(api_key=("k",)))) as s:
        for value in ("Bearer é".encode(), "Bearer é".encode("latin-1"), b"Bearer \xff"):
            response = await s.http.get("/v1/models", headers=httpx.Headers([(b"Authorization", value)]))
            assert response.status_code == 401
