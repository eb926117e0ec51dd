"""The process that shares a command's experts with other commands; see expert_bridge."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from fastdeploy_sd.config import Config, from_json, to_json
from fastdeploy_sd.distributed.expert_bridge import ExpertBridge
from fastdeploy_sd.distributed.starting import new_expert_file
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.process.child import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ChildProcess,
    configure_logging,
    end_with_parent,
    read_start,
)


def start_bridge(config: Config, file: int) -> ChildProcess:
    """Start the process; it leaves when it is told of anything.

    Its exit status is 0 after that, 2 when the commands cannot share experts, and 1 when another one is lost for good;
    one line on standard error says what.
    """
    start = {"config": to_json(config, with_secrets=True), "file": str(file)}
    return ChildProcess("fastdeploy_sd.distributed.expert_process:main", start, (file,), ignores_signals=True)


@contextlib.contextmanager
def shared_experts(config: Config) -> Iterator[tuple[int | None, ChildProcess | None]]:
    """Give the descriptor of memory over which this command's ranks share experts, None = they do not.

    With it comes the process that shares them with other commands, None = there is no other.
    """
    with new_expert_file(config.parallel) as file:
        if file is None or len(config.parallel.expert_places) == 1:
            yield file, None
            return
        with contextlib.closing(start_bridge(config, file)) as bridge:
            yield file, bridge


def main() -> int:
    start = read_start()
    bridges: list[ExpertBridge] = []

    def leave() -> None:
        for bridge in bridges:
            bridge.leave()

    end_with_parent(heard=leave)
    configure_logging("experts")
    try:
        with contextlib.closing(ExpertBridge(from_json(start["config"]), int(start["file"]))) as bridge:
            bridges.append(bridge)
            bridge.run()
    except FdsdError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return EXIT_OK
