"""Prompts computed on one GPU and gone on with on another, in two processes: no answer shows it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from fastdeploy_sd.cli.verify import compare, run_alone
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.disaggregation.roles import open_engine
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import KvSource
from tests.engine.gpu import block_requests, blocks_alone, leaves_no_streams, model_with_layers, tiny_config
from tests.engine.gpu_prefill_process import config_of
from tests.models.rewrite import add_windows

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("kind")]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_layers(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(model: Path, kind: str) -> Iterator[KvSource]:
    """A prefill instance on such a GPU."""
    with prefilling(model) as source:
        yield source


@contextmanager
def prefilling(model: Path, num_ranks: int = 1) -> Iterator[KvSource]:
    """A prefill instance in a process of its own, with as many GPUs."""
    command = [sys.executable, "-m", "tests.engine.gpu_prefill_process", str(model), str(num_ranks)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield KvSource("p0", process.stdout.readline().strip())
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    finally:
        process.kill()


@contextmanager
def decoding(
    model: Path, device: Literal["cpu", "gpu"], num_ranks: int = 1, protocol: Literal["ipc", "tcp"] = "ipc"
) -> Iterator[Engine]:
    config = replace(config_of("decode", model, num_ranks, (protocol,)), device=device)
    executor = create_executor(config)
    try:
        with open_engine(config, executor) as engine:
            yield engine
    finally:
        executor.shutdown()


def goes_on(
    kind: str, model: Path, source: KvSource, num_ranks: int = 1, protocol: Literal["ipc", "tcp"] = "ipc"
) -> None:
    """Requests whose prompts are computed there get the tokens that they get by themselves."""
    with leaves_no_streams(kind), decoding(model, "gpu", num_ranks, protocol) as engine:
        answers = run(engine, [replace(r, kv_source=source) for r in block_requests()[1:]], arrivals_per_step=1)
        stats = engine.stats()
    assert compare({name: blocks_alone(kind)[name] for name in answers}, answers) is None
    assert stats.num_kv_arrivals == len(answers)
    assert stats.transfers.received["cuda" if protocol == "ipc" else protocol].num_transfers == len(answers)
    assert stats.drafts["handed_over"].accepted[0] == len(answers)  # the first token of the same model


def test_a_prompt_goes_on_as_if_computed_here(kind: str, model: Path, source: KvSource) -> None:
    goes_on(kind, model, source)


def test_of_a_window_only_the_end_goes(kind: str, tmp_path: Path) -> None:
    path, requests = model_with_layers(tmp_path), block_requests()[1:]
    add_windows(path, ["full_attention", "sliding_attention"], 12)
    alone = run_alone(tiny_config(path), requests)
    with prefilling(path) as source, decoding(path, "gpu") as engine:
        answers = run(engine, [replace(r, kv_source=source) for r in requests], arrivals_per_step=1)
        stats = engine.stats()
    assert compare(alone, answers) is None
    assert stats.num_kv_arrivals == len(answers)
    # Two layers, a draft layer, and three blocks of each prompt; of the window the first block is left out.
    assert stats.transfers.received["cuda"].num_pages == len(answers) * (3 * 3 - 1)


def test_a_cpu_refuses_the_kv_of_a_gpu(model: Path, source: KvSource, caplog: pytest.LogCaptureFixture) -> None:
    with decoding(model, "cpu") as engine, caplog.at_level(logging.WARNING):
        run(engine, [replace(block_requests()[0], kv_source=source)])
        assert not any(way.num_transfers for way in engine.stats().transfers.received.values())
    text = r"device: expected CPU, \w+ as on the decode instance, got CUDA, .+ on the prefill instance"
    assert any(re.search(text, message) for message in caplog.messages)
