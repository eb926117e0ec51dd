"""`python -m fastdeploy_sd.cluster.router.launch --port 9000 ...`: a router, from its command line to its end.

Exit status: 0 after a requested stop, 1 after a failure, 2 when an option or the address is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from fastdeploy_sd.cluster.router.app import RouterApp
from fastdeploy_sd.cluster.router.choice import Chooser
from fastdeploy_sd.cluster.router.options import RouterConfig, read_router_options
from fastdeploy_sd.cluster.router.registry import Registry
from fastdeploy_sd.cluster.router.relay import UpstreamClient
from fastdeploy_sd.config import verify_keys_are_known
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.metrics import HttpStats, RouterStats
from fastdeploy_sd.process.child import configure_logging, leave_within, stop_on_signals
from fastdeploy_sd.wire.http.acceptor import raise_descriptor_limit
from fastdeploy_sd.wire.http.connection import Connections
from fastdeploy_sd.wire.http.listeners import Listeners, bound, url_of
from fastdeploy_sd.wire.http.service import serve_http
from fastdeploy_sd.wire.http_client import HttpClient
from fastdeploy_sd.wire.secret import deployment_secret, derive_key

logger = logging.getLogger(__name__)

_EXIT_USAGE = 2
_LEAVE_S = 10.0
_POLL_S = 0.05


def main(argv: Sequence[str] | None = None, prog: str = "fastdeploy_sd.cluster.router.launch") -> int:
    """Route until told to stop; return the exit status. `prog` is the name in --help."""
    try:
        configure_logging("router")
        config = read_router_options(sys.argv[1:] if argv is None else argv, prog)
        verify_keys_are_known(os.environ, bool(config.server.api_key))
        secret = deployment_secret(config.splitwise)
        raise_descriptor_limit()
        with bound(config.server) as listeners:
            listeners.listen(config.server)
            logger.info("routing on %s", url_of(listeners.api))
            return asyncio.run(_Router(config, secret, listeners).run())
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return _EXIT_USAGE


class _Router:
    """A router's parts and the order of its end: running requests first, then connections."""

    def __init__(self, config: RouterConfig, secret: bytes, listeners: Listeners) -> None:
        self._config = config
        self._listeners = listeners
        self._http_stats = HttpStats()
        self._registry = Registry(config, derive_key(secret, "registration"))
        self._http = HttpClient(config.routing.connect_timeout_s)
        chooser = Chooser(self._registry.available, lambda: self._registry.instances)
        upstream = UpstreamClient(config.routing, chooser, self._http, derive_key(secret, "route"), RouterStats())
        self._app = RouterApp(config, self._registry, upstream, self._http_stats)
        self._num_signals = 0

    async def run(self) -> int:
        stop_on_signals(self._stop)
        watching = asyncio.create_task(self._registry.watch())
        shared = Connections(self._config.server, self._http_stats)
        try:
            status = await serve_http([self._app.app], self._listeners, shared, self._drained())
        finally:
            watching.cancel()
            self._http.close()
        leave_within(_LEAVE_S, status)
        return status

    def _stop(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            timeout_s = self._config.server.shutdown_timeout_s
            logger.info("stopping: running requests may finish (%g s)", timeout_s)
            self._app.begin_drain()

    async def _drained(self) -> None:
        """Return when the router may end: after a signal, without requests, after a second one, or in the end."""
        while not self._num_signals:
            await asyncio.sleep(_POLL_S)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.server.shutdown_timeout_s
        while self._app.num_open and self._num_signals == 1 and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
