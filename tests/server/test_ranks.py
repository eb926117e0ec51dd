"""A server whose model several processes compute: what clients and its parent process see when one of them ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.toy_process import WAIT_S, Program, Server, Stream, complete, error_of, is_complete, serving

pytestmark = pytest.mark.slow

NUM_RANKS = 4


def ranks_of(server: Program, num_ranks: int = NUM_RANKS) -> list[int]:
    """Process ids of all ranks but the first, which is the engine."""
    [engine] = server.children("engine_process")
    pids = [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]
    found = [pid for pid in pids if "distributed.process" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(found) == num_ranks - 1
    return found


@contextlib.contextmanager
def serving_on_ranks(golden_dir: Path, tmp_path: Path) -> Iterator[tuple[Server, list[int]]]:
    """A server and the other ranks' process ids; nothing of it is left afterwards."""
    with serving(golden_dir, "create_ranks", tmpdir=tmp_path, timeout_graceful_shutdown=60) as server:
        assert complete(server.url).status_code == 200
        ranks = ranks_of(server)
        fds = [os.pidfd_open(pid) for pid in ranks]
        yield server, ranks
        for fd in fds:
            assert select.select([fd], [], [], WAIT_S)[0], "a rank outlived its server"
            os.close(fd)
        deadline = time.monotonic() + WAIT_S
        while left := [path.name for path in tmp_path.iterdir()]:
            assert time.monotonic() < deadline, f"the server left {left}"
            time.sleep(0.01)


def test_sigterm_finishes_running_requests_and_all_ranks_end(golden_dir: Path, tmp_path: Path) -> None:
    with serving_on_ranks(golden_dir, tmp_path) as (server, ranks):
        stream = Stream(server.url, max_tokens=100)
        for pid in (server.process.pid, *server.children("engine_process"), *ranks):  # as a service manager does it
            os.kill(pid, signal.SIGTERM)
        assert is_complete(stream.read())
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_is_an_error_to_clients_and_exit_status_1(
    golden_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with serving_on_ranks(golden_dir, tmp_path) as (server, ranks):
        streams = [Stream(server.url, max_tokens=4000) for _ in range(3)]
        os.kill(ranks[1], number)
        for stream in streams:
            assert error_of(stream.read())["type"] == "internal_error"
        assert server.wait() == 1
        what = "ended (killed by SIGKILL)" if number is signal.SIGKILL else "has got nowhere for"
        assert f"rank 2 {what}" in server.stderr
        assert "error: the engine process failed (exit status 1)" in server.stderr


def test_a_rank_that_ends_while_nothing_runs_ends_the_server(golden_dir: Path, tmp_path: Path) -> None:
    with serving_on_ranks(golden_dir, tmp_path) as (server, ranks):
        os.kill(ranks[0], signal.SIGKILL)
        assert server.wait() == 1
        assert "rank 1 ended (killed by SIGKILL)" in server.stderr


def test_a_killed_engine_takes_its_ranks_along(golden_dir: Path, tmp_path: Path) -> None:
    with serving_on_ranks(golden_dir, tmp_path) as (server, _):
        stream = Stream(server.url, max_tokens=4000)
        [engine] = server.children("engine_process")
        os.kill(engine, signal.SIGKILL)
        assert error_of(stream.read())["type"] == "service_unavailable_error"
        assert server.wait() == 1


def test_a_killed_launcher_takes_everything_along(golden_dir: Path, tmp_path: Path) -> None:
    with serving_on_ranks(golden_dir, tmp_path) as (server, _):
        server.process.kill()


def test_a_rank_that_cannot_load_is_one_clear_line_and_status_2(golden_dir: Path) -> None:
    with serving(golden_dir, "create_misconfigured_ranks") as server:
        assert server.wait() == 2
        assert server.stderr == "error: model: expected a checkpoint with weights, got none\n"


def test_a_rank_that_breaks_while_loading_is_status_1(golden_dir: Path) -> None:
    with serving(golden_dir, "create_broken_ranks") as server:
        assert server.wait() == 1
        assert "RuntimeError: the toy cannot be loaded" in server.stderr
