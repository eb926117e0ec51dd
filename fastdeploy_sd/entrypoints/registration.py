"""What an instance tells routers about itself, and by what it knows them again. Knows no HTTP."""

from __future__ import annotations

import secrets
import time

from fastdeploy_sd.cluster.messages import PROTOCOL_VERSION, Clock, InstanceLoad, Registration
from fastdeploy_sd.cluster.registrar import Registrar
from fastdeploy_sd.cluster.route import RouteReader
from fastdeploy_sd.config import Config, is_wildcard
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.wire.http.listeners import Listeners
from fastdeploy_sd.wire.http_client import Target
from fastdeploy_sd.wire.secret import deployment_secret, derive_key


def new_instance_id() -> str:
    """Return a name for this start of an instance."""
    return secrets.token_hex(16)


def route_gate(config: Config, instance_id: str) -> RouteGate:
    """Return what lets the routes of this instance's routers in; of an instance without routers, none.

    Raises:
        ConfigError: the deployment's secret cannot be read.
    """
    if not config.server.router:
        return RouteGate()
    return RouteGate(RouteReader(derive_key(deployment_secret(config.splitwise), "route"), instance_id))


def make_registrar(config: Config, client: EngineClient, listeners: Listeners, instance_id: str) -> Registrar:
    """Return what registers an instance with its routers, be there any or none.

    Args:
        client: connected.
        listeners: of the instance.

    Raises:
        ConfigError: the deployment's secret cannot be read.
    """
    routers = [Target.parse(text) for text in config.server.router]
    key = derive_key(deployment_secret(config.splitwise), "registration") if routers else b""
    model = client.model_info
    host, port = listeners.api.getsockname()[:2]
    identity = Registration(
        version=PROTOCOL_VERSION,
        challenge="",
        instance_id=instance_id,
        role=config.splitwise.splitwise_role,
        host="" if is_wildcard(host) else host,
        port=port,
        kv_address=model.kv_address,
        kv=model.kv,
        served_names=tuple(config.model.served_names),
        max_model_len=model.max_request_tokens,
        created=int(time.time()),
        fingerprint=model.fingerprint,
        load=InstanceLoad(),
        clock=Clock.now(),
    )
    return Registrar(routers, identity, key, lambda: _load_of(client))


def _load_of(client: EngineClient) -> InstanceLoad:
    try:
        client.verify_takes_requests()
        takes_requests = True
    except Unavailable:
        takes_requests = False
    stats = client.last_stats
    if stats is None:
        return InstanceLoad(takes_requests)
    return InstanceLoad(
        takes_requests=takes_requests,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        max_num_seqs=max(stats.max_num_seqs, 1),
        num_blocks=stats.num_blocks,
        num_available_blocks=stats.num_free_blocks + stats.num_cached_blocks,
    )
