"""Whole servers as processes: starting, stopping, and what clients see when a part of the server dies.

The model is the toy one; engine process, sockets, HTTP and signals are real.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.server.router_process import wait_until
from tests.server.toy_process import WAIT_S, Stream, complete, error_of, is_complete, serving

pytestmark = pytest.mark.slow


def _wait_ended(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} goes on"
        finally:
            os.close(fd)


# ---- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_running_requests_refuses_new_ones_and_exits_with_0(
    golden_dir: Path, number: signal.Signals
) -> None:
    with serving(golden_dir) as server:
        assert complete(server.url).status_code == 200
        streams = [Stream(server.url, max_tokens=150) for _ in range(3)]
        server.process.send_signal(number)
        server.wait_for_line("draining")
        refused = complete(server.url)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert all(is_complete(stream.read()) for stream in streams)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


def test_a_second_signal_ends_requests_with_an_error_and_exits_with_0(golden_dir: Path) -> None:
    with serving(golden_dir) as server:
        stream = Stream(server.url, max_tokens=4000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("draining")
        server.process.send_signal(signal.SIGINT)
        assert error_of(stream.read())["type"] == "service_unavailable_error"
        assert server.wait() == 0


def test_the_deadline_ends_requests_with_an_error_and_exits_with_0(golden_dir: Path) -> None:
    with serving(golden_dir, timeout_graceful_shutdown=0) as server:
        stream = Stream(server.url, max_tokens=4000)
        server.process.send_signal(signal.SIGTERM)
        assert error_of(stream.read())["type"] == "service_unavailable_error"
        assert server.wait() == 0


def test_signals_to_every_process_at_once_are_one_wish_to_stop(golden_dir: Path) -> None:
    """As a service manager does it."""
    with serving(golden_dir, workers=2) as server:
        assert complete(server.url).status_code == 200
        stream = Stream(server.url, max_tokens=100)
        children = server.children("main")
        assert len(children) == 3
        for pid in (*children, server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert is_complete(stream.read())
        assert server.wait() == 0


def test_sigterm_while_loading_exits_with_0_at_once(golden_dir: Path) -> None:
    with serving(golden_dir, "create_never") as server:
        server.wait_for_line("loading")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


# ---- dying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_engine_is_an_error_to_clients_and_exit_status_1(golden_dir: Path, workers: int) -> None:
    with serving(golden_dir, workers=workers) as server:
        streams = [Stream(server.url, max_tokens=4000) for _ in range(3)]
        (engine,) = server.children("engine_process")
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            assert error_of(stream.read())["type"] == "service_unavailable_error"
        assert server.wait() == 1
        assert "error: the engine process failed (killed by SIGKILL)" in server.stderr


def test_a_killed_http_process_is_replaced_and_the_others_streams_go_on(golden_dir: Path) -> None:
    with serving(golden_dir, workers=2) as server:
        url = server.url
        doomed, other = server.wait_for_children("http_process", 2)
        # A stopped process accepts nothing, so each gets its own streams.
        os.kill(other, signal.SIGSTOP)
        lost = [Stream(url, max_tokens=200) for _ in range(3)]
        os.kill(other, signal.SIGCONT)
        os.kill(doomed, signal.SIGSTOP)
        kept = [Stream(url, max_tokens=200) for _ in range(3)]
        os.kill(doomed, signal.SIGKILL)
        for stream in lost:
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                stream.read()
        assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200
        assert all(is_complete(stream.read()) for stream in kept)
        server.wait_for_line(rf"HTTP process {doomed} failed \(killed by SIGKILL\)")
        assert doomed not in server.wait_for_children("http_process", 2)
        os.kill(other, signal.SIGSTOP)  # the new one has to answer
        assert complete(url).status_code == 200
        os.kill(other, signal.SIGCONT)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_everything_ends_with_a_killed_launcher(golden_dir: Path) -> None:
    with serving(golden_dir, workers=2) as server:
        assert complete(server.url).status_code == 200
        children = server.children("main")
        server.process.kill()
        for pid in children:
            _wait_ended(pid)


def test_a_disconnected_client_frees_its_request(golden_dir: Path) -> None:
    with serving(golden_dir) as server:
        streams = [Stream(server.url, max_tokens=4000) for _ in range(2)]
        assert httpx.get(f"{server.url}/load", timeout=WAIT_S).json()["num_requests_running"] == 2
        for stream in streams:
            stream.close()
        wait_until(lambda: httpx.get(f"{server.url}/load", timeout=WAIT_S).json()["num_requests_running"] == 0)
        load = httpx.get(f"{server.url}/load", timeout=WAIT_S).json()
        assert load["num_free_blocks"] + load["num_cached_blocks"] == load["num_blocks"]


# ---- not starting -------------------------------------------------------------------------------------------------


def test_a_used_port_is_one_clear_line_and_status_2(golden_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serving(golden_dir, port=port) as server:
            assert server.wait() == 2
            expected = f"error: host, port: expected a free address, got 127.0.0.1:{port}: Address already in use\n"
            assert server.stderr == expected


def test_a_host_that_is_not_ours_is_one_clear_line_and_status_2(golden_dir: Path) -> None:
    with serving(golden_dir, host="192.0.2.1") as server:
        assert server.wait() == 2
        assert server.stderr.startswith("error: host, port: expected a free address, got 192.0.2.1:0: ")


def test_a_wrong_checkpoint_is_one_clear_line_and_status_2(golden_dir: Path) -> None:
    with serving(golden_dir, "create_misconfigured") as server:
        assert server.wait() == 2
        assert server.stderr == "error: model: expected a checkpoint with weights, got none\n"


def test_a_tokenizer_that_cannot_be_read_is_one_clear_line_and_status_2(golden_dir: Path, tmp_path: Path) -> None:
    with serving(golden_dir, "create_never", tokenizer=str(tmp_path)) as server:
        assert server.wait() == 2
        errors = [line for line in server.stderr.splitlines() if line != "loading"]
        assert len(errors) == 1
        assert errors[0].startswith("error: ")


def test_a_temporary_directory_with_too_long_a_name_is_one_clear_line_and_status_2(
    golden_dir: Path, tmp_path: Path
) -> None:
    tmpdir = tmp_path / ("x" * 100)
    tmpdir.mkdir()
    with serving(golden_dir, tmpdir=tmpdir) as server:
        assert server.wait() == 2
        assert server.stderr.startswith("error: TMPDIR: expected a directory whose name leaves room for a socket, got")
        assert len(server.stderr.splitlines()) == 1


# ---- what is left -------------------------------------------------------------------------------------------------


def test_the_next_start_removes_what_a_double_kill_left_and_nothing_of_the_living(
    golden_dir: Path, tmp_path: Path
) -> None:
    with serving(golden_dir, tmpdir=tmp_path) as living, serving(golden_dir, tmpdir=tmp_path) as killed:
        assert living.url
        assert killed.url
        both = set(tmp_path.glob("fdsd-*"))
        (engine,) = killed.children("engine_process")
        os.kill(engine, signal.SIGSTOP)  # or it would clean up
        os.kill(killed.process.pid, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)
        _wait_ended(engine)
        assert set(tmp_path.glob("fdsd-*")) == both
        with serving(golden_dir, tmpdir=tmp_path) as third:
            assert third.url
            left = set(tmp_path.glob("fdsd-*"))
            assert len(left) == 2
            assert len(left & both) == 1
            assert complete(living.url).status_code == 200
