"""`python -m fastdeploy_sd.entrypoints.openai.multi_api_server`: a server for each of several engines.

    ... --num-servers 2 --ports "8000,8002" --metrics-ports "8800,8802" --args --model PATH ...

`--args` and what follows are the options of all servers. Each starts one engine, `--local-data-parallel-id`, on its
part of the machine, and has its own port. A signal goes to all servers; each lets its requests finish. When one fails,
the others stop. When one is stopped alone, the others go on, unless they need its experts.

Exit status: 0 after a requested stop, 1 when a server failed, 2 when an option is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastdeploy_sd.config import Config, from_json, load_config, to_json, verify_keys_are_known
from fastdeploy_sd.config.command_line import read_flags, split_flags
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.help_text import add_flag
from fastdeploy_sd.config.option import Spec, option, options_of, verify_fields, wrong_value
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process.child import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ChildProcess,
    configure_logging,
    describe_exit,
    end_with_parent,
    read_start,
    stop_on_signals,
)

logger = logging.getLogger(__name__)

_MODULE = "fastdeploy_sd.entrypoints.openai.multi_api_server"
_PROG = "multi_api_server"
_ARGS = "--args"
_MAX_PORT = 65535
_HELP = {"-h", "--help"}
_OF_EACH = ("port", "metrics_port", "local_data_parallel_id")  # what is different for each server


@dataclass(frozen=True, slots=True)
class ServersConfig:
    """The options before `--args`."""

    num_servers: int = option(2, Spec("Servers, each with one engine.", minimum=1, maximum=64))
    ports: tuple[int, ...] = option(
        (8000, 8002), Spec("Port of each server, with commas.", comma_separated=True, minimum=0, maximum=_MAX_PORT)
    )
    metrics_ports: tuple[int, ...] = option(
        (),
        Spec(
            "Another port of each server for its metrics, with commas; none: they are on its port only.",
            comma_separated=True,
            minimum=0,
            maximum=_MAX_PORT,
        ),
    )
    controller_ports: int = option(-1, Spec("Accepted as -1: there is no controller.", choices=(-1,)))

    def __post_init__(self) -> None:
        verify_fields(self, "servers")

    def faults(self) -> Iterator[ConfigError]:
        """Yield what is wrong with numbers that are sound one by one."""
        for name, ports in (("ports", self.ports), ("metrics_ports", self.metrics_ports)):
            if len(ports) != self.num_servers and (ports or name == "ports"):
                yield wrong_value(name, f"{self.num_servers} with commas, as num_servers says", f"{len(ports)}")
        given = [port for port in self.ports + self.metrics_ports if port]
        if len(set(given)) != len(given):
            yield wrong_value("ports, metrics_ports", "every port once", ",".join(map(str, given)))


_OPTIONS = options_of(ServersConfig, "servers")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit status."""
    try:
        configure_logging("servers")
        configs = read_servers(sys.argv[1:] if argv is None else argv)
        verify_keys_are_known(os.environ, bool(configs[0].server.api_key))
        # Only now: wrong options are answered at once.
        from fastdeploy_sd.distributed.starting import new_expert_file, new_weights_file
        from fastdeploy_sd.hub import located

        located(configs[0])  # fetched once, before the servers look for it
        with (
            new_expert_file(configs[0].parallel) as expert_file,
            new_weights_file(configs[0], len(configs)) as weights_file,
        ):
            configs = [replace(c, parallel=replace(c.parallel, weights_file=weights_file)) for c in configs]
            return asyncio.run(_serve_all(configs, expert_file))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


def read_servers(argv: Sequence[str]) -> list[Config]:
    """Return each server's configuration; one ConfigError names everything that is wrong. --help exits."""
    end = argv.index(_ARGS) if _ARGS in argv else len(argv)
    own, common = argv[:end], list(argv[end + 1 :])
    if not _HELP.isdisjoint(own):
        print(_help_text(), end="")
        raise SystemExit(0)
    faults = Faults()
    values = read_flags(own, _OPTIONS, "the servers'", faults)
    servers = ServersConfig(**values)
    for fault in servers.faults():
        faults.add(fault)
    count, config = servers.num_servers, None
    for name in sorted({flag.name for flag in split_flags(common)} & set(_OF_EACH)):
        faults.add(wrong_value(name, f"none after {_ARGS}, as each server has its own", "one"))
    with faults.collecting(origin=_ARGS):
        config = load_config(common, _PROG)
        if config.parallel.data_parallel_size == 1 < count:
            config = load_config([*common, "--data-parallel-size", str(count)], _PROG)
        if config.parallel.ips:
            raise wrong_value("ips", "none, as all servers are on this host", ",".join(config.parallel.ips))
        if (got := config.parallel.data_parallel_size) != count:
            raise wrong_value("data_parallel_size", f"{count}, as num_servers says, or none", got)
    faults.raise_all()
    assert config is not None
    ports = zip(servers.ports, servers.metrics_ports or [config.server.metrics_port] * count, strict=True)
    return [
        replace(
            config,
            server=replace(config.server, port=port, metrics_port=metrics_port),
            parallel=replace(config.parallel, local_data_parallel_id=number),
        )
        for number, (port, metrics_port) in enumerate(ports)
    ]


async def _serve_all(configs: Sequence[Config], expert_file: int | None) -> int:
    from fastdeploy_sd.entrypoints.worker_pool import WorkerPool

    def start(number: int) -> ChildProcess:
        values = {"config": to_json(configs[number], with_secrets=True)}
        if expert_file is not None:
            values["expert_file"] = str(expert_file)
        files = () if expert_file is None else (expert_file,)
        server = ChildProcess(f"{_MODULE}:serve_one", values, files)
        logger.info("server %d of %d: process %d", number, len(configs), server.pid)
        return server

    def stop() -> None:
        pool.begin_drain()
        pool.signal(signal.SIGTERM)

    def stop_others() -> None:
        number, status = list(pool.statuses.items())[-1]
        logger.error("server %d has ended (%s): the others stop", number, describe_exit(status))
        stop()

    pool = WorkerPool(
        start,
        len(configs),
        give_up=stop_others,
        kind="server {}",
        ends_only_in_drain=configs[0].parallel.shares_experts,
    )
    pool.replaces = False
    stop_on_signals(stop)
    with contextlib.suppress(asyncio.CancelledError):
        await pool.run()
    failed = next(filter(None, pool.statuses.values()), EXIT_OK)  # the first one: others end because of it
    return failed if failed in (EXIT_OK, EXIT_CONFIG) else EXIT_FAILED


def serve_one() -> int:
    """Be one of the servers, in a process that `_serve_all` has started."""
    start = read_start()
    end_with_parent()
    from fastdeploy_sd.entrypoints import launch
    from fastdeploy_sd.hub import located

    config = from_json(start["config"])
    configure_logging(f"server {config.parallel.local_data_parallel_id}")
    file = int(start["expert_file"]) if "expert_file" in start else None
    return launch.run([located(config)], expert_file=file)


def _help_text() -> str:
    parser = argparse.ArgumentParser(
        _PROG,
        usage=f"%(prog)s [OPTION...] {_ARGS} [OPTIONS OF A SERVER...]",
        description="Start a server for each of several engines.",
        epilog=f"{_ARGS} --help shows the options of a server.",
        add_help=False,
    )
    for opt in _OPTIONS:
        add_flag(parser.add_argument_group(), opt, opt.default)
    return parser.format_help()


if __name__ == "__main__":
    sys.exit(main())
