"""What a connector is started with, and what its two sides share. Knows no socket."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

from fastdeploy_sd.config import Config, ports_of
from fastdeploy_sd.disaggregation.transfer.counters import Counters
from fastdeploy_sd.disaggregation.transfer.events import EventQueue
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.disaggregation.transports.rdma import RdmaEngine
from fastdeploy_sd.types import KvDescription
from fastdeploy_sd.wire.secret import deployment_secret, derive_key

_RENEW_S = 2.0


def _instance_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The limits bound what an instance keeps for others, whatever they do.

    Attributes:
        role: "prefill" takes orders, "decode" gives them.
        host, port: the address of a prefill instance; port 0 = a free one.
        protocols: that may be used, the preferred first.
        rdma_ports: see the option rdma_comm_ports.
        server_key, client_key: 32 bytes each, of the deployment.
        is_local: only loopback addresses are allowed, because the secret never left this machine.
        lease_s: a transfer, or a decode instance, that was silent for so long is dropped.
        renew_s: how often a decode instance says which transfers it waits for, and is told of their progress.
        silence_s: a prefill instance that answers nothing for so long is lost.
        handshake_s: the time to agree; retry_s: between attempts; idle_s: until an unused connection is closed.
        window_bytes: of pages on their way between two instances.
        max_peers, max_transfers: of a prefill instance.
        max_message_bytes: the longest frame without pages.
    """

    role: str
    host: str
    port: int
    protocols: tuple[str, ...]
    server_key: bytes = field(repr=False)
    client_key: bytes = field(repr=False)
    rdma_ports: tuple[int, ...] = ()
    is_local: bool = False
    instance_id: str = field(default_factory=_instance_id)
    lease_s: float = 30.0
    renew_s: float = _RENEW_S
    silence_s: float = 10.0
    handshake_s: float = 5.0
    retry_s: float = 1.0
    idle_s: float = 60.0
    window_bytes: int = 32 << 20
    max_peers: int = 64
    max_transfers: int = 4096
    max_message_bytes: int = 64 << 20

    @classmethod
    def of(cls, config: Config) -> ConnectorSettings:
        """Return the settings of an engine; ConfigError: the secret cannot be read or made."""
        splitwise, parallel = config.splitwise, config.parallel
        place = parallel.local_data_parallel_id or 0, parallel.data_parallel_size
        port, *_ = (*ports_of(splitwise.pd_comm_port, *place), 0)
        secret = deployment_secret(splitwise)
        return cls(
            role=splitwise.splitwise_role,
            host=splitwise.pd_host or config.server.host,
            port=port,
            protocols=splitwise.cache_transfer_protocol,
            server_key=derive_key(secret, "pd server"),
            client_key=derive_key(secret, "pd client"),
            rdma_ports=ports_of(splitwise.rdma_comm_ports, *place),
            is_local=splitwise.pd_secret is None,
            renew_s=min(_RENEW_S, splitwise.pd_timeout_s / 3),
        )


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What a connector has one of; `rdma` is None where that protocol is not used."""

    settings: ConnectorSettings
    description: KvDescription
    pages: Pages
    events: EventQueue
    counters: Counters
    rdma: RdmaEngine | None

    @property
    def protocols(self) -> tuple[str, ...]:
        """Those that work here, the preferred first. Where KV is in a GPU's memory, ipc is cuda if it can be."""
        found = tuple(p for p in self.settings.protocols if p != "rdma" or self.rdma is not None)
        return ("cuda", *found) if "ipc" in found and self.pages.port is not None else found
