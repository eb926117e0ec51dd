"""Bodies made to stall a server: others are answered meanwhile, with the same bytes, and no process grows with them."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, running_server
from tests.server.attacks import Attack, large_attacks, run_attack, small_attacks

pytestmark = pytest.mark.slow

WARM_UP_S = 120
LARGE_BYTES = 4 << 20
MAX_GROWTH = 10  # times the body
NOISE_BYTES = 16 << 20  # what a process grows by whatever it does
# Answered with a result; all others with an error that names the field.
SERVED = {"600 prompts", "n 128, 20 logprobs"}
# A worker holds an emoji's text with four bytes per character; an answer with logprobs is in proportion to its tokens.
GROWING = {"an emoji and a long message", "n 128, 20 logprobs"}
ATTACKS = {attack.name: attack for attack in (*small_attacks(), *large_attacks(LARGE_BYTES))}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # Few blocks, all of them used before: a block that is used for the first time costs memory for any request.
    # Nor are outputs kept for drafts.
    options = ["--num-threads", "1", "--num-gpu-blocks-override", "64", "--speculative-config", "naive"]
    with running_server("--model", "demo", *options) as server:
        full = {"prompt": ["a"] * 192, "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=full, timeout=WARM_UP_S).status_code == 200
        yield server
        assert server.stop() == 0, "".join(server.log)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_others_are_served_while_a_body_is_handled(server: ServerProcess, attack: Attack) -> None:
    url = urlsplit(server.url)
    assert url.hostname is not None
    assert url.port is not None
    figures = run_attack((url.hostname, url.port), server.pid, attack)
    assert figures.status == (200 if attack.name in SERVED else 400)
    assert figures.num_streams
    assert figures.has_same_bytes
    assert figures.health_ms
    assert figures.one_token_ms
    if attack.name not in GROWING:
        assert figures.growth_bytes <= MAX_GROWTH * len(attack.content) + NOISE_BYTES
