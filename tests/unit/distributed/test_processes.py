"""Ranks as real processes over the toy model: what they compute, and what becomes of all when one of them ends."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.distributed.executor import MultiProcessExecutor, start_ranks
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError, InternalError
from fastdeploy_sd.types import FinishReason
from fastdeploy_sd.worker.ranks.coordinator import RankError
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from tests.doubles.engines import run_to_end, toy_config, toy_request
from tests.doubles.toy_model import ToyModel
from tests.doubles.toy_ranks import COMPUTE_S, INFO, ToyFirst, create_first

pytestmark = pytest.mark.slow

WAIT_S = 120.0
_DOUBLES = "tests.doubles.toy_ranks"


def start(size: int = 2, timeout_s: float = WAIT_S, rank_worker: str = "create_rank_worker") -> MultiProcessExecutor:
    config = replace(toy_config(), parallel=ParallelConfig(tensor_parallel_size=size, rank_timeout_s=timeout_s))
    return start_ranks(config, create_first, f"{_DOUBLES}:{rank_worker}")


def children(pid: int | None = None) -> dict[int, str]:
    """Process id -> command line of every rank process below a process, this one if none is named."""
    pid = pid or os.getpid()
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return {child: line for child, line in found.items() if "distributed.process" in line}


def wait_for_ends(fds: list[int]) -> None:
    for fd in fds:
        assert select.select([fd], [], [], WAIT_S)[0], "a rank goes on"
        os.close(fd)


@contextlib.contextmanager
def started(size: int = 2, timeout_s: float = WAIT_S) -> Iterator[tuple[Engine, MultiProcessExecutor, list[int]]]:
    """An engine on ranks, and the process ids of the others; nothing of them is left afterwards."""
    before, num_fds = children(), len(os.listdir("/proc/self/fd"))
    executor = start(size, timeout_s)
    try:
        yield Engine(toy_config(), executor), executor, sorted(set(children()) - set(before))
    finally:
        executor.shutdown()
        executor.shutdown()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= num_fds  # fewer where what an earlier test left is collected meanwhile


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_computes_what_one_does(size: int) -> None:
    requests = [toy_request(f"r{i}", range(i, i + 30), max_tokens=20) for i in range(6)]
    with started(size) as (engine, _, pids):
        assert len(pids) == size - 1
        for request in requests:
            engine.submit(request)
        transcript = run_to_end(engine)
    assert transcript.token_ids == {r.request_id: ToyModel(INFO.vocab_size).generate(r) for r in requests}


def test_a_plan_as_long_as_a_prompt_can_be_arrives() -> None:
    """More than a socket holds: rank 0 and the others must not wait for each other."""
    with started() as (engine, _, _):
        request = toy_request("r", [5] * (INFO.max_model_len - 100), max_tokens=2)
        engine.submit(request)
        assert run_to_end(engine).token_ids["r"] == ToyModel(INFO.vocab_size).generate(request)


# ---- a rank ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "error"),
    [
        ("die", r"rank 1 ended \(killed by SIGKILL\)"),
        ("refuse", r"rank 1 failed: AssertionError\('a plan that rank 1 does not take"),
    ],
)
def test_a_rank_that_ends_in_a_step_ends_the_step(request_id: str, error: str) -> None:
    with started(4) as (engine, _, _):
        engine.submit(toy_request("r", [5, 6]))
        engine.step()
        engine.submit(toy_request(request_id, [5, 6]))
        with pytest.raises(InternalError, match=error):
            engine.step()


def test_a_rank_that_ends_between_steps_is_told_of_at_once() -> None:
    with started() as (engine, executor, [pid]):
        assert not select.select([executor.failure_fd], [], [], 0)[0]
        os.kill(pid, signal.SIGKILL)
        assert select.select([executor.failure_fd], [], [], WAIT_S)[0]
        engine.submit(toy_request("r", [5, 6]))
        with pytest.raises(InternalError, match=r"rank 1 ended \(killed by SIGKILL\)"):
            engine.step()


def test_a_rank_that_fails_an_attempt_goes_on() -> None:
    """What to do about it is for rank 0's worker to decide."""
    with started() as (engine, executor, _):
        engine.submit(toy_request("fail", [5, 6]))
        with pytest.raises(RankError, match=r"rank 1: RuntimeError\('the toy broke'\)"):
            engine.step()
        assert not select.select([executor.failure_fd], [], [], 0)[0]


def test_a_stopped_rank_is_killed_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with started(4, timeout_s=1.5) as (engine, _, _):
        engine.submit(toy_request("stop", [5, 6]))
        with pytest.raises(InternalError, match=r"rank 1 has got nowhere for \d+ s"):
            engine.step()
    assert next(r.getMessage() for r in caplog.records if r.levelno == logging.ERROR).startswith(
        "rank 1 has got nowhere"
    )


