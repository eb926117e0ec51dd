"""Servers on several "hosts", which are loopback addresses of this machine: the first is a whole server, the others
start ranks for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fastdeploy_sd.config import Config, ParallelConfig, to_json
from tests.doubles.ports import free_port
from tests.server.toy_process import Program, Server

IPS = ("127.0.0.1", "127.0.0.2")
SECRET = "what two nodes share"
_SCRIPT = (
    "import json, sys\n"
    "from fastdeploy_sd.config import config_from_kwargs\n"
    "from fastdeploy_sd.distributed import node\n"
    "sys.exit(node.run(config_from_kwargs(**json.loads(sys.argv[1])), sys.argv[2]))\n"
)
_SCRIPT_OF_JSON = (
    "import sys\n"
    "from fastdeploy_sd.config import from_json\n"
    "from fastdeploy_sd.distributed import node\n"
    "sys.exit(node.run(from_json(sys.argv[1])))\n"
)


class Node(Program):
    """The second of two hosts, over the toy model.

    Args:
        options: of the server.
        rank_worker: a function of tests/doubles/toy_ranks.py.
    """

    def __init__(
        self, golden_dir: Path, options: Mapping[str, object], rank_worker: str = "create_rank_worker"
    ) -> None:
        options = {"model": str(golden_dir / "qwen3-tiny"), "node_rank": 1, **options}
        super().__init__([sys.executable, "-c", _SCRIPT, json.dumps(options), f"tests.doubles.toy_ranks:{rank_worker}"])

    def ranks(self, count: int = 1) -> list[int]:
        """Process ids of its ranks, once there are so many."""
        return self.wait_for_children("distributed.process", count)


def node_options(**options: object) -> dict[str, object]:
    """Options of a server on two hosts."""
    common = {"ips": list(IPS), "tensor_parallel_size": 2, "node_port": free_port(), "pd_secret": SECRET}
    return {**common, "timeout_rank": 60, **options}


@contextlib.contextmanager
def first_node(golden_dir: Path, options: Mapping[str, object]) -> Iterator[Server]:
    """The first host's server over the toy model; killed at the end, should it still run then."""
    more = {"node_rank": 0, "timeout_graceful_shutdown": 60, **options}
    server = Server(golden_dir, "create_nodes", None, None, "", **more)
    with contextlib.closing(server):
        yield server


@contextlib.contextmanager
def second_node(
    golden_dir: Path, options: Mapping[str, object], rank_worker: str = "create_rank_worker"
) -> Iterator[Node]:
    """The second host; killed at the end, should it still run then."""
    with contextlib.closing(Node(golden_dir, options, rank_worker)) as node:
        yield node


@contextlib.contextmanager
def second_node_of(config: Config) -> Iterator[Program]:
    """The second host of a configuration with a real model; it has ended in order at the end."""
    own = replace(config, parallel=replace(config.parallel, node_rank=1))
    with contextlib.closing(Program([sys.executable, "-c", _SCRIPT_OF_JSON, to_json(own, with_secrets=True)])) as node:
        yield node
        assert node.wait() == 0


def on_nodes(base: Config, size: int) -> Config:
    """Return a configuration of the first of two hosts; slow steps of a busy machine are no hang."""
    parallel = ParallelConfig(
        tensor_parallel_size=size, rank_timeout_s=60.0, ips=IPS, node_rank=0, node_port=free_port()
    )
    return replace(base, parallel=parallel, splitwise=replace(base.splitwise, pd_secret=SECRET))


def stop(*pids: int) -> None:
    """Suspend processes, parents first."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
