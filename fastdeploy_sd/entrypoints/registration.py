"""The registration of an instance at routers, and the key by which it recognises them. Knows no HTTP."""

from __future__ import annotations

import secrets
import time

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.cluster.messages import Clock, Registration
from fastdeploy_sd.cluster.registrar import Registrar
from fastdeploy_sd.cluster.route import RouteReader
from fastdeploy_sd.config import Config, is_wildcard
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.wire.http.listeners import Listeners
from fastdeploy_sd.wire.http_client import Target
from fastdeploy_sd.wire.secret import deployment_secret, derive_key


def new_instance_id() -> str:
    """Return a name for this start of an instance."""
    return secrets.token_hex(16)


def route_gate(config: Config, instance_id: str) -> RouteGate:
    """Return what lets the routes of this instance's routers in; of an instance without routers, none.

    Raises ConfigError: the deployment's secret cannot be read.
    """
    if not config.server.router:
        return RouteGate()
    return RouteGate(RouteReader(derive_key(deployment_secret(config.splitwise), "route"), instance_id))


def make_registrar(config: Config, client: EngineGroup, listeners: Listeners, instance_id: str) -> Registrar:
    """Return what registers an instance with its routers, be there any or none.

    Raises ConfigError: the deployment's secret cannot be read.
    """
    routers = [Target.parse(text) for text in config.server.router]
    key = derive_key(deployment_secret(config.splitwise), "registration") if routers else b""
    model = client.model_info
    host, port = listeners.api.getsockname()[:2]
    identity = Registration(
        challenge="",
        member=Member.of(config, model, instance_id, model.fingerprint),
        host="" if is_wildcard(host) else host,
        port=port,
        served_names=tuple(config.model.served_names),
        created=int(time.time()),
        load=InstanceLoad(),
        clock=Clock.now(),
    )
    return Registrar(routers, identity, key, lambda: client.load)
