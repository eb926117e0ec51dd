"""A server whose ranks are on two hosts: what clients and the parent processes see when one of them ends."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.server.node_process import IPS, SECRET, first_node, node_options, second_node, stop
from tests.server.toy_process import WAIT_S, Server, Stream, complete, error_of, is_complete

pytestmark = pytest.mark.slow

# {"rank": 0}
PICKLED = b"\x80\x04\x95\x0d\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x04rank\x94K\x00s."


def engine_of(server: Server) -> int:
    [engine] = server.children("engine_process")
    return engine


def watch(*pids: int) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


def assert_ended(fds: list[int]) -> None:
    for fd in fds:
        assert select.select([fd], [], [], WAIT_S)[0], "a process is left"
        os.close(fd)


def send_garbage(port: object) -> None:
    """Send both ports what they do not expect; no socket listens at other addresses."""
    assert isinstance(port, int)
    for number in (port, port + 1):
        for garbage in (PICKLED, b"\xff" + b"\0" * 8 + b"\x01\x7f" + b"\0" * 4096):
            with socket.create_connection((IPS[0], number), timeout=WAIT_S) as raw:
                raw.sendall(garbage)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", number), timeout=WAIT_S)


def test_requests_are_answered_and_both_hosts_end_in_order(golden_dir: Path) -> None:
    """The second host is there first, and has two ranks."""
    options = node_options(tensor_parallel_size=4)
    with second_node(golden_dir, options) as node:
        node.wait_for_line("node 1 looks for node 0")
        with first_node(golden_dir, options) as server:
            assert complete(server.url).status_code == 200
            left = watch(*node.ranks(2), engine_of(server))
            send_garbage(options["node_port"])
            stream = Stream(server.url, max_tokens=100)
            server.process.send_signal(signal.SIGTERM)
            assert is_complete(stream.read())
            assert server.wait() == 0
            assert node.wait() == 0
            assert_ended(left)
            assert "node 1 runs rank 2 and 3" in node.stderr
            for text in (server.stderr, node.stderr):
                assert "Traceback" not in text
                assert "is gone" not in text


@pytest.mark.parametrize(
    ("doomed", "error"),
    [
        ("node", r"rank 1 is gone with node 1 \(127\.0\.0\.2\), whose connection has ended"),
        ("its rank", r"rank 1 ended \(killed by SIGKILL\) on node 1 \(127\.0\.0\.2\)"),
    ],
)
def test_a_killed_second_host_ends_everything(golden_dir: Path, doomed: str, error: str) -> None:
    options = node_options()
    with first_node(golden_dir, options) as server, second_node(golden_dir, options) as node:
        stream = Stream(server.url, max_tokens=4000)
        [rank] = node.ranks()
        left = watch(rank, engine_of(server))
        os.kill(node.process.pid if doomed == "node" else rank, signal.SIGKILL)
        assert error_of(stream.read())["type"] == "internal_error"
        assert server.wait() == 1
        assert re.search(error, server.stderr)
        assert node.wait() == (-signal.SIGKILL if doomed == "node" else 1)
        if doomed != "node":
            assert "error: node 0 has ended: rank 1 ended (killed by SIGKILL) on node 1" in node.stderr
        assert_ended(left)


@pytest.mark.parametrize("doomed", ["server", "engine"])
def test_a_killed_first_host_ends_the_second(golden_dir: Path, doomed: str) -> None:
    options = node_options()
    with first_node(golden_dir, options) as server, second_node(golden_dir, options) as node:
        assert complete(server.url).status_code == 200
        left = watch(*node.ranks(), engine_of(server))
        os.kill(server.process.pid if doomed == "server" else engine_of(server), signal.SIGKILL)
        assert node.wait() == 1
        assert re.search(r"^error: node 0 at tcp://127\.0\.0\.1:\d+ is gone: ", node.stderr, re.MULTILINE)
        assert_ended(left)


def test_a_second_host_that_hangs_is_noticed(golden_dir: Path) -> None:
    options = node_options(timeout_rank=4)
    with first_node(golden_dir, options) as server, second_node(golden_dir, options) as node:
        stream = Stream(server.url, max_tokens=4000)
        [rank] = node.ranks()
        left = watch(rank, engine_of(server))
        stop(node.process.pid, rank)
        assert error_of(stream.read())["type"] == "internal_error"
        assert server.wait() == 1
        assert re.search("rank 1 (has got nowhere|is gone with node 1 .*no sign of life)", server.stderr)
        node.process.send_signal(signal.SIGCONT)
        assert node.wait() == 1
        assert_ended(left)


def test_a_rank_of_the_second_host_that_hangs_is_killed(golden_dir: Path) -> None:
    """Its host is well, and does it."""
    options = node_options(timeout_rank=4)
    with first_node(golden_dir, options) as server, second_node(golden_dir, options) as node:
        stream = Stream(server.url, max_tokens=4000)
        [rank] = node.ranks()
        left = watch(rank, engine_of(server))
        stop(rank)
        assert error_of(stream.read())["type"] == "internal_error"
        assert server.wait() == 1
        assert "rank 1 has got nowhere for" in server.stderr
        assert node.wait() == 1
        assert_ended(left)


def test_a_first_host_that_hangs_is_noticed(golden_dir: Path) -> None:
    options = node_options(timeout_rank=4)
    with first_node(golden_dir, options) as server, second_node(golden_dir, options) as node:
        assert complete(server.url).status_code == 200
        engine = engine_of(server)
        left = watch(*node.ranks(), engine)
        stop(engine)
        assert node.wait() == 1
        assert "is gone: it has given no sign of life for" in node.stderr
        os.kill(engine, signal.SIGCONT)
        assert server.wait() == 1
        assert "rank 1 is gone with node 1 (127.0.0.2)" in server.stderr
        assert_ended(left)


def test_a_signal_to_the_second_host_ends_both(golden_dir: Path) -> None:
    options = node_options()
    with first_node(golden_dir, options) as server, second_node(golden_dir, options) as node:
        assert complete(server.url).status_code == 200
        left = watch(*node.ranks(), engine_of(server))
        node.process.send_signal(signal.SIGTERM)
        assert node.wait() == 0
        assert "node 1 ends because of a signal" in node.stderr
        assert server.wait() == 1
        assert_ended(left)


def refused(golden_dir: Path, options: Mapping[str, object]) -> str:
    """The last line of a second host that cannot be one of them."""
    with second_node(golden_dir, options) as node:
        assert node.wait() == 2
        return node.stderr.splitlines()[-1]


def test_a_host_that_computes_something_else_is_refused(golden_dir: Path) -> None:
    """The first host goes on waiting for a better one; it stops as while it loads."""
    options = node_options(timeout_nodes=600)
    with first_node(golden_dir, options) as server:
        server.wait_for_line(r"waiting for node 1 \(127.0.0.2\)")
        with first_node(golden_dir, options) as second:
            assert second.wait() == 2
            assert f"error: node_port: expected a free port of 127.0.0.1, got {options['node_port']}" in second.stderr
        assert "is the other pd_secret another one?" in refused(golden_dir, {**options, "pd_secret": SECRET[::-1]})
        other = refused(golden_dir, {**options, "model": str(golden_dir / "ernie4_5-tiny")})
        assert re.match("error: node 0 refuses this node: content of model: expected .* as on node 0, got", other)
        other = refused(golden_dir, {**options, "max_num_seqs": 7})
        assert other == "error: node 0 refuses this node: max_num_seqs: expected 32 as on node 0, got 7"
        server.wait_for_line("refused a node: node 1: max_num_seqs: expected 32")
        with second_node(golden_dir, options):
            assert complete(server.url).status_code == 200
            # While the others run, there is no place for one more.
            third = refused(golden_dir, options)
            assert third.endswith("node_rank: expected one that has not joined, got 1")
            assert complete(server.url).status_code == 200


def test_nobody_waits_for_ever_for_another_host(golden_dir: Path) -> None:
    options = node_options(timeout_nodes=1)
    with first_node(golden_dir, options) as server:
        assert server.wait() == 1
        assert "error: node 1 (127.0.0.2) did not join within 1 s\n" in server.stderr
        assert "Traceback" not in server.stderr
    with second_node(golden_dir, options) as node:
        assert node.wait() == 1
        assert re.search(
            "^error: node 0 at .* did not answer within 1 s: no (connection|answer)$", node.stderr, re.MULTILINE
        )


def test_a_rank_that_cannot_load_on_the_second_host_ends_both(golden_dir: Path) -> None:
    options = node_options()
    with (
        first_node(golden_dir, options) as server,
        second_node(golden_dir, options, "create_misconfigured") as node,
    ):
        assert server.wait() == 2
        assert "error: model: expected a checkpoint with weights, got none" in server.stderr
        assert node.wait() == 1
        assert "error: node 0 has ended: model: expected a checkpoint with weights, got none" in node.stderr
