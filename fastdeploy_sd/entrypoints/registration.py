"""The registration of an instance at routers, and the key by which it recognises them. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
import time
from collections.abc import Sequence

from fastdeploy_sd.cluster.membership import Member, instance_ids
from fastdeploy_sd.cluster.messages import Clock, Registration
from fastdeploy_sd.cluster.registrar import Registrar
from fastdeploy_sd.cluster.route import RouteReader
from fastdeploy_sd.cluster.server_engines import ServerEngines
from fastdeploy_sd.config import Config, is_wildcard
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.wire.http.listeners import Listeners
from fastdeploy_sd.wire.http_client import Ask, HttpClient, Target
from fastdeploy_sd.wire.secret import deployment_secret, derive_key

_ANSWER_S = 5.0
_PAUSE_S = 0.1
_MAX_ANSWER_BYTES = 1 << 16


def new_instance_id() -> str:
    """Return a name for this start of a server."""
    return secrets.token_hex(16)


def route_gate(configs: Sequence[Config], server: str) -> RouteGate:
    """Return what lets the routes of this server's routers in; of a server without routers, none.

    `configs`: of its models. server: its name. Raises ConfigError: the deployment's secret cannot be read.
    """
    if not configs[0].server.router:
        return RouteGate()
    key = derive_key(deployment_secret(configs[0].splitwise), "route")
    return RouteGate(RouteReader(key, instance_ids(server, len(_engines(configs)))))


def _engines(configs: Sequence[Config]) -> list[Config]:
    """Return the configuration of each engine's model."""
    return [config for config in configs for _ in range(config.parallel.num_local_engines)]


def make_registrar(configs: Sequence[Config], engines: ServerEngines, listeners: Listeners, server: str) -> Registrar:
    """Return what registers the engines of a server with its routers, be there any or none.

    Raises ConfigError: the deployment's secret cannot be read.
    """
    routers = [Target.parse(text) for text in configs[0].server.router]
    key = derive_key(deployment_secret(configs[0].splitwise), "registration") if routers else b""
    host, port = listeners.api.getsockname()[:2]
    created = int(time.time())

    def identity(engine: int, config: Config, instance_id: str) -> Registration:
        model = engines.model_infos[engine]
        return Registration(
            challenge="",
            member=Member.of(config, model, instance_id, model.fingerprint),
            host="" if is_wildcard(host) else host,
            port=port,
            served_names=(*config.model.served_names, *(source.adapter.name for source in model.adapters)),
            created=created,
            load=engines.loads[engine],
            clock=Clock.now(),
        )

    of_engines = _engines(configs)
    named = zip(of_engines, instance_ids(server, len(of_engines)), strict=True)
    identities = [functools.partial(identity, number, *engine) for number, engine in enumerate(named)]
    return Registrar(routers, identities, key)


async def wait_answering(listener: socket.socket) -> None:
    """Wait until what accepts connections of a listening socket answers HTTP: processes begin that by and by."""
    host, port = listener.getsockname()[:2]
    if is_wildcard(host):
        host = "::1" if listener.family is socket.AF_INET6 else "127.0.0.1"
    http = HttpClient(_ANSWER_S)
    try:
        while True:
            with contextlib.suppress(Unavailable, TimeoutError):
                await http.fetch(Target(host, port), Ask("GET", "/live"), _MAX_ANSWER_BYTES, _ANSWER_S)
                return
            await asyncio.sleep(_PAUSE_S)
    finally:
        http.close()
