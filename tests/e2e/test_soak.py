"""200 clients at once on a cache too small for them, a third of whom hang up: nothing is lost or left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, running_server
from tests.e2e.soak_client import Answer, Prompt, Visit, draw_visits, visit, visit_all

pytestmark = pytest.mark.slow

NUM_CLIENTS = 200
NUM_PROMPTS = 40
NUM_BLOCKS = 64
SETTLE_TIMEOUT_S = 120.0
# Allocators keep some of what a burst needed; a leak of one request's state per client would be far beyond this.
MAX_GROWTH_KB = 16 * 1024


@pytest.fixture
def server(golden_dir: Path) -> Iterator[ServerProcess]:
    """A tiny model with KV blocks for a fraction of the clients: they queue, are preempted, and share prefixes."""
    arguments = ["--model", str(golden_dir / "qwen3-tiny"), "--max-model-len", "1024", "--block-size", "16"]
    arguments += ["--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "32"]
    arguments += ["--max-num-batched-tokens", "256", "--num-threads", "1"]
    with running_server(*arguments) as server:
        yield server


async def solo_answers(url: str, prompts: list[Prompt]) -> dict[Prompt, Answer]:
    """Return what each prompt gets when it is alone in the server."""
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        return {prompt: await visit(client, Visit(prompt)) for prompt in prompts}


def verify_answer(plan: Visit, answer: Answer, alone: Answer) -> None:
    """A client that stayed got exactly the tokens of a solo run; one that left, the beginning of them."""
    if plan.hang_up_after is None:
        assert answer == alone
    else:
        num_common = min(len(answer.token_ids), len(alone.token_ids))
        assert answer.token_ids[:num_common] == alone.token_ids[:num_common]
        assert not answer.is_done


def wait_until_idle(client: httpx.Client) -> dict[str, int]:
    """Ask until no request is left (hanging up frees a request within a step) and return the last answer.

    Raises:
        AssertionError: requests are still there after a generous time.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        load: dict[str, int] = client.get("/load").raise_for_status().json()
        if load["num_requests_running"] == load["num_requests_waiting"] == 0:
            return load
        assert time.monotonic() < deadline, load


def metric(text: str, name: str) -> float:
    [value] = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == name]
    return float(value)


def verify_everything_free(url: str, num_requests: int) -> None:
    """After the last client, every block is available again and every request has ended exactly once."""
    with httpx.Client(base_url=url, trust_env=False, timeout=SETTLE_TIMEOUT_S) as client:
        load = wait_until_idle(client)
        text = client.get("/metrics").raise_for_status().text
    assert load["num_free_blocks"] + load["num_cached_blocks"] == load["num_blocks"] == NUM_BLOCKS
    assert metric(text, "fastdeploy:available_gpu_block_num") == NUM_BLOCKS
    assert metric(text, 'fastdeploy_sd:kv_cache_blocks{state="used"}') == 0
    ends = {reason: metric(text, f'fastdeploy_sd:requests_finished_total{{reason="{reason}"}}') for reason in ENDS}
    assert sum(ends.values()) == metric(text, "fastdeploy:requests_number_total") <= num_requests
    assert ends["error"] == 0
    assert ends["abort"] > 0, "no client hung up early enough to matter"


ENDS = ("stop", "length", "abort", "error")


async def test_clients_that_come_and_go(server: ServerProcess) -> None:
    rng = random.Random(20)
    prompts = [Prompt.draw(rng, vocab_size=4096) for _ in range(NUM_PROMPTS)]
    alone = await solo_answers(server.url, prompts)
    for prompt, answer in alone.items():
        assert (len(answer.token_ids), answer.finish_reason) == (prompt.max_tokens, "length")
        assert answer.usage_tokens == prompt.max_tokens
        assert answer.is_done
    resident_kb = []
    for num_rounds in (1, 2):
        plans = draw_visits(prompts, NUM_CLIENTS, rng)
        answers = await visit_all(server.url, plans)
        for plan, answer in zip(plans, answers, strict=True):
            verify_answer(plan, answer, alone[plan.prompt])
        verify_everything_free(server.url, NUM_PROMPTS + num_rounds * NUM_CLIENTS)
        resident_kb.append(server.resident_kb())
    assert resident_kb[1] - resident_kb[0] < MAX_GROWTH_KB
    assert server.stop() == 0