def test_a_rank_is_not_killed_while_another_engine_is_waited_for() -> None:
    class Experts:
        """Of two engines of two ranks: which waits for which."""

        def __init__(self) -> None:
            self.pairs = [(0, 1), (1, 3)]

        def awaited(self) -> npt.NDArray[np.bool_]:
            found = np.zeros((4, 4), np.bool_)
            found[tuple(zip(*self.pairs, strict=True))] = True
            return found

        def abort(self) -> None:
            """Nothing waits."""

    with started(timeout_s=1.0) as (engine, executor, _):
        executor._others.share_experts(experts := Experts())  # type: ignore[arg-type]
        engine.submit(toy_request("stop", [5, 6]))
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(engine.step)
            time.sleep(3)
            assert not step.done()
            experts.pairs = [(0, 1), (3, 1)]  # the other engine waits for this one
            with pytest.raises(InternalError, match=r"rank 1 has got nowhere for \d+ s"):
                step.result(WAIT_S)


def test_a_rank_that_computes_for_long_is_not_stopped() -> None:
    request = toy_request("compute", [5, 6], max_tokens=3)
    with started(timeout_s=COMPUTE_S / 3) as (engine, _, _):
        engine.submit(request)
        assert run_to_end(engine).token_ids["compute"] == ToyModel(INFO.vocab_size).generate(request)


def test_a_rank_that_was_stopped_between_steps_and_goes_on_is_fine() -> None:
    request = toy_request("r", [5, 6], max_tokens=3)
    with started(timeout_s=2) as (engine, _, [pid]):  # it may get no processor for some time afterwards
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pid, signal.SIGCONT)
        engine.submit(request)
        assert run_to_end(engine).last["r"].finish_reason is FinishReason.LENGTH


def test_ranks_end_with_rank_0() -> None:
    """A rank 0 that is killed cannot tell them."""
    script = (
        "from tests.unit.distributed.test_processes import start, children\n"
        "executor = start(4)\n"
        "print(*children(), flush=True)\n"
        "input()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        fds = [os.pidfd_open(int(pid)) for pid in first.stdout.readline().split()]
        assert len(fds) == 3
        first.kill()
        wait_for_ends(fds)


def test_ranks_do_not_heed_signals_that_are_meant_for_the_server() -> None:
    """A service manager, or Ctrl-C in a terminal, may tell every process to end; rank 0 decides when they do."""
    request = toy_request("r", [5, 6], max_tokens=3)
    with started() as (engine, _, [pid]):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        engine.submit(request)
        assert run_to_end(engine).last["r"].finish_reason is FinishReason.LENGTH


# ---- a rank does not start ------------------------------------------------------------------------------------------


def test_a_rank_that_breaks_at_last_leaves_nothing_of_the_first_one() -> None:
    """Rank 0 has loaded: it may have threads, a file that it has locked, and memory that it shares with others."""
    config, ended, given = toy_config(), list[str](), list[int]()
    parallel = ParallelConfig(tensor_parallel_size=2, rank_timeout_s=WAIT_S)
    config = replace(config, cache=replace(config.cache, swap_space=1.0), parallel=parallel)

    def create(config: Config, group: RankGroup) -> ToyFirst:
        given.extend(group.kv_files)
        first = create_first(config, group)
        setattr(first, "shutdown", lambda: ended.append("first"))  # noqa: B010
        return first

    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InternalError, match=r"rank 1 failed: RuntimeError"):
        start_ranks(config, create, f"{_DOUBLES}:create_broken_at_last")
    assert (given, ended) == ([1], ["first"])
    assert not children()
    assert len(os.listdir("/proc/self/fd")) <= num_fds


@pytest.mark.parametrize("rank_worker", ["create_misconfigured", "create_misconfigured_beside_one_that_loads"])
def test_what_is_wrong_with_the_configuration_is_said_as_on_one_rank(
    capfd: pytest.CaptureFixture[str], rank_worker: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(4, rank_worker=rank_worker)
    assert (caught.value.message, caught.value.param) == (
        "model: expected a checkpoint with weights, got none",
        "model",
    )
    assert capfd.readouterr().err == "", "rank 0 is who tells the user"
    assert not children()


@pytest.mark.parametrize(
    ("rank_worker", "error"),
    [
        ("create_broken", r"rank 1 failed: RuntimeError\('the toy cannot be loaded'\)"),
        ("create_ending", r"rank 1 ended \(exit status 7\)"),
    ],
)
def test_a_rank_that_breaks_at_start_ends_the_start(rank_worker: str, error: str) -> None:
    with pytest.raises(InternalError, match=error):
        start(rank_worker=rank_worker)
    assert not children()
