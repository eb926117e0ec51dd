"""The promise over ranks with a GPU each: two give the bytes of one, and one that fails does not hold the other.

The emulated GPUs are processes with memory of their own, of which each opens the other's.
"""

from __future__ import annotations

import functools
import pathlib
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import PLAIN, Answer, open_engine, run_alone, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.distributed import executor as ranks
from fastdeploy_sd.distributed.executor import MultiProcessExecutor
from fastdeploy_sd.errors import ConfigError, InternalError
from fastdeploy_sd.types import FinishReason, RequestId
from fastdeploy_sd.worker.executor import LocalExecutor
from tests.doubles import faulty_rank_workers as faulty_followers
from tests.doubles.engines import run_to_end
from tests.engine.gpu import BATCH, TIGHT, model_with_layers, note_drafts, short_requests, tiny_config, two_gpus
from tests.engine.test_gpu import in_order
from tests.engine.test_ranks import run_for_ever
from tests.ops.cuda_device import EMULATED

REQUESTS = short_requests()[:4]


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("kind")]


@pytest.fixture(scope="module")
def kind(kind: str) -> Iterator[str]:
    with two_gpus():
        yield kind


def on_gpus(base: Config, timeout_s: float = 60.0) -> Config:
    """Slow steps of a busy machine are no hang."""
    return replace(base, parallel=ParallelConfig(tensor_parallel_size=2, rank_timeout_s=timeout_s))


@functools.cache
def alone(_kind: str) -> Mapping[RequestId, Answer]:
    """What each of them gets by itself, on one GPU."""
    return run_alone(tiny_config(), REQUESTS)


def test_two_ranks_give_the_bytes_of_one(kind: str) -> None:
    """With n-grams over prompts in parts, several at once, preempted and from the prefix cache."""
    [method] = standard_methods(["ngram"], [3])
    cell = run_cell(on_gpus(tiny_config()), TIGHT, method, REQUESTS, alone(kind))
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0


@pytest.mark.parametrize("model", ["ernie4_5-tiny", "deepseek_v3-tiny"])
def test_draft_layers_run_on_both(model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And draft what one GPU drafts: the layers' KV after every token is the same."""
    config, requests = tiny_config(model_with_layers(tmp_path, model)), REQUESTS[:2]
    [method] = standard_methods(["mtp"], [3])
    answers, drafts = [], []
    for ranks_config in (in_order(config), on_gpus(config)):
        with open_engine(ranks_config, BATCH, method) as engine:
            executor = engine._executor
            first = executor._first if isinstance(executor, MultiProcessExecutor) else executor
            assert isinstance(first, LocalExecutor)
            assert first._runner is not None
            drafts.append(note_drafts(first._runner, monkeypatch))
            answers.append(run(engine, requests))
    assert answers[0] == answers[1] == run_alone(config, requests)
    assert drafts[0] == drafts[1]
    assert sum(map(len, drafts[0].values())) > 5


@pytest.mark.usefixtures("expects_step_failures")
def test_a_pass_that_one_rank_cannot_start_ends_on_the_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's GPU waits for it, is told, and runs the others' rows again."""
    culprit = REQUESTS[1].request_id
    monkeypatch.setattr(ranks, "DEFAULT_RANK_WORKER", f"{faulty_followers.__name__}:create_failing_model")
    monkeypatch.setenv(faulty_followers.CULPRITS, culprit)
    with open_engine(on_gpus(tiny_config()), BATCH, PLAIN) as engine:
        for request in REQUESTS:
            engine.submit(request)
        transcript = run_to_end(engine)
    assert transcript.last[culprit].finish_reason is FinishReason.ERROR
    for request_id, answer in alone(kind).items():
        assert request_id == culprit or tuple(transcript.token_ids[request_id]) == answer.token_ids


@pytest.mark.usefixtures("expects_step_failures")
def test_a_gpu_that_waits_in_vain_costs_no_request_a_token(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0's gives up a pass that the other rank begins late; that one ends too, and both run the rows again."""
    monkeypatch.setattr(ranks, "DEFAULT_RANK_WORKER", f"{faulty_followers.__name__}:create_late_model")
    monkeypatch.setenv(faulty_followers.CULPRITS, REQUESTS[1].request_id)
    with open_engine(on_gpus(tiny_config(), timeout_s=5.0), BATCH, PLAIN) as engine:
        for request in REQUESTS:
            engine.submit(request)
        transcript = run_to_end(engine)
    assert "rank 1 did not come in time" in caplog.text
    for request_id, answer in alone(kind).items():
        assert tuple(transcript.token_ids[request_id]) == answer.token_ids


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize(("number", "timeout_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 4.0)])
def test_a_rank_that_ends_or_hangs_ends_the_engine(number: signal.Signals, timeout_s: float) -> None:
    """Rank 0's GPU waits for its part of a sum; a first step on a busy machine is no hang."""
    with open_engine(on_gpus(tiny_config(), timeout_s=timeout_s), BATCH, PLAIN) as engine:
        for request in REQUESTS:
            engine.submit(request)
        engine.step()
        executor = engine._executor
        assert isinstance(executor, MultiProcessExecutor)
        threading.Timer(0.02, executor._others._children[0].signal, (number,)).start()
        with pytest.raises(InternalError, match="rank 1 "):
            run_for_ever(engine, REQUESTS)


def test_a_model_that_cannot_be_loaded_leaves_the_gpus() -> None:
    """The memory that ranks share is closed, so that the process may load another."""
    config = on_gpus(tiny_config())
    cache = replace(config.cache, num_blocks=None, gpu_memory_utilization=0.02)
    with pytest.raises(ConfigError, match="gpu_memory_utilization: expected what leaves memory for a KV block"):
        ranks.create_executor(replace(config, cache=cache))
    found = device()
    assert isinstance(found, CudaDevice)
    assert found.transfers.on_wait == []


def test_fewer_gpus_than_ranks_and_such_that_do_not_reach_each_other_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpus(tiny_config())
    if kind == EMULATED:
        monkeypatch.setenv("FDSD_EMULATED_GPUS", "1")
        with pytest.raises(ConfigError, match=r"tensor_parallel_size: expected at most 1, .* got 2"):
            open_engine(config, BATCH, PLAIN).__enter__()
        monkeypatch.setenv("FDSD_EMULATED_GPUS", "2-apart")
        with pytest.raises(ConfigError, match=r"tensor_parallel_size: .* got GPUs . and ., which cannot"):
            open_engine(config, BATCH, PLAIN).__enter__()
