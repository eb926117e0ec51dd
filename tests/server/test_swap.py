"""A server whose second level lies in a folder: killed, started again, and never shared."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server_process import ServerProcess, running_server

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
PROMPT = "def first(items):\n    return items[0]\n\n\n" * 40


def flags(folder: Path) -> list[str]:
    """A server whose first level has room for little more than one request."""
    return [
        "--model", "demo", "--num-threads", "1", "--block-size", "16", "--num-gpu-blocks-override", "64",
        "--max-model-len", "1024", "--swap-space", "0.05", "--swap-folder", str(folder),
        "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}',
    ]  # fmt: skip


def answer(server: ServerProcess, prompt: str) -> tuple[str, int]:
    """The text of a completion, and how many of the prompt's tokens were cached."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status().json()
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    [value] = [s.value for s in samples if s.name == name and s.labels == labels]
    return value


def wait_for_stores(server: ServerProcess, least: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while metric(server, "fastdeploy_sd:swap_copies_total", end="stored") < least:
        assert time.monotonic() < deadline, "the blocks are not stored"
        time.sleep(0.05)


@pytest.mark.long
def test_a_killed_servers_prefixes_are_there_for_the_next_one(tmp_path: Path) -> None:
    with running_server(*flags(tmp_path)) as server:
        text, num_cached = answer(server, PROMPT)
        assert num_cached == 0
        other = "\n".join(f"x{i} = {i * i}" for i in range(90))
        answer(server, other)  # now the first level has no room for both
        wait_for_stores(server, 40)
        assert answer(server, PROMPT)[0] == text
        num_from_swap = metric(server, "fastdeploy:prefix_cpu_cache_token_num_total")
        assert num_from_swap > 200
        second = subprocess.run(
            [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", "--port", "0", *flags(tmp_path)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert second.returncode == 2
        assert "error: swap_folder: " in second.stderr
        assert "expected a file that no other server uses, got one that is locked" in second.stderr
        server.kill()  # no time to say goodbye
    with running_server(*flags(tmp_path)) as server:
        assert metric(server, "fastdeploy_sd:swap_used_slots") >= 40
        again, num_cached = answer(server, PROMPT)
        assert again == text
        assert num_cached >= num_from_swap
        assert metric(server, "fastdeploy_sd:swap_copies_total", end="damaged") == 0
        assert server.stop() == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".kvswap"]
