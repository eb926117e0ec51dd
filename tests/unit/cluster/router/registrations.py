"""Registrations as instances send them, and a registry that takes them."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import make_router_config
from fastdeploy_sd.cluster.router.registry import Registry
from fastdeploy_sd.types import KvDescription
from fastdeploy_sd.wire.packing import pack
from fastdeploy_sd.wire.signing import sign

KEY = b"k" * 32
LOCAL = "127.0.0.1"
NOW = m.Clock.now()
SAID = m.Registration(
    m.PROTOCOL_VERSION, "", "i1", m.MIXED, "", 8000, "", None, ("toy",), 4096, 1, "kin",
    m.InstanceLoad(max_num_seqs=8), NOW,
)  # fmt: skip
KV = KvDescription("CPU", "model", 4, "bfloat16", 2, 2, 16, (512, 512))


def registry_of(**options: object) -> Registry:
    """A registry of a router with these options."""
    return Registry(make_router_config(**options), KEY)


def signed(path: str, message: m.Registration | m.Heartbeat, key: bytes = KEY) -> tuple[bytes, str]:
    """A message and its signature."""
    content = pack(message)
    return content, sign(key, path, content)


def register(registry: Registry, said: m.Registration = SAID, host: str = LOCAL) -> str:
    """Register an instance; return its session."""
    said = replace(said, challenge=said.challenge or registry.challenge())
    return registry.register(*signed(m.REGISTER, said), host)


def instance(name: str, number: int = 0, **said: object) -> Instance:
    """An instance that has just registered."""
    registration = replace(SAID, instance_id=name, port=8000 + number, **said)  # type: ignore[arg-type]
    return Instance(registration, f"session of {name}", LOCAL)
