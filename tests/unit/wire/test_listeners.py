"""The request that a server names in its log when it serves."""

from __future__ import annotations

import json
import shlex

import pytest

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.wire.http.listeners import bound, example_request


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")],
)
def test_it_can_be_pasted_on_this_machine(host: str, reached_at: str) -> None:
    server = ServerConfig(host=host, port=0)
    with bound(server) as listeners:
        port = listeners.api.getsockname()[1]
        words = shlex.split(example_request(server, listeners.api))
    assert words[:3] == ["curl", f"http://{reached_at}:{port}/v1/completions", "-d"]
    assert json.loads(words[3])["max_tokens"] == 40
    assert len(words) == 4


def test_it_shows_where_a_key_goes_and_not_the_key() -> None:
    server = ServerConfig(port=0, api_key=("hush",))
    with bound(server) as listeners:
        text = example_request(server, listeners.api)
    assert "Authorization: Bearer YOUR_KEY" in shlex.split(text)
    assert "hush" not in text
