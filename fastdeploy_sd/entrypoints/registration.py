"""The registration of an instance at routers, and the key by which it recognises them. Knows no HTTP."""

from __future__ import annotations

import functools
import secrets
import time

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.membership import Member, instance_ids
from fastdeploy_sd.cluster.messages import Clock, Registration
from fastdeploy_sd.cluster.registrar import Registrar
from fastdeploy_sd.cluster.route import RouteReader
from fastdeploy_sd.config import Config, is_wildcard
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.wire.http.listeners import Listeners
from fastdeploy_sd.wire.http_client import Target
from fastdeploy_sd.wire.secret import deployment_secret, derive_key


def new_instance_id() -> str:
    """Return a name for this start of a server."""
    return secrets.token_hex(16)


def route_gate(config: Config, server: str) -> RouteGate:
    """Return what lets the routes of this server's routers in; of a server without routers, none. `server`: its name.

    Raises ConfigError: the deployment's secret cannot be read.
    """
    if not config.server.router:
        return RouteGate()
    return RouteGate(RouteReader(derive_key(deployment_secret(config.splitwise), "route"), _ids(config, server)))


def _ids(config: Config, server: str) -> list[str]:
    return instance_ids(server, config.parallel.num_local_engines)


def make_registrar(config: Config, client: EngineGroup, listeners: Listeners, server: str) -> Registrar:
    """Return what registers the engines of a server with its routers, be there any or none.

    Raises ConfigError: the deployment's secret cannot be read.
    """
    routers = [Target.parse(text) for text in config.server.router]
    key = derive_key(deployment_secret(config.splitwise), "registration") if routers else b""
    host, port = listeners.api.getsockname()[:2]
    created = int(time.time())

    def identity(engine: int, instance_id: str) -> Registration:
        model = client.model_infos[engine] or client.model_info
        return Registration(
            challenge="",
            member=Member.of(config, model, instance_id, model.fingerprint),
            host="" if is_wildcard(host) else host,
            port=port,
            served_names=tuple(config.model.served_names),
            created=created,
            load=client.loads[engine],
            clock=Clock.now(),
        )

    ids = enumerate(_ids(config, server))
    return Registrar(routers, [functools.partial(identity, engine, name) for engine, name in ids], key)
