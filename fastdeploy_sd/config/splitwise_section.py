"""The options of prefill and decode on different instances. Rules that read other sections are in rules.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fastdeploy_sd.config.option import Spec, option, verify_fields, wrong_value

PROTOCOLS = ("ipc", "tcp", "rdma")
MAX_PORT = 65535
_MIN_SECRET_CHARACTERS = 16
# Option -> the roles in which something reads it. In another role it is accepted, and a line in the log says so.
_ROLES: Mapping[str, tuple[str, ...]] = {
    "cache_transfer_protocol": ("prefill", "decode"),
    "pd_comm_port": ("prefill",),
    "pd_host": ("prefill", "decode"),
    "pd_timeout": ("decode",),
    "rdma_comm_ports": ("prefill", "decode"),
}


@dataclass(frozen=True, slots=True)
class SplitwiseConfig:
    """Whether this instance computes prompts for others or has others compute them, and how their KV travels."""

    splitwise_role: Literal["mixed", "prefill", "decode"] = option(
        "mixed",
        Spec(
            "What this instance does: mixed: everything; prefill: compute the KV of prompts for decode instances;"
            " decode: generate, with the KV of prompts from a prefill instance where a router names one."
        ),
    )
    cache_transfer_protocol: tuple[str, ...] = option(
        ("ipc", "tcp"),
        Spec(
            "How KV may travel, with commas: ipc (shared memory of one machine, of GPUs where both have one that"
            " allows it), tcp (encrypted), rdma (Mooncake's Transfer Engine, which authenticates no peer; needs the"
            " extra of that name). Two instances take ipc where they can, else the first that the other has too.",
            choices=PROTOCOLS,
            comma_separated=True,
            default_text="`ipc,tcp`",
        ),
    )
    pd_comm_port: tuple[int, ...] = option(
        (),
        Spec(
            "TCP port on which a prefill instance takes orders; none or 0: a free one. Of data_parallel_size engines"
            " each needs its own: write one per engine, with commas, or one, and engine d takes that plus d.",
            comma_separated=True,
            minimum=0,
            maximum=MAX_PORT,
        ),
    )
    rdma_comm_ports: tuple[int, ...] = option(
        (),
        Spec(
            "Ports of rdma, with commas: those from the smallest to the largest may be taken, for all ranks together."
            " none: free ones. Of data_parallel_size engines each takes an equal part of the list, in order; of one"
            " port, that plus its number.",
            comma_separated=True,
            minimum=1,
            maximum=MAX_PORT,
        ),
    )
    pd_host: str | None = option(
        None, Spec("The one address of the ports between instances, here and as others reach it; none: `host`.")
    )
    pd_secret: str | None = option(
        None,
        Spec(
            "What all instances of a deployment share, at least 16 characters; the keys between them are derived from"
            " it. none: it is a file of this user on this machine, and addresses are loopback ones only.",
            secret=True,
        ),
    )
    pd_timeout_s: float = option(
        60.0,
        Spec(
            "Seconds a decode instance waits for the KV of a prompt while its prefill instance makes no progress on any"
            " prompt; then it computes the prompt itself.",
            name="pd_timeout",
            minimum=0.1,
            maximum=3600,
        ),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "splitwise")
        _verify_once("cache_transfer_protocol", self.cache_transfer_protocol)
        _verify_once("rdma_comm_ports", self.rdma_comm_ports)
        if not self.cache_transfer_protocol:
            raise wrong_value("cache_transfer_protocol", "at least one of ipc, tcp, rdma", "none")
        _verify_once("pd_comm_port", [port for port in self.pd_comm_port if port])
        if self.pd_secret is not None and len(self.pd_secret) < _MIN_SECRET_CHARACTERS:
            raise wrong_value("pd_secret", f"at least {_MIN_SECRET_CHARACTERS} characters", "fewer")


def ports_of(ports: tuple[int, ...], engine: int, num_engines: int) -> tuple[int, ...]:
    """Return the ports of one engine, of those that are written for all; () = none are.

    One port, but 0, stands for as many in a row. Else the number of ports is a multiple of that of engines.
    """
    if len(ports) == 1:
        return (ports[0] + engine if ports[0] else 0,)
    count = len(ports) // num_engines
    return ports[engine * count : (engine + 1) * count]


def role_notes(given: Iterable[str], role: str) -> list[str]:
    """Return a line for the log for each option among `given` that nothing reads in this role."""
    return [
        f"{name}: accepted without effect: it belongs to splitwise_role {' or '.join(_ROLES[name])}"
        for name in given
        if name in _ROLES and role not in _ROLES[name]
    ]


def _verify_once(name: str, items: Sequence[object]) -> None:
    if len(set(items)) != len(items):
        raise wrong_value(name, "everything once", ",".join(map(str, items)))
