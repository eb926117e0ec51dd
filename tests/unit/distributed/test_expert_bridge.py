"""Commands that share experts, as threads over loopback: who joins, who is refused, who is missed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.config import Config, config_from_kwargs
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.distributed.expert_bridge import ExpertBridge
from fastdeploy_sd.distributed.expert_messages import BridgeHeartbeat, Greet, decode, encode
from fastdeploy_sd.errors import ConfigError, FdsdError, Unavailable
from tests.doubles.ports import free_port
from tests.ops.backends import threads
from tests.ops.cases.experts import run_layer
from tests.ops.expert_model import Ranks, in_one_process, linear_placement, random_layer
from tests.ops.test_experts import tokens
from tests.server.router_process import wait_until

LAYER = random_layer(3, (4, 48, 24))
IPS = ("127.0.0.1", "127.0.0.2")


class Command:
    """A host's rank and its end of the connections, until `close`."""

    def __init__(self, config: Config) -> None:
        self.ranks = Ranks([LAYER], linear_placement(4, 2), np.float32, 8, 60.0)
        self.service: ExpertService = self.ranks.open(config.parallel.own_host())
        self.error: FdsdError | None = None
        self.bridge = ExpertBridge(config, self.ranks.fd)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.closing(self.bridge):
                self.bridge.run()
        except FdsdError as error:
            self.error = error

    def wait_ended(self) -> FdsdError | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error

    def close(self) -> None:
        if self._thread.is_alive():
            self.bridge.leave()
        self.wait_ended()
        self.service.abort()
        self.service.close()
        os.close(self.ranks.fd)


@pytest.fixture
def options(golden_dir: Path) -> dict[str, Any]:
    return {
        "model": str(golden_dir / "qwen3_moe-tiny"),
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "ips": list(IPS),
        "node_port": free_port(),
        "pd_secret": "what commands share",
        "timeout_rank": 60.0,
    }


@contextlib.contextmanager
def command(options: dict[str, Any], host: int, **more: Any) -> Iterator[Command]:
    with contextlib.closing(Command(config_from_kwargs(**options | {"node_rank": host} | more))) as made:
        yield made


def assert_shares(first: Command, second: Command) -> None:
    for one in (first, second):
        one.service.wait_until_all_serve(60)
    x = tokens(0, 5, 48)
    with threads(1):
        y = run_layer(first.service, x, LAYER.router_weight, **LAYER.routing)
        np.testing.assert_array_equal(y, in_one_process(LAYER, x))


def test_a_command_that_leaves_may_come_again(options: dict[str, Any]) -> None:
    """Who connects without the secret is not heard, and no process listens at the last address."""
    with command(options, 0) as first:
        with command(options, 1) as second:
            assert_shares(first, second)
            port = options["node_port"] + 2
            with socket.create_connection((IPS[0], port), timeout=60) as raw:
                raw.sendall(b"FDXM" + b"\xff" * 4096)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((IPS[1], port), timeout=60)
        wait_until(lambda: first.service.states()[1] == "loading")
        with command(options, 1) as second:
            assert_shares(first, second)
            assert_shares(second, first)
        assert first.error is None


@pytest.mark.slow
def test_a_command_that_computes_something_else_is_refused(options: dict[str, Any]) -> None:
    with command(options, 0) as first:
        with command(options, 1, max_num_seqs=7) as other:
            error = other.wait_ended()
            assert isinstance(error, ConfigError)
            want = (
                f"host 127.0.0.1, port {options['node_port'] + 2} refuses to share experts: max_num_seqs: expected 32"
            )
            assert error.message == f"{want} as on node 0, got 7"
        with command(options, 1, pd_secret="another of as many characters") as other:
            error = other.wait_ended()
            assert isinstance(error, ConfigError)
            assert "is the other pd_secret another one?" in error.message
        with command(options, 0) as same, command(options, 1) as second:
            error = same.wait_ended()
            assert isinstance(error, ConfigError)
            assert error.message.startswith("node_port: expected a free port of 127.0.0.1")
            assert_shares(first, second)


@pytest.mark.slow
def test_a_command_that_does_not_come_is_named(options: dict[str, Any]) -> None:
    options = options | {"timeout_nodes": 1, "timeout_rank": 4}
    with command(options, 1) as second:
        error = second.wait_ended()
        assert isinstance(error, Unavailable)
        assert error.message == f"host 127.0.0.1, port {options['node_port'] + 2} did not share its experts within 1 s"
    options = options | {"timeout_nodes": 5}  # for a busy machine to begin both
    with command(options, 0) as first:
        with command(options, 1) as second:
            assert_shares(first, second)
        error = first.wait_ended()
        assert isinstance(error, Unavailable)
        port = options["node_port"] + 2
        assert error.message == f"host 127.0.0.2, port {port} did not come back to share its experts within 5 s"


def test_messages_survive_the_wire() -> None:
    for message in (Greet(1, {"a": "b"}), BridgeHeartbeat()):
        assert decode(encode(message)) == message
