"""Servers whose model is on emulated GPUs, as processes: what clients and the parent process see when one is lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.entrypoints.launch import DEFAULT_EXECUTOR
from tests.engine.gpu import small_model
from tests.server.model_executors import create_losing_gpu, loses_gpu
from tests.server.router_process import wait_until
from tests.server.split_deployment import ModelServer
from tests.server.test_ranks import ranks_of
from tests.server.toy_process import WAIT_S, Stream, complete, error_of

pytestmark = pytest.mark.slow

LOSING = f"{create_losing_gpu.__module__}:{create_losing_gpu.__name__}"
NUM_TOKENS = 400


@contextlib.contextmanager
def serving_on_gpus(
    model: Path, state: Path, monkeypatch: pytest.MonkeyPatch, executor: str = DEFAULT_EXECUTOR, num_ranks: int = 1
) -> Iterator[ModelServer]:
    """A server that runs two requests at once; nothing of it is left afterwards but its state."""
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    monkeypatch.setenv("FDSD_EMULATED_GPUS", str(num_ranks))
    options = {
        "served_model_name": ["m", "toy"], "device": "gpu", "tensor_parallel_size": num_ranks, "max_num_seqs": 2,
        "max_num_batched_tokens": 16, "max_model_len": NUM_TOKENS + 16, "num_gpu_blocks_override": 64,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }  # fmt: skip
    with contextlib.closing(ModelServer(model, state, executor, **options)) as server:
        yield server
        left = {path.name for path in state.iterdir()}
        assert left <= {"fastdeploy_sd", loses_gpu(state).name}


def answer_of(server: ModelServer) -> str:
    text: str = complete(server.url, max_tokens=8, ignore_eos=True).json()["choices"][0]["text"]
    assert text
    return text


def verify_ends(server: ModelServer, lose: Callable[[], object]) -> None:
    """Lose what the server computes on while two requests run and one waits: each is told, and so is a probe."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = [Stream(server.url, NUM_TOKENS, ignore_eos=True) for _ in range(2)]
        waiting = pool.submit(complete, server.url)
        wait_until(lambda: server.load()["num_requests_waiting"] == 1)
        lose()
        for stream in running:
            assert error_of(stream.read())["type"] == "internal_error"
        answer = waiting.result()
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")
    with contextlib.suppress(httpx.TransportError):  # it has ended since
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 503
    assert server.wait() == 1
    assert "error: the engine process failed (exit status 1)" in server.stderr


def test_a_lost_gpu_and_a_lost_rank_end_their_server_and_the_next_one_answers_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one computes on two GPUs."""
    model = small_model(tmp_path_factory.mktemp("small") / "model", "qwen3-tiny")
    with serving_on_gpus(model, tmp_path, monkeypatch, LOSING) as server:
        wanted = answer_of(server)
        verify_ends(server, loses_gpu(tmp_path).touch)
        assert "the GPU has failed: " in server.stderr
        assert "gather_output_rows" in server.stderr
    with serving_on_gpus(model, tmp_path, monkeypatch, num_ranks=2) as server:
        assert answer_of(server) == wanted
        [rank] = ranks_of(server, 2)
        verify_ends(server, lambda: os.kill(rank, signal.SIGKILL))
        assert "rank 1 ended (killed by SIGKILL)" in server.stderr
