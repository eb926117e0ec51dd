"""Registrations as instances send them, and a registry that takes them."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.membership import MIXED, InstanceLoad, Member
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import make_router_config
from fastdeploy_sd.cluster.router.registry import Registry
from fastdeploy_sd.types import KvDescription

KEY = b"k" * 32
LOCAL = "127.0.0.1"
NOW = m.Clock.now()
MEMBER = Member("i1", MIXED, "kin", 4096, "", None)
SAID = m.Registration("", MEMBER, "", 8000, ("toy",), 1, InstanceLoad(max_num_seqs=8), NOW)
KV = KvDescription("CPU", "model", 4, "bfloat16", 2, 2, 16, (512, 512))


def registry_of(**options: object) -> Registry:
    """A registry of a router with these options."""
    return Registry(make_router_config(**options), KEY)


def signed(path: str, message: m.Registration | m.Heartbeat, key: bytes = KEY) -> bytes:
    """The frame of a message to a path of the router."""
    return m.codec_for(key).encode(path, message)


def register(registry: Registry, registration: m.Registration = SAID, host: str = LOCAL) -> str:
    """Register an instance; return its session."""
    registration = replace(registration, challenge=registration.challenge or registry.challenge())
    return registry.register(signed(m.REGISTER, registration), host)


def said(**changes: object) -> m.Registration:
    """SAID with other values, of its own or of its member."""
    own = {name: value for name, value in changes.items() if name not in Member.__slots__}
    member = replace(MEMBER, **{name: value for name, value in changes.items() if name not in own})  # type: ignore[arg-type]
    return replace(SAID, member=member, **own)  # type: ignore[arg-type]


def instance(name: str, number: int = 0, **changes: object) -> Instance:
    """An instance that has just registered."""
    return Instance(said(instance_id=name, port=8000 + number, **changes), f"session of {name}", LOCAL)
