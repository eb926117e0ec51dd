"""By which name a request shares the engine with others."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd.config import ServerConfig
from tests.server.toy_server import serve, server_config

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 1}


@pytest.mark.parametrize(
    ("keys", "key", "fields", "client"),
    [
        ((), "", {}, "address 127.0.0.1"),
        ((), "", {"user": "ada"}, "user ada"),
        ((), "", {"safety_identifier": "ada", "user": None}, "user ada"),
        (("only",), "only", {"user": "ada"}, "user ada"),
        (("first", "second"), "first", {"user": "ada"}, "key 0"),
        (("first", "second"), "second", {}, "key 1"),
    ],
)
async def test_a_client_is_a_key_a_user_or_an_address(
    keys: tuple[str, ...], key: str, fields: dict[str, Any], client: str
) -> None:
    async with serve(server_config(ServerConfig(api_key=keys))) as s:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ):
            answer = await s.http.post(path, json=body | fields, headers=headers)
            assert answer.status_code == 200, answer.text
        assert [request.client for request in s.client.submitted] == [client] * 3


@pytest.mark.parametrize("user", [5, "x" * 257])
async def test_a_user_is_a_short_text(user: object) -> None:
    async with serve() as s:
        answer = await s.http.post("/v1/completions", json=BODY | {"user": user})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "user"
